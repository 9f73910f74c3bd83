"""Packages of other people that add something to perfsuite, installed for one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfsuite import extensions
from perfsuite.case import framework


class Packages:
    """A directory on `sys.path` in which each package is a module and its metadata, as pip leaves them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def install(self, package: str, code: str, **entry_points: str) -> None:
        """Write a package. `frameworks="mine = my_module:Mine"` are lines of that entry point group."""
        module = package.replace("-", "_")
        (self.directory / f"{module}.py").write_text(code)
        metadata = self.directory / f"{module}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        groups = [f"[perfsuite.{group}]\n{lines}\n" for group, lines in entry_points.items()]
        (metadata / "entry_points.txt").write_text("\n".join(groups))
        forget()

    def uninstall(self, package: str) -> None:
        """Remove what `install` wrote."""
        module = package.replace("-", "_")
        (self.directory / f"{module}.py").unlink()
        for file in (self.directory / f"{module}-1.5.dist-info").iterdir():
            file.unlink()
        (self.directory / f"{module}-1.5.dist-info").rmdir()
        sys.modules.pop(module, None)
        forget()


def forget() -> None:
    """Read the metadata of installed packages anew, as a new process would."""
    for cached in (extensions._installed, framework.load, framework._check_findable, framework._package):
        cached.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """No package but perfsuite and what the test installs adds anything."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    before = set(sys.modules)
    forget()
    yield Packages(directory)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(directory) in str(sys.modules[name].__file__):
            del sys.modules[name]
    forget()
