"""Test environments of lock files. pip makes each environment once, without an index."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfsuite.errors import CaseError, PackageError
from perfsuite.inputs.git import git
from perfsuite.launch import installed, installer
from perfsuite.launch.arm import Arm, resolve
from perfsuite.launch.download import Plan
from tests.packages import only_index, write_wheel
from tests.processes import executable
from tests.synthetic import commit

LOCK = "requirements.lock"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the only directory where pip finds packages. It contains two versions of perfsuite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        index = only_index(tmp_path_factory.mktemp("installed") / "index", patch)
        for version in ("1.0", "2.0"):
            write_wheel(index, "perfsuite", version, f"__version__ = {version!r}\n")
        yield index


@pytest.fixture(scope="module")
def made(index: Path) -> Path:
    """Return a repository whose store has each environment once for all tests.

    Its two commits lock two versions of a package. The first one has the tag `old`.
    """
    repository = index.with_name("repo")
    git("init", "-q", "-b", "main", str(repository), cwd=index)
    for version in ("1.0", "2.0"):
        (repository / LOCK).write_text(f"perfsuite=={version}\n")
        commit(repository)
    git("tag", "old", "main~1", cwd=repository)
    return repository


@pytest.fixture
def repo(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the repository of `made` as the current directory."""
    monkeypatch.chdir(made)
    return made


def arm(text: str, repo: Path, agreed: Plan | None = None) -> Arm:
    return resolve("--a", text, root=repo, store=repo.with_name("store"), agreed=agreed)


@pytest.mark.launch
def test_installs_a_locks_packages_once(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed installation is reported, and later starts again.

    Packages on the current path do not hide those of the lock file.
    """
    place = tmp_path / "place"
    half = f'echo "$3" > {place}; mkdir -p "$3/half"'
    broken = executable(tmp_path / "python", half, "echo 'ERROR: the disk is broken' >&2; exit 1")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(broken))
        with pytest.raises(CaseError, match=rf"--a 'old:{LOCK}': .* -m venv .*: ERROR: the disk is broken"):
            arm(f"old:{LOCK}", repo, agreed=Plan(changes=()))
    assert not Path(place.read_text().strip()).exists()
    (tmp_path / "perfsuite.py").write_text("__version__ = '9'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    old = arm(f"old:{LOCK} X=1", repo)
    assert (old.perfsuite, old.lock, old.given) == ("1.0", LOCK, {"X": "1"})
    assert old.python != sys.executable
    assert old.commit == git("rev-parse", "old", cwd=repo).strip()
    done = Path(old.python).parents[1] / installed.DONE
    installed_ns = done.stat().st_mtime_ns
    assert arm(f"old:{LOCK} X=1", repo) == old
    assert arm(f"old:{LOCK} PYTHONPATH={tmp_path}", repo).perfsuite == "9", "the user asked for this path"
    assert done.stat().st_mtime_ns == installed_ns


@pytest.mark.nightly
def test_plans_releases_over_a_lock_files_packages(repo: Path, tmp_path: Path) -> None:
    """A user who has agreed to the packages of a lock file has not yet agreed to additional releases."""
    write_wheel(repo.with_name("index"), "needy", "1.0", "", "perfsuite==2.0")
    store = tmp_path / "store"
    text = f"old:{LOCK} needy==1.0"
    first = resolve("--a", text, root=repo, store=store, installs=False)
    assert first.plan is not None
    of_lock = first.plan()
    assert [(package.name, package.version) for package in of_lock.changes] == [("perfsuite", "1.0")]

    asked: list[str] = []

    def consent(text: str, is_large: bool) -> bool:
        asked.append(text)
        return True

    resolve("--a", text, root=repo, store=store, consent=consent, agreed=of_lock)
    assert asked == ["perfsuite changes from 1.0 to 2.0"]
    kept = resolve("--a", text, root=repo, store=store, installs=False)
    assert kept.plan is None
    assert kept.python != sys.executable


def test_refuses_a_lock_file_without_perfsuite(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small program takes the place of Python. It finds nothing to install, and its venv is another one."""
    answers = "*direct_url*) echo '{}';; *json*) echo '[\"/\"]';; *) echo No module >&2; exit 1;;"
    inner = executable(tmp_path / "inner", f'case "$2" in pip) ;; {answers} esac')
    makes = f'mkdir -p "$3/bin"; cp {inner} "$3/bin/python"'
    python = executable(tmp_path / "python", f'case "$2" in venv) {makes};; *) echo \'[]\' > "$3";; esac')
    (repo / "empty.txt").touch()
    commit(repo)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CaseError, match=r"cannot import perfsuite .*\. Name it in empty\.txt$"):
        arm("main:empty.txt", repo)


def test_refuses_missing_or_two_environments(repo: Path) -> None:
    with pytest.raises(CaseError, match=r"that commit has no such file"):
        arm("old:uv.lock", repo)
    with pytest.raises(CaseError, match=r"there is no lock file after the colon"):
        arm("old:", repo)
    with pytest.raises(CaseError, match=r"an interpreter and a lock file cannot be combined"):
        arm(f"old:{LOCK} {sys.executable}", repo)


PACKAGE = '[[package]]\nname = "net"\nsource = {{ {} }}\n'


@pytest.mark.parametrize(
    ("name", "text", "is_of_commit"),
    [
        (LOCK, "torch==2.13.0 \\\n    --hash=sha256:abc\n", False),
        (LOCK, "-i https://index.example.org/simple\nnet @ https://example.org/net.whl\n", False),
        *(
            (LOCK, f"{line}\n", True)
            for line in ("-r more.txt", "--editable .", "./local", ".", "net @ file:./x", "wheels/x.whl")
        ),
        ("uv.lock", PACKAGE.format('editable = "."'), False),
        ("uv.lock", PACKAGE.format('directory = "libs/net"'), True),
    ],
)
def test_nested_requirements_belong_to_one_commit(
    tmp_path: Path, name: str, text: str, is_of_commit: bool
) -> None:
    (tmp_path / name).write_text(text)
    one, other = (installed._key(tmp_path / name, commit) for commit in "ab")
    assert (one != other) == is_of_commit
    (tmp_path / name).write_text(f"{text}# another\n")
    assert installed._key(tmp_path / name, "a") != one


@pytest.mark.launch
def test_installs_a_uv_lock_with_the_local_uv(
    repo: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "pyproject.toml").write_text(
        "[project]\nname = 'script'\nversion = '1'\nrequires-python = '>=3.11'\n"
        f"dependencies = ['perfsuite==2.0']\n[tool.uv]\nno-index = true\nfind-links = ['{index}']\n"
    )
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    beside = Path(sys.executable).parent
    others = [directory for directory in os.environ["PATH"].split(os.pathsep) if Path(directory) != beside]
    monkeypatch.setenv("PATH", os.pathsep.join(others))  # the environment is not activated
    subprocess.run([beside / "uv", "lock", "--offline"], cwd=repo, check=True)
    commit(repo)
    locked = arm("main:uv.lock", repo)
    assert (locked.perfsuite, locked.lock) == ("2.0", "uv.lock")
    assert locked.python != sys.executable


def test_a_lock_of_uv_needs_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv.lock").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PackageError, match=r"uv, which is not installed\. Install it with pip install uv"):
        installed.environment(tmp_path / "uv.lock", "a", tmp_path / "store")


def test_two_comparisons_install_an_arm_once(tmp_path: Path) -> None:
    directory = tmp_path / "arm"
    installations = list[int]()

    def install() -> None:
        installations.append(len(installations))
        time.sleep(0.2)  # the other thread must wait meanwhile
        directory.mkdir()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: installed.once(directory, install), range(2)))
    assert installations == [0]


def test_an_installer_holds_the_lock_if_perfsuite_is_killed(tmp_path: Path) -> None:
    with installed.locked(tmp_path / "arm"):
        descriptors = installer.run("ls", "-l", "/proc/self/fd")
    assert str(tmp_path / "arm.lock") in descriptors
