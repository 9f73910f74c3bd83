from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results.counts import Counts, MemoryChange, MemoryLog, group_name, merged, of_rank, spans
from perfsuite.results.counts import numbers as named_by

ONE, OTHER = Counts(flops={"forward": 1}), Counts(flops={"forward": 2})


def test_ranks_with_equal_counts_share_an_entry() -> None:
    entries = merged({3: ONE, 0: ONE, 1: OTHER, 2: ONE})
    assert [(entry.ranks, entry.counts) for entry in entries] == [((0, 2, 3), ONE), ((1,), OTHER)]
    assert [entry.name for entry in entries] == ["0,2-3", "1"]
    assert [of_rank(entries, rank) for rank in (1, 2, 4)] == [OTHER, ONE, None]
    assert merged({}) == ()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([5], "5"), ([0, 1], "0-1"), ([0, 1, 2, 6, 8, 9], "0-2,6,8-9"), ([0, 2, 4], "0,2,4")],
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_spans_name_every_number_once(numbers: set[int]) -> None:
    assert named_by(spans(sorted(numbers))) == sorted(numbers)


@pytest.mark.parametrize(
    ("ranks", "apart", "text"), [(1, 0, "1 rank"), (8, 1, "8 ranks"), (8, 4, "8 ranks, 4 apart")]
)
def test_a_group_tells_its_distance_where_ranks_are_not_neighbours(ranks: int, apart: int, text: str) -> None:
    assert group_name(ranks, apart) == text


def test_the_peak_is_over_all_steps() -> None:
    first = (MemoryChange(1, 50, "forward"), MemoryChange(1, -50, "backward"))
    second = (
        MemoryChange(2, 20, "forward"),
        MemoryChange(0, -100, "optimizer"),
        MemoryChange(3, 90, "optimizer"),
    )
    assert MemoryLog((100,), (first, second)).peak == 150
    assert MemoryLog((100,), (second,)).peak == 120
    assert MemoryLog((3, 0, 4), ()).peak == 7
    assert list(MemoryLog((), (first, second)).changes) == [*first, *second]
