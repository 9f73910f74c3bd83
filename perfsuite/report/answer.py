"""Answer three questions on a comparison: does a step do more, is it slower, what was not checked? Pure."""

from collections.abc import Sequence

from perfsuite.errors import shortened
from perfsuite.report import slopes
from perfsuite.report.text import cut, plural
from perfsuite.results.outcome import NOT_JUDGED, UNCONFIRMED, Finding
from perfsuite.results.session_file import Measurement, SessionFile

DOES_MORE = "does a step do more?"
IS_SLOWER = "is it slower?"
NOT_CHECKED = "not checked"
IDS_SHOWN = 4
WHY_SHOWN = 200  # maximum number of characters of the reason why a case failed


def answer(session: SessionFile) -> dict[str, str]:
    """Return the three answers by question, in this order. Empty if the session is not a comparison."""
    if not session.arms or not (session.results or session.skipped):
        return {}
    return {
        DOES_MORE: _does_more(session.results),
        IS_SLOWER: _is_slower(session.results),
        NOT_CHECKED: "; ".join(_not_checked(session)),
    }


def _does_more(results: Sequence[Measurement]) -> str:
    unknown = [result for result in results if not _is_counted(result)]
    more = [result for result in results if _is_counted(result) and any(_grew(result))]
    same = len(results) - len(unknown) - len(more)
    said = _said(results, more, unknown, f"no: in {plural(same, 'case')}, it does no more than in arm A")
    return "; ".join([said, *_why_failed(unknown)])


def _why_failed(unknown: Sequence[Measurement]) -> list[str]:
    """Return the reason of the first case that failed, if there is one."""
    failed = [result for result in unknown if result.verdict.outcome == "failed" and result.verdict.reasons]
    if not failed:
        return []
    why = failed[0].verdict.reasons[0]
    shown = shortened(why, WHY_SHOWN)
    return [shown if len(failed) == 1 else f"the first of them failed because {shown}"]


def _is_counted(result: Measurement) -> bool:
    check = result.verdict.counts
    return check is not None and check.compared and check.outcome not in ("not counted", "recorded")


def _grew(result: Measurement) -> list[Finding]:
    """Return the counts that grew.

    In a timed comparison, counts are not judged, so every count that grew is returned. Otherwise, only counts
    that regressed are returned.
    """
    check = result.verdict.counts
    findings = () if check is None else check.findings
    if result.verdict.checks or _is_disturbed(result):
        return [finding for finding in findings if finding.now > finding.before]
    return [finding for finding in findings if finding.outcome == "regressed"]


def _is_disturbed(result: Measurement) -> bool:
    """Return whether the launches of a timed comparison were set aside, so that no time was judged."""
    verdict = result.verdict
    return bool(verdict.unhealthy_launches) and not verdict.checks and verdict.outcome != "failed"


def _is_slower(results: Sequence[Measurement]) -> str:
    timed = [result for result in results if result.verdict.checks]
    disturbed = [result for result in results if _is_disturbed(result)]
    if disturbed:
        said = (
            f"unknown for {plural(len(disturbed), 'case')}, because launches were set aside as unhealthy: "
            f"{_ids(disturbed)}. Repeat the comparison on a machine that runs nothing else"
        )
        others = [result for result in results if result not in disturbed]
        return f"{_is_slower(others)}; {said}" if timed else said
    if not timed:
        is_dry = any(result.dry for result in results)
        why = "a dry run computes nothing" if is_dry else "the arms were only counted, or did not run"
        return f"not timed here: {why}"
    worse = [
        result for result in timed if any(check.outcome == "regressed" for check in result.verdict.checks)
    ]
    decided = ("passed", "improved")
    open_ones = [
        result
        for result in timed
        if result not in worse and any(check.outcome not in decided for check in result.verdict.checks)
    ]
    held = len(timed) - len(worse) - len(open_ones)
    said = _said(timed, worse, open_ones, f"no: {plural(held, 'case')} within the tolerances")
    left = len(results) - len(timed)
    return f"{said}; {plural(left, 'case')} not timed" if left else said


def _said(
    asked: Sequence[Measurement],
    worse: Sequence[Measurement],
    unknown: Sequence[Measurement],
    if_none: str,
) -> str:
    """Return an answer that names the worse and the unknown cases. `if_none` says that no case is worse."""
    parts = []
    if worse:
        parts.append(f"yes, in {len(worse)} of {plural(len(asked), 'case')}: {_ids(worse)}")
    if unknown:
        parts.append(f"unknown for {plural(len(unknown), 'case')}: {_ids(unknown)}")
    if not worse and len(unknown) < len(asked):
        parts.insert(0, if_none)
    return "; ".join(parts) or "unknown: no case was compared"


def _not_checked(session: SessionFile) -> list[str]:
    results = session.results
    parts = []
    dry = [result for result in results if result.dry]
    if any(not result.verdict.checks for result in results):
        parts.append("times: a slower kernel or a slower network is not noticed")
    if dry:
        parts.append("loss and gradients: a dry run computes no values")
        parts.append("start-up, checkpoints, evaluation and waiting for data: a dry run counts only steps")
    of_one_arm = dict.fromkeys(name for result in results for name in _counted_in_one_arm(result))
    if of_one_arm:
        parts.append(f"counts of only one arm: {', '.join(cut([*of_one_arm], IDS_SHOWN))}")
    on_cpu = [result for result in dry if _pretended_cpu(result)]
    if on_cpu:
        parts.append(
            f"GPU kernels and GPU memory in {plural(len(on_cpu), 'case')}, for which a CPU was simulated"
        )
    uncounted = [result for result in results if not _is_counted(result)]
    if uncounted:
        parts.append(f"the work of a step in {_ids(uncounted)}")
    once = [result for result in results if any(map(_is_unconfirmed, result.verdict.reasons))]
    if once:
        parts.append(
            f"changes of the start-up that only the first launches of {_ids(once)} showed: the arms can "
            "share caches, so these changes depend on which arm fills a cache first"
        )
    for result in results:
        outside = _outside_of_counted_steps(result)
        if outside:
            parts.append(f"work outside of the counted steps of {result.case_id}: {', '.join(outside)}")
        growth = slopes.grows_faster(result)
        if growth is not None:
            parts.append(f"memory outside of Python: the process of {result.case_id} grows by {growth}")
    if session.skipped:
        cases = plural(len(session.skipped), "case")
        cannot = "run dry (see the report)" if dry else "run here (--dry might compare them)"
        parts.append(f"{cases} that cannot {cannot}")
    if session.not_compared:
        parts.append(f"{plural(len(session.not_compared), 'case')} that are missing or changed in arm B")
    if session.cases_unknown is not None:
        parts.append("whether both arms have the same cases")
    return parts or ["hardware other than this machine's"]


def _counted_in_one_arm(result: Measurement) -> list[str]:
    """Return the names of counts and steps that were counted in one arm, but not in the other."""
    check = result.verdict.counts
    notes = () if check is None else check.notes
    return [note.partition(NOT_JUDGED)[0] for note in notes if NOT_JUDGED in note]


def _is_unconfirmed(reason: str) -> bool:
    return reason.endswith(UNCONFIRMED)


def _outside_of_counted_steps(result: Measurement) -> list[str]:
    """Return the events and phases that never happened in a counted step, each with its first step."""
    first: dict[str, int] = {}
    counted = set[int]()
    for run in result.runs:
        for rank in run.counts:
            counted |= {rank.counts.step, *rank.counts.also_counted}
    for run in result.runs if counted else ():
        for name, span in run.spans.items():
            in_steps = [step + 1 for step in span.steps]
            if in_steps and counted.isdisjoint(in_steps):
                first.setdefault(name, in_steps[0])
    return [f"{name} (first in step {step})" for name, step in first.items()]


def _pretended_cpu(result: Measurement) -> bool:
    return any(run.machine.device == "cpu" for run in result.runs)


def _ids(results: Sequence[Measurement]) -> str:
    return ", ".join(cut([result.case_id for result in results], IDS_SHOWN))
