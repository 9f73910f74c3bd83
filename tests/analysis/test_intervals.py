"""Test each function against the same operation on sets of unit intervals."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from perfsuite.analysis.intervals import Span, holds, length, union, within, without
from tests.samples import deterministic

spans = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair))))


def cells(ranges: list[Span]) -> set[int]:
    return {cell for begin, end in ranges for cell in range(int(begin), int(end))}


def assert_are(ranges: list[Span], expected: set[int]) -> None:
    assert cells(ranges) == expected
    assert length(ranges) == len(expected), "the ranges are disjoint"
    assert ranges == sorted(ranges)
    assert all(begin < end for begin, end in ranges)


@given(spans, spans, st.integers(0, 20), st.integers(0, 6))
@deterministic
def test_intervals_are_sets_of_moments(some: list[Span], others: list[Span], begin: int, more: int) -> None:
    joined = union(some)
    rest = union(others)
    assert_are(joined, cells(some))
    assert all(left[1] < right[0] for left, right in pairwise(joined)), "touching ranges are joined"
    assert_are(within(joined, begin, begin + more), cells(some) & {*range(begin, begin + more)})
    assert_are(without(joined, rest), cells(some) - cells(others))
    assert [holds(joined, cell) for cell in range(27)] == [cell in cells(some) for cell in range(27)]
