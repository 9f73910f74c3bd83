"""Replace names of libraries that a script may import, without importing these libraries for it."""

from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

from perfsuite.worker.hooks.imports import AfterImport


def when_imported(name: str, action: Callable[[ModuleType], object]) -> None:
    """Call `action` with a module: now if the module is imported, otherwise directly after its import.

    perfsuite itself must not import the module, because this would be recorded as an import by the script. An
    error of `action` reaches the importer.
    """
    AfterImport({name: action}, _fail).begin()


def _fail(error: Exception) -> NoReturn:
    raise error
