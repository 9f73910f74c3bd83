"""Record the work that the host gives to one simulated GPU, in the order of the calls. Pure.

A dry run records this log from the start of the training process to the end of the reported step. The model
of the allocator replays the whole log. The model of time replays only the reported step, because kernels and
collectives are recorded only in this step. Each storage, stream, event and collective is identified by a
number. Stream 0 is the default stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from perfsuite.results.counts import Phase


class Allocate(NamedTuple):
    """A storage gets memory. If it already has memory, the old memory is freed after the allocation."""

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
    """A thread multiplies matrices in a stream for the first time. cuBLAS keeps a workspace from then on."""

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


class Kernel(NamedTuple):
    """A stream is given the work of an operator, which can consist of several kernels."""

    stream: int
    phase: Phase
    operator: str  # without overload, such as `aten.mm`
    read_bytes: int  # bytes of its input tensors, each counted once
    written_bytes: int
    # Number of its input tensors. It determines how many kernels an operator on lists of tensors needs.
    tensors: int
    dtype: str  # dtype of its first input tensor
    flops: int  # according to the formula of the counts, which ignores masks; 0: no formula
    sizes: tuple[int, ...]
    """The sizes on which the speed of the operator depends. For a matrix product: the batch size, the
    numbers of rows and columns of the result, the inner dimension, and 1 if the first operand is transposed.
    For attention: the numbers of queries and of keys in a sequence, the size of a head, and 1 if the
    attention is causal. Other operators have none."""
    is_strided: bool  # whether a large tensor is not contiguous


class Communicate(NamedTuple):
    """A stream is given a collective."""

    number: int  # counted from 1
    stream: int
    phase: Phase
    kind: str  # as in `Collective`
    ranks: int
    apart: int
    bytes: int  # size of the whole message
    is_async: bool  # whether the stream continues now and waits for the result later


class CollectiveWait(NamedTuple):
    """A stream waits for the result of a collective."""

    stream: int
    number: int


HostWork = Literal["view", "host", "wrapper"]


class HostCall(NamedTuple):
    """The host calls an operator that gives the GPU nothing to do.

    The operator returns a view or an empty tensor, or works on tensors of the host, or takes tensors that
    wrap other tensors (such as DTensors) and calls another operator.
    """

    kind: HostWork


Entry = (
    Allocate
    | Free
    | UseIn
    | Workspace
    | RecordEvent
    | StreamWait
    | HostWait
    | EmptyCache
    | EndOfStep
    | Kernel
    | Communicate
    | CollectiveWait
    | HostCall
)
KINDS: dict[str, type[Entry]] = {kind.__name__: kind for kind in get_args(Entry)}


class DeviceLog:
    """The log of one simulated GPU. Entries can be added until the log is closed."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.stream = 0  # number of the current stream
        self.is_open = True
        self._streams = 0  # number of streams, not including the default stream
        self._events = 0
        self._collectives = 0

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

    def new_collective(self) -> int:
        """Return the number of a new collective."""
        self._collectives += 1
        return self._collectives

    def read_on_host(self) -> None:
        """Record that the host waits for the current stream, to read the result of its work."""
        self.add(HostWait(self.record_event(self.stream)))

    def close(self) -> None:
        """Ignore everything that happens from now on."""
        self.is_open = False


def peak_of_live(entries: Iterable[Entry]) -> int:
    """Return the maximum number of bytes alive at once since the end of the first step, without rounding."""
    sizes: dict[int, int] = {}  # size of each storage
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
