"""Find the functions that a case names as `module:name`, and wrap them. Imports no torch."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class NamedFunction:
    """A function that a case names as `module:name`. It is wrapped as soon as the script has defined it.

    A method can also be named, as in `train:Loader.next_batch`. If the name is that of a class, one of its
    methods is wrapped: the first of `methods` that the class has. If `methods` is empty, a class is not
    accepted.
    """

    def __init__(self, name: str, wrap: Wrap, methods: Sequence[str] = ()) -> None:
        self.name = name
        self.module, _, self.path = name.partition(":")
        self._first = self.path.partition(".")[0]
        self.is_found = False
        self._wrap = wrap
        self._methods = methods
        self._is_of_main = False  # whether the module is the script itself
        self._binding: tuple[Any, Any] = (None, None)  # the module and the object seen by `is_rebound`

    def look(self) -> bool:
        """Look for the function, and wrap it if it exists. Return whether it has been found."""
        if self.is_found:
            return True
        owner = self._owner(self._imported())
        if owner is None:
            return self.is_found
        name = self.path.rpartition(".")[2]
        function = inspect.getattr_static(owner, name, None)
        if function is None:  # the module provides it through its `__getattr__`
            function = getattr(owner, name)
        of_class = owner if isinstance(owner, type | ModuleType) else type(owner)
        if isinstance(function, type):
            method = next((method for method in self._methods if hasattr(function, method)), None)
            if method is None:
                return False
            wrap_method(function, method, self._wrap)
        elif isinstance(function, staticmethod | classmethod):
            wrap_method(of_class, name, self._wrap)
        elif callable(function):
            wrapped = self._wrap(function)
            replace_everywhere(owner, name, function, wrapped)
            if inspect.getattr_static(owner, name, None) is not wrapped:  # the method is inherited
                setattr(of_class, name, wrapped)
        else:
            return False
        self.is_found = True
        return True

    def is_rebound(self) -> bool:
        """Return whether the name has been bound to another object since the last call.

        For a dotted name, only the first part is checked. If the module does not have the name, the module's
        `__getattr__` is checked instead, because it might provide the name. This method must be fast, because
        it runs at every function call in the start-up.
        """
        module = self._imported()
        if module is None:
            return False
        names = object.__getattribute__(module, "__dict__")  # `getattr` would load a lazy module
        bound = names.get(self._first)
        if bound is None:
            bound = names.get("__getattr__")
        last_module, last_bound = self._binding
        if module is last_module and bound is last_bound:
            return False
        self._binding = (module, bound)
        return True

    def forget_binding(self) -> None:
        """Release the object that `is_rebound` has kept, because it can be large."""
        self._binding = (None, None)

    def module_may_be_main(self) -> None:
        """Check again whether the module is the script itself: multiprocessing can replace `__main__`."""
        self._is_of_main = self.module in _names_of_main()

    @property
    def is_imported(self) -> bool:
        """Whether the script has imported the module, or the module is the script itself."""
        return self._imported() is not None

    def check_name(self) -> None:
        """Raise `MismatchError` if there is no such function."""

    def check(self) -> None:
        """Raise `MismatchError` if the first steps show that the name is wrong."""
        self.check_name()

    def why_not_found(self) -> str | None:
        """Return why the function has not been found yet, or None if it has been found."""
        if self.is_found:
            return None
        module = self._imported()
        if module is None:
            return (
                f"the script has not imported a module {self.module!r}. Give the name under which the script "
                "imports it"
            )
        kinds = "function, class or method" if self._methods else "function or method"
        what = "does not exist in" if self._owner(module) is None else f"is not a {kinds} of"
        script = " (the script itself)" if self._is_of_main else ""
        return f"{self.path!r} {what} {self.module!r}{script}"

    def _imported(self) -> Any:
        return sys.modules.get("__main__" if self._is_of_main else self.module)

    def _owner(self, module: Any) -> Any:
        """Return the module or class that has the function, or None if nothing has it."""
        *parents, name = self.path.split(".")
        owner = functools.reduce(lambda holder, parent: getattr(holder, parent, None), parents, module)
        return owner if hasattr(owner, name) else None


class Search:
    """Finds named functions after the script has defined them, and before it calls them.

    Only a profile function can run between the definition of a function in `__main__` and the first call of
    that function. A profile function makes all Python code slower. It is therefore removed during imports of
    modules that cannot define a missing function. It is removed for good when all functions are found, or
    when the first step begins. In each call, the profile function looks for the missing functions only if
    the name of one of them now refers to another object than before.
    """

    def __init__(self, named: Sequence[NamedFunction]) -> None:
        self.named = named
        self._missing = [*named]
        # Whether the search is running. During an import, this stays True, although the profile function of
        # the search is removed for that time.
        self._is_searching = False
        self._is_over = False  # whether the first step has begun
        # The profile function that the search replaces, if any. It is our own, and counts the start-up's
        # calls.
        self._before: Any = None

    def begin(self) -> None:
        """Find the functions that already exist, and start looking for the missing ones."""
        self._find_main()
        is_started_by_python = multiprocessing.parent_process() is None
        before = sys.getprofile()
        is_free = before is None or getattr(before, "__module__", "").startswith("perfsuite.")
        if not self.look() and is_started_by_python and is_free:
            self._before = before
            self._is_searching = True
            sys.setprofile(self._look_in_a_call)

    def end(self) -> None:
        """Remove the profile function when the first step begins, and look once more."""
        if not self._is_over:
            self._is_over = True
            self._unhook()
            self._find_main()
            self.look()
            for named in self.named:
                named.forget_binding()

    def look_late(self) -> list[NamedFunction]:
        """Look for the functions that are still missing. Return those that are found now."""
        missing = [named for named in self.named if not named.is_found]
        return [named for named in missing if named.look()]

    def look(self) -> bool:
        """Look for the functions that are still missing. Return whether all have been found."""
        self._missing = [named for named in self._missing if not named.look()]
        return not self._missing

    def _find_main(self) -> None:
        for named in self.named:
            named.module_may_be_main()

    def _unhook(self) -> None:
        self._is_searching = False
        if sys.getprofile() == self._look_in_a_call:
            sys.setprofile(self._before)

    def _look_in_a_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._before is not None:
            self._before(frame, event, argument)
        try:
            # The module that begins to run can be the script itself, if `runpy` runs it.
            if event == "call" and frame.f_code.co_name == "<module>":
                self._find_main()
            # Check `_is_over`, because another thread might have ended the search.
            is_over = self._is_over or (any(map(NamedFunction.is_rebound, self._missing)) and self.look())
        except Exception:  # an error must not end the script; `end` tries again
            is_over = True
        if is_over:
            self._unhook()

    def around_import(self, name: str) -> Callable[[], None] | None:
        """Set or remove the profile function when an import begins.

        Only the script itself and the named modules can define a named function. So the profile function is
        removed while other modules are imported. If this call changes something, it returns a function that
        undoes the change at the end of the import.
        """
        if not self._is_searching:
            return None
        is_named = any(named.module == name for named in self._missing)
        is_looking = sys.getprofile() == self._look_in_a_call
        if is_named == is_looking:
            return None
        self._turn(is_named)
        return lambda: self._turn(is_looking)

    def _turn(self, is_on: bool) -> None:
        """Set or remove the profile function, unless the script has set a profile function of its own."""
        profiler = sys.getprofile()
        if is_on and self._is_searching and profiler in (None, self._before):
            sys.setprofile(self._look_in_a_call)
        elif not is_on and profiler == self._look_in_a_call:
            sys.setprofile(self._before)


def wrap_method(owner: Any, name: str, wrap: Wrap) -> None:
    """Wrap a function of a class, module or object. Static methods and class methods keep their kind."""
    function = getattr(owner, name)
    # `getattr` on a class returns a static method as a plain function, and a class method as a bound method.
    # If a wrapper around these were set on the class, it would get the instance as an additional argument.
    as_defined = inspect.getattr_static(owner, name, None) if isinstance(owner, type) else None
    if isinstance(as_defined, staticmethod | classmethod):
        setattr(owner, name, type(as_defined)(wrap(as_defined.__func__)))
    else:
        setattr(owner, name, wrap(function))


def replace_everywhere(owner: Any, name: str, function: Any, wrapped: Any) -> None:
    """Replace a function in its module, and in all modules that have used `from module import name`."""
    for module in (owner, *list(sys.modules.values())):
        try:
            names = object.__getattribute__(module, "__dict__")  # `getattr` would load a lazy module
        except AttributeError:
            continue
        if names.get(name) is function:
            setattr(module, name, wrapped)


def _names_of_main() -> tuple[str | None, ...]:
    """Return all names of the script's module: `__main__`, its file's name, and NAME in `python -m NAME`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return ("__main__", Path(getattr(main, "__file__", None) or "").stem, getattr(spec, "name", None))
