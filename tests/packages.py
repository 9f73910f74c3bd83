"""Packages that are installed for one test: a directory on `sys.path` with metadata, as pip leaves it."""

from __future__ import annotations

import functools
import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from perfsuite import extensions
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
