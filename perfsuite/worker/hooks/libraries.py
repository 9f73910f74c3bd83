"""Find what frameworks know of the libraries that this process imports (`frameworks.base.Library`).

A framework is loaded only once the process imports the module of the same name. What was found is kept, as
the clock asks in each step of training. Imports no torch.
"""

import functools
import sys

from perfsuite import extensions
from perfsuite.case.framework import framework_class
from perfsuite.errors import ExtensionError
from perfsuite.extensions import FRAMEWORKS
from perfsuite.frameworks.base import Framework, Library


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of the modules that a framework may know."""
    return tuple(extensions.names(FRAMEWORKS))


def of(name: str) -> Library | None:
    """Return what a framework knows of the module with its name. Raises `ExtensionError` if it is broken."""
    kind = framework_class(name)
    return kind.library if kind is not None and issubclass(kind, Framework) else None


def imported() -> list[Library]:
    """Return the known libraries among the imported modules.

    A broken framework of another package is left out. The hooks that wait for its library have noted it.
    """
    return [kind.library for kind in _kinds() if kind.library is not None]


def packages() -> list[str]:
    """Return the packages of the known libraries among the imported modules."""
    return [package for kind in _kinds() if kind.library is not None for package in kind.packages]


def _kinds() -> list[type[Framework]]:
    """Return the frameworks whose library this process has imported."""
    found = [_kind(name) for name in names() if name in sys.modules]
    return [kind for kind in found if kind is not None]


@functools.cache
def _kind(name: str) -> type[Framework] | None:
    """Return the framework of this name; None if it only has options or is broken. It is not tried again."""
    try:
        kind = framework_class(name)
    except ExtensionError:
        return None
    return kind if kind is not None and issubclass(kind, Framework) else None
