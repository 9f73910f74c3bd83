"""Estimate variance components. Pure.

Launches are the level below sessions: the means of sessions scatter partly because launches scatter. A
variance component is the mean square of a level minus the part that the levels below explain, and is at least
0 (Searle, Casella, McCulloch, Variance Components, 1992).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_UPPER_LIMIT = (40.4, 7.49, 4.33, 3.28, 2.77, 2.46, 2.25, 2.11, 2.0)
"""Upper 87.5% confidence limit of a variance, as a multiple of its estimate, for 1, 2, ... degrees of
freedom: degrees / (0.125 quantile of chi-squared)."""
TABULATED = len(_UPPER_LIMIT)  # degrees of freedom up to which the limit is tabulated
_Z_UPPER = 1.1503  # 87.5% quantile of a normal distribution


def upper_limit(degrees: int) -> float:
    """Return the upper 87.5% limit of a variance, as a multiple of its estimate, for 1 degree or more.

    Beyond the table, the quantile of chi-squared is computed as in Wilson and Hilferty (1931).
    """
    if degrees <= TABULATED:
        return _UPPER_LIMIT[degrees - 1]
    ninth = 2 / (9 * degrees)
    return float((1 - ninth - _Z_UPPER * math.sqrt(ninth)) ** -3)


@dataclass(frozen=True, kw_only=True)
class Component:
    """The estimate of a variance component."""

    observed: float  # mean square, including the part that the levels below add to it
    explained: float  # the part of the mean square that the levels below are expected to add
    degrees: int  # degrees of freedom of `observed`; at least 1

    @property
    def sigma(self) -> float:
        """The estimated standard deviation; 0 if the levels below explain everything."""
        return math.sqrt(max(self.observed - self.explained, 0.0))

    @property
    def upper(self) -> float:
        """The component at its upper confidence limit, because a few values can agree by chance."""
        return max(self.observed, self.explained) * upper_limit(self.degrees) - self.explained

    @property
    def upper_sigma(self) -> float:
        """The standard deviation at its upper confidence limit."""
        return math.sqrt(self.upper)


def pooled(estimates: Iterable[Component | None]) -> Component | None:
    """Return one estimate from independent estimates of a component; None if there are none."""
    known = [estimate for estimate in estimates if estimate is not None]
    if not known:
        return None
    degrees = sum(estimate.degrees for estimate in known)
    return Component(
        observed=sum(estimate.degrees * estimate.observed for estimate in known) / degrees,
        explained=sum(estimate.degrees * estimate.explained for estimate in known) / degrees,
        degrees=degrees,
    )
