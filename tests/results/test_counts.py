import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results import counts
from perfsuite.results.counts import Counts, has_smaller_input, other_inputs
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
    ("before", "now", "words", "is_smaller"),
    [
        ({"int64[4, 128]": 2}, {"int64[4, 64]": 2}, "2 x int64[4, 64] instead of 2 x int64[4, 128]", True),
        ({"int64[4, 64]": 1}, {"int64[4, 128]": 1}, "1 x int64[4, 128] instead of 1 x int64[4, 64]", False),
        ({"int64[4, 9]": 2}, {"int64[4, 9]": 1}, "1 x int64[4, 9] instead of 2 x int64[4, 9]", True),
        ({"int64[4]": 2, "int64[1]": 1}, {"int64[4]": 2}, "none instead of 1 x int64[1]", False),
        (
            {f"int8[{size}]": 1 for size in range(6)},
            {"int8[9]": 1},
            "1 x int8[9] instead of 1 x int8[0] and 1 x int8[1] and 1 x int8[2] and 1 x int8[3] and 2 more",
            False,
        ),
        ({"int64[4]": 1}, {"int64[4]": 1}, "", False),
        ({"int64[4]": 1}, None, "", False),
        (None, {"int64[4]": 1}, "", False),
    ],
)
def test_names_other_inputs_of_steps(
    before: dict[str, int] | None, now: dict[str, int] | None, words: str, is_smaller: bool
) -> None:
    sides = Counts(inputs=before), Counts(inputs=now)
    assert other_inputs(*sides) == words
    assert has_smaller_input(*sides) == is_smaller
