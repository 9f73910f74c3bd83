"""Removes the machine's own drift from launches, by a probe timed between their steps. Pure functions.

The probe is a fixed piece of work. Where the machine slows down both, seconds / probe_seconds**exponent
scatters less than seconds. The exponent is the least-squares slope of log(seconds) on log(probe_seconds),
shrunk towards 0 like Stein's positive-part estimator (James and Stein 1961; here F replaces chi-squared).
"""

import math
from collections.abc import Sequence
from statistics import median

from perfsuite.verdict.sequential import pooled_noise

Pair = tuple[float, float]
"""One launch: its seconds per step, and the seconds of the probe in the same launch."""


def probe_corrected(launches: Sequence[Pair], baseline: Sequence[Pair], exponent: float) -> list[float]:
    """Return seconds as at the baseline's usual speed: seconds x (median baseline probe / probe)^exponent.

    `exponent`, 0 to 1, is best that of all baselines of the hardware class (`probe_exponent`). Today's
    launches are never used to choose it.
    """
    typical = math.exp(median(math.log(probe) for _, probe in baseline))
    return [seconds * (typical / probe) ** exponent for seconds, probe in launches]


def probe_exponent(groups: Sequence[Sequence[Pair]]) -> float:
    """Estimate how strongly launches follow their probe, 0 to 1, from one or more baselines.

    The least-squares slope is multiplied by max(0, 1 - E[F] / F): F is its squared t statistic, and E[F] = d
    / (d - 2) is the expectation of F without any relation, at d residual degrees of freedom. The result is 0
    with fewer than 3 of them, and if the correction does not lower the clipped noise. Five launches with
    unrelated probes give an exponent above 0 about 7 times in 100.
    """
    y = [value for group in groups for value in _centred_logs([seconds for seconds, _ in group])]
    x = [value for group in groups for value in _centred_logs([probe for _, probe in group])]
    exponent = shrunk_slope(x, y, len(y) - len(groups) - 1)
    if not exponent:
        return 0.0
    measured = pooled_noise([[launch for launch, _ in group] for group in groups])
    corrected = pooled_noise([probe_corrected(group, group, exponent) for group in groups], fitted=1)
    return exponent if corrected.sigma < measured.sigma else 0.0


def shrunk_slope(x: Sequence[float], y: Sequence[float], degrees: float) -> float:
    """Return the slope of y on x, shrunk as `probe_exponent` tells: 0 to 1. Both have the mean 0."""
    shared = sum(a * b for a, b in zip(x, y, strict=True))
    if degrees < 3 or shared <= 0:
        return 0.0
    slope = shared / sum(a * a for a in x)
    explained = slope * shared
    residual = max(sum(b * b for b in y) - explained, 0.0)
    by_chance = residual / (degrees - 2)
    return min(1.0, slope * max(0.0, 1 - by_chance / explained))


def _centred_logs(values: Sequence[float]) -> list[float]:
    logs = [math.log(value) for value in values]
    mean = sum(logs) / len(logs)
    return [value - mean for value in logs]
