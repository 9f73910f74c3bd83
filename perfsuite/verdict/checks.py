"""Functions for judging one metric of a case, used both with baselines and with pairs of arms. Pure."""

from collections.abc import Sequence
from statistics import median

from perfsuite.results.metric import CPU_S_PER_STEP, PART_S, PART_SHARE, SPAN_S, Metric, SpanSeconds
from perfsuite.results.outcome import WORST_FIRST, Check, Outcome, Verdict
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run import Run, timed_span
from perfsuite.verdict.sequential import FEWEST_LAUNCHES

NEGLIGIBLE = f"changes below {PART_SHARE:.0%} of a step, or {1e3 * PART_S:.0f} ms, do not count"
NEGLIGIBLE_SPAN = f"changes below {SPAN_S:g} s do not count"
UNSEEN_SPAN = (
    "its time is unknown, which is not an improvement. If the span no longer happens, accept a new baseline"
)
LOOKS_CHANGED = 0.5
"""If a span or the CPU time changed by more than this share of the allowed change, it looks changed, and is
worth more launches."""
LOOKS_THE_SAME = "it looks unchanged, but more launches are needed to be sure (--perf-min-launches)"
NOT_WORTH_A_LAUNCH = (
    "the case was not launched again for this metric, because everything else is decided. To decide this "
    "metric, raise --perf-min-launches"
)
NO_LOADER = "if the loader is not a torch DataLoader, name it: Script(loader='module:name')"


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


def is_negligible(metric: Metric, outcome: Outcome, change: float) -> bool:
    """Return whether a change is too small to count, however significant it is."""
    return outcome in ("regressed", "improved") and abs(change) <= metric.floor


def negligible(metric: Metric) -> str:
    """Explain which changes of a metric are too small to count."""
    return NEGLIGIBLE_SPAN if isinstance(metric, SpanSeconds) else NEGLIGIBLE


def disagreement(raw: Outcome, corrected: Outcome, why: str) -> str:
    """Explain why raw and corrected outcomes disagree."""
    return f"{raw} as measured, but {corrected} when corrected for the machine's own speed; {why}"


def worst_verdict(checks: Sequence[Check], launches: int) -> Verdict:
    """Return the verdict on some checks: their worst outcome.

    A span happens only once or a few times in a launch, and can scatter too much to be judged. The CPU time
    can also scatter too much. Neither casts doubt on the steps. Therefore their checks can be `inconclusive`
    without making the verdict `inconclusive`.
    """
    deciding = [check for check in checks if not is_left_open(check)]
    outcome = min((check.outcome for check in deciding), key=WORST_FIRST.index)
    failure: FailureKind | None = "missing_metric" if outcome == "failed" else None
    return Verdict(outcome=outcome, launches=launches, checks=tuple(checks), failure=failure)


def is_left_open(check: Check) -> bool:
    """Return whether a check is `inconclusive` but casts no doubt on the other checks.

    Only two kinds of checks can be left open: the check of a span that was seen, and the check of a CPU time
    that is known on both sides.
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

    `launches` is the number of healthy launches so far, without those of the baseline. In a comparison, it is
    the number for each arm. If the caller wants to decide only one metric, `awaited` is its name. If
    the check of this metric is undecided, it stays undecided.
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
