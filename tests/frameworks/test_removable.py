"""Each framework is one file or folder that can be deleted without breaking another."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import perfsuite

FRAMEWORKS = Path(perfsuite.__file__).parent / "frameworks"
NAMES = sorted(
    path.stem
    for path in FRAMEWORKS.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
    if path.stem not in ("__init__", "base", "common")
)

IMPORT_THE_REST = """
import importlib, sys
from importlib.abc import MetaPathFinder

names = sys.argv[1:]

class Deleted(MetaPathFinder):
    def find_spec(self, module, path, target=None):
        if f"{module}.".startswith(f"perfsuite.frameworks.{name}."):
            raise ModuleNotFoundError(f"No module named {module!r}")

sys.meta_path.insert(0, Deleted())
for name in names:
    for module in [module for module in sys.modules if module.startswith("perfsuite")]:
        del sys.modules[module]
    for other in names:
        if other != name:
            importlib.import_module(f"perfsuite.frameworks.{other}")
print("imported", len(names))
"""


def imported(file: Path) -> Iterator[str]:
    """Modules that `file` imports anywhere: in functions and for types, too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("owner", [*NAMES, "base", "common"])
def test_no_framework_is_imported_by_another(owner: str) -> None:
    folder = FRAMEWORKS / owner
    files = list(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert files
    others = {f"perfsuite.frameworks.{name}" for name in NAMES if name != owner}
    for file in files:
        for module in imported(file):
            assert ".".join(module.split(".")[:3]) not in others, f"{file.name} imports {module}"


@pytest.mark.launch
def test_the_others_import_without_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_THE_REST, *NAMES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"imported {len(NAMES)}\n"
    assert len(NAMES) >= 10
