"""Install the packages of an arm once, with pip or uv. Imports neither torch nor pytest."""

import contextlib
import fcntl
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from perfsuite import documents
from perfsuite.errors import FileError, PackageError
from perfsuite.inputs import files
from perfsuite.launch.download import Consent, Plan, ask_for, check_space, refuse_large
from perfsuite.launch.installer import pip, run, would_install

UV_LOCK = "uv.lock"
DONE = ".installed"
NO_FILES = ("--hash", "--index-url", "--extra-index-url", "-i ", "--pre", "--no-binary", "--only-binary")
"""A line of requirements that begins with one of these options does not refer to files of the commit."""
_LOCAL_SOURCE = re.compile(r'source = \{ (path|directory|editable|virtual) = "(?!\.")')
"""Matches a package in a `uv.lock` that is installed from a local path, except the project itself."""


def environment(
    lock: Path,
    commit: str,
    store: Path,
    consent: Consent = refuse_large,
    agreed: Plan | None = None,
) -> str:
    """Return the interpreter of a lock file's virtual environment, which is created once in `store`.

    `lock` is in the worktree of `commit`. uv installs the packages of a `uv.lock`, but not the project
    itself. Any other file is installed with `pip install -r`. Commits with the same requirements share an
    environment. `consent` is called before a download, unless the plan is already `agreed`. Raises
    `PackageError` if the installation fails.
    """
    uv = uv_command(lock) if lock.name == UV_LOCK else None
    directory = _directory(lock, commit, store)
    python = directory / "bin" / "python"

    def install() -> None:
        if agreed is None:
            planned = plan_of_lock(lock)
            check_space([planned], store)
            ask_for(consent, [planned])
        _make(lock, directory, python, uv)

    once(directory, install)
    return str(python)


def kept_environment(lock: Path, commit: str, store: Path) -> str | None:
    """Return the interpreter for a lock file if its packages have already been installed, or None."""
    directory = _directory(lock, commit, store)
    return str(directory / "bin" / "python") if (directory / DONE).exists() else None


def _directory(lock: Path, commit: str, store: Path) -> Path:
    """Return the directory in which the environment of a lock file is kept."""
    return (store / "environments" / _key(lock, commit)).absolute()


def plan_of_lock(lock: Path) -> Plan:
    """Return the packages that a new environment for a lock file needs.

    Raises `PackageError` if pip or uv cannot find them.
    """
    with tempfile.TemporaryDirectory() as temporary:
        listed = lock
        if lock.name == UV_LOCK:
            listed = Path(temporary) / "requirements.txt"
            listed.write_text(requirements_of(lock), encoding="utf-8")
        words = ("--ignore-installed", "-r", str(listed))
        return Plan(changes=tuple(would_install(*words, python=sys.executable, cwd=lock.parent)))


def requirements_of(lock: Path) -> str:
    """Return the packages of a `uv.lock`, without its project, as requirements for pip."""
    how = ("--quiet", "--frozen", "--no-hashes", "--no-emit-project", "--format=requirements.txt")
    return run(uv_command(lock), "export", *how, cwd=lock.absolute().parent)


def uv_command(lock: Path) -> str:
    """Return the path of uv. Raises `PackageError`, which names the lock file, if uv is not installed."""
    # pip installs uv into this directory, which is on PATH only if the environment is activated.
    here = str(Path(sys.executable).parent)
    uv = shutil.which("uv", path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))
    if uv is None:
        raise PackageError(f"{lock.name} needs uv, which is not installed. Install it with pip install uv")
    return uv


def once(directory: Path, install: Callable[[], object]) -> None:
    """Call `install` to fill a directory, once and completely. Other commands wait until it has returned.

    A directory without `DONE` is incomplete. It is deleted when `install` fails. If the process was killed,
    the next call deletes the directory. Raises `PackageError` if the directory cannot be written.
    """
    try:
        with locked(directory):
            if not (directory / DONE).exists():
                if directory.exists():
                    shutil.rmtree(directory)
                try:
                    install()
                except BaseException:
                    shutil.rmtree(directory, ignore_errors=True)
                    raise
                (directory / DONE).touch()
    except OSError as error:
        raise PackageError(f"{directory}: {error.strerror or error}") from None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a lock until the end of the `with`. Other commands that create the same directory wait."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # If this process is killed, its pip keeps the lock until pip has ended. Otherwise, pip would still
        # write into the directory while the next command fills it.
        os.set_inheritable(held.fileno(), True)
        yield


def _text_of(file: Path) -> str:
    """Return the content of a file. Raises `FileError` if it cannot be read."""
    try:
        return files.read_text(file, errors="backslashreplace")
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None


def _key(lock: Path, commit: str) -> str:
    """Return the key of an environment.

    It depends on the requirements, the version of Python and, if the requirements refer to files, the commit.
    """
    text = _text_of(lock)
    project = lock.with_name("pyproject.toml")
    beside = _text_of(project) if lock.name == UV_LOCK and project.exists() else ""
    is_of_commit = _LOCAL_SOURCE.search(text) if lock.name == UV_LOCK else _names_files(text)
    of = commit if is_of_commit else None
    return documents.digest([lock.name, text, beside, of, platform.python_version()])


def _names_files(requirements: str) -> bool:
    """Return whether requirements refer to files, such as `-r more.txt`, which can differ between commits."""
    words = (line.partition("#")[0].strip() for line in requirements.splitlines())
    return any(
        word == "." or word.startswith("-") or "file:" in word or ("/" in word and "://" not in word)
        for word in words
        if not word.startswith(NO_FILES)
    )


def _make(lock: Path, directory: Path, python: Path, uv: str | None) -> None:
    run(sys.executable, "-m", "venv", str(directory), cwd=lock.parent)
    if lock.name != UV_LOCK:
        pip("install", "--quiet", "-r", str(lock), python=str(python), cwd=lock.parent)
        return
    assert uv is not None
    words = ("sync", "--quiet", "--frozen", "--no-install-project", "--python", str(python))
    run(uv, *words, cwd=lock.parent, variables={"UV_PROJECT_ENVIRONMENT": str(directory)})
