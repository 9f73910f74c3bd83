"""Simulates whether a planned night finds what its plan claims, with the code that plans and judges.

Draws the baselines of a class of 20 cases, plans a night, and draws the launches of that night. The launches
of the canaries (cases that are launched with the baselines' code) give an estimate of the machine's shift.
The launches of all cases are judged one after another until there is a verdict. If a case looks slower, the
reference is also launched on this case. In one case that is not a canary, the code is slower by the change
that the plan should find.

    python -m tests.benchmarks.simulated_planning   # docs/evidence/statistics.md
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.verdict.noise import pooled_over_sessions
from perfsuite.verdict.planning import NightPlan, Planned, plan_night
from perfsuite.verdict.sequential import Noise
from perfsuite.verdict.shift import canary_change, estimated_shift, shares
from tests.benchmarks import show_table
from tests.benchmarks.simulated_reference import judged

CASES = 20
TOLERANCE = 0.03
LAUNCHES_PER_SESSION = 5
EFFECTS = ((0.01, 0.001, 0.003), (0.01, 0.002, 0.003), (0.01, 0.005, 0.003), (0.01, 0.001, 0.006))
"""Standard deviations of the effects of sessions, cases within a session, and launches, in logarithms."""

Costs = dict[str | None, list[float]]  # the costs of one case, by session


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A simulated hardware class."""

    session: float
    case_within_session: float
    launch: float

    def session_of(self, cases: list[str], launches: int, draw: random.Random) -> dict[str, list[float]]:
        """Return the costs of all cases in one session."""
        shift = draw.gauss(0, self.session)
        costs = {}
        for case in cases:
            level = shift + draw.gauss(0, self.case_within_session)
            costs[case] = [math.exp(level + draw.gauss(0, self.launch)) for _ in range(launches)]
        return costs


@dataclass(frozen=True, kw_only=True)
class Night:
    """The result of one simulated night."""

    is_reached: bool  # whether the plan claims to find the change in the slower case
    is_found: bool  # whether the slower case regressed
    false_alarms: int  # number of other cases that regressed
    launches: int  # number of launches of all cases
    canary_launches: int
    confirming_launches: int  # of the reference on cases that look slower


def night(machine: Machine, sessions: int, find: float, draw: random.Random) -> Night:
    """Simulate the baselines, the plan and the night."""
    cases = [f"case{number}" for number in range(CASES)]
    days = [machine.session_of(cases, LAUNCHES_PER_SESSION, draw) for _ in range(sessions)]
    baselines: dict[str, Costs] = {
        case: {str(day): days[day][case] for day in range(sessions)} for case in cases
    }
    noise = pooled_over_sessions([*baselines.values()])
    assert noise is not None
    planned = {
        case: Planned(baseline_launches=sum(map(len, costs.values())), sessions=shares(costs, case))
        for case, costs in baselines.items()
    }
    plan = plan_night(planned, noise, find, min(find, TOLERANCE), cases)
    # The reference is launched on a case that looks slower as often as the case.
    tonight = machine.session_of(cases, plan.canary_launches + 2 * plan.max_launches, draw)
    return _judged(plan, baselines, tonight, noise, find)


def _judged(
    plan: NightPlan, baselines: dict[str, Costs], tonight: dict[str, list[float]], noise: Noise, find: float
) -> Night:
    slower = [*baselines][-1]
    # The tolerance is smaller than usual only if the plan can find the change in every case.
    tolerance = TOLERANCE if plan.unreached else min(find, TOLERANCE)
    canaries = {
        case: canary_change(tonight[case][: plan.canary_launches], baselines[case], noise, case)
        for case in plan.canaries
    }
    shift = estimated_shift(canaries, noise) if canaries else None
    metric = replace(TOKENS_PER_S, tolerances={"cpu": 0.15, "cuda": tolerance})
    used = 0
    confirming = 0
    regressed = set[str]()
    for case, costs in baselines.items():
        slowdown = 1 + find if case == slower else 1
        later = tonight[case][plan.canary_launches :]
        launches = [slowdown * cost for cost in later[: plan.max_launches]]
        of_reference = later[plan.max_launches :] if plan.canaries else []
        check, made, made_by_reference = judged(metric, costs, launches, noise, shift, of_reference)
        used += made
        confirming += made_by_reference
        if check.outcome == "regressed":
            regressed.add(case)
    return Night(
        is_reached=plan.cases[slower].is_reached,
        is_found=slower in regressed,
        false_alarms=len(regressed - {slower}),
        launches=used,
        canary_launches=plan.canary_launches * len(plan.canaries),
        confirming_launches=confirming,
    )


def rows(nights: int) -> Iterator[list[str]]:
    """Yield a row for each kind of machine, number of sessions, and change that should be found."""
    for session, case_within_session, launch in EFFECTS:
        machine = Machine(session=session, case_within_session=case_within_session, launch=launch)
        for sessions in (2, 3, 5):
            for find in (0.02, 0.03):
                draw = random.Random(f"{session} {launch} {sessions} {find}")
                results = [night(machine, sessions, find, draw) for _ in range(nights)]
                reached = [result for result in results if result.is_reached]
                found = f"{fmean(result.is_found for result in reached):.1%}" if reached else "none"
                alarms = sum(result.false_alarms > 0 for result in results) / nights
                launches = fmean(result.launches for result in results)
                extra = fmean(result.canary_launches + result.confirming_launches for result in results)
                yield [
                    f"{session:.1%}, {case_within_session:.1%}, {launch:.1%}",
                    str(sessions),
                    f"{find:.0%}",
                    f"{len(reached) / nights:.0%}",
                    found,
                    f"{alarms:.2%}",
                    f"{launches:.0f} + {extra:.0f}",
                ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=1_000)
    heads = ["session, case within, launch", "sessions", "find", "plan reaches it", "found", "false alarms"]
    show_table([*heads, "launches + reference"], rows(parser.parse_args().nights))


if __name__ == "__main__":
    main()
