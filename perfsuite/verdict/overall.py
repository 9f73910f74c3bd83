"""Combine a case's verdicts on times and on counts. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from perfsuite.case.case import Case
from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.outcome import WORST_FIRST, Check, CountCheck, Excuse, Outcome, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.run import Run, timed_span
from perfsuite.verdict import exact
from perfsuite.verdict.computation import Computed, does_less, other_computation
from perfsuite.verdict.count_doubts import does_less_later, works_in_threads
from perfsuite.verdict.loss import are_compared, common_factor, may_differ, steadily_differ
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.tonight import Tonight
from perfsuite.verdict.unchanged import unless_unchanged

THE_SAME = "the work is the same: look at"
"""Beginning of the explanation of a slower case with equal counts. The rest depends on the machine."""

OF_COUNTS = "the baseline of counts"
OF_A_DRY_RUN = (
    "a dry run computes no values: tokens and dtypes were compared, but not the loss and the gradients"
)
NOT_COMPARED = (
    "neither the loss nor the gradients before clipping could be compared, so the case might compute "
    "something else. Accept the counts again (perfsuite baseline accept --only-counts)"
)
ONE_LAUNCH = "Without a seed, even launches of the same code differ. To be sure, launch each side twice"
NOTHING_TO_COMPARE = (
    "counts are not judged: no baseline has counts, and these launches cannot become a baseline"
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The data against which the launches of a case are judged.

    A session's reference (the packages and the commit of the baseline) is something else: only `tonight` is
    about it.
    """

    baseline: Baseline | None = None  # None: there is no baseline, and the launches can become one
    counts: CountBaseline | None = None  # the accepted or recorded counts of a step
    noise: ClassNoise = field(default_factory=ClassNoise)  # the noise between launches on this hardware class
    policy: Policy = field(default_factory=Policy)  # the number of launches that the verdict may cost
    tonight: Tonight | None = None  # the launches with the session's reference; None: there are none


def with_counts(
    timed: Verdict,
    runs: Sequence[Run],
    baseline: CountBaseline | None,
    file: str | None = None,
    *,
    times: Baseline | None = None,
) -> Verdict:
    """Combine `timed`, the verdict on time and memory, with the counts of the launches.

    The worse outcome wins. A noisy or new machine does not hide a change of the counts, because counts do not
    depend on the machine. A failure remains a failure. `file` is the path of the baseline of counts. Without
    a `baseline`, the counts are recorded, unless the launches failed, are worse than a baseline of times, or
    had an injected fault. Less work is `improved` only if the launches compute the same values as the
    baseline of counts or as the baseline of times (`times`).
    """
    counts = exact.check(runs, baseline)
    if counts is not None and baseline is not None:
        counts = _if_same(counts, runs, baseline, times)
    is_sound = timed.outcome not in ("failed", "regressed") and all(run.inject is None for run in runs)
    if counts is not None and counts.outcome == "recorded" and not is_sound:
        counts = CountCheck(outcome="passed", compared=False, notes=(NOTHING_TO_COMPARE,))
    if counts is not None and (baseline is not None or counts.outcome == "recorded"):
        counts = counts.replace(baseline_file=file)
    verdict = timed.replace(counts=counts, explained=explained_by_counts(timed.checks, counts, runs[-1]))
    if baseline is not None:
        reason = exact.unlike(runs, baseline) or exact.unlike_compiled(runs, baseline)
        if reason is not None:
            reasons = (*verdict.reasons, reason)
            unlike = verdict.replace(outcome="failed", failure="unlike", reasons=reasons)
            return verdict if timed.outcome == "failed" else unlike
    if baseline is not None and timed.outcome != "failed":
        is_judged = times is not None and timed.outcome in ("passed", "improved", "regressed")
        verdict = _unless_other(verdict, runs, baseline, is_judged=is_judged)
    fewer = does_less_later(runs, [] if baseline is None else baseline.counts)
    if verdict.outcome == "improved" and fewer is not None:
        verdict = verdict.replace(outcome="inconclusive", reasons=(*verdict.reasons, fewer))
    if verdict.failure is None and counts is not None and counts.outcome in ("regressed", "improved"):
        worse: Outcome = min(timed.outcome, counts.outcome, key=WORST_FIRST.index)
        verdict = verdict.replace(outcome=worse)
    return verdict if times is None else unless_unchanged(verdict, runs, times)


def _unless_other(
    verdict: Verdict, runs: Sequence[Run], baseline: CountBaseline, *, is_judged: bool
) -> Verdict:
    """Return the verdict, or `failed` if the launches compute something other than the baseline of counts.

    Two launches on each side show whether values differ or only scatter. With one launch, different
    losses or gradients make the verdict `failed` only if the losses of all steps differ by the same factor.
    With `is_judged`, the loss was already judged against a baseline of times and its scatter. This function
    then only looks for a factor that all losses have in common.
    """
    sound = [run for run in runs if run.failure is None]
    if not sound:
        return verdict
    then = Computed.of_counts(baseline)
    now = Computed.of(sound)
    others = other_computation(then, now, OF_COUNTS)
    if others:
        return verdict.replace(outcome="failed", failure="unlike", reasons=(*verdict.reasons, *others))
    if not then.launches:
        return verdict
    difference = common_factor(then.launches, now.launches, OF_COUNTS)
    if difference is None and not is_judged:
        difference = steadily_differ(then.launches, now.launches)
    if difference is not None:
        return verdict.replace(outcome="failed", failure="loss", reasons=(*verdict.reasons, difference))
    once = None if is_judged else may_differ(then.launches, now.launches)
    if once is None:
        return verdict
    reason = f"unlike {OF_COUNTS}: {once}. {ONE_LAUNCH}"
    return verdict.replace(reasons=(*verdict.reasons, reason))


def _if_same(
    counts: CountCheck, runs: Sequence[Run], baseline: CountBaseline, times: Baseline | None
) -> CountCheck:
    """Return the check of the counts, or `passed` if there is less work but the computation may differ.

    In the second case, the changes remain listed.
    """
    if counts.outcome != "improved":
        return counts
    then = Computed.of_counts(baseline)
    now = Computed.of(runs)
    why = does_less(then, now, OF_COUNTS)
    threads = works_in_threads(runs, baseline.other_threads)
    why += [] if threads is None else [threads]
    if runs[-1].dry and not why:
        return counts.replace(notes=(*counts.notes, OF_A_DRY_RUN))
    if not runs[-1].dry and not (times is not None and are_compared(times.launches, now.launches)):
        if not are_compared(then.launches, now.launches):
            why.append(NOT_COMPARED)
        elif (difference := may_differ(then.launches, now.launches)) is not None:
            why.append(f"{difference}, so the case might compute something else")
    if not why:
        return counts
    listed = tuple(finding.replace(outcome="passed") for finding in counts.findings)
    notes = (*counts.notes, f"less, but not `improved`: {'; '.join(why)}")
    return counts.replace(outcome="passed", findings=listed, notes=notes)


def with_unseen(verdict: Verdict, taken: Mapping[str, TakenProfile]) -> Verdict:
    """Correct the verdict with profiles, which show whether a step did work that was not counted.

    If there was such work, a regression of the counts is kept, but all other outcomes of the counts become
    `not counted`. `taken` has the profiles by name of the arm.
    """
    unseen_of = {
        name: profile.profile.unseen for name, profile in taken.items() if profile.profile is not None
    }
    why = tuple(f"{name}: {unseen}" if name else unseen for name, unseen in unseen_of.items() if unseen)
    counts = verdict.counts
    if counts is None or not why:
        return verdict
    if counts.outcome == "regressed":
        return verdict.replace(counts=counts.replace(notes=(*counts.notes, *why)))
    outcome = verdict.outcome
    if counts.outcome == outcome == "improved":
        outcome = min((check.outcome for check in verdict.checks), key=WORST_FIRST.index, default="passed")
    earlier = counts.notes if counts.outcome == "not counted" else ()
    file = None if counts.outcome == "recorded" else counts.baseline_file
    not_counted = CountCheck(
        outcome="not counted", notes=(*earlier, *why), compared=False, baseline_file=file
    )
    return verdict.replace(outcome=outcome, counts=not_counted, explained=None)


def explained_by_counts(
    checks: Sequence[Check],
    counts: CountCheck | None,
    run: Run,
    outcomes: Sequence[Literal["regressed", "improved"]] = ("regressed",),
) -> str | None:
    """Explain checks with the largest change of counts. Returns None if the counts do not explain anything.

    Only one outcome is explained: the first in `outcomes` that any check has. The counts of a span, such as
    the start-up or a checkpoint, explain the seconds of this span. The counts of steps explain all other
    metrics.
    """
    occurred = [outcome for outcome in outcomes if any(check.outcome == outcome for check in checks)]
    if counts is None or not counts.compared or not occurred:
        return None
    kinds = ("regressed", "passed", "improved")
    order = kinds if occurred[0] == "regressed" else kinds[::-1]
    to_explain = [check for check in checks if check.outcome == occurred[0]]
    findings = [
        finding for finding in counts.findings if any(_is_of(finding.span, check) for check in to_explain)
    ]
    if not findings:
        gpus = "kernels, NCCL" if run.case.topology.world_size > 1 else "kernels"
        return f"{THE_SAME} {gpus if run.machine.device == 'cuda' else 'packages, threads'} and the machine"
    return min(findings, key=lambda finding: order.index(finding.outcome)).sentence


def _is_of(span: str, check: Check) -> bool:
    """Return whether a check is about the time of a span or a part of it. An empty `span` means the steps."""
    timed = timed_span(check.metric)
    if timed is None or not span:
        return timed is None and not span
    return timed == span or timed.startswith(f"{span}: ")


def excuse(case: Case, verdict: Verdict, baseline: Baseline | None, *, shared: bool) -> Excuse | None:
    """Return the excuse for the failure of `case`; None if it has none, or if the case did not fail.

    A known issue excuses the failure that it names, unless a reviewed baseline shows that the issue is fixed.
    A case that may run out of memory is excused if it does. It is not excused if any baseline shows that it
    fits, or if other processes held memory of the same GPUs at the time (`shared`).
    """
    issue = case.known_issue
    is_reviewed = baseline is not None and baseline.accepted is not None
    if issue is not None and verdict.failure == issue.failure and not is_reviewed:
        return "known issue"
    may_be = case.may_run_out_of_memory and baseline is None and not shared
    return "out of memory" if may_be and verdict.failure == "out_of_memory" else None
