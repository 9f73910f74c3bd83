"""Time how long the training waits for batches (data wait). Imports torch.

`_BaseDataLoaderIter.__next__` yields every batch of a `DataLoader`. Other loaders derive from `DataLoader` or
wrap one: torchdata's StatefulDataLoader (and torchtitan's), accelerate's DataLoaderShard, and the loaders of
the Trainer, Lightning and nanotron. `_BaseDataLoaderIter` is private to torch. If a version of torch does not
have it, the data wait is unknown.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
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
from perfsuite.worker.clock.timers import HostTimer, training_thread
from perfsuite.worker.hooks.named import NamedFunction

SETTINGS = ("num_workers", "batch_size", "prefetch_factor", "pin_memory", "persistent_workers")
"""Arguments of a `DataLoader` that decide how fast it yields batches."""
ELSEWHERE = (
    "data wait is unknown: loaders gave batches to other threads during the steps. Name the function or "
    "class that gives the training thread its batches: Script(loader=...)"
)
_HOST = HostTimer()
_loading: set[int] = set()  # ids of the threads in which a loader is producing a batch
_wait: DataWait | None = None  # the data wait of the training in this process
# The id of a living iterator that the loader of the case has returned -> a weak reference to the iterator.
# Calls of a `WeakValueDictionary` would count as Python calls of the training.
_of_case: dict[int, weakref.ref[Any]] = {}
_settings: set[str] = set()  # settings of the loaders that have begun to yield batches


class DataWait:
    """Records how long the training thread waits for batches in each step.

    If loaders give batches to other threads as well, the training might get these batches from a queue. A
    wait for a queue is not seen. The data wait is then unknown, unless the training thread gets batches from
    the loader that is named in the case.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns the time in seconds."""
        self.now = now
        self.is_seen = False  # whether any loader has given the training thread a batch
        # Whether the loader that the case names has given the training thread a batch.
        self._is_of_case = False
        self._is_elsewhere = False  # whether any loader has given another thread a batch
        self.worker_pids: dict[int, int] = {}
        """The id of a loader's dataset -> the process id of the loader's first worker. Only loaders that
        yielded a batch in step `COUNTED_STEP` are included."""
        self._thread = training_thread()
        self._by_step: list[float] = []
        self._running_s = 0.0

    def begin_step(self) -> None:
        """Begin a step. Loading between two steps is not counted."""
        self._running_s = 0.0

    def end_step(self) -> None:
        """End a step."""
        self._by_step.append(self._running_s)

    def result(self) -> tuple[float, ...]:
        """Return the seconds of each step, or nothing if they are unknown."""
        return tuple(self._by_step) if self.is_seen and not self.is_unknown else ()

    @property
    def is_unknown(self) -> bool:
        """Whether the training might have waited for batches that loaders gave to other threads."""
        return self._is_elsewhere and not self._is_of_case

    def give(self, thread: int, *, is_of_case: bool) -> None:
        """Record that a loader has given a thread a batch. `is_of_case`: the case names this loader."""
        if thread != self._thread:
            self._is_elsewhere = True
        elif is_of_case:
            self._is_of_case = True

    def add(self, thread: int, seconds: float) -> None:
        """Add the seconds for which a thread has waited."""
        if thread == self._thread:
            self.is_seen = True
            self._running_s += seconds

    def note_workers(self, maker: Any) -> None:
        """In step `COUNTED_STEP`, record the first worker of the loader that has just yielded a batch.

        Only iterators of torch's `DataLoader` keep such workers in their attribute `_workers`. In a user's
        class, this attribute means something else. A loader without workers is ignored.
        """
        of_batches = private.or_none("BaseDataLoaderIter")
        if len(self._by_step) == COUNTED_STEP - 1 and of_batches and isinstance(maker, of_batches):
            workers = getattr(maker, loader_workers.name, None)
            if workers:
                self.worker_pids[id(loader_dataset(maker))] = workers[0].pid


def begin(now: Callable[[], float] = _HOST.stamp) -> DataWait:
    """Start timing the data wait of the training thread, which calls this function.

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


def timed(make: Callable[..., Any], *, is_of_case: bool = False) -> Callable[..., Any]:
    """Wrap a function so that its calls are timed. If timed calls are nested, only the outermost is timed.

    `is_of_case`: the function belongs to the loader that the case names.
    """

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
            if wait is not None:
                iterator = args[0] if args else None
                wait.give(thread, is_of_case=is_of_case or _is_of_case(iterator))
        if _wait is not None and args:
            # `contextlib.suppress` would count as Python calls of the training.
            try:
                _wait.note_workers(args[0])
            except Exception:  # then only the work that a worker does for a batch is unknown
                return made
        return made

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


def _with_timed_batches(made: Any) -> Any:
    """Return an iterator whose batches are timed: `made` itself if possible, otherwise a proxy of it.

    The class of `made` is changed, so all its other instances are timed as well. A class of C code, such as
    that of generators, cannot be changed.
    """
    kind: Any = type(made)
    if not hasattr(kind.__next__, "is_watched"):
        try:
            kind.__next__ = timed(kind.__next__)
        except (TypeError, AttributeError):
            return _proxy_class(kind)(made)
    with contextlib.suppress(TypeError):  # it does not support weak references
        key = id(made)
        _of_case[key] = weakref.ref(made, lambda _: _of_case.pop(key, None))
    return made


def _is_of_case(iterator: Any) -> bool:
    """Return whether an iterator comes from the loader that the case names."""
    made = _of_case.get(id(iterator))
    return made is not None and made() is iterator


class _Batches:
    """A proxy of an iterator whose class cannot be changed. Its batches are timed.

    Scripts can use the proxy like the iterator: it delegates everything else.
    """

    __slots__ = ("__weakref__", "perfsuite_iterator")

    def __init__(self, iterator: Iterator[Any]) -> None:
        object.__setattr__(self, "perfsuite_iterator", iterator)

    def __iter__(self) -> Any:
        iterator = iter(self.perfsuite_iterator)
        return self if iterator is self.perfsuite_iterator else _with_timed_batches(iterator)

    def watched(self) -> Any:
        return next(self.perfsuite_iterator)

    __next__ = timed(watched, is_of_case=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.perfsuite_iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.perfsuite_iterator, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.perfsuite_iterator)


OWN = {*vars(_Batches), "__del__", "__getattribute__", "__init_subclass__", "__new__", "__subclasshook__"}
"""Special methods that the proxy does not delegate. Python itself calls the iterator's `__del__`."""


@functools.cache
def _proxy_class(kind: type) -> type[_Batches]:
    """Return a class of proxies that has the special methods of `kind`.

    Python looks these up in the class of an object, so `__getattr__` does not provide them.
    """

    def delegated(name: str) -> Callable[..., Any]:
        def delegate(proxy: Any, *args: Any, **kwargs: Any) -> Any:
            result = getattr(proxy.perfsuite_iterator, name)(*args, **kwargs)
            return proxy if result is proxy.perfsuite_iterator else result  # for example of `__enter__`

        return delegate

    names = [name for name in dir(kind) if name.startswith("__") and name not in OWN]
    methods = {name: delegated(name) for name in names if callable(getattr(kind, name, None))}
    return type(kind.__name__, (_Batches,), {"__slots__": (), **methods})


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
                "If a DataLoader yields the batches, remove the argument loader"
            )

    def _noticed(self, make: Callable[..., Any]) -> Callable[..., Any]:
        make_timed = timed(make, is_of_case=True)

        @functools.wraps(make)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            made = make_timed(*args, **kwargs)
            return _with_timed_batches(made) if hasattr(type(made), "__next__") else made

        return watched
