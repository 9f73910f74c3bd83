import os
import shutil
from pathlib import Path

import pytest

from perfsuite.errors import GitError
from perfsuite.git import Revision, changes, current_branch, dates, revision, unplaced
from tests.processes import executable
from tests.synthetic import BEGIN, git, make_repository


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    make_repository(tmp_path / "repo", 3)
    return tmp_path / "repo"


def test_the_revision_is_the_commit_and_whether_tracked_files_changed(repo: Path) -> None:
    commit = git(repo, "rev-parse", "HEAD")
    (repo / "new").write_text("untracked")
    assert revision(repo) == Revision(commit, dirty=False)
    git(repo, "add", "new")
    assert revision(repo) == Revision(commit, dirty=True)


def test_outside_of_git_there_is_no_revision_and_why_git_fails_in_a_repository_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert revision(tmp_path) == Revision(None, dirty=False)
    assert changes(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert revision(tmp_path) == Revision(None, False, "there is no commit yet")
    monkeypatch.setenv("PATH", str(tmp_path))
    why = "git status --porcelain=v2 --branch --untracked-files=no: No such file or directory"
    assert revision(tmp_path) == Revision(None, False, why)


def test_in_an_image_without_git_the_commit_is_the_one_that_github_checked_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GITHUB_SHA", "c0ffee")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "work"))
    (tmp_path / "work" / "cases").mkdir(parents=True)
    assert revision(tmp_path / "work" / "cases") == Revision("c0ffee", False)
    assert revision(tmp_path) == Revision(None, False), "another directory is not what was checked out"


def test_a_checkout_of_another_user_is_read_as_in_a_container(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by git 2.34 of Ubuntu 22.04, whose `-c safe.directory=*` has no effect."""
    commit = git(repo, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert revision(repo).commit == commit
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "git", f'shift 2; exec {shutil.which("git")} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    assert revision(repo).commit == commit


def test_uncommitted_changes_are_told_apart_by_what_they_change(repo: Path) -> None:
    assert changes(repo) is None
    tracked = repo / "tracked"
    tracked.write_text("a")
    git(repo, "add", "tracked")
    first = changes(repo)
    tracked.write_bytes(b"\xff\x00")
    assert None not in (first, changes(repo))
    assert changes(repo) != first
    tracked.write_text("a")
    assert changes(repo) == first


def test_commits_of_a_branch_oldest_first_with_their_dates(repo: Path) -> None:
    found = dates(repo, "main")
    assert list(found) == git(repo, "rev-list", "--reverse", "main").split()
    assert [seconds - int(BEGIN.timestamp()) for seconds in found.values()] == [0, 86400, 2 * 86400]
    with pytest.raises(GitError, match="nowhere"):
        dates(repo, "nowhere")


def test_what_was_merged_in_is_not_of_the_branch_itself(repo: Path) -> None:
    git(repo, "checkout", "-q", "-b", "side")
    git(repo, "commit", "-q", "--allow-empty", "-m", "aside")
    aside = git(repo, "rev-parse", "HEAD")
    git(repo, "checkout", "-q", "main")
    git(repo, "merge", "-q", "--no-ff", "-m", "merge", "side")
    assert len(dates(repo, "main")) == 4
    assert aside not in dates(repo, "main")
    assert unplaced({aside, "f" * 40}, repo, "main") == {
        aside: "not on main itself (git log --first-parent)",
        "f" * 40: f"not in {repo}",
    }
    assert unplaced(set(), repo, "main") == {}


def test_a_shallow_clone_is_refused_if_it_lacks_commits(repo: Path, tmp_path: Path) -> None:
    oldest = next(iter(dates(repo, "main")))
    git(repo, "clone", "-q", "--depth=1", repo.as_uri(), str(tmp_path / "shallow"))
    with pytest.raises(
        GitError, match=r"is a shallow clone, which lacks commits .*\(1\)\. .*git fetch --unshallow"
    ):
        unplaced({oldest}, tmp_path / "shallow", "main")


def test_the_current_branch_is_what_is_checked_out(repo: Path) -> None:
    assert current_branch(repo) == "main"
    git(repo, "checkout", "-q", "--detach")
    assert current_branch(repo) == "HEAD"
