"""Find changes of level in a series: optimal segmentation, then a t-test of each change. Pure.

1. Estimate the noise from the differences between neighbouring nights. A jump to another level hardly affects
   this estimate. Correct the noise for the correlation of neighbouring nights.
2. Clip single outliers towards the median of their neighbours: one bad night is not a change.
3. Find the best piecewise constant fit exactly (Jackson et al., IEEE Signal Processing Letters 12(2), 2005).
   The cost of a fit is the sum of squared residuals, in units of the noise, plus a penalty for each level.
4. Keep a change if it is large enough, and significant in Student's t-test between its two sides.

All computations use logarithms, so changes are relative. A slow drift is found as several small changes. No
library is used: asv's detector and Apache Otava make more errors (tests/features/history/drift.py), and
ruptures would need scipy for step 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from perfsuite.results.trend import ChangePoint
from perfsuite.verdict.robust import Z_99, t_quantile

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

# Minimum size of a change, in standard errors. Tuned to give no false alarm in 100 series of one year.
SIGNIFICANT = 4.4
MIN_NIGHTS = 3  # minimum number of points in a level, because a bad night that is run twice gives two
NOISE_FLOOR = 0.0005  # lower limit of the relative noise, because some values, such as memory, never vary
_NEIGHBOURS = 2  # number of points on each side of a point that contribute to its local median
_CLIP = 3.5  # maximum distance of a point from its local median, in standard deviations
_MAD_OF_DIFFERENCES = round(NormalDist().inv_cdf(0.75), 4) * math.sqrt(2)
"""Median absolute difference between two normally distributed values with standard deviation 1."""


class _Step(NamedTuple):
    """Two neighbouring levels and the change between them, in logarithms."""

    start: int
    middle: int
    end: int
    before: float  # mean of the points from `start` up to (not including) `middle`
    size: float  # change from `before` to the mean of the points from `middle` up to (not including) `end`
    error: float  # standard error of `size`


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Sums of a series, and the noise against which its levels are judged."""

    sums: Floats  # cumulative sums of the logarithms. The first is 0, so there is one more sum than points
    noise: float  # standard deviation of a point, increased because neighbours are correlated
    degrees: int  # degrees of freedom of `noise`

    def steps(self, bounds: Sequence[int]) -> list[_Step]:
        """Return the change at each bound, except the first and the last bound."""
        steps = []
        for start, middle, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
            before = float(self.sums[middle] - self.sums[start]) / (middle - start)
            after = float(self.sums[end] - self.sums[middle]) / (end - middle)
            error = self.noise * math.sqrt(1 / (middle - start) + 1 / (end - middle))
            steps.append(_Step(start, middle, end, before, after - before, error))
        return steps

    def significant(self, bounds: Sequence[int], min_size: float) -> list[_Step]:
        """Remove the weakest changes one by one, and return the changes that remain.

        Every remaining change is significant and at least as large as `min_size`.
        """
        least_errors = t_quantile(SIGNIFICANT, self.degrees)
        kept = list(bounds)
        while steps := self.steps(kept):
            strengths = [abs(step.size) / max(step.error * least_errors, min_size) for step in steps]
            weakest = min(strengths)
            if weakest >= 1:
                break
            del kept[strengths.index(weakest) + 1]
        return steps

    def change(self, step: _Step, origin: float) -> ChangePoint:
        """Convert a change of level to the unit of the series.

        `origin` was subtracted from all logarithms.
        """
        import numpy as np

        sums = self.sums
        start = step.start
        end = step.end
        places = np.arange(start + 1, end)
        costs = -((sums[places] - sums[start]) ** 2) / (places - start)
        costs -= (sums[end] - sums[places]) ** 2 / (end - places)
        near = places[costs <= costs[step.middle - start - 1] + (Z_99 * self.noise) ** 2]
        half = t_quantile(Z_99, self.degrees) * step.error
        return ChangePoint(
            index=step.middle,
            earliest=int(near.min()),
            latest=int(near.max()),
            before=math.exp(origin + step.before),
            after=math.exp(origin + step.before + step.size),
            relative=math.expm1(step.size),
            interval=(math.expm1(step.size - half), math.expm1(step.size + half)),
        )


def correlation(series: Sequence[float]) -> float:
    """Estimate the correlation of neighbours, from 0 to 0.9. Values must be greater than 0.

    If the noise of neighbouring nights has the correlation r, the difference between points two nights apart
    has 1 + r times the variance of the difference between neighbours. A jump to another level hardly affects
    these variances. One series gives only a rough estimate: use the median over all series of a machine.
    """
    import numpy as np

    logs = np.log(np.asarray(series, dtype=np.float64))
    next_one, next_but_one = (float(np.median(np.abs(logs[lag:] - logs[:-lag]))) for lag in (1, 2))
    return min(max((next_but_one / next_one) ** 2 - 1, 0.0), 0.9) if next_one else 0.0


def change_points(series: Sequence[float], *, min_change: float, correlation: float = 0) -> list[ChangePoint]:
    """Find changes of level whose relative size is at least `min_change`, oldest first.

    All values must be greater than 0.
    """
    import numpy as np

    if len(series) < 2 * MIN_NIGHTS:
        return []
    logs = np.log(np.asarray(series, dtype=np.float64))
    noise = float(np.median(np.abs(np.diff(logs)))) / _MAD_OF_DIFFERENCES / math.sqrt(1 - correlation)
    logs = _without_outliers(logs - logs[0], max(noise, NOISE_FLOOR))
    # Factor by which the correlation increases the error of a mean.
    of_means = math.sqrt((1 + correlation) / (1 - correlation))
    noise = max(noise * of_means, NOISE_FLOOR)
    sums = np.concatenate(([0.0], np.cumsum(logs)))
    bounds = _cheapest(sums / noise)
    levels = [(sums[end] - sums[start]) / (end - start) for start, end in pairwise(bounds)]
    residuals = logs - np.repeat(levels, np.diff(bounds))
    degrees = len(logs) - len(levels)
    noise = max(of_means * math.sqrt(float(residuals @ residuals) / degrees), noise)
    fit = _Fit(sums=sums, noise=noise, degrees=degrees)
    return [fit.change(step, math.log(series[0])) for step in fit.significant(bounds, math.log1p(min_change))]


def _without_outliers(logs: Floats, noise: float) -> Floats:
    """Clip each point to within `_CLIP` standard deviations of the median of itself and its neighbours."""
    import numpy as np

    windows = np.lib.stride_tricks.sliding_window_view(logs, 2 * _NEIGHBOURS + 1)
    centre = np.pad(np.median(windows, axis=1), _NEIGHBOURS, mode="edge")
    return np.clip(logs, centre - _CLIP * noise, centre + _CLIP * noise)


def _cheapest(sums: Floats) -> list[int]:
    """Find the fit that has the smallest cost, and return its bounds.

    The bounds are 0, the index of each change, and the number of points. `sums` must be in units of the
    noise.
    """
    import numpy as np

    n = len(sums) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0
    came_from = np.zeros(n + 1, dtype=int)
    lengths = np.arange(n, 0, -1)
    for end in range(MIN_NIGHTS, n + 1):
        starts = end - MIN_NIGHTS + 1
        # The sum of all squares is left out, because it is the same for every fit.
        costs = best[:starts] - (sums[end] - sums[:starts]) ** 2 / lengths[n - end :][:starts]
        start = int(np.argmin(costs))
        best[end] = costs[start] + SIGNIFICANT**2
        came_from[end] = start
    bounds = [n]
    while bounds[-1] > 0:
        bounds.append(int(came_from[bounds[-1]]))
    return bounds[::-1]
