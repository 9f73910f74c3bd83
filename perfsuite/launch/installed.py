"""Installs packages for an arm, by pip or uv, once. Imports neither torch nor pytest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from perfsuite import documents
from perfsuite.errors import PackageError

INSTALL_S = 3600
"""Seconds after which an installation is given up."""
UV_LOCK = "uv.lock"
DONE = ".installed"
_OF_THE_COMMIT = re.compile(r"^\s*(-|\.|file:)(?!-)", re.MULTILINE)
"""A line of requirements that names other files, `-r more.txt` or `-e .`: they may differ by the commit."""


def environment(lock: Path, commit: str, store: Path) -> str:
    """Return the interpreter of the virtual environment that a lock file names, made once in `store`.

    `lock` lies in the worktree of `commit`. A `uv.lock` is installed by uv, without its project, any other
    file by `pip install -r`. The same requirements have the same environment at every commit. Raises
    `PackageError` with what the installer said.
    """
    text = lock.read_text(errors="backslashreplace")
    of = commit if lock.name == UV_LOCK or _OF_THE_COMMIT.search(text) else None
    key = documents.digest([lock.name, text, of, platform.python_version()])
    directory = (store / "environments" / key).absolute()
    python = directory / "bin" / "python"
    if (directory / DONE).exists():
        return str(python)
    if directory.exists():  # an installation that did not end
        shutil.rmtree(directory)
    run(sys.executable, "-m", "venv", str(directory), cwd=lock.parent)
    if lock.name == UV_LOCK:
        if (uv := shutil.which("uv")) is None:
            raise PackageError(f"{lock.name} is installed by uv, which is not there: pip install uv")
        words = ("sync", "--quiet", "--frozen", "--no-install-project", "--python", str(python))
        run(uv, *words, cwd=lock.parent, variables={"UV_PROJECT_ENVIRONMENT": str(directory)})
    else:
        pip("install", "--quiet", "-r", str(lock), python=str(python), cwd=lock.parent)
    (directory / DONE).touch()
    return str(python)


def pip(*words: str, python: str = sys.executable, cwd: Path | None = None) -> str:
    """Return what pip says. Raises `PackageError` with its last line if it fails."""
    return run(python, "-m", "pip", *words, cwd=cwd, variables={"PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def run(*command: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Return what an installer says. Raises `PackageError` with its last line if it fails."""
    said = " ".join(command)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=None if variables is None else {**os.environ, **variables},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PackageError(f"{said}: no end after {INSTALL_S} s") from None
    if done.returncode:
        why = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise PackageError(f"{said}: {why.splitlines()[-1]}")
    return done.stdout
