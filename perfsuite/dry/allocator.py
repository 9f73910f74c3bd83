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
- Expandable segments: each pool has one segment, which grows in pages of 2 MiB (small pool) or 20 MiB (large
  pool). The last block of the segment is used only if no other free block is large enough.

Segments remain reserved: torch's `release_cached_blocks`, which returns segments when CUDA is out of memory,
is not modelled. CUDA graphs and streams are not modelled either. In torch, each stream has its own free
blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from perfsuite.results.counts import MemoryLog

MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = 1 << 20  # kSmallSize
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # kLargeBuffer, large_segment_size
MIN_LARGE_ALLOCATION = 10 << 20  # kMinLargeAlloc
ROUND_LARGE = 2 << 20  # kRoundLarge
FAR = 1 << 60  # distance between the two expandable segments, so that both can grow


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, which is in use or free."""

    address: int
    size: int
    pool: _Pool
    is_free: bool = False
    previous: Block | None = None  # neighbours in the same segment
    next: Block | None = None


_place = attrgetter("size", "address")


class _Pool:
    """The small or the large pool, with its free blocks."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
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


class CachingAllocator:
    """The allocator of one device and stream. All sizes are in bytes."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.allocated = 0
        # Like `torch.cuda.max_memory_allocated`: the size of all blocks in use, including rounding.
        self.peak_allocated = 0
        # Like `torch.cuda.max_memory_reserved`: the memory obtained from CUDA. In this model it never
        # shrinks.
        self.reserved = 0
        self._small = _Pool(is_small=True)
        self._large = _Pool(is_small=False)

    def take(self, request: int) -> Block:
        """Allocate a block for a positive request. `Block.size` may be larger than the request."""
        size = _rounded(request, MIN_BLOCK)
        pool = self._small if size <= SMALL_SIZE else self._large
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        elif self.expandable_segments:
            block = self._expand(pool, size)
        else:
            # A new segment. The simulated addresses have no gaps, so it begins where the last one ends.
            block = Block(self.reserved, _segment_size(size), pool)
            self.reserved += block.size
        self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbours."""
        self.allocated -= block.size
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.is_free:
                block.pool.remove(neighbour)
                _join(block, neighbour)
        block.pool.put(block)

    def _expand(self, pool: _Pool, size: int) -> Block:
        """Grow the pool's segment until its last block has `size`."""
        last = pool.last
        room = last.size if last is not None and last.is_free else 0
        grown = _rounded(size - room, SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT)
        self.reserved += grown
        address = FAR * pool.is_small if last is None else last.address + last.size
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


def replay(
    log: MemoryLog, *, workspaces: Iterable[int] = (), expandable_segments: bool = False
) -> CachingAllocator:
    """Replay a log in a new allocator, and return the allocator.

    `workspaces` are the sizes in bytes of blocks that are allocated first and are not in the log. As in
    torch, a storage that is resized gets its new block before its old block is freed.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    for size in workspaces:
        allocator.take(size)
    sizes = dict(enumerate(log.at_start))
    blocks = {storage: allocator.take(size) for storage, size in sizes.items() if size}
    for storage, growth, _ in log.changes:
        sizes[storage] = sizes.get(storage, 0) + growth
        old = blocks.pop(storage, None)
        if sizes[storage]:
            blocks[storage] = allocator.take(sizes[storage])
        if old is not None:
            allocator.give_back(old)
    return allocator
