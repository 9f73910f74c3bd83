"""Follows the tensors that live in one process: births, deaths, changes of size. Each storage counts once.

Three kinds of storages count as no bytes, as when they come and go is not the training's doing: what is
in shared memory when it is first seen, as a batch from workers of a `DataLoader`; what is new in host memory
while a `DataLoader` without workers makes a batch, or at any time if the model is on another device; and
what is new while a collective is waited for, as gloo's buffers. What another thread lets go last of all
counts until it was last used.
"""

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from perfsuite.results.counts import MemoryChange, MemoryLog, Phase, StepMemory
from perfsuite.worker.observation.replicas import local

RECEIVED = "received"
UNSHARDED = "unsharded"
COMMUNICATION = "communication"
KEPT = "kept"
PERMANENT = ("parameter", "gradient", "optimizer state", RECEIVED)  # parts that a storage stays in


class LiveMemory:
    """The storages of one process. `phase` tells in which part of the step it is."""

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase = phase
        self.error: Exception | None = None  # when a storage was gone: Python itself would only print it
        self.counts_host = True  # whether the model is in the memory of the host
        self._waiting: set[int] = set()  # threads, for a collective: what is new meanwhile is its backend's
        # By address, of each living storage: its number, and a weak reference that tells when it is gone.
        self._living: dict[int, tuple[int, Any]] = {}
        self._bytes: list[int] = []  # bytes now, by number
        self._part: list[str] = []  # what it is, as far as is known, by number
        self._start: list[int] = []  # bytes when this step began, by number
        self._used: list[int] = []  # changes in this step before it was last used, by number
        self._threads: set[int] = set()  # those of the training
        self._changes: list[MemoryChange] = []  # since then
        self._at_first: list[int] = []
        self._steps: list[list[MemoryChange]] = []

    def see(self, tensor: Tensor, part: str, *, born: bool = False) -> None:
        """Note a tensor that an operator takes, or makes (`born`). `part` is used if it is new."""
        storage = _storage(tensor)
        if storage is not None:
            thread = get_ident()
            is_new = storage._cdata not in self._living
            if is_new and (thread in self._waiting or self._is_data(tensor, storage)):
                part = RECEIVED
            number = self._see_storage(storage, part, born=born)
            self._used[number] = len(self._changes)
            self._threads.add(thread)

    def _is_data(self, tensor: Tensor, storage: Any) -> bool:
        """Return whether a new tensor is in host memory, as data are, and not part of the training."""
        if tensor.device.type != "cpu":
            return False
        is_real = storage.device.type == "cpu"  # that of a fake tensor is on no device
        return not self.counts_host or (is_real and storage.is_shared()) or _is_loading()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Say that this thread waits for a collective, inside of the `with`."""
        self._waiting.add(get_ident())
        try:
            yield
        finally:
            self._waiting.discard(get_ident())

    def received(self, storage: Any) -> None:
        """Note a storage on the host that holds data, before any operator is seen to use it."""
        self._see_storage(storage, RECEIVED)

    def resized(self, storage: Any, size: int) -> None:
        """Note that a storage is about to be resized to so many bytes."""
        number = self._see_storage(storage, UNSHARDED)
        if self._part[number] not in PERMANENT:
            self._part[number] = UNSHARDED
        self._change(number, size)

    def communicated(self, tensor: Tensor) -> None:
        """Note that a tensor was part of a collective."""
        number = self.number(tensor)
        if number is not None and self._part[number] not in PERMANENT:
            self._part[number] = COMMUNICATION

    def assign(self, tensor: Any, part: str) -> None:
        """Say what a tensor is, or this rank's shard of it: one of `PERMANENT`."""
        storage = _storage(local(tensor))
        if storage is not None:
            self._part[self._see_storage(storage, KEPT)] = part

    def number(self, tensor: Tensor) -> int | None:
        """Return what a tensor's storage is known by for as long as it lives; None if it was never seen."""
        storage = _storage(tensor)
        return None if storage is None else self._living.get(storage._cdata, (None, None))[0]

    def end_step(self) -> StepMemory:
        """Replay the step that ends, and begin the next one."""
        told = self._replayed()
        if not self._steps:
            self._at_first = self._start
        self._steps.append(self._changes)
        self._start = list(self._bytes)
        self._changes = []
        self._used = [0] * len(self._bytes)
        return told

    def log(self) -> MemoryLog:
        """Return what happened in the steps that have ended."""
        return MemoryLog(tuple(self._at_first), tuple(map(tuple, self._steps)))

    def forget(self) -> None:
        """Watch no storage any more."""
        self._living.clear()

    def _see_storage(self, storage: Any, part: str, *, born: bool = False) -> int:
        address = storage._cdata
        size = storage.nbytes()
        if address in self._living:
            known, _ = self._living[address]
            if self._part[known] != RECEIVED:
                self._change(known, size)  # grown by an `out=` that was too small
            return known
        if part == RECEIVED:
            size = 0
        number = len(self._bytes)
        self._part.append(part)
        self._bytes.append(0)
        self._used.append(len(self._changes))
        if born or self._steps:  # after a whole step all that stayed is known: it was made out of sight
            self._change(number, size)
        else:
            self._bytes[number] = size
            self._start += [0] * (number - len(self._start)) + [size]
        self._living[address] = number, weakref.ref(storage, lambda _: self._died(address))
        return number

    def _change(self, number: int, size: int) -> None:
        growth = size - self._bytes[number]
        if growth:
            self._bytes[number] = size
            self._changes.append(MemoryChange(number, growth, self._phase()))

    def _died(self, address: int) -> None:
        try:
            if address in self._living:
                number, _ = self._living.pop(address)
                if get_ident() in self._threads:
                    self._change(number, 0)
                    return
                at = self._used[number]
                growth = -self._bytes[number]
                self._bytes[number] = 0
                if growth:  # the phase of another thread is none
                    phase = self._changes[at - 1].phase if at else "forward"
                    self._changes.insert(at, MemoryChange(number, growth, phase))
        except Exception as error:
            self.error = error

    def _replayed(self) -> StepMemory:
        live = Counter[str]()
        for part, size in zip(self._part, self._start, strict=False):
            live[part] += size
        start = now = peak = live.total()
        at_peak = live.copy()
        peak_in = "start"
        saved = 0
        phase = "start"
        for change in self._changes:
            if phase == "forward" and change.phase == "backward":
                saved = max(saved, live["forward"])
            phase = change.phase
            live[self._part[change.storage]] += change.bytes
            now += change.bytes
            if now > peak:
                peak = now
                at_peak = live.copy()
                peak_in = change.phase
        return StepMemory(
            peak=peak,
            peak_in=peak_in,
            at_peak={part: size for part, size in sorted(at_peak.items()) if size},
            saved_for_backward=saved,
            growth=now - start,
            allocations=sum(change.bytes > 0 for change in self._changes),
        )


def _storage(tensor: Tensor) -> Any:
    """Return a tensor's storage; None of a sparse one, which has none."""
    with contextlib.suppress(NotImplementedError):
        return tensor.untyped_storage()
    return None


class Batches:
    """Remembers what `DataLoader`s make on the host from now on, until `end`: later nobody could tell.

    The device is that of a tensor: the storage of a fake one is on no device.
    """

    def __init__(self) -> None:
        self._made: list[Any] = []  # weak references to storages
        plain = self._plain = _BaseDataLoaderIter.__next__

        @functools.wraps(plain)
        def remembered(loader: Any) -> Any:
            batch = plain(loader)
            with contextlib.suppress(Exception):  # whatever a batch is
                on_host = (each for each in _tensors_in(batch) if each.device.type == "cpu")
                self._made += map(weakref.ref, filter(None, map(_storage, on_host)))
            return batch

        _BaseDataLoaderIter.__next__ = remembered  # type: ignore[method-assign,assignment]

    def end(self) -> list[Any]:
        """Return the storages of batches that are still there."""
        _BaseDataLoaderIter.__next__ = self._plain  # type: ignore[method-assign]
        living = [made() for made in self._made]
        return [storage for storage in living if storage is not None]


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors_in(list(batch.values()))
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors_in(part)


def _is_loading() -> bool:
    """Return whether a `DataLoader` makes a batch in this thread. A wrapper would count as Python calls."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _BaseDataLoaderIter.__next__.__code__:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def entered(
    owner: Any, name: str, context: Callable[..., contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Make each call of a method inside of what `context` returns for its arguments, within the `with`."""
    method = getattr(owner, name)
    own = vars(owner).get(name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return method(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)  # that of its base class is seen again
        else:
            setattr(owner, name, own)
