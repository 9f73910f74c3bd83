"""Packages of other people that are installed for one test: modules and metadata, as pip leaves them."""

from __future__ import annotations

import functools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from perfsuite import extensions
from perfsuite.case import framework
from perfsuite.extensions import Group


def install(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    package: str,
    group: Group,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str],
) -> Callable[[], None]:
    """Install a package for this process and those that it starts. Return what uninstalls it."""
    site = directory / package
    metadata = site / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    for name, code in modules.items():
        (site / f"{name}.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(site)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    fresh = functools.cache(extensions._installed.__wrapped__)
    monkeypatch.setattr(extensions, "_installed", fresh)

    def uninstall() -> None:
        (metadata / "entry_points.txt").unlink()
        fresh.cache_clear()

    return uninstall


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
