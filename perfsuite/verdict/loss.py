"""Whether a loss curve is the baseline's. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from perfsuite.results.baseline import Baseline, loss_curve
from perfsuite.results.run import Run
from perfsuite.verdict.robust import t_quantile

LOSS_SIGMAS = 4.3
"""A tenth of a loss curve that lies beyond so many is another loss: 1 in 60,000 by the normal."""


LOSS_DEGREES = 3
"""Degrees of freedom of the spread that ten tenths of one launch tell: they are correlated (simulated)."""


LOSS_FLOOR = 0.02
"""Relative difference of the loss curve that is always allowed: reductions in another order drift apart."""


def loss_differs(runs: Sequence[Run], baseline: Baseline) -> str | None:
    """Where today's loss curve leaves the baseline's, beyond what its launches scatter; None if nowhere."""
    usual = _usual_loss(baseline)
    for run in runs:
        for position, (now, (then, allowed)) in enumerate(zip(loss_curve(run.loss), usual, strict=False)):
            if not abs(now - then) <= allowed:
                share = f"{10 * position} to {10 * position + 10} % of the steps"
                return f"the loss over {share} is {now:.4f}, the baseline's {then:.4f} +- {allowed:.4f}"
    return None


def _usual_loss(baseline: Baseline) -> list[tuple[float, float]]:
    """The baseline's loss over each tenth of the steps, and how far from it the same code may be.

    A few launches hardly tell the spread of one tenth, so that of it with its neighbours counts where it is
    larger, and so does the median of all tenths' relative spreads (of no use where a loss crosses zero).
    Student's t, as the spread is estimated, and so is the mean that is compared with.
    """
    curves = [launch.loss for launch in baseline.launches if launch.loss]
    count = len(curves)
    tenths = [
        [curve[position] for curve in curves if len(curve) > position]
        for position in range(max(map(len, curves), default=0))
    ]
    means = [fmean(tenth) for tenth in tenths]
    if count < 3:
        return [(mean, LOSS_FLOOR * abs(mean)) for mean in means]
    spreads = [stdev(tenth) if len(tenth) > 1 else 0.0 for tenth in tenths]
    typical = median(
        [spread / abs(mean) if mean else 0.0 for spread, mean in zip(spreads, means, strict=True)]
    )
    sigmas = t_quantile(LOSS_SIGMAS, LOSS_DEGREES * (count - 1)) * math.sqrt(1 + 1 / count)
    return [
        (mean, max(sigmas * _near(spreads, tenth), max(sigmas * typical, LOSS_FLOOR) * abs(mean)))
        for tenth, mean in enumerate(means)
    ]


def _near(spreads: Sequence[float], tenth: int) -> float:
    """The spread of a tenth, or if that is larger the root mean square of it and its neighbours'."""
    neighbours = spreads[max(0, tenth - 1) : tenth + 2]
    return max(spreads[tenth], math.sqrt(fmean(spread * spread for spread in neighbours)))
