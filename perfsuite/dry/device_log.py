"""Record what the host asks of one simulated GPU, in the order in which it asks. Pure.

A dry run records this log from the start of the training process to the end of the counted steps, and replays
it in a model of the allocator. Storages, streams and events are numbers. Stream 0 is the default stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Allocate(NamedTuple):
    """A storage gets memory. The memory that it already has is freed after the allocation."""

    storage: int
    bytes: int
    stream: int  # the current stream, whose free blocks can be used


class Free(NamedTuple):
    """A storage loses its memory."""

    storage: int


class UseIn(NamedTuple):
    """A stream uses a storage of another stream (`Tensor.record_stream`)."""

    storage: int
    stream: int


class Workspace(NamedTuple):
    """A thread's first matrix product in a stream, for which cuBLAS allocates a workspace for good."""

    stream: int


class RecordEvent(NamedTuple):
    """An event marks the work that a stream has been given so far."""

    event: int
    stream: int


class StreamWait(NamedTuple):
    """A stream waits for an event."""

    stream: int
    event: int


class HostWait(NamedTuple):
    """The host waits for an event, or for all work of the GPU (None)."""

    event: int | None


class EmptyCache(NamedTuple):
    """The allocator returns its free segments to CUDA."""


class EndOfStep(NamedTuple):
    """An optimizer step ends. The first one has the number 1."""

    step: int


Entry = Allocate | Free | UseIn | Workspace | RecordEvent | StreamWait | HostWait | EmptyCache | EndOfStep


class DeviceLog:
    """The log of one simulated GPU, which is written until it is closed."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.stream = 0  # number of the current stream
        self.is_open = True
        self._streams = 0  # number of streams besides the default stream
        self._events = 0

    def add(self, entry: Entry) -> None:
        """Append an entry, unless the log is closed."""
        if self.is_open:
            self.entries.append(entry)

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._streams += 1
        return self._streams

    def record_event(self, stream: int) -> int:
        """Record a new event in a stream, and return its number."""
        self._events += 1
        self.add(RecordEvent(self._events, stream))
        return self._events

    def read_on_host(self) -> None:
        """Record that the host waits for the current stream, to read the result of its work."""
        self.add(HostWait(self.record_event(self.stream)))

    def close(self) -> None:
        """Ignore everything that happens from now on."""
        self.is_open = False


def peak_of_live(entries: Iterable[Entry]) -> int:
    """Return the maximum number of bytes alive at once since the end of the first step, without rounding."""
    sizes: dict[int, int] = {}  # by storage
    live = 0
    peak = 0
    for entry in entries:
        match entry:
            case Allocate(storage, size, _):
                live += size - sizes.get(storage, 0)
                sizes[storage] = size
                peak = max(peak, live)
            case Free(storage):
                live -= sizes.pop(storage)
            case EndOfStep(1):
                peak = live
    return peak
