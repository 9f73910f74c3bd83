"""Test the meaning of the words of an arm, using a real git repository."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfsuite
from perfsuite.errors import CaseError
from perfsuite.inputs.git import git
from perfsuite.launch import arm as arms
from perfsuite.launch.arm import Arm, resolve
from tests.processes import executable
from tests.synthetic import commit, make_repository

HERE = str(Path(perfsuite.__file__).parents[1])


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with two commits on main, as the current directory.

    The first has the tag `first`.
    """
    repository = tmp_path / "repo"
    make_repository(repository, 2)
    git("tag", "first", "main~1", cwd=repository)
    monkeypatch.chdir(repository)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return repository


def arm(text: str, repo: Path) -> Arm:
    return resolve("--a", text, root=repo, store=repo / ".perfsuite")


def python(repo: Path, script: str) -> Path:
    """Return an interpreter that runs this shell script."""
    return executable(repo / "python", script)


def answering(repo: Path, paths: Sequence[str], origins: Mapping[str, object] | None = None) -> Path:
    """Return an interpreter with these paths, these origins of packages, and perfsuite 0.0.7."""
    answers = {"direct_url": json.dumps(origins or {}), "sys.path": json.dumps(paths), "": "0.0.7"}
    cases = "".join(f"*{word}*) echo '{answer}';; " for word, answer in answers.items())
    return python(repo, f'case "$2" in {cases}esac')


def worktree_of(text: str, repo: Path) -> Path:
    directory = arm(text, repo).directory
    assert directory is not None
    return directory


def refused(text: str, repo: Path) -> str:
    with pytest.raises(CaseError) as caught:
        arm(text, repo)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "variables"),
    [(".", {}), ("A=Ring 'WITH_SPACE=a b'", {"A": "Ring", "WITH_SPACE": "a b"})],
    ids=["dot", "variables"],
)
def test_dot_is_this_environment_and_commit(repo: Path, text: str, variables: dict[str, str]) -> None:
    here = arm(text, repo)
    assert (here.python, here.variables, here.directory) == (sys.executable, variables, None)
    assert here.commit == git("rev-parse", "HEAD", cwd=repo).strip()
    facts = {"commit": here.commit[:12], "perfsuite": perfsuite.__version__}
    assert here.facts == {"interpreter": sys.executable, **facts, **variables}


def test_numbers_can_be_values_of_variables(repo: Path) -> None:
    """Versions are refused only if they are hardly meant as the value of a variable."""
    given = {"PYTEST": "8.0.0", "lr": "0.1", "steps": "8", "pytest": "yes"}
    assert arm("PYTEST=8.0.0 lr=0.1 steps=8 pytest=yes", repo).given == given


@pytest.mark.parametrize(
    ("word", "release"),
    [
        ("pytest=8", "pytest==8"),
        ("pytest=8.*", "pytest==8.*"),
        ("pytest=>8.1", "pytest==8.1"),
        ("pytest=v8.0.0", "pytest==8.0.0"),
        ("pytest=nightly", "pytest==nightly"),
        ("PyTest=8.0.0", "PyTest==8.0.0"),
        ("nosuchpackage=8.0.0", "nosuchpackage==8.0.0"),
    ],
)
def test_a_version_with_one_equals_sign_is_refused(repo: Path, word: str, release: str) -> None:
    assert f"{word} would set a variable" in refused(word, repo)
    assert f"To name a release, write {release}." in refused(word, repo)


def test_an_exported_variable_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Arm(given={"NCCL_ALGO": "Ring"})
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert not named.acts_as(Arm())
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert named.acts_as(Arm())


@pytest.mark.parametrize(
    ("changes", "same_packages", "acts_the_same"),
    [
        ({"text": "main", "moved": ("/repo", "/worktree")}, True, True),
        ({"commit": "b"}, True, False),
        ({"dirty": True}, True, False),
        *(({name: value}, False, False) for name, value in (("python", "./p"), ("packages", "/p"))),
        ({"given": {"X": "1"}}, False, False),
    ],
)
def test_arms_of_two_commits_share_packages(
    changes: dict[str, Any], same_packages: bool, acts_the_same: bool
) -> None:
    one = Arm(commit="a")
    other = replace(one, **changes)
    assert (one.has_packages_of(other), one.acts_as(other)) == (same_packages, acts_the_same)


def test_a_secret_is_used_and_not_shown(repo: Path) -> None:
    secret = arm("HF_TOKEN=abc", repo)
    assert secret.variables == {"HF_TOKEN": "abc"}
    assert secret.facts["HF_TOKEN"] == "(not shown)"
    assert secret.text == "HF_TOKEN=..."


@pytest.mark.parametrize(
    "words", ["./python first", "no-such-commit", "first second", "HF_TOKEN=def no-such-commit", "'"]
)
def test_a_message_does_not_show_a_secret(repo: Path, words: str) -> None:
    (repo / "python").touch()
    assert "abc" not in refused(f"HF_TOKEN=abc {words}", repo)


def test_an_import_path_through_a_link_is_the_worktrees(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link-to-the-repository"
    link.symlink_to(repo)
    monkeypatch.setenv("PYTHONPATH", f"{link}/python")
    first = arm("first", repo)
    assert f"{first.directory}/python" in first.paths


def test_commit_is_a_worktree_first_on_the_path(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)
    first = arm("first X=1", repo)
    tagged = git("rev-parse", "first", cwd=repo).strip()
    worktree = repo / ".perfsuite" / "arms" / tagged[:12]
    assert (first.commit, first.directory) == (tagged, worktree)
    assert git("rev-parse", "HEAD", cwd=worktree).strip() == tagged
    assert first.variables["PYTHONPATH"].split(os.pathsep) == [str(worktree), f"{worktree}/src", HERE]
    assert (first.facts["commit"], first.facts["X"]) == (tagged[:12], "1")


def test_reuses_resets_or_rebuilds_a_worktree(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a git hook must not mislead perfsuite.

    With the GIT_DIR of a hook, a reset would move the user's branch.
    """
    main = git("rev-parse", "main", cwd=repo)
    monkeypatch.setenv("GIT_DIR", str(repo / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repo / ".git" / "index"))
    worktree = worktree_of("first", repo)
    (worktree / "tracked").write_text("changed")
    git("add", "--all", cwd=worktree)
    (worktree / "built").write_text("kept")
    assert worktree_of("first", repo) == worktree
    assert git("status", "--porcelain", cwd=worktree).strip() == "?? built"
    assert git("rev-parse", "main", cwd=repo) == main
    (worktree / ".git").write_text("gitdir: /no/such/repository\n")
    assert worktree_of("first", repo) == worktree
    assert git("rev-parse", "HEAD", cwd=worktree) == git("rev-parse", "first", cwd=repo)


@pytest.mark.parametrize(
    ("prefix", "below"),
    [("{}/.venv", ["{}/packages/a", "{}/.venv/lib"]), ("/", ["{}/packages/a"])],
    ids=["in the repository", "around it"],
)
def test_imports_come_from_the_worktree(repo: Path, prefix: str, below: list[str]) -> None:
    """Paths below the interpreter's prefix do not move, unless the repository itself is below the prefix."""
    answering(repo, [path.format(repo) for path in (prefix, *below, "/usr")])
    first = arm("first ./python", repo)
    worktree = str(first.directory)
    assert first.paths == (worktree, f"{worktree}/src", f"{worktree}/packages/a")
    assert first.variables["PERFSUITE_MOVED"] == f"{repo}:{worktree}"


@pytest.mark.parametrize(
    ("folder", "name", "editable", "copies"),
    [
        ("lib", "mylib", False, ("mylib",)),
        ("lib", "mylib", True, ()),
        ("lib", "perfsuite", False, ()),
        ("untracked", "mylib", False, ()),
        ("../elsewhere", "mylib", False, ()),
    ],
    ids=["a copy", "editable", "perfsuite", "not of the commit", "of another project"],
)
def test_finds_copies_of_the_repository(
    repo: Path, folder: str, name: str, editable: bool, copies: tuple[str, ...]
) -> None:
    (repo / "lib").mkdir()
    (repo / "lib" / "pyproject.toml").touch()
    commit(repo)
    url = (repo / folder).resolve().as_uri()
    origins = {name: {"url": url, "dir_info": {"editable": editable}}, "from-git": {"url": url}}
    answering(repo, ["/usr"], origins)
    assert arm("first ./python", repo).copies == copies


def test_it_runs_at_the_same_place_below_the_top(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / "benchmarks").mkdir()
    monkeypatch.chdir(repo / "benchmarks")
    assert "that commit has no directory benchmarks. Run perfsuite in the top directory" in refused(
        "main", repo
    )
    (repo / "benchmarks" / "case.py").touch()
    commit(repo)
    assert worktree_of("main", repo).name == "benchmarks"


def test_other_interpreter_must_have_perfsuite(repo: Path) -> None:
    file = answering(repo, ["/", "/lib"])
    other = arm("./python", repo)
    assert (other.python, other.perfsuite) == (str(file), "0.0.7")
    assert worktree_of(f"first {file}", repo)
    file.chmod(0o644)
    assert f"cannot import perfsuite ({file}: Permission denied)" in refused("./python", repo)
    python(repo, "echo 'No module named perfsuite' >&2; exit 1")
    said = refused("./python", repo)
    assert f"cannot import perfsuite ({file}: No module named perfsuite)" in said
    assert said.endswith(f"{file} -m pip install perfsuite=={perfsuite.__version__}")


def test_refuses_an_interpreter_that_is_too_slow(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's second answer might come within the time limit.

    But the first answer has the paths. Without these paths, the arm would import the code of this checkout.
    """
    python(repo, "[ -e warm ] || { touch warm; exec sleep 60; }; echo 1.0")
    monkeypatch.setattr(arms, "ANSWER_S", 0)
    assert ": no output within 0 s" in refused("./python HEAD", repo)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--a is empty. Give one or more of these words, separated by spaces: . for this environment"),
        ("nosuch", "'nosuch' is not a commit of"),
        ("no/such/python", "'no/such/python' is not a commit of"),
        ("nosuch.txt", "'nosuch.txt' is neither a file nor a commit of"),
        ("../uv.lock", "there is no file ../uv.lock. Give one or more"),
        ("pytest=8.0.0", "pytest is a package. To name a release, write pytest==8.0.0. The name of"),
        ("main ../no/such/python", "there is no interpreter ../no/such/python. Give one or more"),
        ("main first", "names two commits, main and first. Give only one of them"),
        ("--upload-pack=x", "'--upload-pack=x' is an option, which is not allowed here. Give one"),
        ("'main", "No closing quotation. Give one"),
        (f"{sys.executable} /bin/sh", "names two interpreters"),
    ],
)
def test_refuses_words_that_do_not_make_an_arm(repo: Path, text: str, words: str) -> None:
    assert words in refused(text, repo)


def test_has_no_commit_outside_of_git(tmp_path: Path) -> None:
    assert arm("X=1", tmp_path).facts["commit"] == "not known to git"
    assert "'main' is not a commit of" in refused("main", tmp_path)


def test_new_python_file_is_an_uncommitted_change(repo: Path) -> None:
    assert not arm(".", repo).dirty
    (repo / "notes.txt").touch()
    assert not arm(".", repo).dirty, "no case runs this file"
    (repo / "train.py").touch()
    assert arm(".", repo).dirty
    (repo / ".git/info/exclude").write_text("train.py\n")
    assert not arm(".", repo).dirty
