"""Judge times and memory of a case's launches against its baseline. Pure: no clock, no disk.

Each launch is one piece of evidence. The verdict is `undecided` until it suffices: launch once more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from perfsuite.analysis import health
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import (
    CPU_S_PER_STEP,
    PART_S,
    PART_SHARE,
    PEAK_MEMORY,
    SPAN_S,
    TOKENS_PER_S,
    Metric,
    PartOfStep,
    SpanSeconds,
    judged_metrics,
    span_metrics,
)
from perfsuite.results.outcome import WORST_FIRST, Check, Outcome, Verdict
from perfsuite.results.rank_report import COLD, FailureKind
from perfsuite.results.run import Run, timed_span
from perfsuite.verdict import comparability
from perfsuite.verdict.computation import Computed, differences, does_less, other_computation
from perfsuite.verdict.evidence import Evidence
from perfsuite.verdict.loss import are_compared, loss_differs, scaled
from perfsuite.verdict.noise import PROBE_CORRECTED, ClassNoise, against, is_size, pairs, probe_corrected
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES, Noise, decide

MAX_UNHEALTHY = 3  # unhealthy launches that make the verdict `unhealthy`, unless more are healthy
UNKNOWN_NOISE = "the noise between launches is unknown: accept a baseline of more (--perf-min-launches)"
TOO_FEW_LAUNCHES = f"{FEWEST_LAUNCHES} launches or more show a regression by times (--perf-max-launches)"
SESSIONS_APART = 0.2
"""Growth of a time on a CPU that two sessions can show with the same code: once, the CPU time of a step was
15% higher an hour later. A smaller change is reported only if baselines show how much sessions differ."""
WARM_BY = 2  # launches after which a start-up should be warm: the first may fill the compile cache
ONE_SESSION = "sessions on a CPU may differ so: accept two of them (perfsuite baseline accept --sessions 2)"
OTHER_SOFTWARE = "the software that the probe runs through changed, too: accept a new baseline if all is well"
THE_BASELINE = "the baseline"
NOT_THE_SAME = (
    "better, but not `improved`: neither the loss nor the gradients before clipping could be compared, so "
    "it may compute something else"
)
NEGLIGIBLE = f"below {PART_SHARE:.0%} of a step, or {1e3 * PART_S:.0f} ms, no change counts"
NEGLIGIBLE_SPAN = f"below {SPAN_S:g} s no change counts"
UNSEEN_SPAN = "what was not seen is unknown, and not better; accept a new baseline if it is not done any more"
ONLY_COLD = "no launch found in a cache what the first one compiled"
LOOKS_CHANGED = 0.5
"""Share of the allowed change above which a change of a span is worth more launches."""
NOW_AND_THEN = "not every launch of the baseline has it: one without it says nothing"
LOOKS_THE_SAME = "it looks the same, and takes more launches to be sure (--perf-min-launches)"
NO_LOADER = "where a loader is no torch DataLoader, name it: Script(loader='module:name')"
UNKNOWN_EXPONENT = "how speed follows the probe is unknown: accept more launches"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The number of launches that a verdict may cost."""

    # Most launches, including those that are set aside. With 1 or 2 healthy launches it is a quick look:
    # their times cannot show a regression, so the verdict is `passed` or `inconclusive`.
    max_launches: int = MAX_LAUNCHES
    min_launches: int = 1  # fewest healthy launches, whatever they show, even beyond `max_launches`
    record_launches: int = 3  # healthy launches needed to record a baseline if there is none
    max_unhealthy: int = MAX_UNHEALTHY  # 1 if more launches cannot help

    @property
    def most(self) -> int:
        """The most healthy launches: at least `min_launches`."""
        return max(self.max_launches, self.min_launches)


def judge(runs: Sequence[Run], baseline: Baseline | None, noise: ClassNoise, policy: Policy) -> Verdict:
    """Judge the launches so far, in launch order. Call again after one more launch while `undecided`.

    The first failed launch decides the verdict. Otherwise, launches on a machine that was not as at the
    baseline are set aside, and the healthy rest is compared with the baseline, or recorded if there is none.
    """
    for run in runs:
        if run.failure is not None:
            return _failed(runs, run.failure.kind, *why_failed(run))
    problems = {number: comparability.launch_problems(run, baseline) for number, run in enumerate(runs, 1)}
    evidence = Evidence.of(runs, problems)
    healthy = evidence.healthy
    if evidence.is_too_little(policy.max_unhealthy):
        verdict = _unhealthy(runs, baseline, noise, policy)
    elif not healthy:
        verdict = Verdict(outcome="undecided", launches=len(runs))
    else:
        if len(runs) >= policy.most:  # launches set aside count, too: no healthy one can be added
            most = len(healthy)
            policy = replace(policy, max_launches=most, record_launches=min(policy.record_launches, most))
        verdict = _compare(healthy, baseline, noise, policy) if baseline else _record(healthy, policy)
        if len(healthy) < policy.min_launches and verdict.failure in (None, "unlike", "loss"):
            verdict = verdict.replace(outcome="undecided", failure=None)
    verdict = evidence.named_in(verdict.replace(launches=len(runs)), "launch")
    if baseline is None:
        return verdict
    newest = runs[-1]
    choices = comparability.library_choices(newest, baseline)
    computed = differences(Computed.of_baseline(baseline), Computed.of(runs), THE_BASELINE)
    changed = (
        *choices,
        *scaled(runs, baseline),
        *computed,
        *comparability.run_changes(newest, baseline),
    )
    reasons = (*comparability.unexplained(newest, baseline), *verdict.reasons)
    return verdict.replace(reasons=reasons, changed=changed)


def why_failed(run: Run) -> tuple[str, ...]:
    """Return the failure of a failed launch, and the machine's problems meanwhile."""
    assert run.failure is not None
    meanwhile = health.machine_problems(run.health, run.machine)
    fault = health.hardware_fault(f"{run.failure.message}\n{run.failure.traceback}")
    if fault is not None:
        where = "`nvidia-smi -q`, dmesg (Xid) and `systemctl status nvidia-fabricmanager`"
        meanwhile.append(f"hardware: {fault}: look at {where}")
    return f"{run.failure.kind}: {run.failure.message}", *(f"meanwhile {why}" for why in meanwhile)


def _unhealthy(runs: Sequence[Run], baseline: Baseline | None, noise: ClassNoise, policy: Policy) -> Verdict:
    """Return the verdict on too many unhealthy launches: `unhealthy`, unless only code explains a change."""
    verdict = Verdict(outcome="unhealthy", launches=len(runs))
    if baseline is None:
        return verdict
    failed = _unlike(runs, baseline) or _other_loss(runs, baseline)
    if failed is not None:
        return failed
    # pragma: no mutate runs[0]: all launches of a case have one device
    exact = [each for each in _metrics(runs, baseline) if each.judging(runs[0].machine.device) == "exact"]
    checks = (_check(metric, runs, baseline, noise, policy) for metric in exact)
    worse = [check for check in checks if check.outcome == "regressed"]
    return worst_verdict(worse, len(runs)) if worse else verdict


def _record(runs: Sequence[Run], policy: Policy) -> Verdict:
    """Return the verdict without a baseline: `recorded` once there are enough launches for one."""
    verdict = worst_verdict([_unjudged(metric, runs, None) for metric in _metrics(runs, None)], len(runs))
    is_enough = verdict.outcome != "recorded" or len(runs) >= policy.record_launches
    return verdict if is_enough else verdict.replace(outcome="undecided")


def _compare(runs: Sequence[Run], baseline: Baseline, noise: ClassNoise, policy: Policy) -> Verdict:
    """Judge healthy launches against the baseline. An immediate regression does not end open noisy checks."""
    failed = _unlike(runs, baseline)
    if failed is not None:
        return failed
    metrics = _metrics(runs, baseline)
    checks = worth_a_launch([_check(metric, runs, baseline, noise, policy) for metric in metrics])
    verdict = worst_verdict(checks, len(runs))
    both = zip(metrics, checks, strict=True)
    # pragma: no mutate runs[0]: all launches of a case have one device
    noisy = {check.outcome for metric, check in both if metric.judging(runs[0].machine.device) != "exact"}
    if verdict.outcome == "regressed" and "regressed" not in noisy and "undecided" in noisy:
        return verdict.replace(outcome="undecided")
    if verdict.outcome != "undecided":
        failed = _other_loss(runs, baseline)
        if failed is not None:
            return failed.replace(checks=verdict.checks)
    return if_same(verdict, Computed.of_baseline(baseline), Computed.of(runs), THE_BASELINE)


def if_same(verdict: Verdict, then: Computed, now: Computed, whose: str) -> Verdict:
    """Return the verdict. It is `improved` only if loss or gradients show that the computation is the same.

    A dry run has neither, and needs neither.
    """
    if verdict.outcome != "improved":
        return verdict
    is_known = now.is_dry or are_compared(then.launches, now.launches)
    reasons = [*([] if is_known else [NOT_THE_SAME]), *does_less(then, now, whose)]
    if not reasons:
        return verdict
    return verdict.replace(outcome="inconclusive", reasons=(*verdict.reasons, *reasons))


def _metrics(runs: Sequence[Run], baseline: Baseline | None) -> Sequence[Metric]:
    before = baseline.launches if baseline is not None else ()
    of_spans = span_metrics(launch.figures for launch in before)  # a span that it lacks is shown, not judged
    figures = (launch.figures for launches in (runs, before) for launch in launches)
    # pragma: no mutate 0: all launches of a case have one device
    metrics = judged_metrics(figures, runs[0].machine.device)
    return [metric for metric in metrics if not isinstance(metric, SpanSeconds) or metric in of_spans]


def _failed(runs: Sequence[Run], failure: FailureKind, *reasons: str) -> Verdict:
    return Verdict(outcome="failed", launches=len(runs), failure=failure, reasons=reasons)


def _unlike(runs: Sequence[Run], baseline: Baseline) -> Verdict | None:
    then = Computed.of_baseline(baseline)
    now = Computed.of(runs)
    why = comparability.unlike(runs[-1], baseline) or other_computation(then, now, THE_BASELINE)
    return _failed(runs, "unlike", *why) if why else None


def _other_loss(runs: Sequence[Run], baseline: Baseline) -> Verdict | None:
    difference = loss_differs(runs, baseline)
    return None if difference is None else _failed(runs, "loss", difference)


def _is_undecided_span(check: Check) -> bool:
    """Return whether a check is `inconclusive` for a span, except for a span that was not seen."""
    is_unseen = check.note is not None and UNSEEN_SPAN in check.note
    return _is_of_span(check) and check.outcome == "inconclusive" and not is_unseen


def worth_a_launch(checks: Sequence[Check], awaited: str | None = None) -> list[Check]:
    """Return the checks, in which an undecided span asks for a launch only if it looks changed.

    A span scatters more than the steps. To exclude a change of it would take several launches in each nightly
    run, where the other metrics need one or two. `awaited` is the metric of a search: it stays open until it
    is decided.
    """
    others = [check.outcome for check in checks if not _is_of_span(check)]
    if "undecided" in others:
        return list(checks)
    return [
        check.replace(outcome="inconclusive", note=LOOKS_THE_SAME)
        if check.metric != awaited and _looks_the_same(check)
        else check
        for check in checks
    ]


def _looks_the_same(check: Check) -> bool:
    is_open = _is_of_span(check) and check.outcome == "undecided"
    return is_open and check.change is not None and abs(check.change) <= LOOKS_CHANGED * check.allowed


def _is_of_span(check: Check) -> bool:
    return timed_span(check.metric) is not None


def worst_verdict(checks: Sequence[Check], launches: int) -> Verdict:
    """Return the verdict on some checks: their worst outcome.

    A span happens once or a few times in a launch, and can scatter too much to be judged. As that does not
    cast doubt on the steps, only its own check is `inconclusive`.
    """
    deciding = [each for each in checks if not _is_undecided_span(each)]
    outcome = min((check.outcome for check in deciding), key=WORST_FIRST.index)
    failure: FailureKind | None = "missing_metric" if outcome == "failed" else None
    return Verdict(outcome=outcome, launches=launches, checks=tuple(checks), failure=failure)


def _check(
    metric: Metric, runs: Sequence[Run], baseline: Baseline, noise: ClassNoise, policy: Policy
) -> Check:
    """Check one metric: exactly if a device reproduces it to the digit, else with the sequential test.

    The probe of each launch corrects for the machine's drift. The outcome must be the same with and without
    the correction if the probe's software changed, and for a regression while its exponent is unknown.
    """
    if isinstance(metric, SpanSeconds):
        return _span_check(metric, runs, baseline, noise, policy)
    check = _unjudged(metric, runs, baseline)
    if check.outcome == "failed" or check.measured is None:
        return check
    if check.baseline is None:
        return check.replace(outcome="inconclusive", note="not in the baseline: accept or record it again")
    device = runs[0].machine.device  # pragma: no mutate 0: all launches of a case have one device
    metric = metric.against(launch.figures for launch in baseline.launches)
    if metric.judging(device) == "exact":
        return tolerance_check(metric, check, metric.tolerance(device))
    decided = partial(_decided, metric, check, baseline.session_sizes(metric.name), policy, device)
    figures = [run.figures for run in runs], [launch.figures for launch in baseline.launches]
    now, then = (
        [metric.cost(value) for value in map(metric.of, side) if value is not None] for side in figures
    )
    raw = decided(now, then, noise.of(metric, corrected=False))
    pairs_now, pairs_then = (pairs(side, metric) for side in figures)
    lacks_probe = len(pairs_now) < len(now) or len(pairs_then) < len(then)
    if metric not in PROBE_CORRECTED or lacks_probe:
        return raw
    exponent = noise.probe_exponent or 1.0
    now, then = (probe_corrected(each, pairs_then, exponent) for each in (pairs_now, pairs_then))
    corrected = decided(now, then, noise.of(metric)).replace(probe_exponent=exponent)
    if not noise.probe_exponent:
        is_certain = noise.knows_exponent or raw.outcome != "regressed"
        return raw if is_certain else _agreed(raw, corrected, UNKNOWN_EXPONENT)
    if comparability.same_stack(runs[-1], baseline):
        return corrected
    return _agreed(corrected, raw, OTHER_SOFTWARE)


def _span_check(
    metric: SpanSeconds, runs: Sequence[Run], baseline: Baseline, noise: ClassNoise, policy: Policy
) -> Check:
    """Check a span in the launches that have it: the first may have compiled what the others find."""
    metric = metric.against(launch.figures for launch in baseline.launches)
    device = runs[0].machine.device  # pragma: no mutate 0: all launches of a case have one device
    values = (metric.of(run.figures) for run in runs)
    now = [value for value in values if value is not None]
    then = baseline.values(metric.name)
    # pragma: no mutate [0] to [-1]: all launches are of one case
    check = unjudged(metric, runs[0], now, then, metric.tolerance(device))
    if not now:
        cold = f"{COLD}{metric.label}"
        spans_before = [launch.figures.spans_s for launch in baseline.launches]
        if not all(metric.label in spans or cold in spans for spans in spans_before):
            return check.replace(outcome="inconclusive", note=NOW_AND_THEN)
        is_cold = all(cold in run.spans for run in runs)
        if is_cold and len(runs) < min(WARM_BY, policy.most):
            return check.replace(outcome="undecided")
        # A start-up that stays cold compiles in every launch of its users. Like an unseen span, it decides.
        notes = [ONLY_COLD] if is_cold else []
        notes += [] if is_cold and len(runs) < WARM_BY else [UNSEEN_SPAN]
        return check.replace(outcome="inconclusive", note="; ".join(notes))
    costs_now, costs_then = ([metric.cost(value) for value in side] for side in (now, then))
    most = max(1, policy.most - (len(runs) - len(now)))
    policy_of_span = replace(policy, max_launches=most, min_launches=1)
    sessions = baseline.session_sizes(metric.name)
    noise_of_span = noise.of(metric)
    return _decided(metric, check, sessions, policy_of_span, device, costs_now, costs_then, noise_of_span)


def unjudged(
    metric: Metric, run: Run, now: Sequence[float | None], then: Sequence[float | None], tolerance: float
) -> Check:
    """Return the check of a metric with the medians of both sides, not yet judged. `run` is any launch."""
    shown = metric.counting(run.case.unit)
    return Check(
        metric=metric.name,
        label=shown.label,
        unit=shown.unit,
        outcome="recorded",
        measured=median_of(now),
        baseline=median_of(then),
        allowed=metric.bound(tolerance),
    )


def median_of(values: Sequence[float | None]) -> float | None:
    """Return the median; None if there are no values, or one of them is None."""
    measured = [value for value in values if value is not None]
    return median(measured) if measured and len(measured) == len(values) else None


def _unjudged(metric: Metric, runs: Sequence[Run], baseline: Baseline | None) -> Check:
    values = [metric.of(run.figures) for run in runs]
    then = baseline.values(metric.name) if baseline is not None else []
    # pragma: no mutate runs[0], to runs[-1],: all launches are of one case
    # pragma: no mutate runs[0].machine: all launches of a case have one device
    check = unjudged(metric, runs[0], values, then, metric.tolerance(runs[0].machine.device))
    wrong = [
        f"the {what} is {value}"
        for what, each in (("measured value", values), ("baseline's value", then))
        for value in each
        if not is_size(value)
    ]
    if baseline is not None and not then and metric in (TOKENS_PER_S, PEAK_MEMORY):
        wrong = ["the baseline lacks it: accept or record it again"]
    elif None in values:
        wrong = ["the baseline has it, this run does not" if then else "was not measured"]
    if wrong and isinstance(metric, PartOfStep):
        return check.replace(outcome="inconclusive", note=f"{wrong[0]}; {NO_LOADER}")
    return check.replace(outcome="failed", note=wrong[0]) if wrong else check


def _decided(
    metric: Metric,
    check: Check,
    sessions: Sequence[int],
    policy: Policy,
    device: str,
    now: Sequence[float],
    then: Sequence[float],
    noise: Noise | None,
) -> Check:
    """Judge a check with the sequential test; `sessions` has the baseline's launches per session."""
    if noise is None:
        return check.replace(outcome="inconclusive", note=UNKNOWN_NOISE)
    noise = against(noise, sessions)
    most = max(policy.most, FEWEST_LAUNCHES)
    decision = decide(then, now, tolerance=metric.tolerance(device), noise=noise, max_launches=most)
    decided = check.replace(
        outcome=decision.outcome,
        change=metric.change(decision.estimate),
        interval=metric.interval(decision.interval),
        minimum_detectable=metric.bound(decision.minimum_detectable_drop),
    )
    if is_negligible(metric, decision.outcome, decision.estimate):
        return decided.replace(outcome="passed", note=negligible(metric))
    is_time = metric in (*PROBE_CORRECTED, CPU_S_PER_STEP) or isinstance(metric, PartOfStep | SpanSeconds)
    is_of_host = device == "cpu" or isinstance(metric, SpanSeconds)
    apart = SESSIONS_APART if is_time and is_of_host else 0.0
    is_change = decision.outcome in ("regressed", "improved")
    if is_change and not noise.session_sigma and abs(math.log1p(decision.estimate)) < math.log1p(apart):
        return decided.replace(outcome="inconclusive", note=ONE_SESSION)
    if policy.most >= FEWEST_LAUNCHES:
        return decided
    decided = decided.replace(minimum_detectable=None)  # so few launches cannot detect a slowdown of any size
    if decided.outcome == "undecided" and len(now) >= policy.most:
        return decided.replace(outcome="inconclusive", note=TOO_FEW_LAUNCHES)
    return decided


def is_negligible(metric: Metric, outcome: Outcome, change: float) -> bool:
    """Return whether a change of a part of the step, or of a span, is too small to count, however sure."""
    return outcome in ("regressed", "improved") and abs(change) <= metric.floor


def negligible(metric: Metric) -> str:
    """Explain which changes of a metric are too small to count."""
    return NEGLIGIBLE_SPAN if isinstance(metric, SpanSeconds) else NEGLIGIBLE


def _agreed(check: Check, second_check: Check, why: str) -> Check:
    """Return `check` if `second_check` agrees, else a weaker outcome. The probe has corrected one of them."""
    if check.outcome == second_check.outcome:
        return check
    if "undecided" in (check.outcome, second_check.outcome):
        return check.replace(outcome="undecided")
    corrected, raw = (check, second_check) if check.probe_exponent is not None else (second_check, check)
    return check.replace(outcome="inconclusive", note=disagreement(raw.outcome, corrected.outcome, why))


def disagreement(raw: Outcome, corrected: Outcome, why: str) -> str:
    """Explain why raw and corrected outcomes disagree."""
    return f"as measured {raw}, corrected for the machine's own speed {corrected}; {why}"


def tolerance_check(metric: Metric, check: Check, tolerance: float) -> Check:
    """Judge a check that needs no statistics: any change beyond the tolerance counts."""
    assert check.measured is not None
    assert check.baseline is not None
    worsening = metric.worsening(check.measured, check.baseline)
    outcome: Outcome = "passed"
    if abs(worsening) > tolerance:
        # pragma: no mutate > 0 to >= 0: the change is beyond the tolerance, so it is not 0
        outcome = "regressed" if worsening > 0 else "improved"
    return check.replace(outcome=outcome, change=metric.change(worsening), minimum_detectable=check.allowed)
