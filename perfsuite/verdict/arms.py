"""Judge the launches of arm B against those of arm A. The k-th launches of the two arms are pair k. Pure.

Arms can differ in anything, because different versions and settings are the reason to compare them.
"""

import re
from collections.abc import Sequence

from perfsuite.analysis.agreement import TOKENS_DIFFER
from perfsuite.results import baseline as baselines
from perfsuite.results import count_baseline
from perfsuite.results.metric import (
    PEAK_MEMORY,
    TOKENS_PER_S,
    Metric,
    PartOfStep,
    SpanSeconds,
    judged_metrics,
    span_metrics,
)
from perfsuite.results.outcome import UNCONFIRMED, Check, CountCheck, Finding, Outcome, Verdict
from perfsuite.results.quantities import KEPT, KEPT_GRAPHS
from perfsuite.results.rank_report import is_of_start_up
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from perfsuite.verdict.checks import (
    NO_LOADER,
    UNSEEN_SPAN,
    disagreement,
    is_negligible,
    median_of,
    negligible,
    tolerance_check,
    unjudged,
    worst_verdict,
    worth_a_launch,
)
from perfsuite.verdict.comparability import launch_problems, run_changes, same_stack, setting_differences
from perfsuite.verdict.computation import (
    Computed,
    differences,
    may_have_other_tokens,
    other_computation,
)
from perfsuite.verdict.count_doubts import does_less_later, works_in_threads
from perfsuite.verdict.evidence import Evidence, counted
from perfsuite.verdict.judge import if_same, why_failed
from perfsuite.verdict.loss import few_differ, loss_differs, may_differ, scaled
from perfsuite.verdict.noise import is_size
from perfsuite.verdict.overall import OF_A_DRY_RUN, explained_by_counts
from perfsuite.verdict.paired_comparison import MAX_PAIRS, MIN_PAIRS, decided
from perfsuite.verdict.policy import MAX_UNHEALTHY
from perfsuite.verdict.tonight import MACHINE_METRICS

ARM_A = "arm A"
ARM_B = "arm B"
ADVICE = r"(?:\.? Correct the case\b| The measurements would not be those of this case\b)"
"""Matches the beginning of the advice to correct the case, which the message of a mismatch contains."""
BY_THE_CHANGE = "the change is the cause"  # reported if arm A matches the case and arm B does not

NOT_COMPARED = CountCheck(outcome="passed", compared=False)
"""The check of the counts if `judge_counts` could not compare them."""


def unhealthy_pairs(a: Sequence[Run], b: Sequence[Run]) -> dict[int, list[str]]:
    """Return the machine's problems during each unhealthy pair, by the number of the pair (from 1)."""
    problems: dict[int, list[str]] = {}
    for number, pair in enumerate(zip(a, b, strict=True), 1):
        # pragma: no mutate True: a pair has a run of each arm
        for arm, run in zip((ARM_A, ARM_B), pair, strict=True):
            for problem in launch_problems(run, None):
                problems.setdefault(number, []).append(f"{arm}: {problem}")
    return problems


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
    """Judge the pairs so far, in launch order. While `undecided`, call this again after one more pair.

    With a `metric`, the verdict is `undecided` until that metric is decided. Without a `metric`, the verdict
    is `undecided` until tokens/s and all other metrics are decided, or until tokens/s is decided and some
    metric is worse. `tolerance` applies to `metric`, or to tokens/s if no `metric` is given. `max_pairs`
    includes unhealthy pairs. After `max_unhealthy` unhealthy pairs, the verdict is `unhealthy`, unless
    healthy pairs are in the majority.

    The verdict's `launches` counts launches of both arms, but its `unhealthy_launches` contains pair numbers
    (from 1). With `corrects`, the probe is used to correct times for the drift of the machine. Set `corrects`
    only if both arms have the same packages and environment variables.
    """
    launches = len(a) + len(b)
    failed = _failed(a, b)
    if failed is not None:
        return failed
    evidence = Evidence.of([*zip(a, b, strict=True)], unhealthy_pairs(a, b))
    is_last = len(a) >= max_pairs
    if evidence.is_too_little(max_unhealthy, is_last=is_last):
        verdict = _of_disturbed(a, b)
    elif not evidence.healthy:
        verdict = Verdict(outcome="undecided", launches=launches)
    else:
        of_a, of_b = zip(*evidence.healthy, strict=True)
        verdict = _judge_healthy(of_a, of_b, tolerance, metric, max_pairs, corrects, is_last=is_last)
    verdict = _with_differences(_if_same(verdict, a, b), a, b)
    return evidence.named_in(verdict.replace(launches=launches), "pair")


def _of_disturbed(a: Sequence[Run], b: Sequence[Run]) -> Verdict:
    """Return the verdict on launches that are set aside.

    If steps keep more objects, the verdict is `regressed`, because counts do not depend on the machine's
    health.
    """
    counts = _counts(a, b)
    if counts is not None:
        counts = _only_growth_judged(counts)
    is_growing = counts is not None and counts.outcome == "regressed"
    outcome: Outcome = "regressed" if is_growing else "unhealthy"
    return Verdict(outcome=outcome, launches=len(a) + len(b), counts=counts)


def judge_counts(a: Run, b: Run) -> Verdict:
    """Judge the counts of a step in arm B against arm A, from one launch or dry run of each arm.

    Kernels and memory are judged even if versions differ, because comparing versions can be the purpose. The
    verdict is `inconclusive` if a step did work that is not counted, or if nothing was counted.
    """
    failed = _failed([a], [b])
    if failed is not None:
        return failed.replace(counts=NOT_COMPARED)
    counts = _counts([a], [b], judges=True)
    verdict = Verdict(outcome="inconclusive", launches=2, counts=counts or NOT_COMPARED)
    if a.counts and exact.unlike([b], count_baseline.from_runs([a])) is not None:
        reasons = (f"{ARM_A} and {ARM_B} count with different methods: use the same perfsuite in both",)
        verdict = verdict.replace(outcome="failed", failure="unlike", reasons=reasons)
    elif counts is None:
        verdict = verdict.replace(reasons=("nothing was counted", *a.notes, *b.notes))
    elif counts.outcome in ("regressed", "improved", "passed"):
        verdict = _of_one_launch(verdict.replace(outcome=counts.outcome), a, b)
    else:
        verdict = verdict.replace(reasons=counts.notes)
    return _with_differences(unless_other(verdict, [a], [b]), [a], [b])


def _of_one_launch(verdict: Verdict, a: Run, b: Run) -> Verdict:
    """Return the verdict on one launch of each arm: `improved` only if both arms compute the same values."""
    then = Computed.of([a])
    now = Computed.of([b])
    difference = may_differ(then.launches, now.launches)
    if verdict.outcome == "regressed" and difference is not None:
        return verdict.replace(reasons=(*verdict.reasons, f"{difference}, in one launch of each arm"))
    if verdict.outcome != "improved":
        return verdict
    if difference is not None or may_have_other_tokens(then, now):
        what = difference or "the model was given another number of tokens"
        reason = f"{what}, so arm B might do less because it computes something else"
        return verdict.replace(outcome="inconclusive", reasons=(*verdict.reasons, reason))
    threads = works_in_threads([b], a.other_threads)
    if threads is not None:
        return verdict.replace(outcome="inconclusive", reasons=(*verdict.reasons, threads))
    if b.dry:
        verdict = verdict.replace(reasons=(*verdict.reasons, OF_A_DRY_RUN))
    return if_same(verdict, then, now, ARM_A)


def unless_other(verdict: Verdict, a: Sequence[Run], b: Sequence[Run]) -> Verdict:
    """Return the verdict on counts, or `failed` if the arms compute different things.

    Call this again after more launches: one launch of each arm does not show whether the arms always differ.
    """
    if verdict.failure is not None:
        return verdict
    failed = _failed(a, b)
    if failed is not None:
        return failed.replace(counts=verdict.counts)
    others = other_computation(Computed.of(a), Computed.of(b), ARM_A)
    if others:
        return verdict.replace(outcome="failed", failure="unlike", reasons=(*others, *verdict.reasons))
    once = may_differ(Computed.of(a).launches, Computed.of(b).launches)
    difference = few_differ(b, a, ARM_A)
    if difference is None:
        is_new = once is not None and not any(reason.startswith(once) for reason in verdict.reasons)
        scatter = (f"{once}, which more launches did not confirm",)
        return verdict.replace(reasons=(*verdict.reasons, *scatter)) if len(a) > 1 and is_new else verdict
    others = [reason for reason in verdict.reasons if once is None or not reason.startswith(once)]
    return verdict.replace(outcome="failed", failure="loss", reasons=(difference, *others))


def needs_more(a: Run, b: Run) -> bool:
    """Return whether loss, gradients or tokens differ between one launch of arm A and one of arm B.

    If they do, more launches must show whether they always differ.
    """
    then = Computed.of([a])
    now = Computed.of([b])
    return may_differ(then.launches, now.launches) is not None or may_have_other_tokens(then, now)


def start_up_findings(verdict: Verdict) -> list[Finding]:
    """Return the changes of the start-up. More launches must confirm them.

    The first launch in an environment builds extensions and fills caches, and both arms share some of these
    caches. Returns an empty list if the comparison failed, because then the start-up does not matter.
    """
    findings = () if verdict.counts is None or verdict.failure is not None else verdict.counts.findings
    changes = (finding for finding in findings if finding.outcome in ("regressed", "improved"))
    return [finding for finding in changes if is_of_start_up(finding.span)]


def with_unconfirmed(verdict: Verdict, first: Sequence[Finding]) -> Verdict:
    """Return the verdict on the second launch of each arm, with a reason for each unconfirmed change.

    `first` has the changes of the start-up in the first launches. A change is unconfirmed if the second
    launches do not show it again.
    """
    confirmed = {(finding.span, finding.quantity) for finding in start_up_findings(verdict)}
    gone = [finding.sentence for finding in first if (finding.span, finding.quantity) not in confirmed]
    unconfirmed = (f"{sentence}, {UNCONFIRMED}" for sentence in gone)
    return verdict.replace(reasons=(*verdict.reasons, *unconfirmed))


def _failed(a: Sequence[Run], b: Sequence[Run]) -> Verdict | None:
    failed = [
        (run.failure.kind, f"{arm} failed: {'; '.join(why_failed(run))}")
        for arm, runs in ((ARM_A, a), (ARM_B, b))
        for run in runs
        if run.failure is not None
    ]
    by_the_change = {kind for kind, _ in failed} == {"mismatch"} and not any(run.failure for run in a)
    if by_the_change:  # the case is right, because arm A matches it
        failed = [("mismatch", _changed_by(why)) for _, why in failed]
    if not failed:
        return None
    (kind, *_), reasons = zip(*failed, strict=True)  # pragma: no mutate True: each failure has both
    launches = len(a) + len(b)
    return Verdict(outcome="failed", launches=launches, failure=kind, reasons=reasons, against=ARM_A)


def _changed_by(why: str) -> str:
    """Return why arm B does not match the case, although arm A does.

    The advice to correct the case is left out.
    """
    why = re.split(ADVICE, why)[0]
    said = why.removeprefix(f"{ARM_B} failed: mismatch: ")
    tokens = TOKENS_DIFFER.search(said)
    if tokens is not None:
        claimed, given = tokens.groups()
        return (
            f"{ARM_B} gives the model {given} tokens a step, but {ARM_A} gives it {claimed}: {BY_THE_CHANGE} "
            f"({said}). To compare the work of both arms, give Script(tokens='vary') in the case"
        )
    return f"{why.rstrip('.')}. {ARM_A} matches the case: {BY_THE_CHANGE}"


def _with_differences(verdict: Verdict, a: Sequence[Run], b: Sequence[Run]) -> Verdict:
    baseline = baselines.from_runs(a)
    other_settings = (
        f"settings differ: {name.removeprefix('observed ')} is {then!r} in {ARM_A} and {now!r} in {ARM_B}"
        for name, (then, now) in setting_differences(b[-1], baseline).items()
    )
    reasons = (*verdict.reasons, *other_settings)
    computed = differences(Computed.of(a), Computed.of(b), ARM_A)
    changed = (*scaled(b, baseline), *computed, *run_changes(b[-1], baseline))
    return verdict.replace(reasons=reasons, changed=changed, against=ARM_A)


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
    awaited = alone or TOKENS_PER_S.name
    corrects = corrects and same_stack(b[-1], baselines.from_runs(a))
    checks = []
    of_spans = span_metrics(run.figures for run in a)  # a span that arm A lacks is shown, but not judged
    # pragma: no mutate [0] to [-1]: all launches of an arm are on one machine
    for metric in judged_metrics((run.figures for run in (*a, *b)), b[0].machine.device):
        if isinstance(metric, SpanSeconds) and metric not in of_spans:
            continue
        check = _check(metric, a, b, tolerance if metric.name == awaited else None, max_pairs, corrects)
        if isinstance(metric, SpanSeconds) and check.outcome == "improved":
            check = _unless_more_often(check, metric.label, a, b)
        is_open = is_last and check.outcome == "undecided"
        checks.append(check.replace(outcome="inconclusive") if is_open else check)
    checks = worth_a_launch(checks, len(b), alone)
    counts = _counts(a, b)
    why = explained_by_counts(checks, counts, b[-1], ("regressed", "improved"))
    if counts is not None:
        counts = _only_growth_judged(counts)
    # pragma: no mutate +: the caller replaces the number of launches
    verdict = worst_verdict(checks, len(a) + len(b)).replace(counts=counts, explained=why)
    state = next((check.outcome for check in checks if check.metric == awaited), None)
    if verdict.outcome != "failed" and state is not None and (state == "undecided" or alone):
        verdict = verdict.replace(outcome=state)
    if alone or verdict.outcome in ("failed", "undecided"):
        return verdict
    if counts is not None and counts.outcome == "regressed":
        return verdict.replace(outcome="regressed")
    fewer = does_less_later(b, [entry for run in counted(a) for entry in run.counts])
    if verdict.outcome == "improved" and fewer is not None:
        return verdict.replace(outcome="inconclusive", reasons=(*verdict.reasons, fewer))
    return verdict


def _unless_more_often(check: Check, span: str, a: Sequence[Run], b: Sequence[Run]) -> Check:
    """Return the given check of a span's seconds. Its outcome was `improved` so far.

    If arm B has more of these spans, the outcome becomes `passed`. The seconds are the time of one span, but
    two checkpoints of 1 s each are not better than one checkpoint of 2 s.
    """
    then, now = ([run.spans[span].occurrences for run in runs if span in run.spans] for runs in (a, b))
    if not then or not now or max(now) <= max(then):
        return check
    note = f"{ARM_B} has more such spans, {max(now)} instead of {max(then)}, so a shorter time is not better"
    return check.replace(outcome="passed", note=note)


def _only_growth_judged(counts: CountCheck) -> CountCheck:
    """Return the counts, with all findings `passed`: in a comparison of times, counts only explain changes.

    An exception is an increase of kept objects, which is judged. Kept objects make long runs slower and
    finally end them, but do not affect the measured window.
    """
    findings = tuple(
        finding
        if finding.quantity in (KEPT.name, KEPT_GRAPHS.name) and finding.outcome == "regressed"
        else finding.replace(outcome="passed")
        for finding in counts.findings
    )
    if counts.outcome == "not counted":
        return counts.replace(findings=tuple(finding.replace(outcome="passed") for finding in findings))
    is_growing = any(finding.outcome == "regressed" for finding in findings)
    return counts.replace(outcome="regressed" if is_growing else "passed", findings=findings)


def _if_same(verdict: Verdict, a: Sequence[Run], b: Sequence[Run]) -> Verdict:
    """Return `failed` if the arms compute different things, even on an unhealthy machine.

    Otherwise return the verdict, which is `improved` only if the computation is known to be the same. A
    failed or undecided verdict is returned unchanged.
    """
    if verdict.outcome in ("failed", "undecided"):
        return verdict
    then = Computed.of(a)
    now = Computed.of(b)
    others = other_computation(then, now, ARM_A)
    if others:
        return verdict.replace(outcome="failed", failure="unlike", reasons=(*others, *verdict.reasons))
    is_enough = len(a) >= MIN_PAIRS
    difference = loss_differs(b, baselines.from_runs(a), ARM_A) if is_enough else few_differ(b, a, ARM_A)
    if difference is not None:
        return verdict.replace(outcome="failed", failure="loss", reasons=(difference, *verdict.reasons))
    return if_same(verdict, then, now, ARM_A)


def _check(
    metric: Metric,
    a: Sequence[Run],
    b: Sequence[Run],
    tolerance: float | None,
    max_pairs: int,
    corrects: bool,
) -> Check:
    """Check one metric.

    If the device reproduces the metric exactly, medians are compared. Otherwise, pairs are compared.
    """
    metric = metric.against(run.figures for run in a)
    device = b[0].machine.device  # pragma: no mutate [0] to [-1]: all launches of an arm are on one machine
    tolerance = metric.tolerance(device) if tolerance is None else tolerance
    if isinstance(metric, SpanSeconds):
        pairs = _pairs_with_span(metric, a, b)
        if not pairs:
            check = unjudged(metric, b[0], [], [metric.reference_s], tolerance)
            return check.replace(outcome="inconclusive", note=f"not seen in {ARM_B}; {UNSEEN_SPAN}")
        a, b = zip(*pairs, strict=True)
    before = [metric.of(run.figures) for run in a]
    now = [metric.of(run.figures) for run in b]
    check = unjudged(metric, b[0], now, before, tolerance)
    missing = _missing(metric, check, before, now)
    if missing is not None:
        return missing
    if metric.judging(device) == "exact":
        return tolerance_check(metric, check, tolerance)
    decision = decided(
        [metric.cost(value) for value in before if is_size(value)],
        [metric.cost(value) for value in now if is_size(value)],
        tolerance=tolerance,
        max_pairs=max_pairs,
        probes=_probes(a, b) if corrects and metric in MACHINE_METRICS else None,
    )
    check = check.replace(
        outcome=decision.outcome,
        measured=median_of(now[: decision.pairs]),
        baseline=median_of(before[: decision.pairs]),
        change=metric.change(decision.change),
        interval=metric.interval(decision.interval),
        minimum_detectable=metric.bound(decision.minimum_detectable),
        probe_exponent=decision.exponent or None,
    )
    if is_negligible(metric, decision.outcome, decision.change):
        return check.replace(outcome="passed", note=negligible(metric))
    if decision.disputed is not None:
        why = disagreement(*decision.disputed, "the probe might also differ between the arms")
        return check.replace(note=why)
    return check.replace(note=f"decided after {decision.pairs} pairs") if decision.pairs < len(a) else check


def _pairs_with_span(metric: SpanSeconds, a: Sequence[Run], b: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the pairs in which both launches have the span."""
    both = zip(a, b, strict=True)
    return [pair for pair in both if all(metric.of(run.figures) is not None for run in pair)]


def _missing(
    metric: Metric, check: Check, before: Sequence[float | None], now: Sequence[float | None]
) -> Check | None:
    """Return a `failed` or `inconclusive` check, or None if all values of both arms are usable.

    A value is not usable if it is missing, not positive or not finite.
    """
    for arm, values in ((ARM_A, before), (ARM_B, now)):
        bad = [value for value in values if not is_size(value)]
        if bad:
            what = "was not measured" if bad[0] is None else f"is {bad[0]}"
            if isinstance(metric, PartOfStep):
                return check.replace(outcome="inconclusive", note=f"{what} in {arm}; {NO_LOADER}")
            is_needed = arm == ARM_B or metric in (TOKENS_PER_S, PEAK_MEMORY)
            return check.replace(outcome="failed" if is_needed else "inconclusive", note=f"{what} in {arm}")
    return None


def _probes(a: Sequence[Run], b: Sequence[Run]) -> tuple[list[float], list[float]] | None:
    """Return the seconds of the probe in each launch of both arms, or None if a launch has none."""
    of_a = [probe for probe in (run.figures.probe_s_p50 for run in a) if is_size(probe)]
    of_b = [probe for probe in (run.figures.probe_s_p50 for run in b) if is_size(probe)]
    return (of_a, of_b) if len(of_a) == len(of_b) == len(a) else None


def _counts(a: Sequence[Run], b: Sequence[Run], *, judges: bool = False) -> CountCheck | None:
    hidden = exact.why_hidden(a)
    if hidden:  # an increase in arm B might then be work that was not counted in arm A
        return CountCheck(outcome="not counted", notes=hidden, compared=False)
    of_a = counted(a)
    return exact.check(b, count_baseline.from_runs(of_a), of_arm=judges) if of_a else None
