"""Identify the Python code that ran, so that a verdict can say that no code changed."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from perfsuite.results.run_dir import COMPILE_CACHES

STANDARD_LIBRARY = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def digest() -> str:
    """Return a digest of the files of all imported modules: 12 hexadecimal digits.

    Of Python files it covers the content, and of compiled modules the size. It does not depend on the
    directory of a file. The standard library is left out, because its version is recorded, and so are files
    that compilers generated in their caches. Takes about a third of a second.
    """
    caches = tuple(os.path.realpath(os.environ[name]) for name in COMPILE_CACHES if os.environ.get(name))
    total = hashlib.sha256()
    for name, path in sorted(_files()):
        if _is_of_standard_library(path) or path.startswith(caches):
            continue
        total.update(f"{name} {_content(path)}\n".encode())
    return total.hexdigest()[:12]


def _files() -> Iterator[tuple[str, str]]:
    """Yield the name and the resolved path of each imported module that has a file."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield name, os.path.realpath(file)


def _is_of_standard_library(path: str) -> bool:
    """Return whether a file belongs to Python. Packages can be installed below the standard library."""
    return path.startswith(STANDARD_LIBRARY) and not any(folder in path for folder in PACKAGES)


def _content(path: str) -> str:
    """Return what identifies the content of a file; empty if it cannot be read any more."""
    try:
        if path.endswith(".py"):
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return str(os.stat(path).st_size)
    except OSError:
        return ""
