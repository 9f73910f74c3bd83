"""Combine time intervals. Results are sorted and disjoint. Pure; imports only the standard library."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[float, float]  # begin and end of an interval


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the intervals."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """Return the parts of the intervals that are between `begin` and `end`."""
    cut = ((max(start, begin), min(stop, end)) for start, stop in spans)
    return [(start, stop) for start, stop in cut if start < stop]


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of the intervals that are outside `others`.

    The intervals of each of the two lists must be sorted and disjoint.
    """
    left: list[Span] = []
    first = 0
    for begin, end in spans:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at = begin
        number = first
        while number < len(others) and others[number][0] < end:
            if others[number][0] > at:
                left.append((at, others[number][0]))
            at = max(at, others[number][1])
            number += 1
        if at < end:
            left.append((at, end))
    return left


def holds(spans: Sequence[Span], moment: float) -> bool:
    """Return whether a moment is in one of the intervals, which must be sorted and disjoint."""
    number = bisect_right(spans, (moment, float("inf"))) - 1
    return number >= 0 and moment < spans[number][1]


def length(spans: Iterable[Span]) -> float:
    """Return the total length of the intervals."""
    return sum(end - begin for begin, end in spans)
