"""Test functions that a case names, in this process. Tests in `frameworks/` launch scripts with them."""

import importlib
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perfsuite.worker.clock import startup_clock
from perfsuite.worker.clock.startup_clock import StartUpClock
from perfsuite.worker.hooks.named import NamedFunction, Search
from tests.samples import known

MODULE = "a_users_module"
pytestmark = pytest.mark.usefixtures("no_profiler")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def search_for(name: str) -> Search:
    """Begin to search for a function, as in a launch."""
    search = Search([NamedFunction(name, doubled)])
    search.begin()
    startup_clock.around_import = search.around_import
    return search


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


def test_finds_later_functions_before_their_calls(module: Any) -> None:
    Search([NamedFunction(f"{MODULE}:{name}", doubled) for name in ("get", "give")]).begin()
    module.get = lambda: 1
    doubled(len)  # any call starts a search
    module.give = lambda: 3
    assert (module.get(), module.give()) == (2, 6)
    assert sys.getprofile() is None


class Looked(NamedFunction):
    """A named function that counts how often it is looked for."""

    looks = 0

    def look(self) -> bool:
        self.looks += 1
        return super().look()


@pytest.mark.parametrize(("name", "looks"), [("later", 2), ("KEPT", 2), ("nothing", 1)])
def test_calls_and_definitions_cost_few_looks(module: Any, name: str, looks: int) -> None:
    named = Looked(f"{MODULE}:{name}", doubled)
    search = Search([named])
    search.begin()
    for number in range(1000):
        setattr(module, f"other_{number}", ones)
        ones()
    module.KEPT = [1]
    module.later = ones
    for _ in range(1000):
        ones()
    sys.setprofile(None)
    # One look when the search begins, one when its module appears, one for each new object of that name.
    assert named.looks <= 1 + looks


def test_finds_a_name_that_is_bound_again(module: Any) -> None:
    module.get = None
    search = Search([NamedFunction(f"{MODULE}:get", doubled)])
    search.begin()
    module.get = ones
    doubled(len)
    assert module.get() == 2
    assert sys.getprofile() is None


@pytest.fixture
def watched_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Watch imports as in a launch, and return a directory from which modules can be imported."""
    bootstrap: Any = importlib._bootstrap
    monkeypatch.setattr(bootstrap, "_find_and_load", bootstrap._find_and_load)
    monkeypatch.setattr(startup_clock, "_clock", None)
    monkeypatch.setattr(startup_clock, "around_import", None)
    monkeypatch.syspath_prepend(tmp_path)
    names = {*sys.modules}
    startup_clock.begin(startup_clock.PERFSUITE, start_of=lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    yield tmp_path
    startup_clock.end()
    for name in {*sys.modules} - names:
        del sys.modules[name]


def test_imports_run_without_the_profile_function(watched_imports: Path) -> None:
    (watched_imports / "import_of_others.py").write_text("import sys\nprofiler = sys.getprofile()\n")
    search = search_for(f"{MODULE}:get")
    imported = importlib.import_module("import_of_others")
    after = sys.getprofile()
    search.end()
    assert imported.profiler is None
    assert after == search._look_in_a_call


def test_named_module_is_searched_during_its_import(watched_imports: Path) -> None:
    text = "def get():\n    return 1\n\nlen('a call')\ngot = get()\n"
    (watched_imports / "named_by_a_case.py").write_text(text)
    (watched_imports / "imports_it.py").write_text("from named_by_a_case import get, got\n")
    search_for("named_by_a_case:get")
    imported = importlib.import_module("imports_it")
    assert (imported.got, imported.get()) == (2, 2)
    assert sys.getprofile() is None


def test_a_step_in_an_import_ends_the_search(watched_imports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (watched_imports / "trains_in_its_import.py").write_text("import a_step\n")
    (watched_imports / "a_step.py").write_text("import sys\nsys.modules['train_step'].end()\n")
    search = search_for("trains_in_its_import:get")
    monkeypatch.setitem(sys.modules, "train_step", search)
    importlib.import_module("trains_in_its_import")
    assert sys.getprofile() is None


def test_the_scripts_own_profile_function_is_kept(watched_imports: Path) -> None:
    text = "import sys\nsys.setprofile(lambda *_: None)\nprofiler = sys.getprofile()\n"
    (watched_imports / "has_a_profiler.py").write_text(text)
    search = search_for(f"{MODULE}:get")
    imported = importlib.import_module("has_a_profiler")
    after = sys.getprofile()
    search.end()
    assert after is imported.profiler
    assert sys.getprofile() is imported.profiler


def test_a_step_in_another_thread_ends_the_search(module: Any) -> None:
    search = Search([NamedFunction(f"{MODULE}:get", doubled)])
    search.begin()
    thread = threading.Thread(target=search.end)
    thread.start()
    thread.join()
    ones()  # the next call removes the profile function of this thread
    assert sys.getprofile() is None


def test_finds_a_function_of_a_script_in_runpy(tmp_path: Path) -> None:
    script = tmp_path / "run_by_runpy.py"
    script.write_text("def get():\n    return 1\n\nlen('a call')\ngot = get()\n")
    Search([NamedFunction("run_by_runpy:get", doubled)]).begin()
    assert runpy.run_path(str(script), run_name="__main__")["got"] == 2
    assert sys.getprofile() is None


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
