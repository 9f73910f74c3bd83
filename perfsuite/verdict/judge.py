"""Judge times and memory of a case's launches against its baseline. Pure: no access to clock or disk.

Each launch is one piece of evidence. As long as the verdict is `undecided`, the case is launched once more.
"""

from collections.abc import Sequence
from dataclasses import replace

from perfsuite.analysis import health
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import Metric, SpanSeconds, judged_metrics, span_metrics
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run import Run
from perfsuite.verdict import comparability
from perfsuite.verdict.checks import worst_verdict, worth_a_launch
from perfsuite.verdict.computation import Computed, differences, does_less, other_computation
from perfsuite.verdict.evidence import Evidence
from perfsuite.verdict.loss import are_compared, loss_differs, scaled
from perfsuite.verdict.metric_checks import check_metric, unusable_checks, without_verdict
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.tonight import Tonight

THE_BASELINE = "the baseline"
NOT_THE_SAME = (
    "better, but not `improved`: neither the loss nor the gradients before clipping could be compared, so "
    "the case might compute something else"
)


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
    the launches with the session's reference, if the session has a reference.
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
    checks = (check_metric(metric, runs, baseline, noise, policy) for metric in exact)
    worse = [check for check in checks if check.outcome == "regressed"]
    return worst_verdict(worse, len(runs)) if worse else verdict


def _record(runs: Sequence[Run], policy: Policy) -> Verdict:
    """Return the verdict without a baseline: `recorded` once there are enough launches for a baseline."""
    verdict = worst_verdict(
        [without_verdict(metric, runs, None) for metric in _metrics(runs, None)], len(runs)
    )
    is_enough = verdict.outcome != "recorded" or len(runs) >= policy.record_launches
    return verdict if is_enough else verdict.replace(outcome="undecided")


def _compare(
    runs: Sequence[Run], baseline: Baseline, noise: ClassNoise, policy: Policy, tonight: Tonight | None
) -> Verdict:
    """Judge healthy launches against the baseline.

    Usually, the verdict is `regressed` as soon as one metric regressed. If only metrics without noise
    regressed, or if all regressions are waived, the verdict is `undecided` as long as the check of a
    metric with noise is `undecided`. Without the rule for waivers, no further launch would be made after a
    waived regression of one metric, so a regression of another metric might not become significant.
    """
    failed = _unlike(runs, baseline)
    if failed is not None:
        return failed
    metrics = _metrics(runs, baseline)
    checks = [check_metric(metric, runs, baseline, noise, policy, tonight) for metric in metrics]
    checks = worth_a_launch(checks, len(runs))
    verdict = worst_verdict([*checks, *unusable_checks(runs, baseline)], len(runs))
    both = zip(metrics, checks, strict=True)
    # pragma: no mutate runs[0]: all launches of a case have one device
    noisy = {check.outcome for metric, check in both if metric.judging(runs[0].machine.device) != "exact"}
    if verdict.outcome == "regressed" and "undecided" in noisy:
        is_without_noise = "regressed" not in noisy
        if is_without_noise or policy.waives(checks):
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
