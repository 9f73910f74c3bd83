"""The names of the public packages, and nothing else, can be imported from them."""

import importlib
import pkgutil
import tomllib
import typing
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


def test_top_names_match_the_type_stubs() -> None:
    assert sorted(perfsuite._MODULES) == sorted(set(perfsuite.__all__) - {"__version__"})
    assert dir(perfsuite) == sorted(perfsuite.__all__)
    for name, module in perfsuite._MODULES.items():
        assert getattr(importlib.import_module(f"perfsuite.{module}"), name) is getattr(perfsuite, name)
    with pytest.raises(AttributeError, match="module 'perfsuite' has no attribute 'Csae'"):
        typing.cast(typing.Any, perfsuite).Csae  # noqa: B018


@pytest.mark.launch
def test_a_name_is_imported_when_it_is_first_used() -> None:
    code = (
        "import sys, perfsuite; before = set(sys.modules); perfsuite.DDP; "
        "print(any('pydantic' in name for name in before), 'perfsuite.frameworks.ddp' in sys.modules, "
        "'perfsuite.frameworks.nanotron' in sys.modules)"
    )
    assert python(code).split() == ["False", "True", "False"]


def test_the_version_stands_in_one_place() -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "perfsuite.__version__"}
    assert version("perfsuite") == perfsuite.__version__
