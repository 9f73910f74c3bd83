"""Tests that exactly the public names can be imported from the public packages."""

import ast
import importlib
import pkgutil
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import perfsuite
from tests.frameworks.removable import DELETED
from tests.processes import python

PUBLIC = ["perfsuite", "perfsuite.frameworks", "perfsuite.results", "perfsuite.testing"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_once(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert len(set(names)) == len(names)
    assert [public_name for public_name in names if getattr(module, public_name) is None] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "perfsuite.testing"])
def test_every_other_name_is_private(name: str) -> None:
    """perfsuite.testing consists of functions, and imports what they need."""
    module = importlib.import_module(name)
    others = {
        defined
        for defined, value in vars(module).items()
        if not defined.startswith("_") and not isinstance(value, ModuleType) and defined not in module.__all__
    }
    assert others <= {"annotations", "Any", "TYPE_CHECKING"}


def test_packages_that_list_names_are_public() -> None:
    packages = [
        package.name for package in pkgutil.iter_modules(perfsuite.__path__, "perfsuite.") if package.ispkg
    ]
    listed = [package for package in packages if hasattr(importlib.import_module(package), "__all__")]
    assert set(listed) == set(PUBLIC) - {"perfsuite", "perfsuite.testing"}


def for_type_checkers() -> dict[str, str]:
    """Return the module of each name that `perfsuite/__init__.py` imports only for type checkers.

    Names of deleted frameworks are left out.
    """
    tree = ast.parse(Path(perfsuite.__file__).read_text())
    (block,) = (statement for statement in tree.body if isinstance(statement, ast.If))
    imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
    deleted = {f"perfsuite.frameworks.{name}" for name in DELETED}
    return {
        name.name: str(statement.module)
        for statement in imports
        for name in statement.names
        if statement.module not in deleted
    }


def test_top_names_are_those_of_type_checkers() -> None:
    assert dir(perfsuite) == perfsuite.__all__ == sorted([*for_type_checkers(), "__version__"])


@pytest.mark.parametrize(("name", "module"), for_type_checkers().items())
def test_a_top_name_is_the_one_of_its_module(name: str, module: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(perfsuite, name)


@pytest.mark.parametrize("name", ["Csae", "csae"])
def test_another_name_is_an_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'perfsuite' has no attribute '{name}'"):
        getattr(perfsuite, name)


def test_importing_a_module_reads_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from perfsuite import errors` first looks for an attribute of the package."""
    monkeypatch.setattr(perfsuite, "_frameworks", lambda: pytest.fail("it was asked"))
    assert not hasattr(perfsuite, "no_such_module")


@pytest.mark.launch
def test_a_name_is_imported_when_it_is_first_used() -> None:
    code = (
        "import sys, perfsuite; before = set(sys.modules); perfsuite.DDP; "
        "print(any('pydantic' in name for name in before), 'perfsuite.frameworks.ddp' in sys.modules, "
        "'perfsuite.frameworks.nanotron' in sys.modules)"
    )
    assert python(code).split() == ["False", "True", "False"]


def test_the_version_is_in_one_place() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "perfsuite.__version__"}
    assert version("perfsuite") == perfsuite.__version__
