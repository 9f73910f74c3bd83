"""Test functions that a case names, in this process. Tests in `frameworks/` launch scripts with them."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from perfsuite.worker.clock.startup_clock import StartUpClock
from perfsuite.worker.hooks.named import NamedFunction, Search
from tests.samples import known

MODULE = "a_users_module"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def no_profiler() -> Iterator[None]:
    profiler = sys.getprofile()
    sys.setprofile(None)
    yield
    sys.setprofile(profiler)


def ones() -> int:
    return 1


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: 2 * function(*args)


def test_wraps_a_function_in_its_importers_too(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.get = lambda: 1
    importer: Any = ModuleType("importer")
    importer.get = module.get
    monkeypatch.setitem(sys.modules, "importer", importer)
    Search([NamedFunction(f"{MODULE}:get", doubled)]).begin()
    assert (module.get(), importer.get()) == (2, 2)


def test_does_not_load_a_lazy_module_to_search_it(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("it was loaded")

    module.get = lambda: 1
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "lazy", Lazy("lazy"))
        Search([NamedFunction(f"{MODULE}:get", doubled)]).begin()
    assert module.get() == 2


@pytest.mark.usefixtures("no_profiler")
def test_finds_later_functions_before_their_calls(module: Any) -> None:
    Search([NamedFunction(f"{MODULE}:{name}", doubled) for name in ("get", "give")]).begin()
    module.get = lambda: 1
    doubled(len)  # any call starts a search
    module.give = lambda: 3
    assert (module.get(), module.give()) == (2, 6)
    assert sys.getprofile() is None


@pytest.mark.usefixtures("no_profiler")
def test_search_keeps_the_count_of_the_start_up(module: Any) -> None:
    clock = StartUpClock(0.0, before="imports", now=lambda: 0.0)
    clock.count_calls(in_forks=False)
    counting = sys.getprofile()
    Search([NamedFunction(f"{MODULE}:get", doubled)]).begin()
    module.get = ones
    ones()  # any call makes the search look for new functions
    assert module.get() == 2
    assert sys.getprofile() is counting
    assert sum(known(known(clock.end()).calls)["start-up: build and first step"].values()) >= 1


@pytest.mark.usefixtures("no_profiler")
def test_failed_count_during_a_search_is_unknown(module: Any) -> None:
    clock = StartUpClock(0.0, before="imports", now=lambda: 0.0)
    clock.count_calls(in_forks=False)
    Search([NamedFunction(f"{MODULE}:get", doubled)]).begin()
    parts = clock._parts
    module.get = ones
    clock._parts = []  # the next call cannot be counted because of this
    ones()
    clock._parts = parts
    ones()
    assert module.get() == 2
    assert known(clock.end()).calls is None


@pytest.mark.usefixtures("no_profiler")
def test_the_search_ends_with_the_first_step() -> None:
    search = Search([NamedFunction(f"{MODULE}:get", doubled)])
    search.begin()
    assert sys.getprofile() == search._look_in_a_call
    search.end()
    assert sys.getprofile() is None


def test_finds_functions_made_after_the_first_step(module: Any) -> None:
    named = NamedFunction(f"{MODULE}:get", doubled)
    search = Search([named])
    search.end()
    assert search.look_late() == []
    module.get = lambda: 1
    assert (search.look_late(), search.look_late()) == ([named], [])
    assert module.get() == 2


def test_class_is_no_function_without_methods(module: Any) -> None:
    module.Kind = type("Kind", (), {"__call__": lambda self: 1})
    name = f"{MODULE}:Kind"
    alone = NamedFunction(name, doubled)
    with_methods = NamedFunction(name, doubled, ("__call__",))
    assert (alone.look(), with_methods.look()) == (False, True)
    assert alone.why_not_found() == f"'Kind' is not a function or method of '{MODULE}'"
    assert module.Kind()() == 2


def test_wraps_an_inherited_method_of_a_class(module: Any) -> None:
    class Base:
        def step(self) -> int:
            return 1

    module.Child = type("Child", (Base,), {})
    named = NamedFunction(f"{MODULE}:Child.step", doubled)

    assert named.look()
    assert (module.Child().step(), Base().step()) == (2, 1)


def test_a_method_of_an_object_is_wrapped(module: Any) -> None:
    class Kind:
        def step(self) -> int:
            return 1

    module.trainer = Kind()
    named = NamedFunction(f"{MODULE}:trainer.step", doubled)

    assert named.look()
    assert module.trainer.step() == 2


def test_wraps_a_function_from_module_getattr(module: Any) -> None:
    def get() -> int:
        return 1

    module.__getattr__ = {"get": get}.__getitem__
    named = NamedFunction(f"{MODULE}:get", doubled)

    assert named.look()
    assert module.get() == 2
