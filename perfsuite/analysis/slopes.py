"""Estimate the trends of memory and step time over the measured steps of a launch, with intervals. Pure."""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, linear_regression, stdev

from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Run, Slope, SlopeUnit

FEWEST = 5  # minimum number of values for estimating a slope
HALF_WIDTH = NormalDist().inv_cdf(0.975)  # half width of a 95% interval, in standard errors


def slopes_of(run: Run, reports: Sequence[RankReport]) -> tuple[Slope, ...]:
    """Return the slopes of step time and of each kind of memory for a run whose window is known.

    The slope of memory is that of the rank whose memory grows most.
    """
    first, end = run.window
    step_time = _slope("step time", "s", dict(enumerate(run.measured_steps, first)))
    slopes = [] if step_time is None else [step_time]
    for kind in dict.fromkeys(kind for report in reports for kind in report.levels):
        of_ranks = []
        for report in reports:
            levels = {step: size for step, size in report.levels.get(kind, {}).items() if first < step <= end}
            slope = _slope(kind, "bytes", levels, rank=report.rank)
            if slope is not None:
                of_ranks.append(slope)
        if of_ranks:
            slopes.append(max(of_ranks, key=lambda slope: slope.per_step))
    return tuple(slopes)


def _slope(
    name: str, unit: SlopeUnit, values: Mapping[int, float], *, rank: int | None = None
) -> Slope | None:
    """Fit a least-squares slope to values by step; None if there are too few, or if one is not finite.

    The interval of step times treats the values as independent. Levels of memory are not independent: after
    one large allocation, all later levels are higher. So their interval has at least the width that follows
    from the scatter of the changes between neighbouring levels.
    """
    if len(values) < FEWEST or not all(map(math.isfinite, values.values())):
        return None
    steps = [*values]
    line = linear_regression(steps, [*values.values()])
    squares = sum((value - line.intercept - line.slope * step) ** 2 for step, value in values.items())
    middle = sum(steps) / len(steps)
    error = math.sqrt(squares / (len(steps) - 2) / sum((step - middle) ** 2 for step in steps))
    if unit == "bytes":
        changes = [
            (after - before) / (later - step)
            for (step, before), (later, after) in itertools.pairwise(values.items())
        ]
        error = max(error, stdev(changes) / math.sqrt(len(changes)))
    return Slope(
        name=name,
        unit=unit,
        per_step=line.slope,
        interval=(line.slope - HALF_WIDTH * error, line.slope + HALF_WIDTH * error),
        rank=rank,
    )
