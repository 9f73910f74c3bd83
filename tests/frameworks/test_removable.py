"""Test that each framework is one file or folder that can be deleted without breaking another."""

from pathlib import Path

import pytest

from perfsuite import extensions, frameworks
from perfsuite.extensions import FRAMEWORKS
from tests.processes import python

HERE = Path(frameworks.__file__).parent
NAMES = sorted(extensions.own(FRAMEWORKS))

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


@pytest.mark.launch
def test_the_others_import_without_it() -> None:
    assert python(IMPORT_THE_REST, *NAMES) == f"imported {len(NAMES)}\n"
    assert len(NAMES) >= 10


OF_EVERY_MACHINE = {"ddp", "fsdp2", "script", "fake"}
"""Frameworks that perfsuite's own commands and test helpers run."""


@pytest.mark.parametrize("name", sorted(set(NAMES) - OF_EVERY_MACHINE))
def test_one_line_imports_each_framework(name: str) -> None:
    """This line is the only change to other code that a new framework needs.

    The new framework also needs an extra, a test, and a row in the docs.
    """
    package = HERE.parent
    lines = [
        f"{file.relative_to(package)}: {line.strip()}"
        for file in package.rglob("*.py")
        if not file.is_relative_to(HERE / name) and file != HERE / f"{name}.py"
        for line in file.read_text().splitlines()
        if f"frameworks.{name} " in line or f"frameworks.{name}." in line
    ]
    (line,) = lines
    assert line.startswith(f"__init__.py: from perfsuite.frameworks.{name} import ")
