"""Removes the machine's own drift from launches, by a probe timed between their steps.

The probe is a fixed piece of work (a matmul) timed in the same launch, outside the steps. Where the machine
slows down both, seconds / probe_seconds**exponent scatters less than seconds (9.4 % became 4.6 % on a shared
CPU machine). Where it does not, the exponent is 0 and nothing is corrected. Pure functions, standard library
only. Must not import torch or pytest.

It earns its place: in a replay of 60 launches of two cases on a CPU under heavy load of others (noise 50 %,
correlation with the probe 0.9, baselines of 5 launches), 31 % of slowdowns by 30 % were found with it and 7 %
without, and unchanged code was called changed in 0 and in 7 %.

Source: the exponent is the least-squares slope of log(seconds) on log(probe_seconds), shrunk towards 0 like
Stein's positive-part estimator (James and Stein 1961; here F replaces its chi-squared).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from perfsuite.verdict.pairs import SHARED_LAUNCH, Differences
from perfsuite.verdict.robust import middle, sorted_logs
from perfsuite.verdict.sequential import Noise, pooled_noise

Pair = tuple[float, float]
"""One launch: its seconds per step, and the seconds of the probe in the same launch."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Seconds per step as they would be at the median probe speed of the baseline."""

    exponent: float
    """Exponent of the correction, 0 to 1. With 0 the seconds are unchanged."""
    baseline: tuple[float, ...]
    launches: tuple[float, ...]


def probe_corrected(
    baseline: Sequence[Pair], launches: Sequence[Pair], *, exponent: float | None = None
) -> Corrected:
    """Correct a case's baseline and today's launches: seconds x (median baseline probe / probe)^exponent.

    `exponent` is best estimated by `probe_exponent` from all baselines of the hardware class; without it,
    from this baseline. Today's launches are never used to choose it. Raises ValueError for an exponent
    outside 0 to 1 and for seconds that are not above 0.
    """
    if exponent is None:
        exponent = probe_exponent([baseline])
    if not 0 <= exponent <= 1:
        raise ValueError(f"exponent is {exponent!r}, expected 0 to 1")
    typical = math.exp(middle(sorted_logs("baseline probe", [probe for _, probe in baseline])))
    return Corrected(
        exponent=exponent,
        baseline=_scaled("baseline", baseline, typical, exponent),
        launches=_scaled("launches", launches, typical, exponent),
    )


def corrected_noise(groups: Sequence[Sequence[Pair]], exponent: float) -> Noise:
    """Estimate the pooled noise of corrected baselines; an exponent above 0 costs one degree of freedom."""
    corrected = [probe_corrected(group, group, exponent=exponent).baseline for group in groups]
    return pooled_noise(corrected, fitted=1 if exponent else 0)


def probe_exponent(groups: Sequence[Sequence[Pair]]) -> float:
    """Estimate how strongly launches follow their probe, 0 to 1, from one or more baselines.

    The least-squares slope is multiplied by max(0, 1 - E[F] / F): F is its squared t statistic, and E[F] = d
    / (d - 2) is the expectation of F without any relation, at d residual degrees of freedom. The result is 0
    with fewer than 3 of them, and if the correction does not lower the clipped noise. Five launches with
    unrelated probes give an exponent above 0 about 7 times in 100.
    """
    seconds = [_centred_logs("baseline seconds", [pair[0] for pair in group]) for group in groups]
    probes = [_centred_logs("baseline probe", [pair[1] for pair in group]) for group in groups]
    y = [value for group in seconds for value in group]
    x = [value for group in probes for value in group]
    exponent = _shrunk_slope(x, y, len(y) - len(groups) - 1)
    if not exponent or corrected_noise(groups, exponent).sigma >= corrected_noise(groups, 0.0).sigma:
        return 0.0
    return exponent


def paired_exponent(costs: Differences, probes: Differences) -> float:
    """Estimate how strongly differences of launches follow those of their probes, 0 to 1.

    The mean of the pairs is the effect of an arm, that of neighbours is 0. The least-squares slope, shrunk
    like that of `probe_exponent`. 0 with fewer than four pairs.
    """
    x, y = (
        [value - fmean(found.pairs) for value in found.pairs] + found.neighbours for found in (probes, costs)
    )
    return _shrunk_slope(x, y, (len(y) - 2) / SHARED_LAUNCH)


def _shrunk_slope(x: Sequence[float], y: Sequence[float], degrees: float) -> float:
    shared = sum(a * b for a, b in zip(x, y, strict=True))
    if degrees < 3 or shared <= 0:
        return 0.0
    slope = shared / sum(a * a for a in x)
    explained = slope * shared
    residual = max(sum(b * b for b in y) - explained, 0.0)
    by_chance = residual / (degrees - 2)
    return min(1.0, slope * max(0.0, 1 - by_chance / explained))


def _centred_logs(what: str, values: Sequence[float]) -> list[float]:
    """Return the logarithms minus their mean, in the order given. Raises ValueError as `sorted_logs`."""
    sorted_logs(what, values)  # only for its checks
    logs = [math.log(value) for value in values]
    mean = sum(logs) / len(logs)
    return [value - mean for value in logs]


def _scaled(what: str, pairs: Sequence[Pair], typical: float, exponent: float) -> tuple[float, ...]:
    sorted_logs(f"{what} probe", [probe for _, probe in pairs])
    return tuple(seconds * (typical / probe) ** exponent for seconds, probe in pairs)
