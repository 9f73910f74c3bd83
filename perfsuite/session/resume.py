"""Which session `--perf-resume` goes on with, and which of its cases are decided."""

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError
from perfsuite.report.text import cut
from perfsuite.results.count_baseline import target_of
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.session_file import Measurement, PytestRun, SessionFile
from perfsuite.results.store import BaselineStore, SessionDir, Store

FAILURES_OF_THE_MACHINE: tuple[FailureKind, ...] = ("cancelled", "error", "missing_report", "no_baseline")
"""A step that somebody cancelled, a file that cannot be written, a launcher that was killed, a baseline that
may be there by now: nothing says that the code failed."""
MOST_DIFFERENCES = 5  # differences between two sessions that are told


def newest(store: Store, now: SessionFile) -> tuple[SessionDir, SessionFile]:
    """The newest session of a store, whose verdicts hold for `now`, and what it left. Dry runs are none.

    Raises `FileError` with the reason where there is none, where its file cannot be read, and where it
    differs from `now` in anything that a verdict depends on.
    """
    for file in reversed(store.results()):
        content = documents.read(file, SessionFile)
        if not content.dry and not any(result.dry for result in content.results):
            break
    else:
        raise FileError(f"no session in {store.sessions}")
    reasons = differences(content, now)
    if reasons:
        told = "; ".join(cut(reasons, MOST_DIFFERENCES))
        raise FileError(f"the newest session, {file.parent}, has {told}")
    return SessionDir(file.parent), content


def differences(then: SessionFile, now: SessionFile) -> list[str]:
    """Return why the verdicts of one session do not hold for another, with both values; empty if they do."""
    if now.commit is None:
        return ["cases outside of git, where no commit says whether they are the same"]
    before, today = (
        {
            "commit": str(session.commit)[:12],
            "uncommitted changes": session.conditions.changes or "none",
            "hardware class": session.machine.hardware_class,
            **session.conditions.options,
            **session.conditions.environment,
        }
        for session in (then, now)
    )
    return [
        f"{name} {before.get(name, 'unset')}, not {today.get(name, 'unset')}"
        for name in dict.fromkeys([*before, *today])
        if before.get(name) != today.get(name)
    ]


def is_decided(result: Measurement) -> bool:
    """Whether a case keeps its verdict when its session goes on: one that says something of the code."""
    return result.outcome not in ("unhealthy", "undecided") and not is_of_machine(result)


def is_of_machine(result: Measurement) -> bool:
    """Whether a case failed for a reason that says nothing of its code."""
    return result.verdict.failure in FAILURES_OF_THE_MACHINE


def ended(parts: tuple[PytestRun, ...]) -> tuple[PytestRun, ...]:
    """The parts of a session that goes on: one that still says `running` was killed."""
    return tuple(part.replace(status="interrupted") if part.status == "running" else part for part in parts)


def holds(result: Measurement, case: Case, machine: Machine, baselines: BaselineStore) -> bool:
    """Whether a case keeps its earlier result: its code was judged, by the baselines that count now."""
    is_of_case = all(documents.plain(run.case) == documents.plain(case) for run in result.runs)
    if not is_decided(result) or not is_of_case:
        return False
    try:
        found = baselines.find(machine.hardware_class, case)
        counted = baselines.counts.find(target_of(machine, dry=False), case)
    except FileError:
        return False
    counts = result.verdict.counts
    judged_by = (result.baseline_file, found), (counts.baseline_file if counts else None, counted)
    return all(before in (None, str(now.file) if now else None) for before, now in judged_by)
