"""Estimate the change that the cases of a session have in common. Pure.

If the machine of a session is slower, or all cases use a package that became slower, all cases are slower by
about the same factor. The logarithm x_i of the change of case i is modelled as

    x_i = common + effect_i + error_i

The common effect is the same for all cases of the session. `effect_i` is the effect of the session on this
case alone, with variance tau^2. The error has a known variance. This is the random-effects model of
meta-analysis. Three quantities are estimated as in the literature:

- tau^2 as in DerSimonian and Laird (Controlled Clinical Trials 7, 1986)
- the error of the common effect as in Hartung and Knapp (Statistics in Medicine 20, 2001)
- the interval for the change of a further case as in Higgins, Thompson and Spiegelhalter (Journal of the
  Royal Statistical Society A 172, 2009)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from perfsuite.verdict.robust import Z_99, t_quantile

FEWEST_CASES = 4
"""Minimum number of cases. The interval for a further case has `cases - 2` degrees of freedom."""
_Z_95 = NormalDist().inv_cdf(0.975)  # half width of a two-sided 95% interval of a normal distribution
# A case that is more than this many standard errors away from the others differs from them. The threshold of
# `regressed` is the same.
_Z_APART = 3.2


@dataclass(frozen=True)
class Estimate:
    """The estimated change of one case, in logarithms."""

    estimate: float
    error: float  # standard error; above 0


@dataclass(frozen=True, kw_only=True)
class CommonChange:
    """The change that several cases have in common, in logarithms."""

    estimate: float
    error: float  # standard error of `estimate`
    scatter: float  # standard deviation tau of the cases' own effects
    cases: tuple[str, ...]  # names of the cases that share the change
    apart: tuple[str, ...]  # names of the cases whose changes differ from the common change

    @property
    def interval(self) -> tuple[float, float]:
        """The 99% interval of the common change."""
        half = t_quantile(Z_99, len(self.cases) - 1) * self.error
        return self.estimate - half, self.estimate + half

    @property
    def is_shared(self) -> bool:
        """Whether the 95% interval for the change of a further case excludes 0."""
        half = t_quantile(_Z_95, len(self.cases) - 2) * math.hypot(self.scatter, self.error)
        return abs(self.estimate) > half


def common_change(changes: Mapping[str, Estimate]) -> CommonChange | None:
    """Estimate the common change. `changes` has the change of each case, by name of the case.

    Cases that differ from the others are left out one by one, beginning with the most different case. Returns
    None if fewer than `FEWEST_CASES` cases remain.
    """
    kept = dict(changes)
    while len(kept) >= FEWEST_CASES:
        distances = {name: _distance(name, kept) for name in kept}
        furthest = max(kept, key=distances.__getitem__)
        if distances[furthest] <= _Z_APART:
            apart = tuple(name for name in changes if name not in kept)
            estimate, error, scatter = _estimated([*kept.values()])
            return CommonChange(
                estimate=estimate, error=error, scatter=scatter, cases=tuple(kept), apart=apart
            )
        del kept[furthest]
    return None


def _distance(name: str, changes: Mapping[str, Estimate]) -> float:
    """Return how many standard errors a case is away from the change that all other cases share."""
    others = [change for other, change in changes.items() if other != name]
    estimate, error, scatter = _estimated(others)
    change = changes[name]
    degrees = len(others) - 1
    distance = abs(change.estimate - estimate) / math.hypot(change.error, error, scatter)
    return distance * _Z_APART / t_quantile(_Z_APART, degrees)


def _estimated(changes: list[Estimate]) -> tuple[float, float, float]:
    """Return the common change, its standard error, and tau. There must be at least two changes."""
    weights = [change.error**-2 for change in changes]
    mean = _mean(changes, weights)
    degrees = len(changes) - 1
    q = _squares(changes, weights, mean)
    scale = sum(weights) - sum(weight**2 for weight in weights) / sum(weights)
    variance = max(0.0, (q - degrees) / scale)
    weights = [1 / (change.error**2 + variance) for change in changes]
    mean = _mean(changes, weights)
    error = math.sqrt(_squares(changes, weights, mean) / (degrees * sum(weights)))
    return mean, error, math.sqrt(variance)


def _mean(changes: list[Estimate], weights: list[float]) -> float:
    values = (weight * change.estimate for weight, change in zip(weights, changes, strict=True))
    return sum(values) / sum(weights)


def _squares(changes: list[Estimate], weights: list[float], mean: float) -> float:
    distances = (change.estimate - mean for change in changes)
    return sum(weight * distance**2 for weight, distance in zip(weights, distances, strict=True))
