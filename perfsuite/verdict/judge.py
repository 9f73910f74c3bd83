"""Judge times and memory of a case's launches against its baseline. Pure: no access to clock or disk.

Each launch is one piece of evidence. As long as the verdict is `undecided`, the case is launched once more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from perfsuite.verdict.noise import (
    PROBE_CORRECTED,
    ClassNoise,
    against,
    at_one_level,
    costs_by_session,
    is_size,
    pairs,
    probe_corrected,
)
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES, Noise, can_pass, decide
from perfsuite.verdict.shift import Correction
from perfsuite.verdict.tonight import MACHINE_METRICS, Tonight, beside_reference, unless_refuted

MAX_UNHEALTHY = 3
"""Minimum number of unhealthy launches that make the verdict `unhealthy`. The verdict is not `unhealthy`
while the healthy launches are in the majority."""
UNKNOWN_NOISE = (
    "the noise between launches is unknown: accept a baseline of more launches (--perf-min-launches)"
)
TOO_FEW_LAUNCHES = (
    f"a regression in times is only reported after {FEWEST_LAUNCHES} launches or more (--perf-max-launches)"
)
SESSIONS_APART = 0.2
"""On a CPU, a time can grow this much between two sessions with the same code: once, the CPU time of a step
was 15% higher an hour later. A smaller change is reported only if baselines show how much sessions differ."""
WARM_BY = 2  # number of the launch that should start up warm, because the first one filled the compile cache
ONE_SESSION = (
    "sessions on a CPU can differ this much: accept a baseline of two sessions (perfsuite baseline accept "
    "--sessions 2)"
)
OTHER_SOFTWARE = "the software that the probe uses has changed too: accept a new baseline if all is well"
THE_BASELINE = "the baseline"
NOT_THE_SAME = (
    "better, but not `improved`: neither the loss nor the gradients before clipping could be compared, so "
    "the case might compute something else"
)
NEGLIGIBLE = f"changes below {PART_SHARE:.0%} of a step, or {1e3 * PART_S:.0f} ms, do not count"
NEGLIGIBLE_SPAN = f"changes below {SPAN_S:g} s do not count"
UNSEEN_SPAN = (
    "its time is unknown, which is not an improvement. If it no longer happens, accept a new baseline"
)
ONLY_COLD = "every launch was cold: none could reuse what the first one compiled"
LOOKS_CHANGED = 0.5
"""If a span or the CPU time changed by more than this share of the allowed change, it looks changed, and is
worth more launches."""
NOW_AND_THEN = "some launches of the baseline lack this span too, so its absence is not a change"
LOOKS_THE_SAME = "it looks unchanged, but more launches are needed to be sure (--perf-min-launches)"
NOT_WORTH_A_LAUNCH = (
    "not launched again for this, because everything else is decided. To decide it, raise --perf-min-launches"
)
NO_LOADER = "if the loader is not a torch DataLoader, name it: Script(loader='module:name')"
UNKNOWN_EXPONENT = "it is unknown how the speed depends on the probe: accept a baseline of more launches"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The number of launches that a verdict may cost."""

    # Maximum number of launches, including those that are set aside. With 1 or 2 healthy launches, times
    # cannot show a regression, so the verdict is only a quick look: `passed` or `inconclusive`.
    max_launches: int = MAX_LAUNCHES
    # Minimum number of healthy launches, whatever they show. It applies even if it exceeds `max_launches`.
    min_launches: int = 1
    record_launches: int = 3  # number of healthy launches needed to record a baseline if there is none
    max_unhealthy: int = MAX_UNHEALTHY  # with 1, the first unhealthy launch can end the case
    tolerance: float | None = None  # tolerance of tokens/s; None: the usual tolerance of the metric

    def tolerance_of(self, metric: Metric, device: str) -> float:
        """Return the largest relative growth of a metric's cost that passes."""
        if self.tolerance is not None and metric.name == TOKENS_PER_S.name:
            return self.tolerance
        return metric.tolerance(device)

    @property
    def most(self) -> int:
        """The maximum number of healthy launches, which is at least `min_launches`."""
        return max(self.max_launches, self.min_launches)


def judge(
    runs: Sequence[Run],
    baseline: Baseline | None,
    noise: ClassNoise,
    policy: Policy,
    tonight: Tonight | None = None,
) -> Verdict:
    """Judge the launches so far, in launch order. While `undecided`, call this again after one more launch.

    The first failed launch decides the verdict. If none failed, launches with a problem of the machine are
    set aside. The other launches are compared with the baseline, or recorded if there is none. `tonight` has
    the launches of the session's reference, if it has one.
    """
    for run in runs:
        if run.failure is not None:
            return _failed(runs, run.failure.kind, *why_failed(run))
    problems = {number: comparability.launch_problems(run, baseline) for number, run in enumerate(runs, 1)}
    evidence = Evidence.of(runs, problems)
    healthy = evidence.healthy
    is_last = len(runs) >= policy.most  # the maximum includes launches that are set aside
    if evidence.is_too_little(policy.max_unhealthy, is_last=is_last):
        verdict = _unhealthy(runs, baseline, noise, policy)
    elif not healthy:
        verdict = Verdict(outcome="undecided", launches=len(runs))
    else:
        if is_last:
            most = len(healthy)
            policy = replace(policy, max_launches=most, record_launches=min(policy.record_launches, most))
        if baseline is None:
            verdict = _record(healthy, policy)
        else:
            verdict = _compare(healthy, baseline, noise, policy, tonight)
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
    """Return the failure of a failed launch, and the machine's problems during the launch.

    A `mismatch` is an error in the case or the script. The machine cannot be its cause, so problems that were
    observed on the machine are left out.
    """
    assert run.failure is not None
    is_of_the_case = run.failure.kind == "mismatch"
    meanwhile = [] if is_of_the_case else health.machine_problems(run.health, run.machine)
    fault = health.hardware_fault(f"{run.failure.message}\n{run.failure.traceback}")
    if fault is not None:
        meanwhile.append(f"hardware: {fault}: {health.advice_on(fault)}")
    return f"{run.failure.kind}: {run.failure.message}", *(f"meanwhile {why}" for why in meanwhile)


def _unhealthy(runs: Sequence[Run], baseline: Baseline | None, noise: ClassNoise, policy: Policy) -> Verdict:
    """Return `unhealthy`, or the verdict on a change that only code can explain."""
    verdict = Verdict(outcome="unhealthy", launches=len(runs))
    if baseline is None:
        return verdict
    failed = _unlike(runs, baseline) or _other_loss(runs, baseline)
    if failed is not None:
        return failed
    exact = [
        metric
        for metric in _metrics(runs, baseline)
        # pragma: no mutate runs[0]: all launches of a case have one device
        if metric.judging(runs[0].machine.device) == "exact"
    ]
    checks = (_check(metric, runs, baseline, noise, policy) for metric in exact)
    worse = [check for check in checks if check.outcome == "regressed"]
    return worst_verdict(worse, len(runs)) if worse else verdict


def _record(runs: Sequence[Run], policy: Policy) -> Verdict:
    """Return the verdict without a baseline: `recorded` once there are enough launches for a baseline."""
    verdict = worst_verdict([_unjudged(metric, runs, None) for metric in _metrics(runs, None)], len(runs))
    is_enough = verdict.outcome != "recorded" or len(runs) >= policy.record_launches
    return verdict if is_enough else verdict.replace(outcome="undecided")


def _compare(
    runs: Sequence[Run], baseline: Baseline, noise: ClassNoise, policy: Policy, tonight: Tonight | None
) -> Verdict:
    """Judge healthy launches against the baseline.

    If only checks of metrics without noise regressed, the verdict is `undecided` as long as any other check
    is `undecided`.
    """
    failed = _unlike(runs, baseline)
    if failed is not None:
        return failed
    metrics = _metrics(runs, baseline)
    checks = [_check(metric, runs, baseline, noise, policy, tonight) for metric in metrics]
    checks = worth_a_launch(checks, len(runs))
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

    A dry run has neither loss nor gradients, and does not need them.
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
    # A span that the baseline lacks is shown, but not judged.
    of_spans = span_metrics(launch.figures for launch in before)
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


def _is_left_open(check: Check) -> bool:
    """Return whether a check is `inconclusive` but casts no doubt on the other checks.

    Only two kinds of checks can be left open: the check of a span that was seen, and the check of the CPU
    time if both sides have one.
    """
    if check.outcome != "inconclusive":
        return False
    if _is_of_cpu_time(check):
        return check.change is not None
    is_unseen = check.note is not None and UNSEEN_SPAN in check.note
    return _is_of_span(check) and not is_unseen


def worth_a_launch(checks: Sequence[Check], launches: int, awaited: str | None = None) -> list[Check]:
    """Return the checks. Undecided checks that are not worth another launch become `inconclusive`.

    If only spans and the CPU time are undecided, only checks that look changed are worth another launch.
    Spans and the CPU time scatter more than the speed: to exclude a change in them, each nightly run would
    need several launches of a case. For the other metrics, one or two launches are enough. The CPU time only
    complements the speed, so it is worth another launch only until there are enough launches to show a
    change.

    `launches` is the number of launches of a side. `awaited` is the only metric that the caller wants to
    decide, if there is one. The check of this metric is never left open.
    """
    if any(check.outcome == "undecided" and not _may_stay_open(check) for check in checks):
        return list(checks)
    return [check if check.metric == awaited else _unless_worth_it(check, launches) for check in checks]


def _unless_worth_it(check: Check, launches: int) -> Check:
    """Return an undecided check of a span or the CPU time as `inconclusive`, unless it is worth a launch."""
    change = check.judged_change
    if check.outcome != "undecided" or change is None:
        return check
    if abs(change) <= LOOKS_CHANGED * check.allowed:
        return check.replace(outcome="inconclusive", note=LOOKS_THE_SAME)
    if _is_of_cpu_time(check) and launches >= FEWEST_LAUNCHES:
        return check.replace(outcome="inconclusive", note=NOT_WORTH_A_LAUNCH)
    return check


def _may_stay_open(check: Check) -> bool:
    """Return whether a verdict can be reached while this check is undecided."""
    return _is_of_span(check) or _is_of_cpu_time(check)


def _is_of_span(check: Check) -> bool:
    return timed_span(check.metric) is not None


def _is_of_cpu_time(check: Check) -> bool:
    return check.metric == CPU_S_PER_STEP.name


def worst_verdict(checks: Sequence[Check], launches: int) -> Verdict:
    """Return the verdict on some checks: their worst outcome.

    A span happens only once or a few times in a launch, and can scatter too much to be judged. The CPU time
    can also scatter too much. Neither casts doubt on the steps. Therefore their checks can be `inconclusive`
    without making the verdict `inconclusive`.
    """
    deciding = [check for check in checks if not _is_left_open(check)]
    outcome = min((check.outcome for check in deciding), key=WORST_FIRST.index)
    failure: FailureKind | None = "missing_metric" if outcome == "failed" else None
    return Verdict(outcome=outcome, launches=launches, checks=tuple(checks), failure=failure)


def _check(
    metric: Metric,
    runs: Sequence[Run],
    baseline: Baseline,
    noise: ClassNoise,
    policy: Policy,
    tonight: Tonight | None = None,
) -> Check:
    """Check one metric. If the device reproduces it to the digit, only the tolerance decides.

    Other metrics are judged with the sequential test. The probe of each launch is used to correct the drift
    of the machine (see `verdict.noise`). If the probe's software changed, the outcome must be the same with
    and without the correction. As long as the exponent of the correction is unknown, a regression must also
    show both with and without the correction.
    """
    if isinstance(metric, SpanSeconds):
        return _span_check(metric, runs, baseline, noise, policy)
    check = _unjudged(metric, runs, baseline)
    if check.outcome == "failed" or check.measured is None:
        return check
    if check.baseline is None:
        return check.replace(outcome="inconclusive", note="not in the baseline: accept or record a new one")
    device = runs[0].machine.device  # pragma: no mutate 0: all launches of a case have one device
    check = check.replace(allowed=metric.bound(policy.tolerance_of(metric, device)))
    metric = metric.against(launch.figures for launch in baseline.launches)
    if metric.judging(device) == "exact":
        return tolerance_check(metric, check, metric.tolerance(device))
    sessions = baseline.session_sizes(metric.name)

    def decided(
        now: Sequence[float], then: Sequence[float], noise_of_metric: Noise | None, exponent: float = 0.0
    ) -> Check:
        corrects = None
        if tonight is not None and noise_of_metric is not None and metric in MACHINE_METRICS:
            corrects = tonight.correction(metric, noise_of_metric, baseline, exponent)
        return decided_tonight(metric, check, sessions, policy, device, now, then, noise_of_metric, corrects)

    figures = [run.figures for run in runs], [launch.figures for launch in baseline.launches]
    now, then = (
        [metric.cost(value) for value in map(metric.of, side) if value is not None] for side in figures
    )
    noise_of_raw = noise.of(metric, corrected=False)
    raw = decided(now, _at_one_level(metric, then, baseline, noise_of_raw), noise_of_raw)
    pairs_now, pairs_then = (pairs(side, metric) for side in figures)
    lacks_probe = len(pairs_now) < len(now) or len(pairs_then) < len(then)
    if metric not in PROBE_CORRECTED or lacks_probe:
        return raw
    exponent = noise.probe_exponent or 1.0
    now, then = (probe_corrected(side, pairs_then, exponent) for side in (pairs_now, pairs_then))
    before = _at_one_level(metric, then, baseline, noise.of(metric), exponent)
    corrected = decided(now, before, noise.of(metric), exponent).replace(probe_exponent=exponent)
    if not noise.probe_exponent:
        is_certain = noise.knows_exponent or raw.outcome != "regressed"
        return raw if is_certain else _agreed(raw, corrected, UNKNOWN_EXPONENT)
    if comparability.same_stack(runs[-1], baseline):
        return corrected
    return _agreed(corrected, raw, OTHER_SOFTWARE)


def _at_one_level(
    metric: Metric, costs: Sequence[float], baseline: Baseline, noise: Noise | None, exponent: float = 0.0
) -> Sequence[float]:
    """Return the costs of a baseline without the differences between its sessions.

    The test has a separate term for the noise between sessions. With an exponent, the costs are corrected
    with the probe.
    """
    if noise is None or metric not in MACHINE_METRICS:
        return costs
    return at_one_level(costs_by_session(baseline, metric, exponent), noise.sigma)


def _span_check(
    metric: SpanSeconds, runs: Sequence[Run], baseline: Baseline, noise: ClassNoise, policy: Policy
) -> Check:
    """Check a span in the launches that have it.

    A launch that compiles, often only the first one, has a cold start-up instead of a warm one.
    """
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
        # If every start-up is cold, every launch compiles, and it would also do so for users. This check then
        # decides the verdict, like the check of an unseen span.
        notes = [ONLY_COLD] if is_cold else []
        notes += [] if is_cold and len(runs) < WARM_BY else [UNSEEN_SPAN]
        return check.replace(outcome="inconclusive", note="; ".join(notes))
    costs_now, costs_then = ([metric.cost(value) for value in side] for side in (now, then))
    most = max(1, policy.most - (len(runs) - len(now)))
    policy_of_span = replace(policy, max_launches=most, min_launches=1)
    sessions = baseline.session_sizes(metric.name)
    noise_of_span = noise.of(metric)
    return decided_tonight(
        metric, check, sessions, policy_of_span, device, costs_now, costs_then, noise_of_span
    )


def unjudged(
    metric: Metric, run: Run, now: Sequence[float | None], then: Sequence[float | None], tolerance: float
) -> Check:
    """Return a check that is not judged yet, with the medians of both sides. `run` is any of the launches."""
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
    """Return the median; None if there are no values, or if any value is None."""
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
        for what, side in (("measured value", values), ("baseline's value", then))
        for value in side
        if not is_size(value)
    ]
    if baseline is not None and not then and metric in (TOKENS_PER_S, PEAK_MEMORY):
        wrong = ["the baseline lacks this metric: accept or record a baseline again"]
    elif None in values:
        wrong = ["the baseline has this metric, but this run does not" if then else "was not measured"]
    if wrong and isinstance(metric, PartOfStep):
        return check.replace(outcome="inconclusive", note=f"{wrong[0]}; {NO_LOADER}")
    return check.replace(outcome="failed", note=wrong[0]) if wrong else check


def decided_tonight(
    metric: Metric,
    check: Check,
    sessions: Sequence[int],
    policy: Policy,
    device: str,
    now: Sequence[float],
    then: Sequence[float],
    noise: Noise | None,
    corrects: Correction | None = None,
) -> Check:
    """Judge a check with the sequential test. `sessions` has the number of launches of each session.

    If the session has a reference, its launches show how far the machine has shifted, and `corrects` is the
    correction for this shift. There are three cases:

    - The noise between sessions is known, and the correction lowers it: the corrected costs decide.
    - The noise between sessions is unknown, because every baseline is of one session. The corrected costs
      decide if their own noise is low enough for an unchanged case to pass.
    - In all other cases the measured costs decide, but the corrected costs must show a change too.
    """
    if noise is None:
        return check.replace(outcome="inconclusive", note=UNKNOWN_NOISE)
    own = against(noise, sessions)
    measured = _decided(metric, check, policy, device, now, then, own)
    if corrects is None:
        return measured
    shifted = [cost / math.exp(corrects.shift) for cost in now]
    beside = _decided(metric, check, policy, device, shifted, then, corrects.noise)
    if own.session_sigma:
        decides = corrects.noise.session_sigma < own.session_sigma
    else:
        decides = can_pass(
            tolerance=policy.tolerance_of(metric, device),
            noise=corrects.noise,
            baseline_launches=len(then),
            max_launches=max(policy.most, FEWEST_LAUNCHES),
        )
    return beside_reference(measured, beside) if decides else unless_refuted(measured, beside)


def _decided(
    metric: Metric,
    check: Check,
    policy: Policy,
    device: str,
    now: Sequence[float],
    then: Sequence[float],
    noise: Noise,
) -> Check:
    """Judge a check with the sequential test, with the noise of a new session against the baseline."""
    most = max(policy.most, FEWEST_LAUNCHES)
    tolerance = policy.tolerance_of(metric, device)
    decision = decide(then, now, tolerance=tolerance, noise=noise, max_launches=most)
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
    decided = decided.replace(minimum_detectable=None)  # so few launches cannot detect any slowdown
    if decided.outcome == "undecided" and len(now) >= policy.most:
        return decided.replace(outcome="inconclusive", note=TOO_FEW_LAUNCHES)
    return decided


def is_negligible(metric: Metric, outcome: Outcome, change: float) -> bool:
    """Return whether a change is too small to count, however significant it is."""
    return outcome in ("regressed", "improved") and abs(change) <= metric.floor


def negligible(metric: Metric) -> str:
    """Explain which changes of a metric are too small to count."""
    return NEGLIGIBLE_SPAN if isinstance(metric, SpanSeconds) else NEGLIGIBLE


def _agreed(check: Check, second_check: Check, why: str) -> Check:
    """Return `check` if `second_check` has the same outcome, and otherwise `undecided` or `inconclusive`.

    Exactly one of the two checks is corrected for drift.
    """
    if check.outcome == second_check.outcome:
        return check
    if "undecided" in (check.outcome, second_check.outcome):
        return check.replace(outcome="undecided")
    corrected, raw = (check, second_check) if check.probe_exponent is not None else (second_check, check)
    return check.replace(outcome="inconclusive", note=disagreement(raw.outcome, corrected.outcome, why))


def disagreement(raw: Outcome, corrected: Outcome, why: str) -> str:
    """Explain why raw and corrected outcomes disagree."""
    return f"{raw} as measured, but {corrected} when corrected for the machine's own speed; {why}"


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
