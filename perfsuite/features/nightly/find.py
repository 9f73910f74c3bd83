"""Plan a night that can find a change of a given size, and estimate its cost (`perfsuite night --find`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from perfsuite.case.case import Case
from perfsuite.cli.shared import options
from perfsuite.errors import CaseError
from perfsuite.node.machine import detect
from perfsuite.report.console import console, plain_table, print_rows
from perfsuite.report.noise import sentence as noise_sentence
from perfsuite.report.text import plural
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.store import BaselineStore, Store
from perfsuite.session.canaries import Candidate, chosen
from perfsuite.session.past_nights import noise_of_class
from perfsuite.session.plan import Planned as Cost
from perfsuite.session.plan import past_of, planned
from perfsuite.verdict.noise import costs_by_session
from perfsuite.verdict.planning import (
    CasePlan,
    NightPlan,
    Planned,
    canary_cost,
    hidden_by_case,
    least_cost,
    most_cost,
    pairs_to_find,
    plan_night,
)
from perfsuite.verdict.sequential import Noise
from perfsuite.verdict.shift import shares

UNKNOWN_NOISE = (
    "--find: the baselines on {hardware_class} do not show the noise between launches. Accept baselines of 5 "
    "launches or more: perfsuite baseline accept"
)
SEVERAL_CLASSES = (
    "--find: these cases have baselines on {classes}, but this machine has another class. Run the command on "
    "the machine that you plan for"
)
NO_BASELINE = "--find: none of these cases has a baseline in {store}. First accept baselines"
ONE_SESSION = (
    "The baselines do not show how much sessions differ, so this plan assumes that sessions do not differ. "
    "Accept baselines of two sessions or more (perfsuite baseline accept --sessions 2)"
)
NEEDS_REFERENCE = (
    "If {canaries} were also launched with a reference, this night would find a change of {find:.1%} in "
    "{more}: add -- --perf-reference ARM"
)
HIDDEN = (
    "The noise of a case within a session hides a change of {find:.1%} in {cases}, however often these cases "
    "are launched"
)
TOO_FEW = "A change of {find:.1%} cannot be found in {cases}: accept baselines with more launches or sessions"
IN_PAIRS = (
    "To find a change of {find:.1%} in these cases, compare two environments in pairs of launches (perfsuite "
    "compare): {pairs} are enough"
)
NOR_PAIRS = "Not even a comparison in pairs of launches (perfsuite compare) finds a change of {find:.1%}"


@dataclass(frozen=True, kw_only=True)
class FindPlan:
    """A plan for the cases of one hardware class, with everything that it is based on."""

    find: float  # the wanted change: 0.02 is 2%
    hardware_class: str
    noise: Noise  # the noise of tokens/s
    usual_tolerance: float  # the tolerance of tokens/s without the plan
    cases: Mapping[str, Planned]  # the cost of a launch is in seconds
    gpus: Mapping[str, int]  # number of GPUs of each case; 0 on CPUs
    plan: NightPlan
    with_reference: NightPlan  # the plan if the night had a reference
    without_baseline: Sequence[str]  # ids of cases that cannot be planned
    unknown_costs: Sequence[str]  # ids of cases whose launches have an unknown duration

    def pytest_options(self) -> list[str]:
        """Return pytest's options for this plan."""
        words = [f"--perf-max-launches={self.plan.max_launches}"]
        if not self.plan.unreached and self.find <= self.usual_tolerance:
            words.append(f"--perf-tolerance={100 * self.find:g}%")
        if self.plan.canaries:
            words.append(f"--perf-canaries={len(self.plan.canaries)}")
        return words


def planned_to_find(
    cases: Sequence[Case], store: Store, baselines: BaselineStore, find: float, *, has_reference: bool
) -> FindPlan:
    """Plan a night that finds a change. Raises `CaseError` if nothing is known about the noise."""
    hardware_class = _hardware_class(cases, baselines)
    of_class = baselines.of_class(hardware_class)
    known = noise_of_class(hardware_class, baselines, store)
    noise = known.of(TOKENS_PER_S)
    if noise is None:
        raise CaseError(UNKNOWN_NOISE.format(hardware_class=hardware_class))
    by_id = {baseline.case.id: baseline for baseline in of_class}
    costs = {
        cost.case.id: cost for cost in planned(cases, past_of(store.results()), datetime.now(UTC).date())
    }
    with_baseline = [case for case in cases if case.id in by_id]
    to_plan = {
        case.id: _to_plan(by_id[case.id], costs[case.id], known.probe_exponent) for case in with_baseline
    }
    has_gpus = any(costs[case.id].gpus for case in cases)
    usual = options(tolerance=None).policy.tolerance_of(TOKENS_PER_S, "cuda" if has_gpus else "cpu")
    candidates = [
        Candidate(case=case, baseline=by_id[case.id], baseline_file="", launch_s=costs[case.id].launch_s)
        for case in with_baseline
    ]
    canaries = [candidate.case.id for candidate in chosen(candidates, len(candidates))]
    with_reference = plan_night(to_plan, noise, find, min(find, usual), canaries)
    alone = plan_night(to_plan, noise, find, min(find, usual), ())
    return FindPlan(
        find=find,
        hardware_class=hardware_class,
        noise=noise,
        usual_tolerance=usual,
        cases=to_plan,
        gpus={case.id: costs[case.id].gpus for case in cases},
        plan=with_reference if has_reference else alone,
        with_reference=with_reference,
        without_baseline=[case.id for case in cases if case.id not in by_id],
        unknown_costs=[case_id for case_id in to_plan if costs[case_id].launch_s is None],
    )


def _hardware_class(cases: Sequence[Case], baselines: BaselineStore) -> str:
    """Return the hardware class to plan for: that of this machine, or the only one with baselines."""
    ids = {case.id for case in cases}
    classes = {file.parent.name for file in baselines.files() if file.stem in ids}
    here = detect().hardware_class
    if here in classes:
        return here
    if not classes:
        raise CaseError(NO_BASELINE.format(store=baselines))
    if len(classes) > 1:
        raise CaseError(SEVERAL_CLASSES.format(classes=", ".join(sorted(classes))))
    return classes.pop()


def _to_plan(baseline: Baseline, cost: Cost, exponent: float) -> Planned:
    costs = costs_by_session(baseline, TOKENS_PER_S, exponent)
    return Planned(
        baseline_launches=sum(map(len, costs.values())),
        sessions=shares(costs, baseline.case.id),
        cost=cost.launch_s or 0.0,
    )


def show(finding: FindPlan, *, as_json: bool) -> None:
    """Print a plan: the launches that each case needs, the noise, the reference, and the cost."""
    grid = plain_table(("case", "baseline", "launches", "finds", ""))
    rows = list[dict[str, object]]()
    for case_id, case_plan in finding.plan.cases.items():
        case = finding.cases[case_id]
        grid.add_row(
            case_id,
            f"{case.baseline_launches} of {plural(len(case.sessions), 'session')}",
            str(case_plan.launches),
            f"{case_plan.finds:.1%}",
            "" if case_plan.is_reached else "not reached",
        )
        rows.append(_row(finding, case_id, case_plan))
    print_rows(rows, grid, as_json=as_json)
    if not as_json:
        console().print("\n".join(sentences(finding)))


def _row(finding: FindPlan, case_id: str, case_plan: CasePlan) -> dict[str, object]:
    launch_s = None if case_id in finding.unknown_costs else finding.cases[case_id].cost
    most_s = None if launch_s is None else launch_s * finding.plan.max_launches
    return {
        "case": case_id,
        "launches": case_plan.launches,
        "finds": case_plan.finds,
        "reached": case_plan.is_reached,
        "canary_launches": finding.plan.canary_launches if case_id in finding.plan.canaries else 0,
        "most_s": most_s,
        "most_gpu_hours": None if most_s is None else most_s * finding.gpus[case_id] / 3600,
    }


def sentences(finding: FindPlan) -> list[str]:
    """Describe the noise, the reference, the cost, and the cases in which the plan cannot find the change."""
    return [
        noise_sentence(finding.noise, finding.hardware_class),
        *([ONE_SESSION] if not finding.noise.session_sigma else []),
        _reference(finding),
        _cost(finding),
        *_unreached(finding),
        *(
            [f"not planned, because these cases have no baseline: {', '.join(finding.without_baseline)}"]
            if finding.without_baseline
            else []
        ),
    ]


def _reference(finding: FindPlan) -> str:
    plan = finding.plan
    if not plan.canaries:
        return "no reference"
    times = plural(plan.canary_launches, "launch")
    canaries = plural(len(plan.canaries), "canary case")
    return f"reference: {times} of each of {canaries}: {', '.join(plan.canaries)}"


def _cost(finding: FindPlan) -> str:
    """State the lowest and the highest cost of the night, in launches, minutes and GPU hours."""
    plan = finding.plan
    ends = [least_cost, most_cost]
    launches, minutes, hours = (
        " to ".join(f"{end(plan, _costing(finding, unit)):,.{digits}f}" for end in ends)
        for unit, digits in (("launches", 0), ("minutes", 1), ("GPU hours", 1))
    )
    extra = canary_cost(plan, _costing(finding, "GPU hours"))
    of_reference = f", of which {extra:,.1f} GPU hours are for the reference" if plan.canaries else ""
    unknown = finding.unknown_costs
    more = f", and {plural(len(unknown), 'case')} of unknown cost" if unknown else ""
    return f"cost: {launches} launches, {minutes} min, {hours} GPU hours{of_reference}{more}"


def _costing(finding: FindPlan, unit: str) -> Mapping[str, Planned]:
    """Return the cases, with the cost of a launch converted to `unit`."""

    def of_launch(case_id: str) -> float:
        seconds = finding.cases[case_id].cost
        factors = {
            "launches": 1.0,
            "minutes": seconds / 60,
            "GPU hours": seconds * finding.gpus[case_id] / 3600,
        }
        return factors[unit]

    return {case_id: replace(case, cost=of_launch(case_id)) for case_id, case in finding.cases.items()}


def _unreached(finding: FindPlan) -> list[str]:
    """Explain why the plan cannot find the change in some cases, and how the change could be found."""
    unreached = finding.plan.unreached
    if not unreached:
        return []
    find = finding.find
    better = [name for name in unreached if name not in finding.with_reference.unreached]
    lines = []
    if better and not finding.plan.canaries:
        canaries = plural(len(finding.with_reference.canaries), "canary case")
        more = plural(len(better), "more case")
        lines.append(NEEDS_REFERENCE.format(canaries=canaries, find=find, more=more))
    others = [name for name in unreached if name not in better]
    hidden = [name for name in others if hidden_by_case(finding.noise, finding.cases[name], find)]
    too_few = [name for name in others if name not in hidden]
    if hidden:
        lines.append(HIDDEN.format(find=find, cases=_named(hidden, finding)))
    if too_few:
        lines.append(TOO_FEW.format(find=find, cases=_named(too_few, finding)))
    if others:
        pairs = pairs_to_find(finding.noise, find)
        how = NOR_PAIRS if pairs is None else IN_PAIRS
        lines.append(how.format(find=find, pairs=plural(pairs or 0, "pair")))
    least = max(plan.finds for plan in finding.plan.cases.values())
    lines.append(
        f"This night finds a change of {least:.1%} in every case. It keeps its tolerance, because it cannot "
        f"find a change of {find:.1%} in every case."
    )
    return lines


def _named(case_ids: Sequence[str], finding: FindPlan) -> str:
    return "all cases" if len(case_ids) == len(finding.cases) else ", ".join(case_ids)
