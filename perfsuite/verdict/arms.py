"""Judges the launches of arm B against those of arm A: launch k of both arms is one pair. Pure.

Nothing that differs between the arms is refused: other versions and settings are why they are compared.
"""

import re
from collections.abc import Sequence

from perfsuite.analysis.agreement import TOKENS_DIFFER
from perfsuite.results import baseline as baselines
from perfsuite.results import count_baseline
from perfsuite.results.metric import CPU_S_PER_STEP, PEAK_MEMORY, TOKENS_PER_S, Metric, judged
from perfsuite.results.outcome import Check, CountCheck, Verdict
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from perfsuite.verdict.comparability import launch_problems, run_changes, same_stack, setting_differences
from perfsuite.verdict.judge import (
    MAX_UNHEALTHY,
    disagreement,
    median_of,
    tolerance_check,
    unjudged,
    why_failed,
    worst,
)
from perfsuite.verdict.loss import loss_differs, loss_scale, other_gradients, scaled, steadily_other_gradients
from perfsuite.verdict.noise import PROBE_CORRECTED, is_size
from perfsuite.verdict.overall import explained
from perfsuite.verdict.paired_test import MAX_PAIRS, MIN_PAIRS, decided

ARM_A, ARM_B = "arm A", "arm B"
ADVICE = r"(?:\.? Correct the case\b| Nothing measured this way\b)"
"""Where the message of a mismatch begins to say what to do about the case."""
FOLLOW_THE_PROBE = (*PROBE_CORRECTED, CPU_S_PER_STEP)  # what takes longer where the machine is slower


def unhealthy_pairs(a: Sequence[Run], b: Sequence[Run]) -> dict[int, list[str]]:
    """The pairs, from 1 on, that are no evidence, with what was wrong with the machine in either launch."""
    found: dict[int, list[str]] = {}
    for number, pair in enumerate(zip(a, b, strict=True), 1):
        for arm, run in zip((ARM_A, ARM_B), pair, strict=True):
            for problem in launch_problems(run, None):
                found.setdefault(number, []).append(f"{arm}: {problem}")
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

    It is `undecided` as long as `metric` is; without one, as long as tokens/s is, and then as long as any
    other metric is, unless one is worse. `tolerance` is that of `metric`, or of tokens/s. The `max_pairs`
    include pairs that are no evidence; after `max_unhealthy` of these, if there are no more healthy ones, it
    is `unhealthy`. Its launches are those of both arms, its `unhealthy_launches` numbers of pairs. With
    `corrects` (both arms have the same packages and variables), what follows the probe is taken out.
    """
    launches = len(a) + len(b)
    if (failed := _failed(a, b)) is not None:
        return failed
    problems = unhealthy_pairs(a, b)
    healthy = [pair for number, pair in enumerate(zip(a, b, strict=True), 1) if number not in problems]
    if len(problems) >= max(max_unhealthy, len(healthy)):
        verdict = Verdict(outcome="unhealthy", launches=launches)
    elif not healthy:
        verdict = Verdict(outcome="undecided", launches=launches)
    else:
        of_a, of_b = zip(*healthy, strict=True)
        is_last = len(a) >= max_pairs
        verdict = _judge_healthy(of_a, of_b, tolerance, metric, max_pairs, corrects, is_last=is_last)
    set_aside = [f"pair {number} set aside: {'; '.join(why)}" for number, why in problems.items()]
    verdict = _with_differences(verdict, a, b)
    return verdict.replace(
        launches=launches,
        unhealthy_launches=tuple(problems),
        reasons=(*verdict.reasons, *set_aside),
        changed=(*scaled(b, baselines.from_runs(a)), *verdict.changed),
    )


def judge_counts(a: Run, b: Run) -> Verdict:
    """Judge what a step does in arm B by what it does in arm A: exactly, by one launch or dry run of each.

    Kernels and memory are judged though versions differ: that may be the question. `inconclusive` where work
    was done out of sight, or nothing was counted.
    """
    if (failed := _failed([a], [b])) is not None:
        return failed
    counts = _counts([a], [b], judges=True)
    verdict = Verdict(outcome="inconclusive", launches=2, counts=counts)
    if a.counts and exact.unlike([b], count_baseline.from_runs([a])) is not None:
        reasons = (f"{ARM_A} and {ARM_B} count in different ways: give both the same perfsuite",)
        verdict = verdict.replace(outcome="failed", failure="unlike", reasons=reasons)
    elif counts is None:
        verdict = verdict.replace(reasons=("nothing was counted", *a.notes, *b.notes))
    elif counts.outcome == "improved" and (gradients := other_gradients(a, b)) is not None:
        verdict = verdict.replace(reasons=(f"{gradients}: what does less may compute something else",))
    elif counts.outcome in ("regressed", "improved", "passed"):
        verdict = verdict.replace(outcome=counts.outcome)
    else:
        verdict = verdict.replace(reasons=counts.notes)
    return _with_differences(verdict, [a], [b])


def judge_gradients(verdict: Verdict, a: Sequence[Run], b: Sequence[Run]) -> Verdict:
    """The verdict of `judge_counts` after more launches: `failed` if the arms always have other gradients."""
    scale = loss_scale(b, baselines.from_runs(a)) or 1
    if (told := steadily_other_gradients(a, b, scale)) is None:
        return verdict
    others = [reason for reason in verdict.reasons if not reason.startswith(told)]
    reasons = (f"{told}, in {len(b)} launches of each arm", *others)
    return verdict.replace(outcome="failed", failure="loss", reasons=reasons)


def _failed(a: Sequence[Run], b: Sequence[Run]) -> Verdict | None:
    failed = [
        (run.failure.kind, f"{arm} failed: {'; '.join(why_failed(run))}")
        for arm, runs in ((ARM_A, a), (ARM_B, b))
        for run in runs
        if run.failure is not None
    ]
    by_the_change = {kind for kind, _ in failed} == {"mismatch"} and not any(run.failure for run in a)
    if by_the_change:  # the case is right, as arm A is what it says
        failed = [("mismatch", _changed_by(why)) for _, why in failed]
    if not failed:
        return None
    (kind, *_), reasons = zip(*failed, strict=True)
    launches = len(a) + len(b)
    return Verdict(outcome="failed", launches=launches, failure=kind, reasons=reasons, against=ARM_A)


def _changed_by(why: str) -> str:
    """Return why arm B is not what the case says, where arm A is: without advice to correct the case."""
    why = re.split(ADVICE, why)[0]
    said = why.removeprefix(f"{ARM_B} failed: mismatch: ")
    if (tokens := TOKENS_DIFFER.search(said)) is not None:
        claimed, given = tokens.groups()
        return f"{ARM_B} gives the model {given} tokens a step, {ARM_A} {claimed}: the change did it ({said})"
    return f"{why.rstrip('.')}. {ARM_A} runs as the case says: the change did it"


def _with_differences(verdict: Verdict, a: Sequence[Run], b: Sequence[Run]) -> Verdict:
    known = baselines.from_runs(a)
    other_settings = (
        f"settings differ: {name.removeprefix('observed ')} is {then!r} in {ARM_A} and {now!r} in {ARM_B}"
        for name, (then, now) in setting_differences(b[-1], known).items()
    )
    reasons = (*verdict.reasons, *other_settings)
    return verdict.replace(reasons=reasons, changed=run_changes(b[-1], known), against=ARM_A)


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
    known, awaited = baselines.from_runs(a), alone or TOKENS_PER_S.name
    corrects = corrects and same_stack(b[-1], known)
    checks = []
    for metric in judged((run.figures for run in (*a, *b)), b[0].machine.device):
        check = _check(metric, a, b, tolerance if metric.name == awaited else None, max_pairs, corrects)
        is_open = is_last and check.outcome == "undecided"
        checks.append(check.replace(outcome="inconclusive") if is_open else check)
    counts = _counts(a, b)
    why = explained(checks, counts, b[-1], ("regressed", "improved"))
    if counts is not None:  # they explain a change and are none by themselves
        findings = tuple(finding.replace(outcome="passed") for finding in counts.findings)
        outcome = "not counted" if counts.outcome == "not counted" else "passed"
        counts = counts.replace(outcome=outcome, findings=findings)
    verdict = worst(checks, len(a) + len(b)).replace(counts=counts, explained=why)
    state = next((check.outcome for check in checks if check.metric == awaited), None)
    if verdict.outcome != "failed" and state is not None and (state == "undecided" or alone):
        verdict = verdict.replace(outcome=state)
    if verdict.outcome == "undecided" or len(a) < MIN_PAIRS:
        return verdict
    if (other_loss := loss_differs(b, known, ARM_A)) is None:
        return verdict
    return verdict.replace(outcome="failed", failure="loss", reasons=(other_loss,))


def _check(
    metric: Metric,
    a: Sequence[Run],
    b: Sequence[Run],
    tolerance: float | None,
    max_pairs: int,
    corrects: bool,
) -> Check:
    """The check of one metric: by the medians where a device repeats it to the digit, else pair by pair."""
    before, now = ([metric.of(run.figures) for run in runs] for runs in (a, b))
    device = b[0].machine.device
    tolerance = metric.tolerance(device) if tolerance is None else tolerance
    check = unjudged(metric, b[0], now, before, tolerance)
    for arm, values in ((ARM_A, before), (ARM_B, now)):
        if bad := [value for value in values if not is_size(value)]:
            is_needed = arm == ARM_B or metric in (TOKENS_PER_S, PEAK_MEMORY)
            what = "was not measured" if bad[0] is None else f"is {bad[0]}"
            return check.replace(outcome="failed" if is_needed else "inconclusive", note=f"{what} in {arm}")
    if metric.judging(device) == "exact":
        return tolerance_check(metric, check, tolerance)
    costs = [[metric.cost(value) for value in values if is_size(value)] for values in (before, now)]
    probes = None
    if corrects and metric in FOLLOW_THE_PROBE:
        seen = [[run.figures.probe_s_p50 for run in runs] for runs in (a, b)]
        slow_a, slow_b = ([probe for probe in arm if is_size(probe)] for arm in seen)
        probes = (slow_a, slow_b) if len(slow_a) == len(slow_b) == len(a) else None
    decision = decided(*costs, tolerance=tolerance, max_pairs=max_pairs, probes=probes)
    check = check.replace(
        outcome=decision.outcome,
        measured=median_of(now[: decision.pairs]),
        baseline=median_of(before[: decision.pairs]),
        change=metric.change(decision.change),
        interval=metric.interval(decision.interval),
        minimum_detectable=metric.bound(decision.minimum_detectable),
        probe_exponent=decision.exponent or None,
    )
    if decision.disputed is not None:
        why = disagreement(*decision.disputed, "the probe may differ between the arms, too")
        return check.replace(note=why)
    return check.replace(note=f"decided after {decision.pairs} pairs") if decision.pairs < len(a) else check


def _counts(a: Sequence[Run], b: Sequence[Run], *, judges: bool = False) -> CountCheck | None:
    if hidden := exact.why_hidden([*a, *b]):
        return CountCheck(outcome="not counted", notes=hidden, compared=False)
    counted = exact.counted(a)
    return exact.check(b, count_baseline.from_runs(counted), of_arm=judges) if counted else None
