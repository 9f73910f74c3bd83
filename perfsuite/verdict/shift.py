"""Estimate from launches of unchanged code how much slower the machine is than at the baselines. Pure.

The logarithm of the cost of a launch is modelled as the sum of four independent effects:

    log(cost) = case + session + case within session + launch

A session launches a few cases (the canaries) with its reference: the packages and the commit of the
baseline. Only the machine can make these launches slower or faster. Each canary therefore estimates the
effect of tonight's session minus the effect of the baseline's sessions. This difference is called the shift.
The variance of a case within a session is estimated from the scatter of the canaries around the shift, and
from the scatter of cases between the sessions of their baselines. The shift does not remove this variance:
`correction` adds it to the noise of a case that is judged against the reference.

The case itself can also be launched with the reference. The effect of the case within the session is then the
same in these launches and in tonight's launches of the new code, so it cancels. Only the noise between
launches is left (`own_correction`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, variance

from perfsuite.verdict.common_change import Estimate, common_change
from perfsuite.verdict.noise import LaunchesBySession, at_one_level
from perfsuite.verdict.robust import (
    Z_99,
    clipped_variance,
    location,
    sorted_logs,
    squares,
)
from perfsuite.verdict.sequential import OWN_SPREAD, Noise
from perfsuite.verdict.variance import Component, pooled

MIN_DEGREES = 2
"""Minimum degrees of freedom for the noise of a case within a session. One degree is not enough, because it
comes from two values, which can agree by chance."""
_SAME_SHARES = 1e-9  # a squared difference of shares below this is only rounding

Shares = Mapping[str, float]  # the share of each session in the launches of a baseline, by name


@dataclass(frozen=True, kw_only=True)
class CanaryChange:
    """The change between the baseline of one canary and the canary's launches with the reference."""

    estimate: float  # in logarithms: above 0 is slower
    error: float  # standard error due to the noise between launches; the noise of the case is not included
    sessions: Shares  # the sessions of its baseline


@dataclass(frozen=True, kw_only=True)
class Shift:
    """How much slower the machine is tonight than at the baselines, in logarithms."""

    estimate: float
    error: float  # standard error
    case_variance: float  # upper confidence limit of the variance of a case within a session
    sessions: Shares  # the sessions with which tonight is compared
    canaries: tuple[str, ...]  # the canaries that agree
    apart: tuple[str, ...] = field(default=())  # the other canaries, whose changes differ

    @property
    def interval(self) -> tuple[float, float]:
        """The 99% interval of the shift."""
        half = Z_99 * self.error
        return self.estimate - half, self.estimate + half


def canary_change(now: list[float], baseline: LaunchesBySession, noise: Noise, case_id: str) -> CanaryChange:
    """Return the change of a canary. `now` has the costs of its launches with the reference."""
    then = at_one_level(baseline, noise.sigma)
    change = location(sorted_logs(now), noise.sigma) - location(sorted_logs(then), noise.sigma)
    return CanaryChange(
        estimate=change,
        error=error_of_launches(noise, len(now), len(then)),
        sessions=shares(baseline, case_id),
    )


def error_of_launches(noise: Noise, now: int, then: int) -> float:
    """Return the standard error that the noise between launches causes in a canary's change.

    `now` and `then` are the numbers of launches of the two sides.
    """
    return noise.sigma * math.sqrt(1 / now + 1 / then)


def shares(baseline: LaunchesBySession, case_id: str) -> Shares:
    """Return the share of each session in the launches of a baseline.

    A session without a name is assumed to be a session of this case alone.
    """
    total = sum(map(len, baseline.values()))
    return {
        name or f"unnamed session of {case_id}": len(launches) / total for name, launches in baseline.items()
    }


def estimated_shift(changes: Mapping[str, CanaryChange], noise: Noise) -> Shift | None:
    """Estimate the shift from the changes of canaries, which are given by case id.

    `noise` is the noise of the hardware class. Canaries whose changes differ from the others are left out, if
    enough others agree. Returns None without canaries, or if the noise of a case within a session is unknown.
    """
    common = common_change(
        {name: Estimate(change.estimate, change.error) for name, change in changes.items()}
    )
    names = tuple(changes) if common is None else common.cases
    agreeing = [changes[name] for name in names]
    component = pooled([noise.of_case, _scatter(agreeing)])
    if not agreeing or component is None or component.degrees < MIN_DEGREES:
        return None
    shift = weighted_shift({name: changes[name] for name in names}, component.upper)
    return shift if common is None else replace(shift, apart=common.apart)


def weighted_shift(changes: Mapping[str, CanaryChange], case_variance: float) -> Shift:
    """Return the mean of one or more changes, weighted with their inverse variances."""
    variances = [change.error**2 + case_variance * _times(change.sessions) for change in changes.values()]
    precision = sum(1 / of_canary for of_canary in variances)
    estimate = 0.0
    sessions: dict[str, float] = {}
    for of_canary, change in zip(variances, changes.values(), strict=True):
        weight = 1 / of_canary / precision
        estimate += weight * change.estimate
        for name, share in change.sessions.items():
            sessions[name] = sessions.get(name, 0.0) + weight * share
    return Shift(
        estimate=estimate,
        error=math.sqrt(1 / precision),
        case_variance=case_variance,
        sessions=sessions,
        canaries=tuple(changes),
    )


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The correction of a case's costs for the shift of the machine."""

    shift: float  # in logarithms: costs are divided by its exponential
    noise: Noise  # the noise when corrected costs are compared with the case's baseline


def correction(noise: Noise, sessions: Shares, shift: Shift) -> Correction | None:
    """Return the correction of a case; None if the noise of its corrected costs is unknown.

    `noise` is the noise of the hardware class, and `sessions` are the sessions of the case's baseline. If the
    canaries' baselines are from other sessions than the case's baseline, the noise between sessions must be
    known.
    """
    names = {*sessions, *shift.sessions}
    differences = (sessions.get(name, 0.0) - shift.sessions.get(name, 0.0) for name in names)
    others = sum(difference**2 for difference in differences)
    if others > _SAME_SHARES and not noise.session_sigma:
        return None
    of_session = shift.error**2 + shift.case_variance * _times(sessions) + others * noise.session_sigma**2
    return Correction(shift=shift.estimate, noise=replace(noise, session_sigma=math.sqrt(of_session)))


def own_correction(noise: Noise, baseline: LaunchesBySession, now: list[float], case_id: str) -> Correction:
    """Return the correction of a case that was also launched with the reference.

    `now` has the costs of the launches with the reference. Their noise is assumed to be at least `OWN_SPREAD`
    times the standard deviation of these costs.
    """
    logs = sorted_logs(now)
    spread = math.sqrt(clipped_variance(squares(logs), len(logs) - 1))
    error = max(noise.sigma, OWN_SPREAD * spread) / math.sqrt(len(logs))
    change = canary_change(now, baseline, noise, case_id)
    return Correction(shift=change.estimate, noise=replace(noise, session_sigma=error))


def _scatter(changes: Iterable[CanaryChange]) -> Component | None:
    """Estimate the variance of a case within a session from the scatter of canaries; None with only one."""
    known = [*changes]
    if len(known) < 2:
        return None
    times = fmean(_times(change.sessions) for change in known)
    return Component(
        observed=variance(change.estimate for change in known) / times,
        explained=fmean(change.error**2 for change in known) / times,
        degrees=len(known) - 1,
    )


def _times(sessions: Shares) -> float:
    """Return the variance of the difference between tonight and a baseline.

    The unit is the variance of one session.
    """
    return 1 + sum(share**2 for share in sessions.values())
