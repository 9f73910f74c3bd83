"""Calls a function as soon as a module was imported. Imports no torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], object]


class AfterImport:
    """Finds some modules as other finders do, and calls an action for each once it was executed.

    Nobody has taken a name from the module by then. An error of an action never reaches who imports.
    """

    def __init__(self, actions: Mapping[str, Action], on_error: Callable[[Exception], object]) -> None:
        self._actions = dict(actions)  # of the modules that are still to be imported, by name
        self._on_error = on_error
        self._asking = threading.local()

    def begin(self) -> None:
        """Call the actions of modules that are imported already, and wait for the others."""
        self.look()
        if self._actions:
            sys.meta_path.insert(0, self)

    def look(self) -> None:
        """Call the actions of modules that are imported by now.

        To be called again, later: a library that imports torch is imported in part when torch was, and is
        never imported anew.
        """
        for name in [*self._actions]:
            module = sys.modules.get(name)
            if module is not None and not _is_being_imported(module):
                self._act(name, module)

    def end(self) -> None:
        """Wait no longer."""
        self._actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return None, but for a module that is waited for."""
        if name not in self._actions or getattr(self._asking, "now", False):  # others may ask all finders
            return None
        self._asking.now = True
        try:
            others = (each for each in tuple(sys.meta_path) if each is not self)
            found = (each.find_spec(name, path, target) for each in others if hasattr(each, "find_spec"))
            spec = next((spec for spec in found if spec is not None), None)
            if spec is not None and spec.loader is not None:
                self._act_after(spec.loader, name)
        except Exception as error:  # the other finders are asked after this one, as without it
            self._on_error(error)
            return None
        finally:
            self._asking.now = False
        return spec

    def _act_after(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._act(name, module)

        loader.exec_module = exec_module

    def _act(self, name: str, module: ModuleType) -> None:
        action = self._actions.pop(name, None)
        if action is None:  # the module is executed again
            return
        try:
            action(module)
        except Exception as error:
            self._on_error(error)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
