from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results.counts import Counts
from perfsuite.results.quantities import (
    BLOCKING,
    COPIES,
    FLOPS,
    GRAPHS,
    GROWTH,
    KERNELS,
    LOOSE,
    PEAK,
    Change,
    Group,
    differing,
    quantities,
)
from tests import twin_counts
from tests.samples import deterministic, known
from tests.twin_counts import BYTES, GATHERED, GATHERED_AGAIN, compiled, counts, python

BARRIER = twin_counts.collective("barrier", dtype="", bytes=0, count=2)
BUCKETS = GATHERED.replace(count=20)
PEAK_BYTES = 12_900_000


def group(*rows: Any) -> Group:
    first, *_ = quantities([counts(collectives=rows)])
    assert isinstance(first, Group)
    return first


def test_orders_collectives_by_group() -> None:
    far = GATHERED.replace(apart=8)
    names = [quantity.name for quantity in quantities([counts(), counts(collectives=(far, BARRIER))])]
    shapes = ("all_gather of 2 ranks", "reduce_scatter of 2 ranks", "all_gather of 2 ranks, 8 apart")
    others = ("FLOPs", "host reads", "blocking copies between devices", "copies between devices")
    assert names[:8] == [*shapes, "barrier of 2 ranks", *others]
    assert group(GATHERED.replace(ranks=1, apart=0)).name == "all_gather of 1 rank"


def test_collectives_count_bytes_and_barriers_calls() -> None:
    gathered = group(GATHERED)
    barrier = group(BARRIER)
    assert gathered.read(counts()) == {"all_gather of 2 ranks: bytes": 2 * BYTES}
    assert [gathered.value(rank_counts) for rank_counts in (counts(), counts(collectives=()))] == [
        2 * BYTES,
        0,
    ]
    assert (barrier.unit, barrier.family, gathered.family) == ("calls", "barriers", "collectives")
    assert barrier.value(counts(collectives=(BARRIER,))) == 2


def test_group_change_is_in_bytes_else_in_calls() -> None:
    sides = ((GATHERED, GATHERED_AGAIN), (GATHERED,), (BUCKETS, GATHERED_AGAIN))
    before, fewer, buckets = (counts(collectives=rows) for rows in sides)
    changes = [group(GATHERED).changes(before, now) for now in (before, fewer, buckets)]
    name = "all_gather of 2 ranks"
    of_bytes = Change(f"{name}: bytes", "bytes", 2 * BYTES, BYTES)
    assert changes == [[], [of_bytes], [Change(f"{name}: calls", "calls", 10, 25)]]
    assert not differing([counts(), counts(collectives=(twin_counts.REDUCED, GATHERED_AGAIN, GATHERED))]), (
        "the order does not matter"
    )


def test_judges_each_phase_and_their_sum() -> None:
    assert KERNELS.value(counts()) == 177 + 327 + 351
    assert KERNELS.value(counts(), leave_out=["kernels in optimizer"]) == 177 + 327
    assert (KERNELS.allowed(counts()), PEAK.floor(counts())) == (0, 64 * 2**10)
    assert [GROWTH.value(counts(memory=twin_counts.memory(growth=size))) for size in (-5, 0, 5)] == [0, 0, 5]
    assert FLOPS.floor(counts(flops={"forward": 7_000_000, "backward": 3_000_000})) == 10_000
    assert FLOPS.changes(counts(), counts(flops={"forward": 469_762_048})) == [
        Change("FLOPs in recompute", "FLOP", 335_544_320, 0),
        Change("FLOPs in backward", "FLOP", 956_301_312, 0),
    ]
    assert FLOPS.changes(counts(flops={}), counts(flops={"forward": 5})) == [
        Change("FLOPs in forward", "FLOP", 0, 5)
    ]


def test_unknown_copies_are_no_change() -> None:
    some, none = (counts(device_copies={} if way is None else {way: 2}) for way in ("x", None))
    assert COPIES.changes(counts(device_copies={"x": 0}), none) == []
    assert COPIES.changes(none, some) == [Change("copies x", "calls", 0, 2)]


def test_names_copies_by_direction() -> None:
    copies = counts(device_copies={"cuda to cpu": 2}, blocking_copies={"cuda to cpu": 1})
    assert BLOCKING.read(copies) == {"blocking copies cuda to cpu": 1}
    assert COPIES.read(copies) == {"copies cuda to cpu": 2}


def test_what_counts_cannot_say_is_none_and_not_0() -> None:
    assert [PEAK.value(rank_counts) for rank_counts in (counts(), compiled())] == [PEAK_BYTES, None]
    assert [GRAPHS.value(rank_counts) for rank_counts in (counts(), compiled())] == [0, 2]
    assert BLOCKING.value(counts(blocking_copies=None)) == 0, "there are no copies at all"
    assert BLOCKING.value(counts(blocking_copies=None, device_copies={"cuda to cpu": 2})) is None
    by_name = {quantity.name: quantity.value(compiled(breaks={"print": 2})) for quantity in quantities([])}
    assert [by_name[name] for name in ("graph breaks", "recompilations", "generated kernels")] == [2, 0, 31]


DIFFERENT: dict[str, Counts] = {
    **twin_counts.WORSE,
    "all_gather of 2 ranks: calls": counts(collectives=(BUCKETS, GATHERED_AGAIN, twin_counts.REDUCED)),
    "blocking copies cpu to cuda": counts(
        blocking_copies={"cpu to cuda": 1}, device_copies={"cpu to cuda": 0}
    ),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_names_fields_that_vary_by_launch(field: str) -> None:
    same = counts() if DIFFERENT[field].python is None else python()
    assert [*differing([same, same, DIFFERENT[field]])] == [field]


def test_compares_calls_only_of_one_python() -> None:
    all_counts = [python(), python(version="3.12")]
    old, new = quantities(all_counts)[-2:]
    assert (old.name, new.name) == ("Python 3.11 calls", "Python 3.12 calls")
    assert [old.value(rank_counts) for rank_counts in (*all_counts, counts())] == [10_000, None, None]
    assert old.changes(python(), python(forward=7_000)) == [
        Change("Python 3.11 calls in forward", "calls", 6_000, 7_000),
        Change("Python 3.11 calls in backward", "calls", 4_000, 0),
    ]
    assert [old.floor(python(forward=calls)) for calls in (1_000, 5_000, 10_000)] == [1_000, 1_000, 2_000]
    assert differing([python(), python(forward=7_500, backward=4_000)]) == {}


@given(st.floats(-2, 2))
@deterministic
def test_peak_differs_beyond_asynchronous_work(share: float) -> None:
    peak = round(PEAK_BYTES * (1 + share * LOOSE))
    differs = abs(peak - PEAK_BYTES) > LOOSE * PEAK_BYTES
    fields = differing([counts(), counts(memory=twin_counts.memory(peak=peak))])
    assert [*fields] == (["peak of live tensors"] if differs else [])


def test_compiled_dry_runs_have_unknown_kernels_and_peak() -> None:
    """An unknown count is neither better nor worse, no matter which side has it."""
    dry = compiled(kernels=None, extern_calls=None).replace(kernels=None, memory=counts().memory)
    unknown = {"kernels", "peak of live tensors", "generated kernels", "extern calls of compiled code"}
    assert {
        each.name for each in quantities([dry]) if each.name in unknown and each.value(dry) is None
    } == unknown
    assert differing([dry, dry.replace(memory=known(dry.memory).replace(peak=0))]) == {}
    assert "saved for backward" in {each.name for each in quantities([dry]) if each.value(dry)}
