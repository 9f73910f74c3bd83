"""Judges the launches of arm B against those of arm A. Pure: no clock, no disk.

Launch k of both arms is one pair. Nothing that differs between the arms is refused: other versions and other
settings are why they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from perfsuite.results import baseline as baselines
from perfsuite.results import count_baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import (
    CPU_S_PER_STEP,
    PEAK_MEMORY,
    TOKENS_PER_S,
    Metric,
    judged,
)
from perfsuite.results.outcome import WORST_FIRST, Check, CountCheck, Outcome, Verdict
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from perfsuite.verdict.comparability import launch_problems, run_changes, same_stack, setting_differences
from perfsuite.verdict.judge import MAX_UNHEALTHY, disagreement, tolerance_check, why_failed
from perfsuite.verdict.loss import loss_differs, scaled
from perfsuite.verdict.noise import PROBE_CORRECTED, is_size
from perfsuite.verdict.overall import likely_cause
from perfsuite.verdict.paired_test import MAX_PAIRS, MIN_PAIRS, PairedDecision, PairedOutcome, decided

ARM_A, ARM_B = "arm A", "arm B"
OUTCOMES: dict[PairedOutcome, Outcome] = {
    "slower": "regressed",
    "faster": "improved",
    "same": "passed",
    "inconclusive": "inconclusive",
    "undecided": "undecided",
}
"""What arm B is, compared with arm A, in the words of verdicts."""
FOLLOW_THE_PROBE = (*PROBE_CORRECTED, CPU_S_PER_STEP)
"""What may be corrected by the probe: whatever takes longer where the machine is slower."""


def unhealthy_pairs(a: Sequence[Run], b: Sequence[Run]) -> dict[int, list[str]]:
    """The pairs, from 1 on, that are no evidence, with what was wrong with the machine in either launch."""
    found = {}
    for number, pair in enumerate(zip(a, b, strict=True), 1):
        why = [
            f"{arm}: {problem}"
            for arm, run in zip((ARM_A, ARM_B), pair, strict=True)
            for problem in launch_problems(run, None)
        ]
        if why:
            found[number] = why
    return found


def judge_pairs(
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    tolerance: float | None = None,
    metric: str | None = None,
    max_pairs: int = MAX_PAIRS,
    max_unhealthy: int = MAX_UNHEALTHY,
    corrects: bool = False,
) -> Verdict:
    """Judge the pairs so far, in the order they were made. Call again after one more while `undecided`.

    With a `metric`, the verdict is `undecided` as long as that is, and `tolerance` is that metric's. Without,
    it is `undecided` as long as tokens/s is, and then as long as any other metric is, unless one is worse;
    `tolerance` is that of tokens/s. The `max_pairs` include pairs that are no evidence. After `max_unhealthy`
    of these, if there are no more healthy ones, it is `unhealthy`. Its launches count those of both arms; its
    `unhealthy_launches` are numbers of pairs. With `corrects`, both arms have the same packages and
    variables: on a CPU, what follows the probe is taken out of the ratios.
    """
    launches = len(a) + len(b)
    if failed := [(arm, run) for arm, runs in ((ARM_A, a), (ARM_B, b)) for run in runs if run.failure]:
        return Verdict(
            outcome="failed",
            launches=launches,
            failure=_kind(failed[0][1]),
            reasons=tuple(f"{arm} failed: {'; '.join(why_failed(run))}" for arm, run in failed),
            against=ARM_A,
        )
    problems = unhealthy_pairs(a, b)
    healthy_a, healthy_b = (
        [run for number, run in enumerate(runs, 1) if number not in problems] for runs in (a, b)
    )
    if len(problems) >= max(max_unhealthy, len(healthy_a)):
        verdict = Verdict(outcome="unhealthy", launches=launches)
    elif not healthy_a:
        verdict = Verdict(outcome="undecided", launches=launches)
    else:
        verdict = _judge_healthy(
            healthy_a, healthy_b, tolerance, metric, max_pairs, corrects, is_last=len(a) >= max_pairs
        )
    set_aside = tuple(f"pair {number} set aside: {'; '.join(why)}" for number, why in problems.items())
    known = baselines.from_runs(a)
    return verdict.replace(
        launches=launches,
        unhealthy_launches=tuple(problems),
        reasons=(*verdict.reasons, *_other_settings(b[-1], known), *set_aside),
        changed=(*scaled(b, known), *run_changes(b[-1], known)),
        against=ARM_A,
    )


def _kind(run: Run) -> FailureKind:
    assert run.failure is not None
    return run.failure.kind


def _other_settings(run: Run, known: Baseline) -> tuple[str, ...]:
    return tuple(
        f"settings differ: {name.removeprefix('observed ')} is {then!r} in {ARM_A} and {now!r} in {ARM_B}"
        for name, (then, now) in setting_differences(run, known).items()
    )


def _judge_healthy(
    a: Sequence[Run],
    b: Sequence[Run],
    tolerance: float | None,
    alone: str | None,
    max_pairs: int,
    corrects: bool,
    *,
    is_last: bool,
) -> Verdict:
    known = baselines.from_runs(a)
    corrects = corrects and same_stack(b[-1], known)
    device = b[0].machine.device
    metrics = judged((run.figures for run in (*a, *b)), device)
    awaited = alone or TOKENS_PER_S.name
    checks = tuple(
        _check(each, a, b, tolerance if each.name == awaited else None, max_pairs, corrects)
        for each in metrics
    )
    if is_last:
        checks = tuple(
            each.replace(outcome="inconclusive") if each.outcome == "undecided" else each for each in checks
        )
    outcome = min((check.outcome for check in checks), key=WORST_FIRST.index)
    state = next((check.outcome for check in checks if check.metric == awaited), None)
    if outcome != "failed" and state is not None and (state == "undecided" or alone):
        outcome = state
    counts = _counts(a, b)
    verdict = Verdict(
        outcome=outcome,
        launches=len(a) + len(b),
        checks=checks,
        counts=None if counts is None else _unjudged(counts),
        explained=_explained(checks, counts, b[-1]),
        failure="missing_metric" if outcome == "failed" else None,
    )
    if (
        outcome != "undecided"
        and len(a) >= MIN_PAIRS
        and (other := loss_differs(b, known, ARM_A)) is not None
    ):
        return verdict.replace(outcome="failed", failure="loss", reasons=(other,))
    return verdict


def _check(
    metric: Metric,
    a: Sequence[Run],
    b: Sequence[Run],
    tolerance: float | None,
    max_pairs: int,
    corrects: bool,
) -> Check:
    """The check of one metric: by the medians where a device repeats it to the digit, else pair by pair.

    Pairs that are made for another metric after one is decided pair by pair change nothing of it.
    """
    before, now = ([metric.of(run.figures) for run in runs] for runs in (a, b))
    shown, device = metric.counting(b[0].case.unit), b[0].machine.device
    tolerance = metric.tolerance(device) if tolerance is None else tolerance
    check = Check(
        metric=metric.name,
        label=shown.label,
        unit=shown.unit,
        outcome="passed",
        measured=_median(now),
        baseline=_median(before),
        allowed=metric.bound(tolerance),
    )
    for arm, values in ((ARM_A, before), (ARM_B, now)):
        if bad := [value for value in values if not is_size(value)]:
            is_needed = arm == ARM_B or metric in (TOKENS_PER_S, PEAK_MEMORY)
            what = "was not measured" if bad[0] is None else f"is {bad[0]}"
            return check.replace(outcome="failed" if is_needed else "inconclusive", note=f"{what} in {arm}")
    if metric.judging(device) == "exact":
        return tolerance_check(metric, check, tolerance)
    costs = [[metric.cost(value) for value in values if is_size(value)] for values in (before, now)]
    probes = _probes(a, b) if corrects and metric in FOLLOW_THE_PROBE else None
    decision = decided(*costs, tolerance=tolerance, max_pairs=max_pairs, probes=probes)
    check = check.replace(
        outcome=OUTCOMES[decision.outcome],
        measured=_median(now[: decision.pairs]),
        baseline=_median(before[: decision.pairs]),
        change=metric.change(decision.change),
        interval=metric.interval(decision.interval),
        minimum_detectable=metric.bound(decision.minimum_detectable),
        probe_exponent=decision.exponent or None,
    )
    notes = (_note(decision, len(a)), _medians_disagree(check))
    return check.replace(note="; ".join(filter(None, notes)) or None)


def _probes(a: Sequence[Run], b: Sequence[Run]) -> tuple[list[float], list[float]] | None:
    before, now = ([probe for run in runs if is_size(probe := run.figures.probe_s_p50)] for runs in (a, b))
    return (before, now) if len(before) == len(a) and len(now) == len(b) else None


def _note(decision: PairedDecision, pairs: int) -> str | None:
    """What a reader should know: that the decision is older than the last pair, or why there is none."""
    if decision.disputed is not None:
        raw, corrected = (OUTCOMES[outcome] for outcome in decision.disputed)
        return disagreement(raw, corrected, "the probe may differ between the arms, too")
    return f"decided after {decision.pairs} pairs" if decision.pairs < pairs else None


def _medians_disagree(check: Check) -> str | None:
    """That the medians of the two arms, which tables show, tell another change than the pairs, if they do."""
    if not check.measured or not check.baseline or check.change is None or check.probe_exponent is not None:
        return None
    medians = check.measured / check.baseline - 1
    if abs(medians - check.change) <= check.allowed / 2:
        return None
    return (
        f"the medians of the arms differ by {medians:+.1%}, the launches of a pair by {check.change:+.1%}: "
        "the machine's speed changed meanwhile, and the pairs are judged"
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _counts(a: Sequence[Run], b: Sequence[Run]) -> CountCheck | None:
    if hidden := exact.why_hidden([*a, *b]):
        return CountCheck(outcome="not counted", notes=hidden, compared=False)
    counted = exact.counted(a)
    return exact.check(b, count_baseline.from_runs(counted)) if counted else None


def _unjudged(check: CountCheck) -> CountCheck:
    """Counts as they are shown of two arms: they explain a change and are none by themselves."""
    findings = tuple(finding.replace(outcome="passed") for finding in check.findings)
    outcome = check.outcome if check.outcome == "not counted" else "passed"
    return check.replace(outcome=outcome, findings=findings)


def _explained(checks: Sequence[Check], counts: CountCheck | None, run: Run) -> str | None:
    outcomes = {check.outcome for check in checks}
    if counts is None or not counts.compared or not outcomes & {"regressed", "improved"}:
        return None
    return likely_cause(counts, "regressed" if "regressed" in outcomes else "improved", run)
