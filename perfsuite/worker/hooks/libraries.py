"""Look up how frameworks describe the libraries that this process imports (`frameworks.base.Library`).

A framework is loaded only after the process has imported the library of the same name. Results are cached,
because the clock uses them in each training step. Imports no torch.
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
    """Return the names of all frameworks. The modules of their libraries have the same names."""
    return tuple(extensions.names(FRAMEWORKS))


def of(name: str) -> Library | None:
    """Return the library that the framework `name` describes, or None if it describes no library.

    Raises `ExtensionError` if the framework is broken.
    """
    framework = _framework(name)
    return None if framework is None else framework.library


def imported() -> list[Library]:
    """Return the libraries that are imported and that a framework describes.

    If a framework of another package is broken, it is left out. The error is reported by the hooks that
    run when the library of the framework is imported.
    """
    libraries = [framework.library for framework in _imported_frameworks()]
    return [library for library in libraries if library is not None]


def packages() -> list[str]:
    """Return the packages of the libraries that are imported and that a framework describes."""
    with_library = [framework for framework in _imported_frameworks() if framework.library is not None]
    return [package for framework in with_library for package in framework.packages]


def _imported_frameworks() -> list[type[Framework]]:
    """Return the frameworks whose library this process has imported."""
    frameworks = [_usable_framework(name) for name in names() if name in sys.modules]
    return [framework for framework in frameworks if framework is not None]


@functools.cache
def _usable_framework(name: str) -> type[Framework] | None:
    """Return the framework of this name, or None if it is broken. It is imported only once."""
    try:
        return _framework(name)
    except ExtensionError:
        return None


def _framework(name: str) -> type[Framework] | None:
    """Return the framework of this name, or None if it is not installed or cannot run cases.

    A class that derives from `FrameworkOptions`, but not from `Framework`, has only options.
    """
    framework = framework_class(name)
    return framework if framework is not None and issubclass(framework, Framework) else None
