"""Installs packages for an arm, by pip or uv, once. Imports neither torch nor pytest."""

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from perfsuite import documents, files
from perfsuite.errors import FileError, PackageError
from perfsuite.node.processes import captured

INSTALL_S = 3600
UV_LOCK = "uv.lock"
DONE = ".installed"
NO_FILES = ("--hash", "--index-url", "--extra-index-url", "-i ", "--pre", "--no-binary", "--only-binary")
"""Options in requirements that name no file of the commit."""
OF_ANOTHER_ENVIRONMENT = frozenset(("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"))
"""Variables by which an installer would look, or install, elsewhere."""
_LOCAL_SOURCE = re.compile(r'source = \{ (path|directory|editable|virtual) = "(?!\.")')
"""A package in a `uv.lock` that lies in the repository, and is not its project."""


def environment(lock: Path, commit: str, store: Path) -> str:
    """Return the interpreter of the virtual environment that a lock file names, made once in `store`.

    `lock` lies in the worktree of `commit`. A `uv.lock` is installed by uv, without its project, any other
    file by `pip install -r`. The same requirements have the same environment at every commit. Raises
    `PackageError` with what the installer said.
    """
    here = str(Path(sys.executable).parent)  # where pip puts it; the environment may not be activated
    uv = shutil.which("uv", path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))
    if lock.name == UV_LOCK and uv is None:
        raise PackageError(f"{lock.name} is installed by uv, which is not there: pip install uv")
    directory = (store / "environments" / _key(lock, commit)).absolute()
    python = directory / "bin" / "python"
    once(directory, lambda: _make(lock, directory, python, uv))
    return str(python)


def once(directory: Path, install: Callable[[], object]) -> None:
    """Have `install` fill a directory, once and whole; other commands wait. Raises `PackageError`."""
    try:
        with locked(directory):
            if not (directory / DONE).exists():
                if directory.exists():
                    shutil.rmtree(directory)
                install()
                (directory / DONE).touch()
    except OSError as error:
        raise PackageError(f"{directory}: {error.strerror or error}") from None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Have other commands, which make the same directory, wait until the end of the `with`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def release(requirements: Sequence[str], python: str, store: Path) -> Path:
    """Return the directory with releases of packages, `accelerate==1.10.0`, for an interpreter.

    It holds those of their needs, too, that the interpreter's environment has in another version. Its torch
    stays, unless that is named: releases that need another are refused. Raises `PackageError`: what pip said.
    """
    of = "" if python == sys.executable else f"-{documents.digest([python])}"
    directory = (store / "packages" / f"{','.join(requirements)}{of}").absolute()

    def install() -> None:
        listed = pip("list", "--format=freeze", python=python).splitlines()
        torch = [each for each in listed if each.startswith("torch==")]
        held = [] if any(each.startswith("torch==") for each in requirements) else torch
        said = pip("install", "--quiet", "--dry-run", "--report=-", *requirements, *held, python=python)
        changes = [each["metadata"] for each in json.loads(said)["install"]]
        wanted = [f"{each['name']}=={each['version']}" for each in changes] or requirements
        into = ("--upgrade", "--target", str(directory))
        pip("install", "--quiet", "--no-deps", *into, *wanted, python=python)

    once(directory, install)
    return directory


def versions(package: str) -> list[Version]:
    """What pip finds, oldest first: pre-releases, nothing yanked. Raises `PackageError` if it finds none."""
    said = pip("index", "versions", "--pre", package).splitlines()
    listed = next((line for line in said if line.startswith("Available versions:")), "").partition(":")[2]
    return sorted(Version(each.strip()) for each in listed.split(",") if each.strip())


def _text_of(file: Path) -> str:
    """Return what a file holds. Raises `FileError`."""
    try:
        return files.read_text(file, errors="backslashreplace")
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None


def _key(lock: Path, commit: str) -> str:
    """What tells environments apart: the requirements, Python and, where they name files, the commit."""
    text = _text_of(lock)
    project = lock.with_name("pyproject.toml")
    beside = _text_of(project) if lock.name == UV_LOCK and project.exists() else ""
    is_of_commit = _LOCAL_SOURCE.search(text) if lock.name == UV_LOCK else _names_files(text)
    of = commit if is_of_commit else None
    return documents.digest([lock.name, text, beside, of, platform.python_version()])


def _names_files(requirements: str) -> bool:
    """Whether requirements name other files, as `-r more.txt` does: these may differ by the commit."""
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


def pip(*words: str, python: str = sys.executable, cwd: Path | None = None) -> str:
    """Return what pip says. Raises `PackageError` with the line that says why if it fails."""
    return run(python, "-m", "pip", *words, cwd=cwd)


def run(*command: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Return what an installer says. Raises `PackageError` with the line that says why if it fails."""
    said = " ".join(command)
    kept = {name: value for name, value in os.environ.items() if name not in OF_ANOTHER_ENVIRONMENT}
    # Safe: a module of the repository, in whose directory this runs, is none of the installer's.
    ours = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONSAFEPATH": "1"}
    try:
        done = captured(command, cwd=cwd, env={**kept, **ours, **(variables or {})}, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise PackageError(f"{said}: no end after {INSTALL_S} s") from None
    if done.returncode:
        why = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        lines = why.splitlines()  # pip's last one may only name a page of its manual
        told = next((line for line in lines if line.startswith("ERROR: Cannot install")), lines[-1])
        raise PackageError(f"{said}: {told}")
    return done.stdout
