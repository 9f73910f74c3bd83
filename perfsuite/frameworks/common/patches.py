"""Replace private names of torch and other packages for a dry run. Names are looked up only in a dry run."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from perfsuite.errors import DryRunError


def attribute(owner: Any, name: str) -> Any:
    """Return `owner.name`, which can be private. Raises `DryRunError` if the name does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = owner if isinstance(owner, ModuleType | type) else type(owner)
        path = kind.__name__ if isinstance(kind, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
        raise _gone(f"{path}.{name}") from None


def replace(owner: Any, name: str, by: Any) -> None:
    """Set `owner.name` in this process. Raises `DryRunError` if the name does not exist."""
    attribute(owner, name)
    setattr(owner, name, by)


def replace_everywhere(owner: ModuleType, name: str, by: Any) -> None:
    """Call `replace`, and also replace the object in every loaded module that imported it under any name."""
    before = attribute(owner, name)
    for module in [owner, *sys.modules.values()]:
        names = [key for key, value in [*getattr(module, "__dict__", {}).items()] if value is before]
        for each in names:
            setattr(module, each, by)


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace `owner.name` with `around(owner.name)`. Raises `DryRunError` if the name does not exist."""
    setattr(owner, name, around(attribute(owner, name)))


def module(name: str) -> Any:
    """Import a module, which can be private. Raises `DryRunError` if the module does not exist."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports another module that is missing
        raise _gone(name) from None


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing. This replaces a function whose effect is not needed."""


def _gone(path: str) -> DryRunError:
    return DryRunError(
        f"{path.partition('.')[0]} has no {path}, which a dry run replaces. Install a version that has it "
        "(constraints.txt lists the versions that dry runs are tested with), or launch the case for real"
    )
