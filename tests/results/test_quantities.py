from __future__ import annotations

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
    KERNELS,
    LOOSE,
    PEAK,
    Change,
    Group,
    differing,
    quantities,
)
from tests.samples import deterministic
from tests.twin_counts import (
    BYTES,
    GATHERED,
    GATHERED_AGAIN,
    REDUCED,
    WORSE,
    collective,
    compiled,
    counts,
    memory,
    python,
)

BARRIER = collective("barrier", dtype="", bytes=0, count=2)
BUCKETS = GATHERED.replace(count=20)


def group(*rows: Any) -> Group:
    first, *_ = quantities([counts(collectives=rows)])
    assert isinstance(first, Group)
    return first


def test_collectives_come_first_a_quantity_for_each_shape_of_group() -> None:
    far = GATHERED.replace(apart=8)
    names = [each.name for each in quantities([counts(), counts(collectives=(far, BARRIER))])]
    assert names[:4] == [
        "all_gather of 2 ranks",
        "reduce_scatter of 2 ranks",
        "all_gather of 2 ranks, 8 apart",
        "barrier of 2 ranks",
    ]
    assert names[4:8] == ["FLOPs", "host reads", "blocking copies between devices", "copies between devices"]
    assert group(GATHERED.replace(ranks=1, apart=0)).name == "all_gather of 1 rank"


def test_a_group_is_its_bytes_over_dtypes_and_phases_and_a_barrier_its_calls() -> None:
    assert group(GATHERED).value(counts()) == 2 * BYTES
    assert group(GATHERED).read(counts()) == {"all_gather of 2 ranks: bytes": 2 * BYTES}
    assert (group(BARRIER).unit, group(BARRIER).family) == ("calls", "barriers")
    assert group(BARRIER).value(counts(collectives=(BARRIER,))) == 2
    assert group(GATHERED).value(counts(collectives=())) == 0


@pytest.mark.parametrize(
    ("now", "change"),
    [
        ((GATHERED,), Change("all_gather of 2 ranks: bytes", "bytes", 2 * BYTES, BYTES)),
        ((BUCKETS, GATHERED_AGAIN), Change("all_gather of 2 ranks: calls", "calls", 10, 25)),
    ],
)
def test_what_changed_in_a_group_is_its_bytes_else_its_calls(now: Any, change: Change) -> None:
    before, today = (counts(collectives=rows) for rows in ((GATHERED, GATHERED_AGAIN), now))
    assert group(GATHERED).changes(before, today) == [change]
    assert group(GATHERED).changes(before, before) == []


def test_rows_in_another_order_are_no_change() -> None:
    assert not differing([counts(), counts(collectives=(REDUCED, GATHERED_AGAIN, GATHERED))])


def test_a_phase_is_a_field_and_their_sum_is_judged() -> None:
    assert KERNELS.value(counts()) == 177 + 327 + 351
    assert KERNELS.value(counts(), leave_out=["kernels in optimizer"]) == 177 + 327
    assert FLOPS.changes(counts(), counts(flops={"forward": 469_762_048})) == [
        Change("FLOPs in recompute", "FLOP", 335_544_320, 0),
        Change("FLOPs in backward", "FLOP", 956_301_312, 0),
    ]
    blocking = counts(device_copies={"cuda to cpu": 2}, blocking_copies={"cuda to cpu": 1})
    assert BLOCKING.read(blocking) == {"blocking copies cuda to cpu": 1}
    assert COPIES.read(counts(device_copies={"cuda to cpu": 2})) == {"copies cuda to cpu": 2}


def test_what_counts_cannot_say_is_none_and_not_0() -> None:
    assert (PEAK.value(counts()), PEAK.value(compiled())) == (12_900_000, None)
    assert (GRAPHS.value(counts()), GRAPHS.value(compiled())) == (0, 2)
    assert BLOCKING.value(counts(blocking_copies=None)) == 0, "no copy at all"
    assert BLOCKING.value(counts(blocking_copies=None, device_copies={"cuda to cpu": 2})) is None
    by_name = {each.name: each.value(compiled(breaks={"print": 2})) for each in quantities([])}
    assert [by_name[name] for name in ("graph breaks", "recompilations", "generated kernels")] == [2, 0, 31]


DIFFERENT: dict[str, Counts] = {
    **WORSE,
    "all_gather of 2 ranks: calls": counts(collectives=(BUCKETS, GATHERED_AGAIN, REDUCED)),
    "blocking copies cpu to cuda": counts(
        blocking_copies={"cpu to cuda": 1}, device_copies={"cpu to cuda": 0}
    ),
}


@pytest.mark.parametrize(("field", "other"), DIFFERENT.items(), ids=list(DIFFERENT))
def test_each_field_that_differs_between_launches_is_named(field: str, other: Counts) -> None:
    same = counts() if other.python is None else python()
    assert differing([same, same, other]) == {field}


def test_calls_of_two_pythons_are_not_compared() -> None:
    every = [python(), python(version="3.12")]
    old, new = quantities(every)[-2:]
    assert (old.name, new.name) == ("Python 3.11 calls", "Python 3.12 calls")
    assert [old.value(each) for each in (*every, counts())] == [10_000, None, None]
    assert old.changes(python(), python(forward=7_000)) == [
        Change("Python 3.11 calls in forward", "calls", 6_000, 7_000),
        Change("Python 3.11 calls in backward", "calls", 4_000, 0),
    ]


@pytest.mark.parametrize(("calls", "floor"), [(1_000, 1_000), (5_000, 1_000), (10_000, 2_000)])
def test_a_fifth_of_python_s_calls_or_a_thousand_are_too_few_to_be_judged(calls: int, floor: int) -> None:
    before = python(forward=calls)
    assert quantities([before])[-1].floor(before) == floor


@given(st.floats(-2, 2))
@deterministic
def test_a_peak_differs_between_launches_by_more_than_asynchronous_work_explains(share: float) -> None:
    peak = round(12_900_000 * (1 + share * LOOSE))
    now: Counts = counts(memory=memory(peak=peak))
    differs = abs(peak - 12_900_000) > LOOSE * 12_900_000
    assert differing([counts(), now]) == ({"peak of live tensors"} if differs else set())
