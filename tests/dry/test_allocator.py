"""Each rule of the allocator by an example worked out by hand, in the sizes of torch's source."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.dry import allocator
from perfsuite.dry.allocator import Block, CachingAllocator, replay
from perfsuite.results.counts import MemoryChange, MemoryLog
from tests.samples import deterministic

MIB = 1 << 20


def log(*changes: tuple[int, int], at_start: tuple[int, ...] = ()) -> MemoryLog:
    return MemoryLog(at_start, (tuple(MemoryChange(storage, size, "forward") for storage, size in changes),))


def state(cache: CachingAllocator) -> tuple[int, int]:
    return cache.allocated, cache.reserved


def test_sizes_match_the_installed_torch() -> None:
    torch = pytest.importorskip("torch")
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text()
    sizes = {name: int(size) for name, size in re.findall(r"constexpr size_t (k\w+) = (\d+);", text)}
    assert sizes == {
        "kMinBlockSize": allocator.MIN_BLOCK,
        "kSmallSize": allocator.SMALL_SIZE,
        "kSmallBuffer": allocator.SMALL_SEGMENT,
        "kMinLargeAlloc": allocator.MIN_LARGE_ALLOCATION,
        "kRoundLarge": allocator.ROUND_LARGE,
    }
    assert f"large_segment_size_{{{allocator.LARGE_SEGMENT}}}" in text


@pytest.mark.parametrize(
    ("request_bytes", "taken", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB - 1, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB, 34 * MIB),  # with 1 MiB that nobody asked for
        (33 * MIB - 512, 33 * MIB - 512, 34 * MIB),  # leaves 1 MiB and 512 bytes
    ],
)
def test_request_takes_a_segment_of_its_size(request_bytes: int, taken: int, segment: int) -> None:
    cache = CachingAllocator()
    assert cache.take(request_bytes).size == taken
    assert state(cache) == (taken, segment)


def test_small_blocks_share_a_small_segment() -> None:
    cache = CachingAllocator()
    cache.give_back(cache.take(30 * MIB))
    first = cache.take(MIB)
    second = cache.take(MIB)
    assert state(cache) == (2 * MIB, 32 * MIB)
    assert second.address == first.address + MIB
    cache.take(1)
    assert cache.reserved == 34 * MIB


def test_takes_the_smallest_fitting_free_block() -> None:
    cache = CachingAllocator()
    blocks = [cache.take(size * MIB) for size in (40, 12, 24, 12)]
    large, small, middle, equal = (block.address for block in blocks)
    for block in reversed(blocks):
        cache.give_back(block)
    assert [cache.take(size * MIB).address for size in (13, 12, 12)] == [middle, small, equal]
    assert cache.take(14 * MIB).address == large
    assert cache.reserved == 88 * MIB


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    cache = CachingAllocator()
    cache.take(MIB)
    block = cache.take(MIB - 512)
    assert block.size == MIB - 512
    assert cache.take(512).address == block.address + block.size
    assert cache.reserved == 2 * MIB


def test_freed_block_joins_its_neighbours() -> None:
    cache = CachingAllocator()
    blocks = [cache.take(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    others = cache.take(10 * MIB)
    assert state(cache) == (30 * MIB, 30 * MIB)
    for index in (0, 2):
        cache.give_back(blocks[index])
    assert cache.take(10 * MIB).address == 30 * MIB  # two holes of 5 MiB do not serve
    cache.give_back(blocks[1])
    assert cache.take(15 * MIB).address == 0  # the three are one
    cache.give_back(blocks[3])
    cache.give_back(others)
    assert cache.take(14 * MIB).address == 40 * MIB  # neighbours in different segments stay apart


def test_expandable_segments_grow_by_pages() -> None:
    cache = CachingAllocator(expandable_segments=True)
    first = cache.take(30 * MIB)
    assert state(cache) == (30 * MIB, 40 * MIB)
    second = cache.take(30 * MIB)  # 10 MiB are free at the end: one page more
    assert state(cache) == (60 * MIB, 60 * MIB)
    cache.give_back(first)
    cache.give_back(second)
    cache.take(60 * MIB)
    assert cache.reserved == 60 * MIB
    cache.take(512)
    assert cache.reserved == 62 * MIB  # small blocks have a segment of their own, in pages of 2 MiB


def test_expandable_segment_grows_at_its_end() -> None:
    cache = CachingAllocator(expandable_segments=True)
    first, small, second = (cache.take(size) for size in (10 * MIB, 1, 11 * MIB))
    assert (second.address, cache.reserved) == (first.address + 10 * MIB, 42 * MIB)
    assert small.address > second.address + second.size


def test_expandable_segments_split_to_512_bytes() -> None:
    cache = CachingAllocator(expandable_segments=True)
    assert cache.take(40 * MIB - 512).size == 40 * MIB - 512
    assert state(cache) == (40 * MIB - 512, 40 * MIB)


def test_uses_the_end_of_a_segment_last() -> None:
    cache = CachingAllocator(expandable_segments=True)
    hole = cache.take(25 * MIB)
    cache.take(12 * MIB)
    cache.give_back(hole)  # free: 25 MiB at the start, 3 MiB at the end
    assert cache.take(2 * MIB).address == hole.address
    assert cache.reserved == 40 * MIB


STEP = tuple(MemoryChange(0, size, "forward") for size in (50 * MIB, -50 * MIB))


@pytest.mark.parametrize(
    ("log", "workspaces", "allocated", "reserved"),
    [
        (log((1, 12 * MIB), (1, -12 * MIB), (2, 14 * MIB), at_start=(30 * MIB,)), (), 44, 56),
        (log((0, -30 * MIB), (1, 30 * MIB), (0, 30 * MIB), at_start=(30 * MIB,)), (), 60, 60),
        (log((0, -30 * MIB), (1, 30 * MIB), at_start=(30 * MIB,)), (), 30, 30),
        (log((0, 10 * MIB), at_start=(20 * MIB,)), (), 50, 50),
        (MemoryLog((), (STEP, STEP)), (), 50, 50),
        (log((0, 12 * MIB)), [12 * MIB], 24, 24),
        (log((0, 0)), (), 0, 0),
        (log(), (), 0, 0),
    ],
    ids=[
        *("from its start", "death and birth", "death", "both blocks for a moment", "second step"),
        *("workspaces for good", "no bytes", "nothing"),
    ],
)
def test_a_log_is_replayed(log: MemoryLog, workspaces: Sequence[int], allocated: int, reserved: int) -> None:
    cache = replay(log, workspaces=workspaces)
    assert (cache.peak_allocated, cache.reserved) == (allocated * MIB, reserved * MIB)


sizes = st.integers(1, 64 * MIB) | st.integers(1, 2 * MIB) | st.sampled_from([512, MIB, 10 * MIB, 20 * MIB])


@deterministic
@given(st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 99)), max_size=60), st.booleans())
def test_blocks_never_overlap(steps: list[tuple[int, bool, int]], expandable: bool) -> None:
    cache = CachingAllocator(expandable_segments=expandable)
    held: list[tuple[int, Block]] = []
    for size, is_birth, which in steps:
        if is_birth or not held:
            held.append((size, cache.take(size)))
        else:
            cache.give_back(held.pop(which % len(held))[1])
        assert cache.reserved >= cache.peak_allocated >= cache.allocated >= sum(size for size, _ in held)
        assert cache.allocated == sum(block.size for _, block in held)
        assert all(block.size >= size and block.size % 512 == 0 for size, block in held)
        waste = 512 if expandable else MIB + 512
        assert all(block.size - size < waste for size, block in held)
        ranges = sorted((block.address, block.address + block.size) for _, block in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    for _, block in held:
        cache.give_back(block)
    assert cache.allocated == 0
    reserved = cache.reserved
    if held:
        cache.take(max(size for size, _ in held))
    assert cache.reserved == reserved, "what was held fits again into what is reserved"
