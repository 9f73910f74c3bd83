"""Forecast the time of a step on a machine on which other cases were measured. Pure.

Two factors are fitted to the measured cases: the times of the GPU and of the host, relative to the expected
times. Each kind of parallelism has its own factor of the GPU, because the errors of the prediction differ
between the kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from perfsuite.errors import PredictionError
from perfsuite.results.dry_facts import Expected, Forecast, Parallelism

SPREAD = 0.028
"""Standard deviation of the prediction's error, as a logarithm, among cases on the same cluster with the same
parallelism. This is the pooled value of the published steps in docs/evidence/step-times.md."""
DEGREES = 4
"""The weight of `SPREAD`, as a number of measurements. This is less than the number of published steps, so
that the errors on this machine soon outweigh `SPREAD`: published steps on one cluster are more alike than the
cases of a repository."""
Z_95 = 1.645  # quantile of the normal distribution: 9 of 10 values are between -1.645 and 1.645
HOSTS = tuple(2 ** (eighth / 8) for eighth in range(-16, 25))
"""Times of the host (relative to those of the GPU) that are tried: from a quarter to eight times."""
USUAL_HOST = math.log(2)
"""Standard deviation of the host's time relative to the assumed time, as a logarithm. The speeds of single
cores of servers differ by about a factor of two."""
PLAUSIBLE = 2.7
"""A host is plausible if its squared errors exceed those of the best host by at most this: the 90% quantile
of chi-squared with one degree of freedom."""
MOST_FROM_THE_HOST = 1.25
"""There is no forecast if the slowest and the fastest plausible host give times that differ by a larger
factor."""
MOST_FOR_A_FACTOR = 2  # the host's factor is shown only if plausible hosts differ by at most this factor
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
    """Return the time of a step if the host takes `host` times as long as assumed, by interpolation."""
    points = step.by_host
    low, high = points[-2:]
    for before, after in pairwise(points):
        if host <= after[0]:
            low, high = before, after
            break
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return low[1] + slope * (host - low[0])


class _Fit(NamedTuple):
    """The errors of predictions if the host has a given speed, after the GPU's factors were fitted."""

    host: float  # the host's time relative to that of the GPU
    factors: dict[Parallelism, float]  # of the GPU, by parallelism
    squares: dict[Parallelism, float]  # sum of the squared errors
    excess: float  # sum of the squared errors of cases and host, each relative to its usual size

    @classmethod
    def of(cls, cases: Sequence[MeasuredCase], host: float) -> _Fit:
        errors: dict[Parallelism, list[float]] = {}
        for case in cases:
            error = math.log(case.step_s / seconds_at(case.expected, host))
            errors.setdefault(case.expected.parallelism or "none", []).append(error)
        means = {kind: sum(values) / len(values) for kind, values in errors.items()}
        squares = {
            kind: sum((value - means[kind]) ** 2 for value in values) for kind, values in errors.items()
        }
        excess = sum(squares.values()) / SPREAD**2 + (math.log(host) / USUAL_HOST) ** 2
        return cls(host, {kind: math.exp(mean) for kind, mean in means.items()}, squares, excess)


def forecast(step: Expected, cases: Sequence[MeasuredCase]) -> Forecast:
    """Forecast a step from the cases that were measured on the same machine.

    Raises `PredictionError` if no measured case has the same parallelism, or if the time depends on the
    host's speed, which the measured cases do not show.
    """
    kind = step.parallelism
    usable = [case for case in cases if case.expected.by_host]
    alike = [case.case_id for case in usable if case.expected.parallelism == kind]
    if kind is None or not step.by_host:
        raise PredictionError("an older perfsuite made the dry run. Run the case dry again")
    if not alike:
        raise PredictionError(
            f"none of the measured cases has the same parallelism ({KINDS[kind]}). Measure one of them first"
        )
    fits = [_Fit.of(usable, host) for host in HOSTS]
    best = min(fits, key=lambda fit: fit.excess)
    plausible = [fit for fit in fits if fit.excess <= best.excess + PLAUSIBLE]
    times = [fit.factors[kind] * seconds_at(step, fit.host) for fit in plausible]
    if max(times) > MOST_FROM_THE_HOST * min(times):
        raise PredictionError(
            "the step's time depends on the speed of the host, which the measured cases do not show. Measure "
            "a case whose GPU waits for the host first"
        )
    reach = math.exp(_reach(best.squares[kind], len(alike)))
    return Forecast(
        low_s=min(times) / reach,
        high_s=max(times) * reach,
        cases=tuple(sorted(alike)),
        gpu_factor=best.factors[kind],
        host_factor=best.host * best.factors[kind] if _shows_host(plausible) else None,
    )


def _shows_host(plausible: Sequence[_Fit]) -> bool:
    return plausible[-1].host <= MOST_FOR_A_FACTOR * plausible[0].host


def _reach(squares: float, cases: int) -> float:
    """Return half the width of the interval for another case, as a logarithm.

    `squares` is the sum of the squared errors of the measured cases.
    """
    degrees = DEGREES + cases - 1
    sigma = math.sqrt((DEGREES * SPREAD**2 + squares) / degrees)
    # The first terms of a series for Student's quantile are within 1% with 4 degrees or more.
    second = (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / (96 * degrees**2)
    t = Z_95 + (Z_95**3 + Z_95) / (4 * degrees) + second
    return t * sigma * math.sqrt(1 + 1 / cases)
