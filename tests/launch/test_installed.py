"""Environments that lock files name: made once, by pip, without an index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite.errors import CaseError, PackageError
from perfsuite.git import git
from perfsuite.launch import installed
from perfsuite.launch.arm import Arm, resolve
from tests.packages import only_index, write_wheel
from tests.synthetic import commit

LOCK = "requirements.lock"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, the first tagged `old`, lock two versions of a package; pip finds both."""
    index = only_index(tmp_path / "index", monkeypatch)
    for version in ("1.0", "2.0"):
        write_wheel(index, "perfsuite", version, f"__version__ = {version!r}\n")
    repository = tmp_path / "repo"
    repository.mkdir()
    git("init", "-q", "-b", "main", cwd=repository)
    for version in ("1.0", "2.0"):
        (repository / LOCK).write_text(f"perfsuite=={version}\n")
        commit(repository)
    git("tag", "old", "main~1", cwd=repository)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(repository)
    return repository


def arm(text: str, repo: Path) -> Arm:
    return resolve("--a", text, root=repo, store=repo / ".perfsuite")


@pytest.mark.launch
def test_a_commit_with_its_lock_file_has_the_packages_that_it_names_installed_once(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = arm(f"old:{LOCK}", repo), arm(f"main:{LOCK} X=1", repo)
    assert (old.perfsuite, new.perfsuite) == ("1.0", "2.0")
    assert old.python != new.python != sys.executable
    assert (old.lock, new.given) == (LOCK, {"X": "1"})
    assert old.commit == git("rev-parse", "old", cwd=repo).strip()
    monkeypatch.setattr(installed, "run", lambda *command, **settings: pytest.fail(f"ran {command}"))
    assert arm(f"old:{LOCK}", repo) == old


@pytest.mark.launch
def test_what_is_on_the_path_here_does_not_stand_before_it(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "here").mkdir()
    (repo / "here" / "perfsuite.py").write_text("__version__ = '9'\n")
    monkeypatch.setenv("PYTHONPATH", str(repo / "here"))
    assert arm(f"old:{LOCK}", repo).perfsuite == "1.0"
    assert arm(f"old:{LOCK} PYTHONPATH={repo / 'here'}", repo).perfsuite == "9", "asked for"


@pytest.mark.launch
def test_a_lock_file_without_perfsuite_is_refused_with_the_way_out(repo: Path) -> None:
    git("rm", "-q", LOCK, cwd=repo)
    (repo / "empty.txt").touch()
    commit(repo)
    with pytest.raises(CaseError, match=r"cannot import perfsuite .*\. Name it in empty\.txt$"):
        arm("main:empty.txt", repo)


@pytest.mark.launch
def test_an_installation_that_fails_is_said_and_begun_anew(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(repo))
        with pytest.raises(CaseError, match=rf"--a 'old:{LOCK}': .*pip install .*No matching distribution"):
            arm(f"old:{LOCK}", repo)
    assert arm(f"old:{LOCK}", repo).perfsuite == "1.0"


def test_a_file_that_is_not_there_and_two_environments_are_refused(repo: Path) -> None:
    with pytest.raises(CaseError, match=r"that commit has no such file"):
        arm("old:uv.lock", repo)
    with pytest.raises(CaseError, match=r"name the lock file after the colon"):
        arm("old:", repo)
    with pytest.raises(CaseError, match=r"an interpreter or a lock file, not both"):
        arm(f"old:{LOCK} {sys.executable}", repo)


def test_requirements_that_name_other_files_are_of_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(*command: str, **settings: object) -> str:
        ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return ""

    monkeypatch.setattr(installed, "run", run)
    lock = tmp_path / "requirements.txt"

    def made(text: str, commit: str) -> str:
        lock.write_text(text)
        return installed.environment(lock, commit, tmp_path / "store")

    plain = "torch==2.13.0 \\\n    --hash=sha256:abc\n"
    assert made(plain, "a") == made(plain, "b")
    urls = "-i https://index.example.org/simple\nnet @ https://example.org/net.whl\n"
    assert made(urls, "a") == made(urls, "b")
    for text in ("-r more.txt\n", "--editable .\n", "./local\n", ".\n", "net @ file:./x\n", "wheels/x.whl\n"):
        assert made(text, "a") != made(text, "b")


@pytest.mark.launch
def test_a_lock_of_uv_is_installed_by_the_uv_beside_this_python(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "pyproject.toml").write_text(
        "[project]\nname = 'script'\nversion = '1'\nrequires-python = '>=3.11'\n"
        f"dependencies = ['perfsuite==1.0']\n[tool.uv]\nno-index = true\nfind-links = ['{tmp_path}/index']\n"
    )
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    beside = Path(sys.executable).parent
    others = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != beside]
    monkeypatch.setenv("PATH", os.pathsep.join(others))  # the environment is not activated
    subprocess.run([beside / "uv", "lock", "--offline"], cwd=repo, check=True)
    commit(repo)
    locked = arm("main:uv.lock", repo)
    assert (locked.perfsuite, locked.lock) == ("1.0", "uv.lock")
    assert locked.python != sys.executable


def test_a_lock_of_uv_needs_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv.lock").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PackageError, match=r"uv, which is not there: pip install uv"):
        installed.environment(tmp_path / "uv.lock", "a", tmp_path / "store")


def test_a_lock_of_uv_is_of_a_commit_where_it_names_packages_of_the_repository(tmp_path: Path) -> None:
    lock = tmp_path / "uv.lock"

    def key(source: str, commit: str) -> str:
        lock.write_text(f'[[package]]\nname = "net"\nsource = {source}\n')
        return installed._key(lock, commit)

    own, other = '{ editable = "." }', '{ directory = "libs/net" }'
    assert key(own, "a") == key(own, "b")
    assert key(other, "a") != key(other, "b")


@pytest.fixture
def library(repo: Path, tmp_path: Path) -> Path:
    """A library that needs vision; its newest release needs another torch than the one here."""
    index = tmp_path / "index"
    for version, torch in (("1.0", "torch"), ("2.0", "torch==99")):
        write_wheel(index, "vision", version, f"VERSION = {version!r}\n", torch)
    write_wheel(index, "torch", "99", "")
    write_wheel(index, "library", "1.0", "", "vision")
    write_wheel(index, "library", "2.0", "", "vision>=2")
    return repo


@pytest.mark.launch
def test_a_release_brings_its_needs_and_leaves_torch_as_it_is(library: Path) -> None:
    packages = Path(arm("library==1.0", library).packages)
    assert (packages / "vision.py").read_text() == "VERSION = '1.0'\n"
    assert not list(packages.glob("torch*"))


@pytest.mark.launch
def test_a_release_that_needs_another_torch_is_refused_unless_it_is_named(library: Path) -> None:
    with pytest.raises(CaseError, match=r"pip install .* library==2\.0 torch==.*: ERROR: "):
        arm("library==2.0", library)
    packages = Path(arm("library==2.0 torch==99", library).packages)
    assert {each.name for each in packages.glob("*.py")} == {"library.py", "vision.py", "torch.py"}


@pytest.mark.launch
def test_several_releases_of_an_arm_fit_each_other(library: Path, tmp_path: Path) -> None:
    """The needs of one do not hide the release of another."""
    write_wheel(tmp_path / "index", "vision", "0.9", "VERSION = '0.9'\n")
    packages = arm("library==1.0 vision==0.9", library).packages
    assert (Path(packages) / "vision.py").read_text() == "VERSION = '0.9'\n"
