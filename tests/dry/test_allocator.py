"""Test each rule of the allocator on an example worked out by hand, with the sizes in torch's source."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.dry import allocator
from perfsuite.dry.allocator import Block, CachingAllocator, EventsEnd, replay
from perfsuite.results.device_log import (
    Allocate,
    CollectiveWait,
    Communicate,
    EmptyCache,
    EndOfStep,
    Entry,
    Free,
    HostCall,
    HostWait,
    Kernel,
    RecordEvent,
    StreamWait,
    UseIn,
    Workspace,
)
from tests.samples import deterministic

MIB = 1 << 20


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
        (33 * MIB, 34 * MIB, 34 * MIB),  # 1 MiB is wasted
        (33 * MIB - 512, 33 * MIB - 512, 34 * MIB),  # 1 MiB and 512 bytes are left
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
    assert cache.take(10 * MIB).address == 30 * MIB  # two separate holes of 5 MiB are not enough
    cache.give_back(blocks[1])
    assert cache.take(15 * MIB).address == 0  # the three free blocks are now one
    cache.give_back(blocks[3])
    cache.give_back(others)
    assert cache.take(14 * MIB).address == 40 * MIB  # blocks in different segments are not joined


def test_expandable_segments_grow_by_pages() -> None:
    cache = CachingAllocator(expandable_segments=True)
    first = cache.take(30 * MIB)
    assert state(cache) == (30 * MIB, 40 * MIB)
    second = cache.take(30 * MIB)  # 10 MiB are free at the end, so one page is added
    assert state(cache) == (60 * MIB, 60 * MIB)
    cache.give_back(first)
    cache.give_back(second)
    cache.take(60 * MIB)
    assert cache.reserved == 60 * MIB
    cache.take(512)
    assert cache.reserved == 62 * MIB  # small blocks have their own segment, with pages of 2 MiB


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


def test_streams_share_no_free_blocks() -> None:
    cache = CachingAllocator()
    cache.give_back(cache.take(30 * MIB, stream=1))
    cache.take(30 * MIB)
    assert cache.reserved == 60 * MIB
    cache.take(30 * MIB, stream=1)
    assert state(cache) == (60 * MIB, 60 * MIB)


def test_streams_have_expandable_segments_of_their_own() -> None:
    cache = CachingAllocator(expandable_segments=True)
    first, second = (cache.take(15 * MIB, stream) for stream in (0, 1))
    assert (first.address + 15 * MIB, cache.reserved) != (second.address, 20 * MIB)
    assert cache.reserved == 40 * MIB


def test_emptying_the_cache_keeps_segments_in_use() -> None:
    cache = CachingAllocator()
    blocks = [cache.take(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    cache.give_back(cache.take(30 * MIB, stream=1))
    for block in blocks[:3]:
        cache.give_back(block)
    cache.empty_cache()
    assert state(cache) == (5 * MIB, 20 * MIB)
    cache.give_back(blocks[3])
    cache.empty_cache()
    assert state(cache) == (0, 0)
    assert (cache.peak_allocated, cache.peak_reserved) == (35 * MIB + 15 * MIB, 50 * MIB)


def test_emptying_the_cache_shrinks_expandable_segments() -> None:
    cache = CachingAllocator(expandable_segments=True)
    first, second = cache.take(25 * MIB), cache.take(30 * MIB)
    cache.give_back(second)
    cache.empty_cache()
    assert state(cache) == (25 * MIB, 40 * MIB)  # 35 MiB were free: one whole page, and 15 MiB of another one
    assert cache.take(15 * MIB).address == first.address + 25 * MIB
    cache.give_back(first)
    cache.empty_cache()
    assert cache.reserved == 40 * MIB  # the end of the segment is in use


def test_an_emptied_expandable_segment_grows_again() -> None:
    cache = CachingAllocator(expandable_segments=True)
    cache.give_back(cache.take(40 * MIB))
    cache.empty_cache()
    assert cache.reserved == 0
    cache.take(1 + 20 * MIB)
    assert cache.reserved == 40 * MIB


GET_30 = Allocate(0, 30 * MIB, 0)
STEP = (Allocate(1, 50 * MIB, 0), Free(1))


@pytest.mark.parametrize(
    ("log", "allocated", "reserved"),
    [
        ((GET_30, Allocate(1, 12 * MIB, 0), Free(1), Allocate(2, 14 * MIB, 0)), 44, 56),
        ((GET_30, Free(0), Allocate(1, 30 * MIB, 0)), 30, 30),
        ((GET_30, Allocate(0, 40 * MIB, 0)), 70, 70),
        ((*STEP, EndOfStep(1), *STEP, EndOfStep(2)), 50, 50),
        ((*STEP, EndOfStep(1)), 0, 50),
        ((*STEP, EndOfStep(1), EndOfStep(2)), 0, 50),
        ((*STEP, EmptyCache(), EndOfStep(1), GET_30), 30, 30),
        ((GET_30, Free(0), Workspace(0), GET_30), 42, 60),
        ((GET_30, Free(0), Workspace(3), GET_30), 42, 42),
        ((), 0, 0),
    ],
    ids=[
        *(
            "a gap",
            "death and birth",
            "both blocks for a moment",
            "second step",
            "peaks from the second step",
        ),
        *("reserved for good", "emptied", "a workspace takes a free block", "a workspace of a stream"),
        "nothing",
    ],
)
def test_a_log_is_replayed(log: tuple[Entry, ...], allocated: int, reserved: int) -> None:
    cache = replay(log, workspace_bytes=12 * MIB)
    assert (cache.peak_allocated, cache.peak_reserved) == (allocated * MIB, reserved * MIB)


def test_the_peak_up_to_the_first_step_is_kept() -> None:
    built = (GET_30, Allocate(1, 50 * MIB, 0), Free(1))
    cache = replay((*built, EndOfStep(1), *STEP, EndOfStep(2), *STEP, *STEP), workspace_bytes=MIB)
    assert cache.peak_before_reset == 80 * MIB
    assert replay(built, workspace_bytes=MIB).peak_before_reset == 0, "no step has ended"


LENT = (GET_30, UseIn(0, 1))


def reserved(*log: Entry, events_end: EventsEnd = "when awaited") -> int:
    """Return the MiB that are reserved after this log and an allocation of 30 MiB."""
    whole = (*log, Allocate(2, 30 * MIB, 0))
    return replay(whole, workspace_bytes=MIB, events_end=events_end).reserved // MIB


def test_lent_block_waits_for_the_other_stream() -> None:
    assert reserved(GET_30, Free(0)) == 30
    assert reserved(*LENT, Free(0)) == 60
    assert reserved(GET_30, UseIn(0, 0), Free(0)) == 30, "it was used in its own stream"
    assert reserved(*LENT, Free(0), EndOfStep(2)) == 30
    assert reserved(*LENT, Free(0), EmptyCache()) == 30


@pytest.mark.parametrize(
    ("awaited", "known_to_be_done"),
    [
        ((HostWait(None),), True),
        ((RecordEvent(1, 1), HostWait(1)), True),
        ((RecordEvent(1, 1), StreamWait(2, 1), RecordEvent(2, 2), HostWait(2)), True),
        ((RecordEvent(1, 2), HostWait(1)), False),
        ((RecordEvent(1, 1), RecordEvent(2, 2), StreamWait(2, 1), HostWait(2)), False),
        ((RecordEvent(1, 1), StreamWait(2, 1)), False),
    ],
    ids=["all", "the stream", "a stream that waited for it", "another stream", "too late", "no host"],
)
def test_host_waits_end_events(awaited: tuple[Entry, ...], known_to_be_done: bool) -> None:
    assert reserved(*LENT, Free(0), *awaited) == (30 if known_to_be_done else 60)
    assert reserved(*LENT, Free(0), *awaited, events_end="at the end of the step") == 60
    assert reserved(*LENT, *awaited, Free(0)) == 60, "the event is recorded by the release"


def test_lent_blocks_are_merged_only_when_done() -> None:
    parts = [Allocate(number, 5 * MIB, 0) for number in range(4)]  # one segment of 20 MiB
    freed: list[Entry] = [UseIn(1, 1), *map(Free, range(4))]
    whole = Allocate(9, 20 * MIB, 0)
    assert replay([*parts, *freed, whole], workspace_bytes=MIB).reserved == 40 * MIB
    assert replay([*parts, *freed, HostWait(None), whole], workspace_bytes=MIB).reserved == 20 * MIB


def test_kernels_and_collectives_take_no_memory() -> None:
    work: tuple[Entry, ...] = (
        Kernel(1, "forward", "aten.add", 8, 8, 2, "float32", 0, (), is_strided=False),
        Communicate(1, 1, "forward", "all_reduce", 8, 1, 64, is_async=True),
        CollectiveWait(0, 1),
        HostCall("view"),
    )
    memory: tuple[Entry, ...] = (Allocate(0, MIB, 0), UseIn(0, 1), Free(0), Allocate(1, MIB, 0))
    mixed = [entry for of_memory in memory for entry in (of_memory, *work)]
    assert replay(mixed, workspace_bytes=MIB).reserved == replay(memory, workspace_bytes=MIB).reserved > 0


def test_reused_block_has_forgotten_other_streams() -> None:
    again = (Allocate(1, 30 * MIB, 0), Free(1))
    assert reserved(*LENT, Free(0), HostWait(None), *again) == 30


def test_released_storages_cannot_be_used() -> None:
    assert reserved(GET_30, Free(0), UseIn(0, 1)) == 30


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
    assert cache.reserved == reserved, "the largest block fits again into the reserved memory"
