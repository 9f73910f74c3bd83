import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perfsuite.dry import imports
from perfsuite.errors import DryRunError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that is not imported yet."""
    (tmp_path / "a_library.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "a_library", ModuleType("a_library"))  # removed after the test
    del sys.modules["a_library"]
    return "a_library"


def change(module: ModuleType) -> None:
    module.value = 2  # type: ignore[attr-defined]


def refuse(module: ModuleType) -> None:
    raise DryRunError(module.__name__)


def test_a_library_is_not_imported_early(library: str) -> None:
    imports.when_imported(library, change)
    assert library not in sys.modules


def test_a_library_is_changed_when_it_is_imported(library: str) -> None:
    imports.when_imported(library, change)
    assert importlib.import_module(library).value == 2


def test_an_imported_library_is_changed_at_once(library: str) -> None:
    module = importlib.import_module(library)
    imports.when_imported(library, change)
    assert module.value == 2


def test_a_change_that_fails_ends_the_import(library: str) -> None:
    imports.when_imported(library, refuse)
    with pytest.raises(DryRunError, match=library):
        importlib.import_module(library)
