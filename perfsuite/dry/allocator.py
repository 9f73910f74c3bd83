"""Model torch's caching allocator for CUDA, and replay a log of allocations in the model. Pure.

The model follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13 with the default settings, or with
`expandable_segments:True`. These are the rules, with torch's names:

- `round_size`: a request is rounded up to a multiple of 512 bytes.
- `get_pool`: requests of up to 1 MiB use the small pool, larger requests use the large pool.
- `get_free_block`: the smallest free block in the pool that is large enough is used. If several blocks have
  this size, the one with the lowest address is used.
- `get_allocation_size`: if no free block is large enough, a new segment is requested from CUDA. In the small
  pool, it has 2 MiB. In the large pool, it has 20 MiB if the request is below 10 MiB; otherwise it has the
  size of the request, rounded up to a multiple of 2 MiB.
- `should_split`: the rest of a block becomes a separate free block if it has at least 512 bytes (small pool,
  expandable segments) or more than 1 MiB (large pool). A smaller rest remains part of the allocated block.
- `try_merge_blocks`: a freed block is merged with its free neighbours in the same segment.
- Expandable segments: each pool of a stream has one segment, which grows in pages of 2 MiB (small pool) or
  20 MiB (large pool). The last block of the segment is used only if no other free block is large enough.
- Streams: a segment belongs to the stream that asked for it, and only allocations of this stream use its free
  blocks. When a block is freed that another stream has used (`recordStream`), the block gets an event in that
  stream (`insert_events`). The block can be neither used nor merged until an allocation finds that the event
  is done (`process_events`).
- `release_cached_blocks`: emptying the cache waits for all events and returns the segments in which no block
  is used. With expandable segments, torch returns all free pages. The model deviates from this rule: it
  returns only the free pages at the end of each segment.

A segment also leaves the cache if CUDA is out of memory or if `garbage_collection_threshold` is set. This is
not modelled. CUDA graphs and user-defined memory pools are not modelled either.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from perfsuite.results.device_log import (
    Allocate,
    EmptyCache,
    EndOfStep,
    Entry,
    Free,
    HostWait,
    RecordEvent,
    StreamWait,
    UseIn,
    Workspace,
)

MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = 1 << 20  # kSmallSize
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # kLargeBuffer, large_segment_size
MIN_LARGE_ALLOCATION = 10 << 20  # kMinLargeAlloc
ROUND_LARGE = 2 << 20  # kRoundLarge
FAR = 1 << 60  # distance between the expandable segments, so that all can grow


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, which is in use or free."""

    address: int
    size: int
    pool: _Pool
    is_free: bool = False
    previous: Block | None = None  # neighbours in the same segment
    next: Block | None = None
    other_streams: set[int] = field(default_factory=set)  # streams that use it, except the pool's


_place = attrgetter("size", "address")


class _Pool:
    """The free blocks of the small or the large pool that belong to one stream."""

    def __init__(self, number: int, stream: int, *, is_small: bool) -> None:
        self.number = number  # unique among the pools of all streams
        self.stream = stream
        self.is_small = is_small
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT  # size by which expandable segments grow
        self.last: Block | None = None  # the last block of the expandable segment
        self._free: list[Block] = []  # sorted by size, then by address

    def put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free, block, key=_place)

    def remove(self, block: Block) -> None:
        block.is_free = False
        del self._free[bisect_left(self._free, _place(block), key=_place)]

    def best_fit(self, size: int) -> Block | None:
        index = bisect_left(self._free, (size, -1), key=_place)
        fitting = self._free[index : index + 2]
        if len(fitting) == 2 and fitting[0] is self.last:
            return fitting[1]
        return fitting[0] if fitting else None

    def whole_segments(self) -> list[Block]:
        """Return the free blocks that fill their segments."""
        return [block for block in self._free if block.previous is None and block.next is None]


class CachingAllocator:
    """The allocator of one device. All sizes are in bytes."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.allocated = 0
        # Like `torch.cuda.max_memory_allocated`: the size of all blocks in use, including rounding.
        self.peak_allocated = 0
        # The memory obtained from CUDA, and its peak (`torch.cuda.max_memory_reserved`).
        self.reserved = 0
        self.peak_reserved = 0
        self.peak_before_reset = 0  # `peak_allocated` before `reset_peaks`
        self._end = 0  # address at which the next segment begins
        self._pools: dict[tuple[int, bool], _Pool] = {}  # by stream, and by whether the pool is small

    def take(self, request: int, stream: int = 0) -> Block:
        """Allocate a block for a positive request. `Block.size` can be larger than the request."""
        size = _rounded(request, MIN_BLOCK)
        pool = self._pool(stream, is_small=size <= SMALL_SIZE)
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        elif self.expandable_segments:
            block = self._expand(pool, size)
        else:
            # A new segment. The simulated addresses have no gaps, so it begins where the last one ends.
            block = Block(self._end, _segment_size(size), pool)
            self._end += block.size
            self._reserve(block.size)
        self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block, so that it can be used again."""
        self.retire(block)
        self.put(block)

    def retire(self, block: Block) -> None:
        """Free a block that must not be used again before `put`."""
        self.allocated -= block.size

    def put(self, block: Block) -> None:
        """Merge a freed block with its free neighbours, and let its stream use it again."""
        block.other_streams.clear()
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free:
                block.pool.remove(neighbour)
                _join(block, neighbour)
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Return free segments to CUDA, or the free pages at the end of expandable segments."""
        for pool in self._pools.values():
            if self.expandable_segments:
                self._shrink(pool)
                continue
            for block in pool.whole_segments():
                pool.remove(block)
                self.reserved -= block.size

    def reset_peaks(self) -> None:
        """Let the peaks begin at the current values, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_before_reset = self.peak_allocated
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _pool(self, stream: int, *, is_small: bool) -> _Pool:
        key = (stream, is_small)
        if key not in self._pools:
            self._pools[key] = _Pool(len(self._pools), stream, is_small=is_small)
        return self._pools[key]

    def _shrink(self, pool: _Pool) -> None:
        last = pool.last
        if last is None or not last.is_free:
            return
        pool.remove(last)
        returned = last.size // pool.page * pool.page
        self.reserved -= returned
        last.size -= returned
        if last.size:
            pool.put(last)
            return
        pool.last = last.previous
        if last.previous is not None:
            last.previous.next = None

    def _expand(self, pool: _Pool, size: int) -> Block:
        """Grow the pool's segment until its last block has `size`."""
        last = pool.last
        room = last.size if last is not None and last.is_free else 0
        grown = _rounded(size - room, pool.page)
        self._reserve(grown)
        address = FAR * pool.number if last is None else last.address + last.size
        block = Block(address, grown, pool, previous=last)
        pool.last = block
        if last is not None:
            last.next = block
            if last.is_free:
                pool.remove(last)
                _join(block, last)
        return block

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < MIN_BLOCK if block.pool.is_small or self.expandable_segments else left <= SMALL_SIZE:
            return
        rest = Block(block.address + size, left, block.pool, previous=block, next=block.next)
        if rest.next is not None:
            rest.next.previous = rest
        if block.pool.last is block:
            block.pool.last = rest
        block.size = size
        block.next = rest
        block.pool.put(rest)


def _join(block: Block, neighbour: Block) -> None:
    """Merge a neighbour in the same segment into `block`. Both blocks must already be out of the pool."""
    if neighbour is block.previous:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
        if block.pool.last is neighbour:
            block.pool.last = block
    block.size += neighbour.size


def _segment_size(size: int) -> int:
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE_ALLOCATION else _rounded(size, ROUND_LARGE)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


EventsEnd = Literal["when awaited", "at the end of the step"]
"""The time at which the events of freed blocks are done. A dry run does not know how fast the GPU works.

`when awaited`: when the host has waited for the work that the event marks, or at the end of the step. This
assumes that the host is as far ahead of the GPU as its waits allow. `at the end of the step`: all events are
done only then, even if the host has waited earlier.
"""


class _Replay:
    """Replays the log of a device in the model of the allocator."""

    def __init__(self, allocator: CachingAllocator, workspace_bytes: int, events_end: EventsEnd) -> None:
        self.allocator = allocator
        self._workspace_bytes = workspace_bytes
        self._waits_count = events_end == "when awaited"
        self._blocks: dict[int, Block] = {}  # by storage
        self._work = defaultdict[int, int](int)  # number of marks (points in the work) of each stream
        # By stream: its own latest mark, and the latest mark of each other stream for which it has waited.
        self._seen = defaultdict[int, dict[int, int]](dict)
        # By event: for each stream, the latest mark that the event includes.
        self._included: dict[int, dict[int, int]] = {}
        self._done: dict[int, int] = {}  # by stream: the latest mark that is known to be done
        # Freed blocks that other streams have used, each with its marks in these streams. A block can be used
        # again when all its marks are done.
        self._retired: list[tuple[Block, dict[int, int]]] = []

    def apply(self, entry: Entry) -> None:
        """Apply one entry of the log."""
        match entry:
            case Allocate(storage, size, stream):
                self._process_events()
                old = self._blocks.pop(storage, None)
                self._blocks[storage] = self.allocator.take(size, stream)
                if old is not None:
                    self._free(old)
            case Free(storage):
                self._free(self._blocks.pop(storage))
            case Workspace(stream):
                self._process_events()
                self.allocator.take(self._workspace_bytes, stream)
            case UseIn(storage, stream):
                block = self._blocks.get(storage)
                if block is not None and stream != block.pool.stream:
                    block.other_streams.add(stream)
            case RecordEvent(event, stream):
                self._mark(stream)
                self._included[event] = dict(self._seen[stream])
            case StreamWait(stream, event):
                _update(self._seen[stream], self._included[event])
            case HostWait(event):
                if self._waits_count:
                    _update(self._done, self._work if event is None else self._included[event])
            case EmptyCache():
                self._end_all()
                self.allocator.empty_cache()
            case EndOfStep(step):
                self._end_all()
                if step == 1:
                    self.allocator.reset_peaks()

    def _free(self, block: Block) -> None:
        if not block.other_streams:
            self.allocator.give_back(block)
            return
        self.allocator.retire(block)
        self._retired.append((block, {stream: self._mark(stream) for stream in block.other_streams}))

    def _mark(self, stream: int) -> int:
        self._work[stream] += 1
        self._seen[stream][stream] = self._work[stream]
        return self._work[stream]

    def _process_events(self) -> None:
        """Let each freed block be used again if all its events are done.

        Torch does this in each allocation.
        """
        waiting = []
        for block, marks in self._retired:
            if all(self._done.get(stream, 0) >= mark for stream, mark in marks.items()):
                self.allocator.put(block)
            else:
                waiting.append((block, marks))
        self._retired = waiting

    def _end_all(self) -> None:
        _update(self._done, self._work)
        self._process_events()


def _update(marks: dict[int, int], others: dict[int, int]) -> None:
    """Raise each stream's mark to the mark in `others`, if that mark is higher."""
    for stream, mark in others.items():
        marks[stream] = max(marks.get(stream, 0), mark)


def replay(
    log: Iterable[Entry],
    *,
    workspace_bytes: int,
    expandable_segments: bool = False,
    events_end: EventsEnd = "when awaited",
) -> CachingAllocator:
    """Replay a log in a new allocator, and return the allocator.

    The allocator's peaks do not include the first step and the time before it. The peak of the allocated
    memory until the end of the first step is in `peak_before_reset`. `workspace_bytes` is the size of each of
    cuBLAS's workspaces.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    run = _Replay(allocator, workspace_bytes, events_end)
    for entry in log:
        run.apply(entry)
    return allocator
