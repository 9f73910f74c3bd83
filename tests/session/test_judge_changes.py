import os
from dataclasses import replace
from pathlib import Path

import pytest

from perfsuite.launch.arm import HERE, Arm
from perfsuite.results.session_file import JudgeChanges
from perfsuite.session.judge_changes import judge_changes
from perfsuite.session.option_table import options_of
from tests.synthetic import commit, git, make_repository

SHADOW = "pytest.ini: shadow mode on: no case fails a test"
INI = "[pytest]\nperf_shadow = true\n"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit, which has settings and a file of cases."""
    top = tmp_path / "repo"
    make_repository(top, 1)
    (top / "pytest.ini").write_text("[pytest]\n")
    (top / "bench_cases").mkdir()
    (top / "bench_cases" / "test_it.py").write_text("a\n")
    commit(top)
    monkeypatch.delenv("GITHUB_SHA", raising=False)
    return top


def arm_of(name: str, repo: Path) -> Arm:
    """Return the arm of a commit, like `resolve`."""
    return replace(HERE, text=name, commit=git(repo, "rev-parse", name), moved=("a", "b"))


def against(name: str, repo: Path, root: Path | None = None) -> JudgeChanges | None:
    return judge_changes(options_of(root or repo, {}), (arm_of(name, repo), HERE))


def of_night(repo: Path) -> JudgeChanges | None:
    return judge_changes(options_of(repo, {}), ())


def test_reports_changes_since_a_commit(repo: Path) -> None:
    base = git(repo, "rev-parse", "HEAD")
    assert against("HEAD", repo) == JudgeChanges(base=base, sentences=())
    (repo / "pytest.ini").write_text(INI)
    assert against("HEAD", repo) == JudgeChanges(base=base, sentences=(SHADOW,)), "before a commit"
    commit(repo)
    assert against("HEAD~1", repo) == JudgeChanges(base=base, sentences=(SHADOW,))


def test_omits_what_main_changed_since(repo: Path) -> None:
    base = git(repo, "rev-parse", "HEAD")
    git(repo, "checkout", "--quiet", "-b", "feature")
    (repo / "conftest.py").write_text("a\n")
    commit(repo)
    git(repo, "checkout", "--quiet", "main")
    (repo / "pytest.ini").write_text(INI)
    commit(repo)
    git(repo, "checkout", "--quiet", "feature")
    assert against("main", repo) == JudgeChanges(base=base, sentences=("conftest.py added: 1 line",))


def test_unrelated_branches_are_unknown(repo: Path) -> None:
    git(repo, "checkout", "--quiet", "--orphan", "other")
    commit(repo)
    changes = against("main", repo)
    assert changes is not None
    assert changes.base is None
    assert "and HEAD have no common commit here" in changes.sentences[0]


def test_untracked_files_judge_too(repo: Path) -> None:
    (repo / "bench_cases" / "conftest.py").write_text("a\n")
    (repo / ".gitignore").write_text("ignored/\n")
    (repo / "ignored").mkdir()
    (repo / "ignored" / "conftest.py").write_text("a\n")
    changes = against("HEAD", repo)
    assert changes is not None
    assert changes.sentences == ("bench_cases/conftest.py added: 1 line",)


def test_settings_place_cases_and_baselines(repo: Path) -> None:
    (repo / "sub" / "cases").mkdir(parents=True)
    (repo / "sub" / "pytest.ini").write_text("[pytest]\nperf_cases = cases\n")
    commit(repo)
    (repo / "sub" / "cases" / "sizes.py").write_text("a")
    (repo / "sub" / "baselines" / "cpu").mkdir(parents=True)
    (repo / "sub" / "baselines" / "cpu" / "x.json").write_text("{")
    (repo / "baselines").mkdir()
    (repo / "baselines" / "x.json").write_text("{")
    changes = against("HEAD", repo, repo / "sub")
    assert changes is not None
    assert [sentence.split(" cannot")[0] for sentence in changes.sentences] == [
        "baseline of x on cpu (sub/baselines/cpu/x.json)",
        "case file sub/cases/sizes.py added: 1 line",
    ]


def test_reports_odd_files_that_would_judge(repo: Path) -> None:
    (repo / "perf-waivers.toml").write_text("# none\n")
    commit(repo)
    (repo / "perf-waivers.toml").unlink()
    os.mkfifo(repo / "perf-waivers.toml")
    (repo / "bench_cases" / "conftest.py").symlink_to("nowhere")
    (repo / "na\nme").mkdir()
    (repo / "na\nme" / "conftest.py").write_text("a")
    changes = against("HEAD", repo)
    assert changes is not None
    assert changes.sentences == (
        "perf-waivers.toml cannot be read in its current version, so its changes are not known",
        "bench_cases/conftest.py is now a link to nowhere",
        "na\nme/conftest.py added: 1 line",
    )


def test_a_case_file_that_is_now_a_link_is_said(repo: Path) -> None:
    (repo / "other.txt").write_text("a\n")
    commit(repo)
    (repo / "bench_cases" / "test_it.py").unlink()
    (repo / "bench_cases" / "test_it.py").symlink_to("../other.txt")
    changes = against("HEAD", repo)
    assert changes is not None
    assert changes.sentences == ("case file bench_cases/test_it.py is now a link to ../other.txt",)


def test_what_a_case_file_links_to_is_a_case_file(repo: Path) -> None:
    (repo / "other.txt").write_text("a\n")
    (repo / "bench_cases" / "test_link.py").symlink_to("../other.txt")
    commit(repo)
    (repo / "other.txt").write_text("a\nb\n")
    changes = against("HEAD", repo)
    assert changes is not None
    assert changes.sentences == ("case file other.txt changed: 1 line added, 0 lines removed",)


def test_without_a_base_nothing_is_said(repo: Path) -> None:
    (repo / "pytest.ini").write_text(INI)
    assert of_night(repo) is None
    assert judge_changes(options_of(repo, {}), (replace(HERE, packages="x"), HERE)) is None


def test_pull_request_base_is_where_it_began(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = git(repo, "rev-parse", "HEAD")
    git(repo, "update-ref", "refs/remotes/origin/main", "HEAD")
    (repo / "pytest.ini").write_text(INI)
    commit(repo)
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    assert of_night(repo) == JudgeChanges(base=base, sentences=(SHADOW,))


def test_merge_base_by_github_is_the_first_parent(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repo, "checkout", "--quiet", "-b", "feature")
    (repo / "pytest.ini").write_text(INI)
    commit(repo)
    git(repo, "checkout", "--quiet", "main")
    (repo / "conftest.py").write_text("of main")
    base = commit(repo)
    git(repo, "merge", "--quiet", "--no-ff", "-m", "merge", "feature")
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    monkeypatch.setenv("GITHUB_SHA", git(repo, "rev-parse", "HEAD"))
    assert of_night(repo) == JudgeChanges(base=base, sentences=(SHADOW,))


def test_base_missing_in_the_clone_is_unknown(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    changes = of_night(repo)
    assert changes is not None
    assert changes.base is None
    (sentence,) = changes.sentences
    assert sentence.startswith("it is unknown whether this branch changes its own checks: git merge-base")
    assert sentence.endswith("Check out the base as well (actions/checkout with fetch-depth: 0)")
