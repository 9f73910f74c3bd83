"""Finds where warm-up ends in a finished series of step times. Pure; imports the standard library alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

ROLL = 5
"""Steps of the rolling median: one slow step moves it little, and five steps are soon past."""
FLAT = 0.05
"""Relative difference that is allowed between a rolling median and the level on which the series ends."""

UNMEASURED_STEPS = 2
"""First steps of a case that are never measured: in the second one the worker observes what runs
(`perfsuite.worker.observe`). Where a step is counted, none up to that one is (`COUNTED_STEP`)."""


SETTLED_WARMUP_S, SETTLED_WINDOW_S = 10, 20
"""Fewest seconds of warm-up, after the steps that are never measured, and of measured window on a GPU: with
less, its clock and temperature have not settled, and launches of other machines or days differ."""


class Window(NamedTuple):
    """The measured steps `series[start:stop]`. `steady` is False if the series never became flat."""

    start: int
    stop: int
    steady: bool


def settled(step_s: Sequence[float], first: int) -> int:
    """The first step that begins `SETTLED_WARMUP_S` after step `first`, both from 0 on.

    It is the number of steps if none does.
    """
    passed = 0.0
    for step in range(first, len(step_s)):
        if passed >= SETTLED_WARMUP_S:
            return step
        passed += step_s[step]
    return len(step_s)


def find_window(step_s: Sequence[float], max_warmup: int, *, unmeasured: int = UNMEASURED_STEPS) -> Window:
    """The measured part of a launch's step times, in seconds.

    The level is the median of the steps after `max_warmup`. Warm-up ends at the first step from which
    `ROLL` steps have a median within `FLAT` of that level (or within the series' own noise, on a machine
    noisier than that): after `unmeasured` steps at the earliest, after `max_warmup` at the latest. The
    launch is steady if the first and the second half of the window agree within the same bound.
    """
    count = len(step_s)
    if not 0 <= max_warmup <= count - 2 * ROLL:
        raise ValueError(
            f"{count} steps are too few for a warm-up of up to {max_warmup}: {2 * ROLL} must remain"
        )
    tail = step_s[max_warmup:]
    level = median(tail)
    # From step to step, not from the level: a drift must not pass for noise.
    deviation = median(abs(after - before) for before, after in pairwise(tail)) / 2**0.5
    bound = max(FLAT * level, 2 * deviation)
    start = next(
        (i for i in range(unmeasured, max_warmup) if abs(median(step_s[i : i + ROLL]) - level) <= bound),
        max_warmup,
    )
    # A rolling median is flat while up to two of its first steps are not: leave those out as well.
    while start < max_warmup and abs(step_s[start] - level) > bound:
        start += 1
    middle = (start + count) // 2
    drift = abs(median(step_s[start:middle]) - median(step_s[middle:]))
    return Window(start, count, drift <= bound)
