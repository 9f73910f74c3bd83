"""Intervals of time: what is returned is sorted and disjoint. Pure; imports the standard library alone."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[float, float]  # begin and end of an interval


def union(spans: Iterable[Span]) -> list[Span]:
    """What lies in any of these intervals."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def within(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """The parts of intervals between `begin` and `end`."""
    cut = ((max(start, begin), min(stop, end)) for start, stop in spans)
    return [(start, stop) for start, stop in cut if start < stop]


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts of disjoint, sorted intervals that lie in none of `others`, which are so, too."""
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
    """Whether a moment lies in one of disjoint, sorted intervals."""
    number = bisect_right(spans, (moment, float("inf"))) - 1
    return number >= 0 and moment < spans[number][1]


def length(spans: Iterable[Span]) -> float:
    """The time that intervals take together."""
    return sum(end - begin for begin, end in spans)
