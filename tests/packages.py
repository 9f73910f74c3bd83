"""Helpers: packages of other people, installed for one test like by pip, or as wheels that pip can find."""

import contextlib
import os
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from perfsuite import extensions
from perfsuite.case import framework
from perfsuite.worker.hooks import libraries
from tests.warm import PACKAGES

MINE = """
from typing import Any, ClassVar
from perfsuite.frameworks import LaunchPlan, Workload
from perfsuite.frameworks.fake import Fake

class Mine(Fake):
    name: ClassVar[str] = "mine"
"""
"""A framework that simulates training. Code can be added at its end, indented by four spaces."""
PODS = """
from perfsuite.inputs.setting import Setting
from perfsuite.launch.local import LocalLauncher

class Pods(LocalLauncher):
    settings = (
        Setting(name="k8s-pool", metavar="NAME", default="any", ini=True, help="the pool of its pods"),
        Setting(name="k8s-spot", ini=True, help="pods that may be taken away"),
    )

    def __init__(self, pool, spot):
        self.given = (pool, spot)
"""
"""A launcher with two settings."""
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"


def write_wheel(
    index: Path,
    name: str,
    version: str,
    code: str = "",
    *needs: str,
    tag: str = "py3-none-any",
    requires_python: str = "",
) -> None:
    """Write a wheel of one module into a directory. The module has the name of the distribution."""
    module = canonicalize_name(name).replace("-", "_")
    stem = f"{module}-{version}"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    metadata += [f"Requires-Python: {requires_python}"] if requires_python else []
    with zipfile.ZipFile(index / f"{stem}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{module}.py", code)
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
        wheel.writestr(f"{stem}.dist-info/WHEEL", f"{WHEEL}Tag: {tag}\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def only_index(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new directory, and make it the only place where pip finds packages."""
    directory.mkdir()
    for name, value in (("FIND_LINKS", str(directory)), ("NO_INDEX", "1"), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    return directory


class Packages:
    """A directory on `sys.path`. Each package in it is a module with metadata, as pip leaves them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def install(self, package: str, code: str, **entry_points: str) -> None:
        """Write a package whose module has the name of the package.

        Each keyword is an entry point group with its lines, for example `frameworks="mine = my_module:Mine"`.
        """
        module = package.replace("-", "_")
        (self.directory / f"{module}.py").write_text(textwrap.dedent(code))
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
    """Read the metadata of installed packages again, as a new process would."""
    of_cases = (framework.load, framework._check_findable, framework._package)
    for cached in (extensions.installed, *of_cases, libraries.names, libraries._usable_framework):
        cached.cache_clear()


@contextlib.contextmanager
def site(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """Yield a new directory of packages, from which this process and its child processes import."""
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
    monkeypatch.setenv(PACKAGES, str(directory))
    before = set(sys.modules)
    forget()
    yield Packages(directory)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(directory) in str(sys.modules[name].__file__):
            del sys.modules[name]
    forget()
