"""Call a function before or directly after the import of a module. Imports no torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

Action = Callable[[ModuleType], object]


class AfterImport:
    """A finder that delegates to the other finders, and calls an action after a watched module was executed.

    When an action runs, nobody has imported a name from the module yet. Errors in actions never reach the
    importer. A function in `before` is called with the name of its module before the module is executed. This
    function can `add` actions.
    """

    def __init__(
        self,
        actions: Mapping[str, Action],
        on_error: Callable[[Exception], object],
        *,
        before: Mapping[str, Callable[[str], object]] = MappingProxyType({}),
    ) -> None:
        self._actions = dict(actions)  # a module that has not been imported yet -> action
        self._before = dict(before)  # a module whose import has not begun yet -> function
        self._on_error = on_error
        self._asking = threading.local()

    def begin(self) -> None:
        """Run the actions of already imported modules. Other actions run after the import of their module."""
        for name in [*self._before]:
            if name in sys.modules:
                self._begins(name)
        self.look()
        if self._actions or self._before:
            sys.meta_path.insert(0, self)

    def add(self, actions: Mapping[str, Action]) -> None:
        """Add actions. An action runs now if its module is already imported, otherwise after the import."""
        self._actions.update(actions)
        self.look()

    def look(self) -> None:
        """Run the actions of modules that have been imported by now.

        Call this again later, because a module can still be in the middle of its import. For example, suppose
        that a library imports torch, and that `begin` is called as soon as torch has been imported. The
        import of the library is then still running, and Python does not ask this finder for the library
        again.
        """
        for name in [*self._actions]:
            module = sys.modules.get(name)
            if module is not None and not _is_being_imported(module):
                self._act(name, module)

    def end(self) -> None:
        """Stop waiting for imports, and drop all actions."""
        self._actions.clear()
        self._before.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the other finders' spec for a watched module, and None for all other modules."""
        # Do nothing while this finder waits for another finder, because that finder can ask all finders
        # again, including this one.
        is_watched = name in self._actions or name in self._before
        if not is_watched or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            others = (finder for finder in tuple(sys.meta_path) if finder is not self)
            specs = (
                finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec")
            )
            spec = next((spec for spec in specs if spec is not None), None)
            if spec is not None and spec.loader is not None:
                self._act_around(spec.loader, name)
            elif spec is not None:  # a folder without `__init__.py`, for which nothing is executed
                self._begins(name)
        except Exception as error:  # return None, so that Python asks the other finders
            self._on_error(error)
            return None
        finally:
            self._asking.now = False
        return spec

    def _act_around(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._begins(name)
            execute(module)
            self._act(name, module)

        loader.exec_module = exec_module

    def _begins(self, name: str) -> None:
        action = self._before.pop(name, None)
        if action is None:
            return
        try:
            action(name)
        except Exception as error:
            self._on_error(error)

    def _act(self, name: str, module: ModuleType) -> None:
        action = self._actions.pop(name, None)
        if action is None:  # the module is being executed again
            return
        try:
            action(module)
        except Exception as error:
            self._on_error(error)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
