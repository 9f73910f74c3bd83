"""Test actions after an import, with modules that the test writes."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perfsuite.worker.hooks.imports import AfterImport

NAME = "a_library_of_a_test"


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> Iterator[Callable[[Callable[[ModuleType], object]], AfterImport]]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    begun: list[AfterImport] = []

    def begin(action: Callable[[ModuleType], object]) -> AfterImport:
        begun.append(AfterImport({NAME: action}, errors.append))
        begun[-1].begin()
        return begun[-1]

    yield begin
    for hook in begun:
        hook.end()
    sys.modules.pop(NAME, None)
    assert not any(isinstance(finder, AfterImport) for finder in sys.meta_path)


Begin = Callable[[Callable[[ModuleType], object]], AfterImport]


def change(module: Any) -> None:
    module.value += 1


def test_changes_a_module_before_its_importers(after: Begin) -> None:
    after(change)
    assert importlib.import_module(NAME).value == 2


def test_changes_an_imported_module_at_once(after: Begin) -> None:
    module = importlib.import_module(NAME)
    after(change)
    assert module.value == 2


def test_changes_a_half_imported_module_later(
    after: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module imports torch. That makes perfsuite attach in the middle of the module's import."""
    begun: list[AfterImport] = []
    (tmp_path / f"{NAME}.py").write_text("import sys; sys.begin_in_the_middle()\nvalue = 1\n")
    monkeypatch.setattr(sys, "begin_in_the_middle", lambda: begun.append(after(change)), raising=False)
    module = importlib.import_module(NAME)
    assert module.value == 1
    begun[0].look()
    assert module.value == 2


def test_does_not_change_a_reloaded_module_again(after: Begin) -> None:
    after(change)
    module = importlib.import_module(NAME)
    assert importlib.reload(module).value == 1


def test_action_error_does_not_reach_the_import(after: Begin, errors: list[Exception]) -> None:
    after(lambda module: 1 / 0)
    assert importlib.import_module(NAME).value == 1
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_asking_for_a_module_does_not_import_it(after: Begin) -> None:
    after(change)
    assert importlib.util.find_spec(NAME) is not None
    assert NAME not in sys.modules


def test_acts_before_a_module_that_exists_is_executed(after: Begin, errors: list[Exception]) -> None:
    existed: list[bool] = []
    watching = AfterImport(
        {},
        errors.append,
        before={NAME: lambda name: existed.append(hasattr(sys.modules[name], "value"))},
    )
    watching.begin()
    assert importlib.util.find_spec(NAME) is not None
    assert existed == [], "the module was looked for, but not imported"
    importlib.import_module(NAME)
    watching.end()
    assert existed == [False]


def test_before_an_import_actions_can_be_added(after: Begin, errors: list[Exception]) -> None:
    watching = AfterImport({}, errors.append, before={NAME: lambda name: watching.add({name: change})})
    watching.begin()
    assert importlib.import_module(NAME).value == 2
    watching.end()


def test_acts_before_modules_of_a_plain_folder(tmp_path: Path, after: Begin, errors: list[Exception]) -> None:
    folder = tmp_path / "a_folder_of_a_test"
    folder.mkdir()
    (folder / "inner.py").write_text("value = 1\n")
    inner = f"{folder.name}.inner"
    watching = AfterImport(
        {}, errors.append, before={folder.name: lambda name: watching.add({inner: change})}
    )
    watching.begin()
    assert importlib.import_module(inner).value == 2
    watching.end()
    assert errors == []
