"""Replace names of libraries that a script may import, without importing these libraries for it."""

from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

from perfsuite.worker.hooks.imports import AfterImport


def when_imported(name: str, action: Callable[[ModuleType], object]) -> None:
    """Call `action` with a module: now if the module is already imported, or else right after its import.

    perfsuite itself must not import the module, because this would be recorded as an import by the script. If
    `action` raises an error, the import raises this error.
    """
    AfterImport({name: action}, _fail).begin()


def _fail(error: Exception) -> NoReturn:
    raise error
