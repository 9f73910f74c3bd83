"""The names of the public packages, and nothing else, can be imported from them."""

import ast
import importlib
import pkgutil
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import perfsuite
from tests.processes import python

PUBLIC = ["perfsuite", "perfsuite.frameworks", "perfsuite.results", "perfsuite.testing"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_once(name: str) -> None:
    module = importlib.import_module(name)
    names = module.__all__
    assert len(set(names)) == len(names)
    for each in names:
        assert getattr(module, each) is not None
    if name != "perfsuite.testing":  # a module of functions imports what it works with
        others = {
            each
            for each, value in vars(module).items()
            if not each.startswith("_") and not isinstance(value, ModuleType) and each not in names
        }
        assert others <= {"annotations", "Any", "TYPE_CHECKING"}


def test_packages_that_list_names_are_public() -> None:
    packages = [each.name for each in pkgutil.iter_modules(perfsuite.__path__, "perfsuite.") if each.ispkg]
    listed = [each for each in packages if hasattr(importlib.import_module(each), "__all__")]
    assert set(listed) == set(PUBLIC) - {"perfsuite", "perfsuite.testing"}


def for_type_checkers() -> dict[str, str]:
    """The module of each name that `perfsuite/__init__.py` imports for type checkers alone."""
    tree = ast.parse(Path(perfsuite.__file__).read_text())
    (block,) = (each for each in tree.body if isinstance(each, ast.If))
    imports = [each for each in block.body if isinstance(each, ast.ImportFrom)]
    return {name.name: str(each.module) for each in imports for name in each.names}


def test_top_names_are_those_of_type_checkers() -> None:
    modules = for_type_checkers()
    assert dir(perfsuite) == perfsuite.__all__ == sorted([*modules, "__version__"])
    for name, module in modules.items():
        assert getattr(importlib.import_module(module), name) is getattr(perfsuite, name)


@pytest.mark.parametrize("name", ["Csae", "csae"])
def test_another_name_is_an_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'perfsuite' has no attribute '{name}'"):
        getattr(perfsuite, name)


def test_importing_a_module_reads_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from perfsuite import errors` asks the package for the name first."""
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


def test_the_version_stands_in_one_place() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "perfsuite.__version__"}
    assert version("perfsuite") == perfsuite.__version__
