"""Time how long the training waits for batches (data wait). Imports torch.

`_BaseDataLoaderIter.__next__` yields every batch of a `DataLoader`. Other loaders derive from `DataLoader` or
wrap one: torchdata's StatefulDataLoader (and torchtitan's), accelerate's DataLoaderShard, and the loaders of
the Trainer, Lightning and nanotron. `_BaseDataLoaderIter` is private to torch. If a version of torch does not
have it, the data wait is unknown.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from torch.utils.data import DataLoader

from perfsuite.errors import MismatchError
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.private import loader_dataset, loader_workers
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.rank_report import LOADER
from perfsuite.worker.clock import startup_clock
from perfsuite.worker.clock.timers import HostTimer
from perfsuite.worker.hooks.named import NamedFunction

SETTINGS = ("num_workers", "batch_size", "prefetch_factor", "pin_memory", "persistent_workers")
"""Arguments of a `DataLoader` that decide how fast it yields batches."""
_HOST = HostTimer()
_loading: set[int] = set()  # ids of the threads in which a loader is producing a batch
_wait: DataWait | None = None  # the data wait of the training in this process
_settings: set[str] = set()  # settings of the loaders that have begun to yield batches


class DataWait:
    """Records how long the thread that creates this object waits for batches in each step."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns the time in seconds."""
        self.now = now
        self.is_seen = False  # whether any loader has given this thread a batch
        self.worker_pids: dict[int, int] = {}
        """The id of a loader's dataset -> the process id of the loader's first worker. Only loaders that
        yielded a batch in step `COUNTED_STEP` are included."""
        self._thread = get_ident()
        self._by_step: list[float] = []
        self._running_s = 0.0

    def begin_step(self) -> None:
        """Begin a step. Loading between two steps is not counted."""
        self._running_s = 0.0

    def end_step(self) -> None:
        """End a step."""
        self._by_step.append(self._running_s)

    def result(self) -> tuple[float, ...]:
        """Return the seconds of each step, or nothing if no loader was seen."""
        return tuple(self._by_step) if self.is_seen else ()

    def add(self, thread: int, seconds: float) -> None:
        """Add the seconds for which a thread has waited."""
        if thread == self._thread:
            self.is_seen = True
            self._running_s += seconds

    def note_workers(self, maker: Any) -> None:
        """In step `COUNTED_STEP`, record the first worker of the loader that has just yielded a batch.

        A loader without workers is ignored.
        """
        if len(self._by_step) == COUNTED_STEP - 1:
            workers = getattr(maker, loader_workers.name, None)
            if workers:
                self.worker_pids[id(loader_dataset(maker))] = workers[0].pid


def begin(now: Callable[[], float] = _HOST.stamp) -> DataWait:
    """Start timing the data wait of the calling thread, which is the training thread.

    `now` returns the time in seconds.
    """
    global _wait
    _wait = DataWait(now)
    return _wait


def is_loading(thread: int) -> bool:
    """Return whether a loader is producing a batch in this thread."""
    return thread in _loading


def settings() -> dict[str, str]:
    """Return the settings of all `DataLoader`s that have yielded batches, as one entry; {} if none has."""
    return {LOADER: "; ".join(sorted(_settings))} if _settings else {}


def _note_settings(loader: Any) -> None:
    """Record the arguments that decide how fast a loader is.

    A configuration file can contain them, so they can change although the code does not.
    """
    if isinstance(loader, DataLoader):
        with contextlib.suppress(Exception):  # a subclass can have removed an attribute
            words = [f"{name}={getattr(loader, name)}" for name in SETTINGS]
            _settings.add(", ".join(words))


def watch() -> None:
    """From now on, time how long each `DataLoader` takes to start its workers and to yield a batch."""
    _settings.clear()
    of_batches = private.or_none("BaseDataLoaderIter")
    for owner, name in ((DataLoader, "__iter__"), (of_batches, "__next__")):
        if owner is not None and not hasattr(getattr(owner, name), "is_watched"):
            setattr(owner, name, timed(getattr(owner, name)))


def timed(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its calls are timed. If timed calls are nested, only the outermost is timed."""

    @functools.wraps(make)
    def watched(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        if thread in _loading:
            return make(*args, **kwargs)
        _loading.add(thread)
        wait = _wait
        since = 0.0 if wait is None else wait.now()
        try:
            with startup_clock.Part(startup_clock.DATA):
                made = make(*args, **kwargs)
        finally:
            _loading.discard(thread)
            if wait is not None:
                wait.add(thread, wait.now() - since)
        if hasattr(type(made), "__next__"):  # this is an iterator of batches
            _note_settings(args[0] if args else None)
        else:
            startup_clock.first_batch()
        if _wait is not None and args:
            _wait.note_workers(args[0])
        return made

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


class _Batches:
    """An iterator whose batches are timed."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> _Batches:
        return self

    def watched(self) -> Any:
        return next(self._iterator)

    __next__ = timed(watched)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class NamedLoader(NamedFunction):
    """The loader that a case names as `module:name`. It is timed as soon as the script has defined it.

    A function can return one batch per call, or an iterator of batches. If the name is that of a class, its
    `__next__` is timed. If the class has no `__next__`, the iterator that its `__iter__` returns is timed. A
    method can also be named, as in `train:Loader.next_batch`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, self._noticed, methods=("__next__", "__iter__"))
        self.calls = 0  # number of calls of the named function, in any thread

    def check_name(self) -> None:
        """Raise `MismatchError` if there is no such loader."""
        why = self.why_not_found()
        if why is not None:
            advice = ". Name the function or class that yields batches" if self.is_imported else ""
            raise MismatchError(f"loader={self.name!r}: {why}{advice}")

    def check(self) -> None:
        """Raise `MismatchError` if there is no such loader, or if the training does not call it."""
        self.check_name()
        if not self.calls:
            raise MismatchError(
                f"loader={self.name!r}: it was not called in the first steps. Name the function that the "
                "training calls for each batch, or the function that returns the iterator over batches. "
                "If a DataLoader yields the batches, do not give loader"
            )

    def _noticed(self, make: Callable[..., Any]) -> Callable[..., Any]:
        make_timed = timed(make)

        @functools.wraps(make)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            made = make_timed(*args, **kwargs)
            return _Batches(made) if hasattr(type(made), "__next__") else made

        return watched
