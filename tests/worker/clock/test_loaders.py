"""Test loaders in this process. `frameworks/test_data_wait.py` launches scripts with loaders."""

import sys
from collections.abc import Callable, Iterator
from inspect import isgenerator
from io import StringIO
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from perfsuite.errors import MismatchError
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.worker.clock import loaders
from perfsuite.worker.clock.loaders import DataWait, NamedLoader
from perfsuite.worker.counting.live_memory import _is_loading
from perfsuite.worker.hooks.named import Search
from tests.worker.loops import in_a_thread

MODULE = "a_users_module"


class Slow:
    """A dataset in which loading a row takes time on `Clock`."""

    def __init__(self) -> None:
        self.is_data = list[bool]()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        Clock.now += 1
        self.is_data.append(_is_loading())
        return torch.ones(2)


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def _original_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.fixture
def wait() -> DataWait:
    """Watch loaders. Time passes only in datasets."""
    loaders.watch()
    return loaders.begin(lambda: Clock.now)


def step(wait: DataWait, *work: Callable[[], object]) -> None:
    wait.begin_step()
    for act in work:
        act()
    wait.end_step()


def test_settings_of_loaders_are_recorded(wait: DataWait) -> None:
    assert loaders.settings() == {}, "no loader has begun yet"
    next(iter(DataLoader(Slow(), batch_size=2)))  # type: ignore[arg-type]
    one = "num_workers=0, batch_size=2, prefetch_factor=None, pin_memory=False, persistent_workers=False"
    assert loaders.settings() == {"loader": one}
    next(iter(DataLoader(Slow(), batch_size=4)))  # type: ignore[arg-type]
    assert loaders.settings() == {"loader": f"{one}; {one.replace('=2', '=4')}"}


def test_a_loader_without_attributes_is_not_recorded(wait: DataWait) -> None:
    class Odd(DataLoader[torch.Tensor]):
        @property
        def pin_memory(self) -> bool:
            raise RuntimeError("not today")

        @pin_memory.setter
        def pin_memory(self, value: bool) -> None:
            pass

    loaders._note_settings(Odd(Slow()))  # type: ignore[arg-type]
    assert loaders.settings() == {}


def test_each_step_has_the_seconds_of_its_batches(wait: DataWait) -> None:
    batches = iter(DataLoader(Slow(), batch_size=2))  # type: ignore[arg-type]
    step(wait)
    step(wait, lambda: next(batches))
    step(wait, lambda: next(batches), lambda: next(batches))
    assert wait.result() == (0, 2, 4)


def test_loading_between_steps_is_of_no_step(wait: DataWait) -> None:
    batches = iter(DataLoader(Slow(), batch_size=2))  # type: ignore[arg-type]
    step(wait, lambda: next(batches))
    next(batches)
    step(wait)
    assert wait.result() == (2, 0)


def test_without_a_loader_data_wait_is_unknown(wait: DataWait) -> None:
    step(wait, lambda: torch.ones(2))
    assert wait.result() == ()


def test_does_not_wait_for_another_threads_loader(wait: DataWait) -> None:
    loader: Any = DataLoader(Slow(), batch_size=2)  # type: ignore[arg-type]
    step(wait, lambda: in_a_thread(lambda: next(iter(loader))))
    assert wait.result() == ()


def test_batches_of_other_threads_hide_the_wait(wait: DataWait) -> None:
    """An example is training on batches from a queue, beside an evaluation with a loader of its own."""
    train: Any = DataLoader(Slow(), batch_size=2)  # type: ignore[arg-type]
    valid: Any = DataLoader(Slow(), batch_size=1)  # type: ignore[arg-type]
    step(wait, lambda: in_a_thread(lambda: next(iter(train))), lambda: next(iter(valid)))
    assert wait.result() == ()
    assert wait.is_unknown


def test_watching_twice_counts_once(wait: DataWait) -> None:
    loaders.watch()
    step(wait, lambda: next(iter(DataLoader(Slow(), batch_size=2))))  # type: ignore[arg-type]
    assert wait.result() == (2,)


def test_live_memory_knows_that_a_batch_is_made(wait: DataWait) -> None:
    data = Slow()
    next(iter(DataLoader(data, batch_size=2)))  # type: ignore[arg-type]
    assert data.is_data == [True, True]
    assert not _is_loading()


def test_dataset_error_passes_and_is_timed(wait: DataWait) -> None:
    def fail() -> None:
        Clock.now += 3
        raise ValueError("bad row")

    wait.begin_step()
    with pytest.raises(ValueError, match="bad row"):
        loaders.timed(fail)()
    wait.end_step()
    assert wait.result() == (3,)
    assert not loaders._loading


class OfWorkers(_BaseDataLoaderIter):
    """The iterator of a `DataLoader` with one worker, without the worker."""

    def __init__(self, worker: object, data: object) -> None:
        self._workers = [worker]
        self._dataset = data  # type: ignore[assignment]


def test_knows_the_counted_steps_workers(wait: DataWait) -> None:
    def give(pid: int, data: object) -> Callable[[], object]:
        loader = OfWorkers(SimpleNamespace(pid=pid), data)
        return lambda: loaders.timed(lambda loader: None)(loader)

    train = object()
    valid = object()
    for _ in range(COUNTED_STEP - 1):
        step(wait, give(1, train))
    step(wait, give(2, train), give(3, valid))
    step(wait, give(4, valid))
    assert sorted(wait.worker_pids.values()) == [2, 3]


def test_ended_loader_is_not_of_the_counted_step(wait: DataWait) -> None:
    def end(loader: Any) -> None:
        raise StopIteration

    loader = OfWorkers(SimpleNamespace(pid=1), object())
    for _ in range(COUNTED_STEP - 1):
        step(wait)
    with pytest.raises(StopIteration):
        loaders.timed(end)(loader)
    assert not wait.worker_pids


@pytest.mark.parametrize(
    "loader",
    [SimpleNamespace(_workers=4), SimpleNamespace(_workers=[object()]), OfWorkers(object(), object())],
    ids=["number of a user's loader", "threads of a user's loader", "unknown worker of torch"],
)
def test_unknown_workers_end_no_training(wait: DataWait, loader: Any) -> None:
    for _ in range(COUNTED_STEP - 1):
        step(wait)
    assert loaders.timed(lambda loader: "batch")(loader) == "batch"
    assert not wait.worker_pids


def test_torch_still_has_the_private_names() -> None:
    """perfsuite counts workers with torch's private names `_workers` and `_dataset`."""
    loader: Any = DataLoader([torch.ones(1)] * 4, num_workers=1)  # type: ignore[arg-type]
    batches = iter(loader)
    assert isinstance(batches, _MultiProcessingDataLoaderIter)
    assert batches._workers[0].pid
    assert batches._dataset is loader.dataset


# --- a loader that a case names -------------------------------------------------------------------------


def passes(seconds: float) -> int:
    Clock.now += seconds
    return 1


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(MODULE)
    module.get_batch = lambda: passes(1)
    module.batches = lambda: (passes(1) for _ in count())

    class Loader:
        def __iter__(self) -> Iterator[int]:
            yield from (passes(1) for _ in count())

        def next_batch(self) -> int:
            return passes(1)

        @staticmethod
        def static() -> int:
            return passes(1)

    class Batches:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return passes(1)

    module.Loader = Loader
    module.Batches = Batches
    module.NUMBER = 7
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


USES: dict[str, Callable[[Any], Callable[[], object]]] = {
    "get_batch": lambda module: module.get_batch,
    "batches": lambda module: module.batches().__next__,
    "Loader": lambda module: iter(module.Loader()).__next__,
    "Loader.next_batch": lambda module: module.Loader().next_batch,
    "Loader.static": lambda module: module.Loader.static,
    "Batches": lambda module: module.Batches().__next__,
}


@pytest.mark.parametrize("name", USES)
def test_a_named_loader_is_timed(wait: DataWait, module: ModuleType, name: str) -> None:
    loader = NamedLoader(f"{MODULE}:{name}")
    Search([loader]).begin()
    step(wait, USES[name](module))
    loader.check()
    assert wait.result() == (1,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("elsewhere:get_batch", "the script has not imported a module 'elsewhere'"),
        (f"{MODULE}:nothing", f"'nothing' does not exist in '{MODULE}'"),
        (f"{MODULE}:Loader.nothing", f"'Loader.nothing' does not exist in '{MODULE}'"),
        (f"{MODULE}:NUMBER", f"'NUMBER' is not a function, class or method of '{MODULE}'"),
        (f"{MODULE}:get_batch", "it was not called in the first steps. Name the function"),
    ],
)
def test_a_loader_that_gives_no_batch_is_refused(module: ModuleType, name: str, said: str) -> None:
    loader = NamedLoader(name)
    Search([loader]).end()
    with pytest.raises(MismatchError, match=f"^loader='{name}': {said}"):
        loader.check()


@pytest.mark.parametrize("name", ["get_batch", "batches", "Loader", "Batches", "of_torch"])
def test_a_named_loaders_wait_is_known_in_threads(wait: DataWait, module: Any, name: str) -> None:
    data: Any = DataLoader(Slow(), batch_size=2)  # type: ignore[arg-type]
    module.of_torch = lambda: iter(DataLoader(Slow(), batch_size=1))  # type: ignore[arg-type]
    uses: Any = {**USES, "of_torch": lambda module: module.of_torch().__next__}
    Search([NamedLoader(f"{MODULE}:{name}")]).begin()
    step(wait, lambda: in_a_thread(lambda: next(iter(data))), lambda: uses[name](module)())
    assert not wait.is_unknown
    assert wait.is_seen


def test_a_named_loader_in_another_thread_is_unknown(wait: DataWait, module: Any) -> None:
    valid: Any = DataLoader(Slow(), batch_size=1)  # type: ignore[arg-type]
    Search([NamedLoader(f"{MODULE}:get_batch")]).begin()
    step(wait, lambda: in_a_thread(module.get_batch), lambda: next(iter(valid)))
    assert wait.is_unknown


def test_named_loaders_iterator_keeps_its_methods(wait: DataWait, module: Any) -> None:
    Search([NamedLoader(f"{MODULE}:batches")]).begin()
    batches = module.batches()
    assert iter(batches) is batches
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


class Prefetcher:
    """A user's loader, which begins an epoch in `__iter__`."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> "Prefetcher":
        self._epoch = iter(range(self._rows))
        return self

    def __next__(self) -> int:
        return passes(1) * next(self._epoch)


@pytest.fixture
def loader_of(wait: DataWait, module: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Return a function that returns the value of a named function when a script calls that function."""
    monkeypatch.setattr(Prefetcher, "__next__", Prefetcher.__next__)

    def give(made: Any) -> Any:
        module.get_batch = lambda: made
        Search([NamedLoader(f"{MODULE}:get_batch")]).begin()
        return module.get_batch()

    return give


def test_named_loader_begins_each_epoch(loader_of: Callable[[Any], Any]) -> None:
    loader = loader_of(Prefetcher(2))
    assert [[*loader], [*loader], len(loader)] == [[0, 1], [0, 1], 2]


def test_times_the_class_of_a_returned_iterator(wait: DataWait, loader_of: Callable[[Any], Any]) -> None:
    made = Prefetcher(2)
    loader = loader_of(made)
    step(wait, lambda: next(iter(loader)))
    assert loader is made
    assert wait.result() == (1,)


def test_a_timed_class_is_not_timed_twice(wait: DataWait, loader_of: Callable[[Any], Any]) -> None:
    once = loader_of(Prefetcher(2)).__class__.__next__
    assert loader_of(Prefetcher(2)).__class__.__next__ is once


def test_a_proxy_is_like_its_generator(loader_of: Callable[[Any], Any]) -> None:
    batches = loader_of(word for word in ("a", "b"))
    assert isgenerator(batches)
    assert (repr(batches)[:17], [*batches]) == ("<generator object", ["a", "b"])


def test_a_proxy_has_special_methods(wait: DataWait, loader_of: Callable[[Any], Any]) -> None:
    with loader_of(StringIO("a\nb\n")) as lines:
        step(wait, lambda: next(lines))
        assert next(lines) == "b\n"
    assert wait.is_seen


def test_a_proxy_times_another_iterator_of_iter(wait: DataWait, loader_of: Callable[[Any], Any]) -> None:
    """An example is a class of C code whose `__iter__` begins an epoch with a new iterator."""

    class Epochs:
        def __iter__(self) -> Iterator[int]:
            return (passes(1) for _ in range(2))

        def __next__(self) -> int:
            raise NotImplementedError

    proxy = loaders._Batches(Epochs())
    step(wait, lambda: next(iter(proxy)))
    assert wait.result() == (1,)
