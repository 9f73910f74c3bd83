"""Takes the machine's own drift out of launches by a probe timed between their steps.

The probe is a fixed piece of work, say a matrix product, timed in the same launch and apart from
the steps. Where the machine slows down both, seconds / probe_seconds**exponent scatters less than
seconds (9.4 % became 4.6 % on a shared CPU machine); where it does not, the exponent is 0 and
nothing changes. Pure functions, standard library only. Must not import torch or pytest.

Source: a least-squares slope of log(seconds) on log(probe_seconds), shrunk towards 0 like
Stein's positive-part estimator (James and Stein 1961; here F replaces its chi-squared).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.verdict.robust import middle, sorted_logs
from perfsuite.verdict.sequential import Noise, pooled_noise

Pair = tuple[float, float]
"""One launch: its seconds per step, and the probe's seconds in that launch."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Seconds per step at the probe speed that is typical of the baseline."""

    exponent: float
    """0 where the probe does not help: the seconds are then as they were."""
    baseline: tuple[float, ...]
    launches: tuple[float, ...]


def probe_corrected(
    baseline: Sequence[Pair], launches: Sequence[Pair], *, exponent: float | None = None
) -> Corrected:
    """Correct a case's baseline and today's launches by one and the same exponent.

    The exponent comes from the baseline alone (today's launches must not choose it), or better
    from `probe_exponent` over all baselines of the hardware class. Raises ValueError.
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
    """Pooled noise of corrected baselines, one degree of freedom spent on a fitted exponent."""
    corrected = [probe_corrected(group, group, exponent=exponent).baseline for group in groups]
    return pooled_noise(corrected, fitted=1 if exponent else 0)


def probe_exponent(groups: Sequence[Sequence[Pair]]) -> float:
    """How strongly launches follow their probe, 0 to 1, from one or more baselines.

    A slope that chance could have made counts little: it is multiplied by 1 - E[F]/F, 0 at the
    least, where F is its squared t statistic and E[F] = d / (d - 2) what noise alone makes of it
    with d residual degrees of freedom. Then the correction must lower the clipped noise, else 0.
    Five launches with unrelated probes give an exponent above 0 about 7 times in 100.
    """
    seconds = [_centred_logs("baseline seconds", [pair[0] for pair in group]) for group in groups]
    probes = [_centred_logs("baseline probe", [pair[1] for pair in group]) for group in groups]
    y = [value for group in seconds for value in group]
    x = [value for group in probes for value in group]
    degrees = len(y) - len(groups) - 1
    shared = sum(a * b for a, b in zip(x, y, strict=True))
    if degrees < 3 or shared <= 0:
        return 0.0
    slope = shared / sum(a * a for a in x)
    explained = slope * shared
    left = max(sum(b * b for b in y) - explained, 0.0)
    by_chance = degrees / (degrees - 2) * left / degrees
    exponent = min(1.0, slope * max(0.0, 1 - by_chance / explained))
    if corrected_noise(groups, exponent).sigma >= corrected_noise(groups, 0.0).sigma:
        return 0.0
    return exponent


def _centred_logs(what: str, values: Sequence[float]) -> list[float]:
    """Logarithms less their mean, in the order given."""
    sorted_logs(what, values)  # for its checks
    logs = [math.log(value) for value in values]
    mean = sum(logs) / len(logs)
    return [value - mean for value in logs]


def _scaled(what: str, pairs: Sequence[Pair], typical: float, exponent: float) -> tuple[float, ...]:
    sorted_logs(f"{what} probe", [probe for _, probe in pairs])
    return tuple(seconds * (typical / probe) ** exponent for seconds, probe in pairs)
