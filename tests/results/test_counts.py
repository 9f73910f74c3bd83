import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results import counts
from perfsuite.results.counts import Counts, other_inputs
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


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"int64[4, 128]": 2}, {"int64[4, 64]": 2}, "int64[4, 64] instead of int64[4, 128]"),
        ({"int64[4, 128]": 2}, {"int64[4, 128]": 4}, "int64[4, 128] 2 -> 4"),
        ({"int64[4]": 2}, {"int64[4]": 2, "int64[1]": 1}, "int64[1] 0 -> 1"),
        (
            {f"int64[{size}]": 1 for size in range(6)},
            {"int64[4]": 2},
            "int64[0] 1 -> 0 and int64[1] 1 -> 0 and int64[2] 1 -> 0 and int64[3] 1 -> 0 and 2 more",
        ),
        ({"int64[4]": 1}, {"int64[4]": 1}, ""),
        ({"int64[4]": 1}, None, ""),
        (None, {"int64[4]": 1}, ""),
    ],
)
def test_names_other_inputs_of_steps(
    before: dict[str, int] | None, now: dict[str, int] | None, words: str
) -> None:
    assert other_inputs(Counts(inputs=before), Counts(inputs=now)) == words
