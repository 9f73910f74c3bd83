"""Forecast the time of a step on a machine on which other cases were measured. Pure.

Two factors are fitted to the measured cases: the times of the GPU and of the host, relative to the expected
times. The host can set the pace of a step if a slow host would lengthen the step. Otherwise the GPU sets the
pace. Cases are alike if they have the same kind of parallelism, and if a slow host would lengthen the steps
of all of them or of none. Each such group of cases has its own factor of the GPU and its own spread, because
the errors of the prediction differ between the groups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from perfsuite.errors import PredictionError
from perfsuite.results.dry_facts import Expected, Forecast, Parallelism

SPREAD = 0.028
"""Standard deviation of the prediction's error, as a logarithm, among cases on the same cluster with the same
parallelism, if the GPU sets the pace. This is the pooled value of the published steps in
docs/evidence/step-times.md."""
SPREAD_OF_HOST = 0.17
"""Standard deviation of the prediction's error if the host can set the pace. The value comes from nine cases
of this kind that were measured on one H100 (docs/evidence/step-times.md). It is larger than `SPREAD` because
a dry run's log does not show the time that Python takes between two operators."""
DEGREES = 4
"""The weight of `SPREAD` and `SPREAD_OF_HOST`, as a number of measurements. Published steps on one cluster
are more alike than the cases of a repository. The weight is therefore less than the number of published
steps, so that the errors on this machine soon outweigh `SPREAD`."""
SLOW_HOST = 4.0
"""The host can set the pace of a step if the step takes longer with a host that needs this many times the
assumed time. A core of another server can be half as fast as the assumed core. In addition, the log shows
only a part of the host's time."""
# In the docstring of `SLOW_HOST`, a step "takes longer" if its time is more than this factor times its time
# with the assumed host. The factor is exp(1.645 * SPREAD): 95% of the prediction's usual errors are below it.
LONGER = 1.05
Z_95 = 1.645  # quantile of the normal distribution: 9 of 10 values are between -1.645 and 1.645
HOSTS = tuple(2 ** (eighth / 8) for eighth in range(-16, 25))
"""Times of the host (relative to those of the GPU) that are tried: from a quarter to eight times."""
USUAL_HOST = math.log(2)
"""Standard deviation of the host's time relative to the assumed time, as a logarithm. The speeds of single
cores of servers differ by about a factor of two."""
PLAUSIBLE = 2.7
"""A host is plausible if its `_Fit.excess` exceeds that of the best host by at most this number: the 90%
quantile of chi-squared with one degree of freedom."""
MOST_FROM_THE_HOST = 1.25
"""There is no forecast if the times of the step with different plausible hosts differ by more than this
factor."""
# The host's factor is shown only if its plausible values differ from each other by at most this factor.
MOST_FOR_A_FACTOR = 2
KINDS = {
    "none": "without communication",
    "replicated": "with replicated parameters",
    "sharded": "with sharded parameters",
    "within layers": "with parallelism within layers",
}


class MeasuredCase(NamedTuple):
    """A case whose step was predicted and measured."""

    case_id: str
    expected: Expected
    step_s: float  # the measured time


def seconds_at(step: Expected, host: float) -> float:
    """Interpolate the time of a step for a host that takes `host` times as long as assumed.

    Above the largest factor in `step.by_host`, the time is extrapolated.
    """
    points = step.by_host
    low, high = points[-2:]
    for before, after in pairwise(points):
        if host <= after[0]:
            low, high = before, after
            break
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return low[1] + slope * (host - low[0])


def host_can_set_the_pace(step: Expected) -> bool:
    """Return whether the step would take longer with a slow host."""
    return seconds_at(step, SLOW_HOST) > LONGER * seconds_at(step, 1)


class _Group(NamedTuple):
    """The properties that the cases of a group have in common."""

    parallelism: Parallelism
    host: bool  # whether the host can set the pace

    @classmethod
    def of(cls, step: Expected) -> _Group:
        return cls(step.parallelism, host_can_set_the_pace(step))

    @property
    def spread(self) -> float:
        return SPREAD_OF_HOST if self.host else SPREAD


class _Fit(NamedTuple):
    """The errors of predictions if the host has a given speed, after the GPU's factors were fitted."""

    host: float  # the host's time relative to that of the GPU
    factors: dict[_Group, float]  # of the GPU
    squares: dict[_Group, float]  # sum of the squared errors
    # Sum of the squared errors of the cases, each divided by its group's spread, plus the square of
    # log(host) / USUAL_HOST.
    excess: float

    @classmethod
    def of(cls, groups: Mapping[_Group, Sequence[MeasuredCase]], host: float) -> _Fit:
        errors = {
            group: [math.log(case.step_s / seconds_at(case.expected, host)) for case in cases]
            for group, cases in groups.items()
        }
        means = {group: sum(values) / len(values) for group, values in errors.items()}
        squares = {
            group: sum((value - means[group]) ** 2 for value in values) for group, values in errors.items()
        }
        of_cases = sum(squares[group] / group.spread**2 for group in squares)
        excess = of_cases + (math.log(host) / USUAL_HOST) ** 2
        return cls(host, {group: math.exp(mean) for group, mean in means.items()}, squares, excess)


def forecast(step: Expected, cases: Sequence[MeasuredCase]) -> Forecast:
    """Forecast a step from the cases that were measured on the same machine.

    Raises `PredictionError` if no measured case is like this one, or if the time depends on the host's speed,
    which the measured cases do not show.
    """
    group = _Group.of(step)
    groups: dict[_Group, list[MeasuredCase]] = {}
    for case in cases:
        groups.setdefault(_Group.of(case.expected), []).append(case)
    if group not in groups:
        raise PredictionError(_nothing_alike(group, groups))
    alike = groups[group]
    fits = [_Fit.of(groups, host) for host in HOSTS]
    best = min(fits, key=lambda fit: fit.excess)
    plausible = [fit for fit in fits if fit.excess <= best.excess + PLAUSIBLE]
    times = [fit.factors[group] * seconds_at(step, fit.host) for fit in plausible]
    if max(times) > MOST_FROM_THE_HOST * min(times):
        raise PredictionError(
            "the step's time depends on the speed of the host, which the measured cases do not show. First "
            "measure a case whose GPU waits for the host"
        )
    reach = math.exp(_reach(best.squares[group], len(alike), group.spread))
    return Forecast(
        low_s=min(times) / reach,
        high_s=max(times) * reach,
        cases=tuple(sorted(case.case_id for case in alike)),
        gpu_factor=best.factors[group],
        host_factor=best.host * best.factors[group] if _shows_host(plausible) else None,
        host_pace=group.host,
    )


def _nothing_alike(group: _Group, measured: Collection[_Group]) -> str:
    kind = KINDS[group.parallelism]
    if all(other.parallelism != group.parallelism for other in measured):
        return f"none of the measured cases has the same parallelism. First measure a case {kind}"
    if group.host:
        return (
            f"the host can set the pace of this step, but not the pace of any measured case {kind}. "
            "First measure a case whose GPU waits for the host"
        )
    return (
        f"the GPU sets the pace of this step, but the host can set the pace of every measured case "
        f"{kind}. First measure a case with larger layers or batches"
    )


def _shows_host(plausible: Sequence[_Fit]) -> bool:
    return plausible[-1].host <= MOST_FOR_A_FACTOR * plausible[0].host


def _reach(squares: float, cases: int, spread: float) -> float:
    """Return half the width of the interval for another case, as a logarithm.

    `squares` is the sum of the squared errors of the measured cases, and `spread` is the usual size of one
    error.
    """
    degrees = DEGREES + cases - 1
    sigma = math.sqrt((DEGREES * spread**2 + squares) / degrees)
    # The first terms of a series for Student's quantile: with 4 degrees or more, their error is within 1%.
    second = (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / (96 * degrees**2)
    t = Z_95 + (Z_95**3 + Z_95) / (4 * degrees) + second
    return t * sigma * math.sqrt(1 + 1 / cases)
