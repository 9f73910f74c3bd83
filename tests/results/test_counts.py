from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results.counts import Counts, group_name, merged, of_rank, spans

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


@given(st.sets(st.integers(0, 300)))
def test_spans_name_every_number_once(numbers: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, spans(sorted(numbers)).split(",")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


@pytest.mark.parametrize(
    ("ranks", "apart", "text"),
    [(1, 0, "1 rank"), (8, 1, "8 ranks"), (8, 4, "8 ranks, 4 apart")],
)
def test_a_group_tells_its_distance_where_ranks_are_not_neighbours(ranks: int, apart: int, text: str) -> None:
    assert group_name(ranks, apart) == text
