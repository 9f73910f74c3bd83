from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results import counts
from perfsuite.results.counts import Counts
from tests.samples import deterministic


def test_ranks_with_equal_counts_share_an_entry() -> None:
    one = Counts(flops={"forward": 1})
    other = Counts(flops={"forward": 2})
    entries = counts.merged({3: one, 0: one, 1: other, 2: one})
    assert [(entry.ranks, entry.counts) for entry in entries] == [((0, 2, 3), one), ((1,), other)]
    assert [entry.name for entry in entries] == ["0,2-3", "1"]
    assert [counts.of_rank(entries, rank) for rank in (1, 2, 4)] == [other, one, None]
    assert counts.merged({}) == ()
    names = {(): "", (5,): "5", (0, 1): "0-1", (0, 1, 2, 6, 8, 9): "0-2,6,8-9", (0, 2, 4): "0,2,4"}
    assert {ranks: counts.spans(ranks) for ranks in names} == names
    groups = {(1, 0): "1 rank", (8, 1): "8 ranks", (8, 2): "8 ranks, 2 apart"}
    assert {group: counts.group_name(*group) for group in groups} == groups


@given(st.sets(st.integers(0, 300), min_size=1))
@deterministic
def test_spans_name_every_number_once(named: set[int]) -> None:
    assert counts.numbers(counts.spans(sorted(named))) == sorted(named)
