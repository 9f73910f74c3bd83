"""Plan how often to launch cases and canaries to find a change of a wanted size in one night. Pure.

A plan uses the same noise as the gate, which judges the night later. Both use the same formula for the
smallest change that is found 95 times in 100. Even if the reference shows exactly how fast the machine is,
the noise of a case within a session remains. If this noise alone hides a change of the wanted size, only
launches in pairs can find the change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from perfsuite.verdict.noise import against
from perfsuite.verdict.paired_comparison import MAX_PAIRS, MIN_CHANGED, minimum_detectable_difference
from perfsuite.verdict.robust import SCALE_EFFICIENCY
from perfsuite.verdict.sequential import (
    FEWEST_LAUNCHES,
    MAX_LAUNCHES,
    Noise,
    can_pass,
    minimum_detectable_drop,
    smallest_tolerance,
)
from perfsuite.verdict.shift import CanaryChange, Shares, Shift, correction, error_of_launches, weighted_shift

MIN_CANARIES = 2  # a single canary does not show whether the machine or the case changed
MAX_CANARIES = 8  # more canaries hardly lower the error of the shift
USUAL_MAX_LAUNCHES = 6  # maximum number of launches per case in a night without a plan
ALARMS_PER_NIGHT = 0.001  # largest expected number of false alarms in a night in which nothing changed
EXTRA = 0.25  # maximum number of launches with the reference, as a share of the launches of the cases


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case to plan for."""

    baseline_launches: int
    sessions: Shares  # for each session, its share of the launches in the case's baseline
    cost: float = 1.0  # cost of one launch, in any unit


@dataclass(frozen=True, kw_only=True)
class CasePlan:
    """The part of a plan for one case."""

    launches: int  # number of launches that find the wanted change; the maximum if no number finds it
    fewest_launches: int  # number of launches after which an unchanged case can pass
    finds: float  # smallest change that is found reliably with `launches`: 0.03 is 3%
    is_reached: bool  # whether `finds` is as small as wanted


@dataclass(frozen=True, kw_only=True)
class NightPlan:
    """The number of launches of each case, and of each canary's launches with the reference."""

    cases: Mapping[str, CasePlan]
    canaries: tuple[str, ...] = ()  # empty: no reference
    canary_launches: int = 0  # number of launches of each canary with the reference

    @property
    def unreached(self) -> list[str]:
        """The cases in which the wanted change is not found reliably."""
        return [name for name, plan in self.cases.items() if not plan.is_reached]

    @property
    def max_launches(self) -> int:
        """The largest number of launches that any case needs to find the wanted change.

        Cases in which the wanted change cannot be found are ignored.
        """
        needed = (plan.launches for plan in self.cases.values() if plan.is_reached)
        return max(needed, default=USUAL_MAX_LAUNCHES)


def plan_night(
    cases: Mapping[str, Planned], noise: Noise, find: float, tolerance: float, canaries: Sequence[str]
) -> NightPlan:
    """Return the plan that finds a change of size `find` in as many cases as possible, at the lowest cost.

    `tolerance` is the tolerance of the night: smaller changes may pass. `canaries` are the possible canaries,
    the best first. The plan has no reference if a reference would not help to find changes.
    """
    most = min(len(canaries), MAX_CANARIES, max(MIN_CANARIES, int(EXTRA * len(cases))))
    counts = (0, *range(MIN_CANARIES, most + 1))
    plans = [_plan(cases, noise, find, tolerance, canaries[:count]) for count in counts]

    def badness(plan: NightPlan) -> tuple[int, float, float]:
        excess = sum(plan.cases[name].finds for name in plan.unreached)
        return len(plan.unreached), excess, most_cost(plan, cases)

    return min(plans, key=badness)


def least_cost(plan: NightPlan, cases: Mapping[str, Planned]) -> float:
    """Return the cost of a night in which each case passes as soon as it can."""
    of_cases = (
        min(case_plan.fewest_launches, plan.max_launches) * cases[name].cost
        for name, case_plan in plan.cases.items()
    )
    return sum(of_cases) + canary_cost(plan, cases)


def most_cost(plan: NightPlan, cases: Mapping[str, Planned]) -> float:
    """Return the cost of a night in which each case needs the maximum number of launches."""
    return plan.max_launches * sum(case.cost for case in cases.values()) + canary_cost(plan, cases)


def canary_cost(plan: NightPlan, cases: Mapping[str, Planned]) -> float:
    """Return the cost of the launches with the reference."""
    return plan.canary_launches * sum(cases[name].cost for name in plan.canaries)


def hidden_by_case(noise: Noise, case: Planned, find: float) -> bool:
    """Return whether the noise of a case within a session hides a change of size `find`.

    If it does, more launches of the case do not help. The limit for false alarms is left out here, because it
    depends on the number of cases, but the noise of a case does not.
    """
    if noise.of_case is None:
        return False
    exact = Shift(
        estimate=0.0, error=0.0, case_variance=noise.of_case.upper, sessions=case.sessions, canaries=()
    )
    least = correction(replace(noise, sigma=0.0), case.sessions, exact)
    return least is not None and smallest_found(least.noise, case.baseline_launches, MAX_LAUNCHES, 0.0) > find


def smallest_found(noise: Noise, baseline_launches: int, launches: int, z_alarm: float) -> float:
    """Return the smallest change that a night finds 95 times in 100, with few enough false alarms.

    An unchanged case is a false alarm if its estimated change is at least `z_alarm` standard errors. Today's
    launches improve the estimate of the noise, so they add degrees of freedom.
    """
    degrees = noise.degrees_of_freedom + SCALE_EFFICIENCY * (launches - 1)
    noise = replace(noise, degrees_of_freedom=degrees)
    found = minimum_detectable_drop(noise=noise, baseline_launches=baseline_launches, max_launches=launches)
    tolerance = smallest_tolerance(
        noise=noise, baseline_launches=baseline_launches, launches=launches, z=z_alarm
    )
    return max(found, tolerance)


def expected_shift(canaries: Mapping[str, Planned], launches: int, noise: Noise) -> Shift | None:
    """Return the shift that a plan assumes for a night with these canaries.

    Its estimate is 0, and its standard error is computed. Returns None if the baselines do not show the noise
    of a case within a session. The canaries of the night will show more exactly how large this noise is, but
    a plan cannot rely on that.
    """
    if noise.of_case is None or not canaries:
        return None
    changes = {
        name: CanaryChange(
            estimate=0.0,
            error=error_of_launches(noise, launches, canary.baseline_launches),
            sessions=canary.sessions,
        )
        for name, canary in canaries.items()
    }
    return weighted_shift(changes, noise.of_case.upper)


def _plan(
    cases: Mapping[str, Planned], noise: Noise, find: float, tolerance: float, canaries: Sequence[str]
) -> NightPlan:
    """Return the plan with these canaries.

    How often canaries are launched depends on the plan of the cases. That plan in turn depends on how often
    canaries are launched. The plan is therefore computed twice.
    """
    launches = 1
    plans = {}
    z_alarm = NormalDist().inv_cdf(1 - ALARMS_PER_NIGHT / len(cases))
    for _ in range(2 if canaries else 1):
        shift = expected_shift({name: cases[name] for name in canaries}, launches, noise)
        plans = {
            name: _case_plan(case, noise, shift, find, tolerance, z_alarm) for name, case in cases.items()
        }
        fewest = sum(min(plan.fewest_launches, USUAL_MAX_LAUNCHES) for plan in plans.values())
        launches = max(1, int(EXTRA * fewest / len(canaries))) if canaries else 0
    return NightPlan(cases=plans, canaries=tuple(canaries), canary_launches=launches)


def _case_plan(
    case: Planned, noise: Noise, shift: Shift | None, find: float, tolerance: float, z_alarm: float
) -> CasePlan:
    """Return the plan of a case. `z_alarm` is explained in `smallest_found`."""
    of_case = against(noise, case.sessions.values())
    corrects = None if shift is None else correction(noise, case.sessions, shift)
    if corrects is not None and corrects.noise.session_sigma < of_case.session_sigma:
        of_case = corrects.noise

    def finds(launches: int) -> float:
        return smallest_found(of_case, case.baseline_launches, launches, z_alarm)

    counts = range(FEWEST_LAUNCHES, MAX_LAUNCHES + 1)
    launches = next((count for count in counts if finds(count) <= find), MAX_LAUNCHES)
    fewest = (
        fewest
        for fewest in range(1, launches)
        if can_pass(
            tolerance=tolerance, noise=of_case, baseline_launches=case.baseline_launches, max_launches=fewest
        )
    )
    return CasePlan(
        launches=launches,
        fewest_launches=next(fewest, launches),
        finds=finds(launches),
        is_reached=finds(launches) <= find,
    )


def pairs_to_find(noise: Noise, find: float) -> int | None:
    """Return the number of pairs of launches that find a change in a comparison; None if no number does.

    The two launches of a pair are of one case in one session. The effects of the case and of the session
    cancel, so only the noise between launches remains.
    """
    pair_sigma = math.sqrt(2) * noise.sigma
    enough = (
        pairs
        for pairs in range(MIN_CHANGED, MAX_PAIRS + 1)
        if minimum_detectable_difference(pair_sigma, pairs) <= find
    )
    return next(enough, None)
