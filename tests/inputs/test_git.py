import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from perfsuite.errors import GitError
from perfsuite.inputs.git import Revision, changes, commit_of, current_branch, dates, revision, unplaced
from perfsuite.inputs.git import git as perfsuite_git
from tests.cli.commands import run
from tests.processes import executable
from tests.synthetic import BEGIN, commit, git, make_repository


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    make_repository(tmp_path / "repo", 3)
    return tmp_path / "repo"


def test_revision_shows_changes_of_tracked_files(repo: Path) -> None:
    commit = git(repo, "rev-parse", "HEAD")
    (repo / "new").write_text("untracked")
    assert revision(repo) == Revision(commit, dirty=False)
    git(repo, "add", "new")
    assert revision(repo) == Revision(commit, dirty=True)


def test_why_a_repository_has_no_revision_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert revision(tmp_path) == Revision(None, dirty=False)
    assert changes(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert revision(tmp_path) == Revision(None, False, "there is no commit yet")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = "git status --porcelain=v2 --branch --untracked-files=no --ignore-submodules=dirty"
    why = f"{command}: No such file or directory"
    assert revision(tmp_path) == Revision(None, False, why)


def test_takes_githubs_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GITHUB_SHA", "c0ffee")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "work"))
    (tmp_path / "work" / "cases").mkdir(parents=True)
    assert revision(tmp_path / "work" / "cases") == Revision("c0ffee", False)
    assert revision(tmp_path) == Revision(None, False), "only the checkout has this commit"


def test_reads_another_users_checkout_in_a_container(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkout is also read by the git 2.34 of Ubuntu 22.04.

    There, `-c safe.directory=*` has no effect.
    """
    commit = git(repo, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert revision(repo).commit == commit
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "git", f'shift 2; exec {shutil.which("git")} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    assert revision(repo).commit == commit


def test_uncommitted_changes_have_their_own_digests(repo: Path) -> None:
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


def test_a_huge_change_is_not_read(repo: Path) -> None:
    """git would read a sparse file of a terabyte for hours."""
    huge = repo / "tracked"
    huge.write_text("a")
    git(repo, "add", "tracked")
    git(repo, "commit", "-q", "-m", "tracked")
    other = repo / "other"
    other.write_text("a")
    git(repo, "add", "other")
    with huge.open("wb") as file:
        file.truncate(10**12)

    first = changes(repo)
    other.write_text("b")
    second = changes(repo)
    with huge.open("r+b") as file:
        file.truncate(10**11)

    assert None not in (first, second)
    assert len({first, second, changes(repo)}) == 3


def test_lists_dated_commits_oldest_first(repo: Path) -> None:
    found_dates = dates(repo, "main")
    assert list(found_dates) == git(repo, "rev-list", "--reverse", "main").split()
    assert [seconds - int(BEGIN.timestamp()) for seconds in found_dates.values()] == [0, 86400, 2 * 86400]
    with pytest.raises(GitError, match="nowhere"):
        dates(repo, "nowhere")


def test_merged_commits_are_off_the_branch(repo: Path) -> None:
    git(repo, "checkout", "-q", "-b", "side")
    git(repo, "commit", "-q", "--allow-empty", "-m", "aside")
    side_commit = git(repo, "rev-parse", "HEAD")
    git(repo, "checkout", "-q", "main")
    git(repo, "merge", "-q", "--no-ff", "-m", "merge", "side")
    assert len(dates(repo, "main")) == 4
    assert side_commit not in dates(repo, "main")
    assert unplaced({side_commit, "f" * 40}, repo, "main") == {
        side_commit: "not on main itself (git log --first-parent)",
        "f" * 40: f"not in {repo}",
    }
    assert unplaced(set(), repo, "main") == {}


def test_refuses_a_shallow_clone_lacking_commits(repo: Path, tmp_path: Path) -> None:
    oldest = next(iter(dates(repo, "main")))
    git(repo, "clone", "-q", "--depth=1", repo.as_uri(), str(tmp_path / "shallow"))
    with pytest.raises(
        GitError, match=r"is a shallow clone, which lacks commits .*\(1\)\. .*git fetch --unshallow"
    ):
        unplaced({oldest}, tmp_path / "shallow", "main")


def test_current_branch_is_the_checked_out_one(repo: Path) -> None:
    assert current_branch(repo) == "main"
    git(repo, "checkout", "-q", "--detach")
    assert current_branch(repo) == "HEAD"


KEYS = (
    "commit.gpgSign=true",
    "core.alternateRefsCommand={evil}",
    "core.askPass={evil}",
    "core.editor={evil}",
    "core.fsmonitor={evil}",
    "core.gitProxy={evil}",
    "core.pager={evil}",
    "core.sshCommand={evil}",
    "credential.helper=!{evil}",
    "credential.https://localhost.helper=!{evil}",
    "diff.evil.command={evil}",
    "diff.evil.textconv={evil}",
    "diff.external={evil}",
    "filter.a=b.clean={evil}",
    "filter.a=b.smudge={evil}",
    "filter.evil.clean={evil}",
    "filter.evil.process={evil}",
    "filter.evil.required=true",
    "filter.evil.smudge={evil}",
    "gc.recentObjectsHook={evil}",
    "gpg.program={evil}",
    "log.showSignature=true",
    "merge.evil.driver={evil}",
    "pager.log={evil}",
    "protocol.ext.allow=always",
    "remote.origin.receivepack={evil}",
    "remote.origin.uploadpack={evil}",
    "sequence.editor={evil}",
)
HOOKS = (
    "post-checkout",
    "post-commit",
    "post-index-change",
    "pre-commit",
    "pre-push",
    "reference-transaction",
)


class Hostile:
    """A repository whose own settings, hooks and attributes run a program that leaves a file."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.ran = top.parent / f"{top.name}-ran"
        make_repository(top, 2)
        for name, kind in (("a.txt", "evil"), ("b.txt", "a=b")):
            (top / name).write_text("text")
            with (top / ".gitattributes").open("a") as file:
                file.write(f"{name} filter={kind} diff=evil merge=evil\n")
        (top / "c.txt").write_text("text")
        commit(top)
        evil = executable(top.parent / f"{top.name}-evil", f'echo "$0 $@" >> "{self.ran}"', "exit 1")
        for key in KEYS:
            name, _, value = key.rpartition("=")
            plain("config", name, value.format(evil=evil), cwd=top)
        for hook in HOOKS:
            shutil.copy(evil, top / ".git" / "hooks" / hook)
        os.utime(top / "a.txt", (0, 0))  # makes git compare the content
        os.utime(top / "b.txt", (0, 0))

    def owned_by(self, uid: int) -> None:
        for path in (self.top, *self.top.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)


def plain(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run git directly, without the settings that perfsuite passes to git."""
    return subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, check=False)


NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path / "hostile")


def test_runs_no_program_a_repository_names(hostile: Hostile) -> None:
    top = hostile.top
    assert revision(top) == Revision(perfsuite_git("rev-parse", "HEAD", cwd=top).strip(), dirty=False)
    assert changes(top) is None
    assert len(dates(top, "main")) == 3
    (top / "a.txt").write_text("changed")
    (top / "c.txt").write_text("changed")
    assert revision(top).dirty
    assert changes(top) is not None
    perfsuite_git("log", "-1", "--format=%H", cwd=top)
    perfsuite_git("show", "HEAD:a.txt", cwd=top)
    perfsuite_git("diff", "--name-only", "HEAD", cwd=top)
    assert not hostile.ran.exists()
    plain("status", cwd=top)
    assert hostile.ran.exists(), "plain git runs it"


def test_diff_of_a_branch_runs_no_program(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile.top)
    (hostile.top / "baselines").mkdir()
    run("baseline", "diff", "HEAD")
    assert not hostile.ran.exists()


@pytest.mark.parametrize("address", ["origin", "ext::{evil}"])
def test_reading_a_partial_clone_runs_no_program(hostile: Hostile, address: str) -> None:
    """git fetches missing objects of such a clone with the ssh command and the programs in its settings."""
    evil = hostile.top.parent / "hostile-evil"
    (blob,) = perfsuite_git("rev-parse", "HEAD:a.txt", cwd=hostile.top).split()
    (hostile.top / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    settings = {"extensions.partialClone": "origin", "remote.origin.promisor": "true"}
    settings |= {"remote.origin.url": address.format(evil=evil), "core.repositoryFormatVersion": "1"}
    for name, value in settings.items():
        plain("config", name, value, cwd=hostile.top)
    with pytest.raises(GitError, match="not allowed"):
        perfsuite_git("show", "HEAD:a.txt", cwd=hostile.top)
    assert not hostile.ran.exists()
    plain("show", "HEAD:a.txt", cwd=hostile.top)
    assert hostile.ran.exists(), "plain git runs it"


def test_deploy_key_serves_its_remote(repo: Path, tmp_path: Path) -> None:
    """actions/checkout with `ssh-key` writes core.sshCommand to the configuration of the checkout."""
    git(tmp_path, "init", "--quiet", "--bare", "remote")
    ssh = executable(tmp_path / "ssh", 'exec sh -c "$2"')
    settings = {"core.sshCommand": str(ssh), "ssh.variant": "simple"}
    settings |= {"remote.origin.url": f"git@github.invalid:{tmp_path / 'remote'}"}
    for name, value in settings.items():
        plain("config", name, value, cwd=repo)
    perfsuite_git("push", "--quiet", "origin", "main", cwd=repo)
    assert "refs/heads/main" in perfsuite_git("ls-remote", "--heads", "origin", cwd=repo)


def test_a_command_that_writes_runs_no_hook(hostile: Hostile) -> None:
    plain("config", "--remove-section", "filter.evil", cwd=hostile.top)
    plain("config", "--remove-section", "filter.a=b", cwd=hostile.top)
    plain("config", "commit.gpgSign", "false", cwd=hostile.top)
    (hostile.top / "c.txt").write_text("changed")
    commit(hostile.top)
    git(hostile.top, "worktree", "add", "--detach", "../other")
    assert not hostile.ran.exists()


def test_repository_filter_serves_a_worktree(hostile: Hostile) -> None:
    with pytest.raises(GitError):
        perfsuite_git("worktree", "add", "--detach", "../other", cwd=hostile.top)
    assert "evil" in hostile.ran.read_text()


def lower_case(repo: Path, *scope: str) -> None:
    """Commit a file that a filter changes, as git-lfs does."""
    plain("config", *scope, "filter.lower.clean", "tr A-Z a-z", cwd=repo)
    plain("config", *scope, "filter.lower.required", "true", cwd=repo)
    (repo / ".gitattributes").write_text("*.bin filter=lower\n")
    (repo / "a.bin").write_text("ABC")
    (repo / "a.txt").write_text("ABC")
    commit(repo)
    assert perfsuite_git("show", "HEAD:a.bin", cwd=repo) == "abc"
    os.utime(repo / "a.bin", (0, 0))  # makes git compare the content


def test_checkout_with_its_own_filter_is_clean(repo: Path) -> None:
    lower_case(repo)
    assert not revision(repo).dirty
    assert changes(repo) is None
    (repo / "a.txt").write_text("changed")
    assert revision(repo).dirty
    assert changes(repo) is not None


def test_a_filter_of_the_user_shows_changed_files(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "mine"))
    lower_case(repo, "--global")
    plain("config", "filter.lower.clean", "evil", cwd=repo)
    assert not revision(repo).dirty
    (repo / "a.bin").write_text("ABD")
    assert revision(repo).dirty


def test_error_names_the_unused_settings(repo: Path) -> None:
    plain("config", "diff.external", "evil", cwd=repo)
    with pytest.raises(GitError, match=r"the repository's own settings diff.external, because such"):
        perfsuite_git("show", "nowhere", cwd=repo)


def test_asks_once_without_submodules(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git's settings are read before each command."""
    trace = tmp_path / "trace"
    monkeypatch.setenv("GIT_TRACE", str(trace))
    revision(repo)
    commands = re.findall(r"trace: built-in: git (\S+)", trace.read_text())
    assert [command for command in commands if command != "config"] == ["status"]


@pytest.fixture
def in_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variable by which podman marks a container."""
    monkeypatch.setenv("container", "podman")


@only_root
@pytest.mark.usefixtures("in_container")
def test_a_container_reads_foreign_repositories(hostile: Hostile) -> None:
    head = perfsuite_git("rev-parse", "HEAD", cwd=hostile.top).strip()
    hostile.owned_by(NOBODY)
    assert revision(hostile.top) == Revision(head, dirty=False)
    assert not hostile.ran.exists()


@only_root
def test_distrusts_foreign_repositories(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    # This test might itself run in a container, which cannot be hidden.
    monkeypatch.setattr("perfsuite.inputs.git._is_container", lambda: False)
    hostile.owned_by(NOBODY)
    assert "dubious ownership" in (revision(hostile.top).problem or "")
    assert not hostile.ran.exists()


@only_root
@pytest.mark.usefixtures("in_container")
@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_distrusts_a_foreign_git_directory_above(hostile: Hostile, mode: int) -> None:
    """The directory above belongs to root, whether it is open to all (like /tmp) or not.

    The owner does not match.
    """
    hostile.owned_by(NOBODY)
    os.chown(hostile.top, 0, 0)
    hostile.top.chmod(mode)
    (hostile.top / "work").mkdir()
    checked_out = revision(hostile.top / "work")
    assert checked_out.commit is None
    assert "dubious ownership" in (checked_out.problem or "")
    assert not hostile.ran.exists()


@only_root
@pytest.mark.usefixtures("in_container")
def test_distrusts_another_users_open_directory(hostile: Hostile) -> None:
    hostile.owned_by(NOBODY)
    hostile.top.chmod(0o777)
    assert revision(hostile.top).commit is None


def test_ignores_a_bare_repository_above(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--bare", "pretended")
    (tmp_path / "pretended" / "work").mkdir()
    with pytest.raises(GitError, match=r"bareRepository|not a git repository"):
        git(tmp_path / "pretended" / "work", "rev-parse", "--git-dir")
    assert git(tmp_path / "pretended", "rev-parse", "--is-bare-repository") == "true"


def test_ignores_replacements_of_commits(repo: Path) -> None:
    (repo / "file").write_text("changed")
    git(repo, "add", "file")
    commit(repo)
    plain("replace", "HEAD~1", "HEAD", cwd=repo)
    assert not plain("diff", "--name-only", "HEAD~1", cwd=repo).stdout, "plain git sees no change"
    assert "file" in perfsuite_git("diff", "--name-only", "HEAD~1", cwd=repo).splitlines()


@pytest.mark.parametrize("name", ["--output=written", "-x"])
def test_a_branch_that_is_an_option_is_refused(repo: Path, name: str) -> None:
    with pytest.raises(GitError, match="is an option: name a commit"):
        dates(repo, name)
    with pytest.raises(GitError, match="is an option: name a commit"):
        commit_of(name, cwd=repo)
    assert not (repo / "written").exists()


def test_a_submodule_is_not_compared_in_full(repo: Path, tmp_path: Path) -> None:
    """With `diff.submodule = diff`, git would look into the submodule with programs that the submodule
    names."""
    inner = Hostile(tmp_path / "inner")
    plain("-c", "core.fsmonitor=", "clone", "--no-checkout", str(inner.top), str(repo / "sub"), cwd=tmp_path)
    git(repo / "sub", "reset", "--hard")
    (repo / ".gitmodules").write_text('[submodule "sub"]\npath = sub\nurl = ../sub\n')
    git(repo, "add", "sub")
    commit(repo)
    for name in ("filter.evil.clean", "diff.external"):
        plain("config", name, str(tmp_path / "inner-evil"), cwd=repo / "sub")
    plain("config", "diff.submodule", "diff", cwd=repo)
    git(repo / "sub", "checkout", "--quiet", "HEAD~1")
    inner.ran.unlink(missing_ok=True)
    (repo / "sub" / "a.txt").write_text("changed")
    assert changes(repo) is not None
    assert not inner.ran.exists()


def test_sees_submodule_changes_without_filters(repo: Path, tmp_path: Path) -> None:
    inner = Hostile(tmp_path / "inner")
    plain("-c", "core.fsmonitor=", "clone", "--no-checkout", str(inner.top), str(repo / "sub"), cwd=tmp_path)
    plain("config", "filter.evil.clean", str(tmp_path / "inner-evil"), cwd=repo / "sub")
    git(repo / "sub", "reset", "--hard")
    (repo / ".gitmodules").write_text('[submodule "sub"]\npath = sub\nurl = ../sub\n')
    git(repo, "add", "sub")
    commit(repo)
    inner.ran.unlink(missing_ok=True)
    os.utime(repo / "sub" / "a.txt", (0, 0))
    assert not revision(repo).dirty
    assert changes(repo) is None
    (repo / "sub" / "a.txt").write_text("changed")
    (repo / "sub" / "c.txt").write_text("changed")
    assert revision(repo).dirty
    assert changes(repo) is not None
    assert not inner.ran.exists()
