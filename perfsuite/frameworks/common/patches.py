"""Replace private names of torch and other packages for a dry run. Each is looked up when it is replaced."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from perfsuite.errors import DryRunError


def attribute(owner: Any, name: str) -> Any:
    """Return `owner.name`, which may be private. Raises `DryRunError` if there is no such name."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = owner if isinstance(owner, ModuleType | type) else type(owner)
        path = kind.__name__ if isinstance(kind, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
        raise _gone(f"{path}.{name}") from None


def replace(owner: Any, name: str, by: Any) -> None:
    """Set `owner.name` in this process. Like the next two, raises `DryRunError` if there is no such name."""
    attribute(owner, name)
    setattr(owner, name, by)


def replace_everywhere(owner: ModuleType, name: str, by: Any) -> None:
    """Do the same as `replace`, and also in every loaded module that has imported the object by name."""
    before = attribute(owner, name)
    for module in (owner, *sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is before:
            setattr(module, name, by)


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace `owner.name` with the result of calling `around` on it."""
    setattr(owner, name, around(attribute(owner, name)))


def module(name: str) -> Any:
    """Import a module that may be private. Raises `DryRunError` if there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # another module, which this one imports, is missing
        raise _gone(name) from None


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function whose effect nobody needs."""


def _gone(path: str) -> DryRunError:
    return DryRunError(
        f"{path.partition('.')[0]} has no {path}, which a dry run replaces: install a version that has "
        "it (constraints.txt names those that dry runs are tested with), or launch the case for real"
    )
