"""Find the session that `--perf-resume` continues, and decide which of its results are still valid."""

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError
from perfsuite.report.text import cut
from perfsuite.results.count_baseline import target_of
from perfsuite.results.rank_report import UNSET, FailureKind
from perfsuite.results.session_file import Measurement, PytestRun, SessionFile
from perfsuite.results.store import BaselineStore, SessionDir, Store, digest_of
from perfsuite.verdict.comparability import of_any_allocation

FAILURES_OF_THE_MACHINE: tuple[FailureKind, ...] = ("cancelled", "error", "missing_report", "no_baseline")
"""Failures that are not evidence against the code: a cancelled job, a file that cannot be written, a killed
launcher, a missing baseline that might exist by now."""
MOST_DIFFERENCES = 5  # maximum number of differences listed between two sessions


def newest(store: Store, now: SessionFile) -> tuple[SessionDir, SessionFile]:
    """Return the directory and content of the newest session of a store, if session `now` can continue it.

    Skips dry runs. Raises `FileError` if there is no session, if its file cannot be read, if the session has
    decided all of its cases, or if it differs from `now` in anything that a verdict depends on.
    """
    for file in reversed(store.results()):
        content = documents.read(file, SessionFile)
        if not content.dry and not any(result.dry for result in content.results):
            break
    else:
        raise FileError(f"no session in {store.sessions}")
    reasons = differences(content, now)
    if reasons:
        listed = "; ".join(cut(reasons, MOST_DIFFERENCES))
        raise FileError(f"the newest session, {file.parent}, has {listed}")
    if _decided_all(content):
        raise FileError(f"the newest session, {file.parent}, has decided all of its cases")
    return SessionDir(file.parent), content


def differences(then: SessionFile, now: SessionFile) -> list[str]:
    """List the differences between two sessions that prevent the newer one from continuing the older one.

    `then` is the older session, and `now` is the newer one. Each difference has both values.
    """
    if now.commit is None:
        return ["cases that are not in git, so it is unknown whether they have changed"]
    if then.reference is not None:
        return ["a reference, whose launches show the speed of the machine only during that session"]
    before, today = (
        {
            "commit": str(session.commit)[:12],
            "uncommitted changes": session.conditions.changes or "none",
            "hardware class": session.machine.hardware_class,
            "driver": session.machine.driver or UNSET,
            **session.conditions.options,
            **of_any_allocation(session.conditions.environment),
        }
        for session in (then, now)
    )
    return [
        f"{name} {before.get(name, UNSET)}, not {today.get(name, UNSET)}"
        for name in dict.fromkeys([*before, *today])
        if before.get(name) != today.get(name)
    ]


def _decided_all(session: SessionFile) -> bool:
    """Return whether a session came to its end and decided every case, so that nothing is left to do."""
    reached_all = not any(skipped.not_reached for skipped in session.skipped)
    reached_all = reached_all and session.interrupted_case is None
    return session.status == "complete" and reached_all and all(map(is_decided, session.results))


def is_decided(result: Measurement) -> bool:
    """Return whether a verdict is about the code, so that a resumed session can keep the result."""
    return result.outcome not in ("unhealthy", "undecided") and not is_of_machine(result)


def is_of_machine(result: Measurement) -> bool:
    """Return whether a case failed for a reason that has nothing to do with its code."""
    return result.verdict.failure in FAILURES_OF_THE_MACHINE


def ended(parts: tuple[PytestRun, ...]) -> tuple[PytestRun, ...]:
    """Return the parts of a resumed session, with parts that are still `running` marked as interrupted."""
    return tuple(part.replace(status="interrupted") if part.status == "running" else part for part in parts)


def holds(result: Measurement, case: Case, machine: Machine, baselines: BaselineStore) -> bool:
    """Return whether an earlier result can be kept.

    Its verdict must be about the code, the case must not have changed, and each baseline that judged the case
    must still be found in the same file, with the same content.
    """
    is_of_case = all(documents.plain(run.case) == documents.plain(case) for run in result.runs)
    if not is_decided(result) or not is_of_case:
        return False
    try:
        stored = baselines.find(machine.hardware_class, case)
        counted = baselines.counts.find(target_of(machine, dry=False), case)
    except FileError:
        return False
    counts = result.verdict.counts
    files = (result.baseline_file, stored), (counts.baseline_file if counts else None, counted)
    if not all(before in (None, str(now.file) if now else None) for before, now in files):
        return False
    # One of the two baselines might not have existed when the case was judged.
    possible = [(stored, counted), (stored,), (counted,)]
    return result.judged_by in (None, *map(digest_of, possible))
