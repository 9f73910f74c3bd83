"""Track the storages of one process: when they are created, resized and freed. Each storage counts once.

Three kinds of storages count as zero bytes, because the training does not decide when they are created and
freed:

- storages that are in shared memory when they are first seen, such as a batch from workers of a `DataLoader`
- storages that appear in host memory while a `DataLoader` without workers makes a batch. If the model is on
  another device, all storages that appear in host memory count as this kind
- storages that appear while the training waits for a collective, such as gloo's buffers

If a thread that does not train releases a storage, the storage counts until its last use.
"""

import contextlib
import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from perfsuite.frameworks.common.private import BaseDataLoaderIter, FakeTensor, cdata
from perfsuite.results.counts import InCycles, Phase, StepMemory
from perfsuite.worker.counting.holders import Garbage
from perfsuite.worker.observation.replicas import local

RECEIVED = "received"
UNSHARDED = "unsharded"
COMMUNICATION = "communication"
KEPT = "kept"
PERMANENT = ("parameter", "gradient", "optimizer state", RECEIVED)  # a storage never leaves these categories


class MemoryChange(NamedTuple):
    """The allocation, release or resize of a storage."""

    storage: int  # number of the storage. Storages are numbered in the order in which they appear
    bytes: int  # growth in bytes. It is negative if the storage shrinks or is released
    phase: Phase


class LiveMemory:
    """The storages of one process. `phase` returns the current phase of the step."""

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase = phase
        # An error in the callback of a freed storage. It is kept, because Python itself would only print it.
        self.error: Exception | None = None
        self.counts_host = True  # whether the model is in host memory
        # Ids of threads that wait for a collective. Storages that they create belong to the collective's
        # backend.
        self._waiting: set[int] = set()
        # Address of a living storage -> its number, and a weak reference that reports when the storage is
        # freed.
        self._living: dict[int, tuple[int, Any]] = {}
        # The index of the following lists is the number of a storage.
        self._bytes: list[int] = []  # current size in bytes
        self._part: list[str] = []  # category, as far as it is known
        self._start: list[int] = []  # size in bytes when this step began
        self._used: list[int] = []  # length of `_changes` when the storage was last used in this step
        self._threads: set[int] = set()  # ids of the threads of the training
        self._changes: list[MemoryChange] = []  # changes since this step began
        self._has_seen_a_step = False  # whether a whole step has ended
        self._born = set[int]()  # numbers of the storages that were created in counted steps
        self._of_first_step = set[int]()  # those of the first counted step
        self._in_cycles = 0  # bytes of these storages that the garbage collector has freed
        self._collecting: int | None = None  # id of the thread in which the garbage collector runs
        self._callback = self._see_collector  # keep one bound method, so that `forget` finds it in the list

    def see(self, tensor: Tensor, part: str, *, born: bool = False) -> None:
        """Record a tensor that an operator gets as input. With `born`, the operator has created the tensor.

        `part` is the category of the tensor's storage if the storage is new.
        """
        storage = storage_of(tensor)
        if storage is not None:
            thread = get_ident()
            is_new = cdata(storage) not in self._living
            if is_new and (thread in self._waiting or self._is_data(tensor, storage)):
                part = RECEIVED
            number = self._see_storage(storage, part, born=born)
            self._used[number] = len(self._changes)
            self._threads.add(thread)

    def _is_data(self, tensor: Tensor, storage: Any) -> bool:
        """Return whether a new tensor in host memory is data for the training. Such data is not counted."""
        if tensor.device.type != "cpu":
            return False
        is_real = storage.device.type == "cpu"  # the storage of a fake tensor is on no device
        return not self.counts_host or (is_real and storage.is_shared()) or _is_loading()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this thread as waiting for a collective inside the `with` block."""
        self._waiting.add(get_ident())
        try:
            yield
        finally:
            self._waiting.discard(get_ident())

    def received(self, storage: Any) -> None:
        """Record a storage in host memory that belongs to a batch of a loader.

        Call this before an operator uses the storage.
        """
        self._see_storage(storage, RECEIVED)

    def resized(self, storage: Any, size: int) -> None:
        """Record that a storage is about to be resized to `size` bytes."""
        number = self._see_storage(storage, UNSHARDED)
        if self._part[number] not in PERMANENT:
            self._part[number] = UNSHARDED
        self._change(number, size)

    def communicated(self, tensor: Tensor) -> None:
        """Record that a tensor was part of a collective."""
        number = self.number(tensor)
        if number is not None and self._part[number] not in PERMANENT:
            self._part[number] = COMMUNICATION

    def assign(self, tensor: Any, part: str) -> None:
        """Assign a tensor, or this rank's shard of it, to one of the `PERMANENT` categories."""
        storage = storage_of(local(tensor))
        if storage is not None:
            self._part[self._see_storage(storage, KEPT)] = part

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, or None if the storage was never seen."""
        storage = storage_of(tensor)
        return None if storage is None else self._living.get(cdata(storage), (None, None))[0]

    def end_step(self) -> StepMemory:
        """Return the memory of the step that ends, and begin the next step."""
        memory = self._replayed()
        self._has_seen_a_step = True
        self._start = list(self._bytes)
        self._changes = []
        self._used = [0] * len(self._bytes)
        return memory

    def watch_collector(self) -> None:
        """Begin to record what Python's garbage collector frees, until `forget` is called."""
        gc.callbacks.append(self._callback)

    def in_cycles(self) -> InCycles:
        """Return what the first step allocated and only the garbage collector freed.

        Call `watch_collector` before the first step, and this method after the second step. A training loop
        keeps the outputs of a step in its variables until the next step replaces them, so only then are these
        outputs garbage.
        """
        garbage = Garbage(self._left())
        gc.collect()
        return InCycles(bytes=self._in_cycles, holders=garbage.holders())

    def begin_cycles_again(self) -> None:
        """Forget what the first step has allocated so far, so that `in_cycles` does not report it."""
        self._of_first_step.clear()
        self._in_cycles = 0

    def _left(self) -> list[Tensor]:
        """Return the living tensors whose storages were created in counted steps, the largest first.

        Tensors of the second step are included. If the collector has already freed all garbage of the first
        step, only garbage of the second step can still show the holders.
        """
        living = {number for number, _ in self._living.values()} & self._born
        if not living:
            return []
        # Only these classes: reading the storage of another subclass of Tensor could run code of that class.
        tensors = (thing for thing in gc.get_objects() if type(thing) in (Tensor, Parameter, FakeTensor))
        left = [tensor for tensor in tensors if self.number(tensor) in living]
        return sorted(left, key=lambda tensor: -tensor.untyped_storage().nbytes())

    def forget(self) -> None:
        """Stop watching storages."""
        self._living.clear()
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _see_collector(self, at: str, _: Any) -> None:
        self._collecting = get_ident() if at == "start" else None

    def _see_storage(self, storage: Any, part: str, *, born: bool = False) -> int:
        address = cdata(storage)
        size = storage.nbytes()
        if address in self._living:
            number, _ = self._living[address]
            if self._part[number] != RECEIVED:
                self._change(number, size)  # an operator can enlarge an `out=` that is too small
            return number
        if part == RECEIVED:
            size = 0
        number = len(self._bytes)
        self._part.append(part)
        self._bytes.append(0)
        self._used.append(len(self._changes))
        if born and part != RECEIVED:
            self._born.add(number)
            if not self._has_seen_a_step:
                self._of_first_step.add(number)
        # After a whole step, all older storages are known. So this one is new, even if its creation was not
        # seen.
        if born or self._has_seen_a_step:
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
                if get_ident() == self._collecting and number in self._of_first_step:
                    self._in_cycles += self._bytes[number]
                if get_ident() in self._threads:
                    self._change(number, 0)
                    return
                at = self._used[number]
                growth = -self._bytes[number]
                self._bytes[number] = 0
                if growth:  # this thread has no phase, so use the phase of the last use
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


def storage_of(tensor: Tensor) -> Any:
    """Return a tensor's storage, or None for a sparse tensor, which has no storage."""
    with contextlib.suppress(NotImplementedError):
        return tensor.untyped_storage()
    return None


class Batches:
    """Remembers the host tensors in the batches of `DataLoader`s, until `end` is called.

    Later, these tensors could not be distinguished from other tensors. The device is read from the tensor and
    not from its storage, because the storage of a fake tensor is on no device.
    """

    def __init__(self) -> None:
        self._made: list[Any] = []  # weak references to storages
        plain = self._plain = BaseDataLoaderIter.__next__

        @functools.wraps(plain)
        def remembered(loader: Any) -> Any:
            batch = plain(loader)
            with contextlib.suppress(Exception):  # a batch can be anything
                on_host = (each for each in _tensors_in(batch) if each.device.type == "cpu")
                self._made += map(weakref.ref, filter(None, map(storage_of, on_host)))
            return batch

        BaseDataLoaderIter.__next__ = remembered

    def end(self) -> list[Any]:
        """Return the storages of batches that are still alive."""
        BaseDataLoaderIter.__next__ = self._plain
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
    """Return whether a `DataLoader` is making a batch in this thread.

    This function searches the stack. A wrapper around the loader cannot be used instead, because its calls
    would be counted as Python calls.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BaseDataLoaderIter.__next__.__code__:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def entered(
    owner: Any, name: str, context: Callable[..., contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Inside the `with` block, run each call of a method in a context of its own.

    `context` gets the arguments of the call, and returns a context manager for it.
    """
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
            delattr(owner, name)  # the method of the base class becomes visible again
        else:
            setattr(owner, name, own)
