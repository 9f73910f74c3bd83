"""Find what frameworks know of the libraries that this process imports (`frameworks.base.Library`).

A framework is loaded only once the process imports the module of the same name. Imports no torch.
"""

import sys

from perfsuite import extensions
from perfsuite.case.framework import framework_class
from perfsuite.extensions import FRAMEWORKS
from perfsuite.frameworks.base import Framework, Library


def names() -> list[str]:
    """Return the names of the modules that a framework may know."""
    return extensions.names(FRAMEWORKS)


def of(name: str) -> Library | None:
    """Return what a framework knows of the module with its name. Raises `ExtensionError` if it is broken."""
    kind = framework_class(name)
    return kind.library if kind is not None and issubclass(kind, Framework) else None


def imported() -> list[Library]:
    """Return the known libraries among the imported modules. Raises `ExtensionError` for a broken one."""
    known = (of(name) for name in names() if name in sys.modules)
    return [library for library in known if library is not None]


def packages() -> list[str]:
    """Return the packages of the known libraries among the imported modules."""
    kinds = (framework_class(name) for name in names() if name in sys.modules and of(name) is not None)
    return [package for kind in kinds if kind is not None for package in kind.packages]
