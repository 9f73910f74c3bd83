"""Identify the code that ran, so that a verdict can say that no code changed."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from perfsuite.results.run_dir import CACHES

STANDARD_LIBRARY = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
GENERATED = f"{os.sep}{CACHES}{os.sep}"
"""If a compiler generated a file in this session, the path of the file contains this text."""


def digest(started_at: float | None) -> str | None:
    """Return a digest of all imported modules and loaded libraries: 12 hexadecimal digits.

    The digest covers the content of Python files, and the size and modification time of compiled libraries.
    It does not depend on the directories of the files. The standard library is left out, because Python's
    version is recorded separately. Files that compilers generated in the session's caches are left out as
    well.

    `started_at` is the time at which the process started, in seconds since the epoch. The result is None if
    this time is unknown, if a file cannot be read, or if a Python file has changed since the process
    started. The function takes less than a second.
    """
    if started_at is None:
        return None
    try:
        return digest_of({*_modules(), *_libraries()}, started_at)
    except OSError:  # for example, the file is in an archive or was deleted
        return None


def digest_of(files: Iterable[tuple[str, str]], started_at: float) -> str | None:
    """Return the digest of files, given as names and paths. None if a Python file is newer than the process.

    Raises OSError if a file cannot be read.
    """
    total = hashlib.sha256()
    for name, path in sorted(files):
        if GENERATED in path or _is_of_standard_library(path):
            continue
        if path.endswith(".py"):
            if os.stat(path).st_mtime > started_at:
                return None
            total.update(f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}\n".encode())
        else:
            status = os.stat(path)
            total.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return total.hexdigest()[:12]


def _modules() -> Iterator[tuple[str, str]]:
    """Yield the name and the resolved path of each imported module that has a file."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isabs(file):  # `torch.ops` names a file that does not exist
            yield name, os.path.realpath(file)


def _libraries() -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each shared library that this process has loaded."""
    with open("/proc/self/maps") as file:
        paths = {fields[5].strip() for line in file if len(fields := line.split(maxsplit=5)) == 6}
    for path in paths:
        if path.startswith(os.sep) and ".so" in os.path.basename(path):
            yield os.path.basename(path), path


def _is_of_standard_library(path: str) -> bool:
    """Return whether a file belongs to Python itself, and not to a package in the same directory."""
    return path.startswith(STANDARD_LIBRARY) and not any(folder in path for folder in PACKAGES)
