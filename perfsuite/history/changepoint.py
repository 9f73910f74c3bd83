"""Where the level of a series changed: optimal segmentation, then a t-test of each change. Pure.

1. The noise is read off differences of neighbours, which a step hardly moves. Where neighbouring nights are
   alike (a machine has good and bad weeks), a mean is less sure than its number of nights says.
2. Single outliers are clipped to what their neighbours allow, so that one bad night is no change.
3. The cheapest piecewise constant fit, squares in units of the noise and a price per level, is found exactly
   (optimal partitioning: Jackson et al., IEEE Signal Processing Letters 12(2), 2005).
4. A change stays if it is large enough and Student's t of its two sides is sure; the weakest falls first.

All on logarithms, so that changes are relative. A slow drift shows as a stair.

Why not Apache Otava: its pins (numpy 2.2.0, BigQuery and Slack clients) would change the very environment
that is measured; with its defaults two series in five have a false alarm within a year; made as quiet as
this, it misses most small changes, since it looks at 50 points at a time. Figures of both, and of asv's own
detector: tests/benchmarks/drift.py.

Imports numpy, inside functions; neither torch nor pytest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from perfsuite.documents import Data
from perfsuite.verdict.robust import t_quantile

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

SURE = 4.4
"""Standard errors by which a change must differ from none: no false alarm in 100 series of a year."""
MIN_NIGHTS = 3
"""Points that a level needs: fewer may be one bad night and its repetition."""
NOISE_FLOOR = 0.0005
"""Relative: what repeats to the digit, as memory does, still has a scale."""
_NEIGHBOURS = 2
_CLIP = 3.5
_MAD_OF_DIFFERENCES = 0.6745 * math.sqrt(2)
_Z_99 = 2.576


class Change(Data):
    """A change of level between two neighbouring points of a series."""

    index: int
    """Of the first point of the new level."""
    earliest: int
    latest: int
    """Between these `index` lies (99 %)."""
    before: float
    after: float
    """Levels, in the unit of the series."""
    relative: float
    """+0.05 is 5 % more."""
    interval: tuple[float, float]
    """99 % interval of `relative`."""


def correlation(series: Sequence[float]) -> float:
    """How alike neighbours are, from 0 to 0.9, by differences of next and next but one, which steps leave be.

    For noise in which each night keeps a share r of the one before, their variances are as 1 to 1 + r. Vague
    for one series: take the median of those that share a machine.
    """
    import numpy as np

    logs = np.log(np.asarray(series, dtype=np.float64))
    next_one, next_but_one = (float(np.median(np.abs(logs[lag:] - logs[:-lag]))) for lag in (1, 2))
    return min(max((next_but_one / next_one) ** 2 - 1, 0.0), 0.9) if next_one else 0.0


def changes(series: Sequence[float], *, min_change: float, correlation: float = 0.0) -> list[Change]:
    """Changes of level by at least `min_change` (relative), oldest first. Values must be above 0.

    `correlation` is that of neighbours, as `correlation` tells it.
    """
    import numpy as np

    if len(series) < 2 * MIN_NIGHTS:
        return []
    logs = np.log(np.asarray(series, dtype=np.float64))
    noise = float(np.median(np.abs(np.diff(logs)))) / _MAD_OF_DIFFERENCES / math.sqrt(1 - correlation)
    logs = _without_outliers(logs - logs[0], max(noise, NOISE_FLOOR))
    of_means = math.sqrt((1 + correlation) / (1 - correlation))
    noise = max(noise * of_means, NOISE_FLOOR)
    sums = np.concatenate(([0.0], np.cumsum(logs)))
    bounds = _cheapest(sums / noise)
    residuals = logs - np.repeat(
        [(sums[end] - sums[start]) / (end - start) for start, end in pairwise(bounds)], np.diff(bounds)
    )
    degrees = len(logs) - (len(bounds) - 1)
    noise = max(of_means * math.sqrt(float(residuals @ residuals) / degrees), noise)
    bounds = _sure(sums, bounds, noise, degrees, math.log1p(min_change))
    origin = math.log(series[0])
    return [
        _change(sums, start, middle, end, noise, degrees, origin)
        for start, middle, end in zip(bounds, bounds[1:], bounds[2:], strict=False)
    ]


def _without_outliers(logs: Floats, noise: float) -> Floats:
    """Each point at most so far from the median of itself and its neighbours."""
    import numpy as np

    windows = np.lib.stride_tricks.sliding_window_view(logs, 2 * _NEIGHBOURS + 1)
    centre = np.pad(np.median(windows, axis=1), _NEIGHBOURS, mode="edge")
    return np.clip(logs, centre - _CLIP * noise, centre + _CLIP * noise)


def _cheapest(sums: Floats) -> list[int]:
    """Bounds of the levels of the cheapest fit: 0, the index of each change, the length.

    `sums` are cumulative, in units of the noise. The sum of all squares is the same for every fit and left
    out: a level from `start` to `end` then costs its price less (sum over it)^2 / (its length).
    """
    import numpy as np

    n = len(sums) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0
    came_from = np.zeros(n + 1, dtype=int)
    lengths = np.arange(n, 0, -1)
    for end in range(MIN_NIGHTS, n + 1):
        starts = end - MIN_NIGHTS + 1
        costs = best[:starts] - (sums[end] - sums[:starts]) ** 2 / lengths[n - end :][:starts]
        start = int(np.argmin(costs))
        best[end] = costs[start] + SURE**2
        came_from[end] = start
    bounds = [n]
    while bounds[-1] > 0:
        bounds.append(int(came_from[bounds[-1]]))
    return bounds[::-1]


def _sure(sums: Floats, bounds: list[int], noise: float, degrees: int, min_log: float) -> list[int]:
    """Drop the weakest change until all that are left are sure and large enough."""
    sure = t_quantile(SURE, degrees)
    bounds = list(bounds)
    while len(bounds) > 2:
        strengths = []
        for start, middle, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
            before, after, error = _levels(sums, start, middle, end, noise)
            strengths.append(min(abs(after - before) / (error * sure), abs(after - before) / min_log))
        weakest = strengths.index(min(strengths))
        if strengths[weakest] >= 1:
            break
        del bounds[weakest + 1]
    return bounds


def _levels(sums: Floats, start: int, middle: int, end: int, noise: float) -> tuple[float, float, float]:
    """Mean before, mean after, standard error of their difference."""
    before = float(sums[middle] - sums[start]) / (middle - start)
    after = float(sums[end] - sums[middle]) / (end - middle)
    return before, after, noise * math.sqrt(1 / (middle - start) + 1 / (end - middle))


def _change(
    sums: Floats, start: int, middle: int, end: int, noise: float, degrees: int, origin: float
) -> Change:
    import numpy as np

    before, after, error = _levels(sums, start, middle, end, noise)
    half = t_quantile(_Z_99, degrees) * error
    places = np.arange(start + 1, end)
    costs = -((sums[places] - sums[start]) ** 2) / (places - start)
    costs -= (sums[end] - sums[places]) ** 2 / (end - places)
    near = places[costs <= costs[middle - start - 1] + (_Z_99 * noise) ** 2]
    return Change(
        index=middle,
        earliest=int(near.min()),
        latest=int(near.max()),
        before=math.exp(origin + before),
        after=math.exp(origin + after),
        relative=math.expm1(after - before),
        interval=(math.expm1(after - before - half), math.expm1(after - before + half)),
    )
