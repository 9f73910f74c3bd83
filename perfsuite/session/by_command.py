"""Select and measure cases for a command, without pytest, and show the results."""

import signal
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.case.hardware import hardware_error
from perfsuite.dry import cases as dry_cases
from perfsuite.errors import AllocationOverError, CaseError, error_text
from perfsuite.report import summary
from perfsuite.report.answer import answer
from perfsuite.report.console import console, say
from perfsuite.report.safe_text import printable
from perfsuite.report.text import relative, wrapped
from perfsuite.results.session_file import Status
from perfsuite.session import outputs
from perfsuite.session.jobs import end_by_signal
from perfsuite.session.session import Session
from perfsuite.session.setup import Host

UNDECIDED = 3  # exit status: no case regressed, but at least one is undecided (inconclusive or unhealthy)


def check_asked(hardware: str, cases: Path) -> None:
    """Raise `CaseError` if the hardware marker is unknown, or if the directory of cases does not exist."""
    error = hardware_error(hardware)
    if error is not None:
        raise CaseError(f"--hardware {hardware}: {error}")
    if not cases.is_dir():
        raise CaseError(f"--cases {cases}: no such directory. Give the directory that contains your cases")


def selected(directory: Path, ids: list[str] | None, expression: str | None) -> list[Case]:
    """Select the cases of a directory by id or with a -k expression.

    Raises `CaseError` if both are given, or neither.
    """
    if ids and expression is not None:
        raise CaseError("give case ids or -k, not both")
    if not ids and expression is None:
        raise CaseError("no case is selected: give case ids, or select cases with -k")
    return dry_cases.by_id(directory, ids) if ids else dry_cases.by_expression(directory, str(expression))


def runnable(host: Host, cases: list[Case], *, are_named: bool) -> list[Case]:
    """Return the cases that `host` can run.

    If `are_named`, raises `CaseError` for the first case that `host` cannot run.
    """
    able = []
    for case in cases:
        reason = host.why_not(case)
        if reason is None:
            able.append(case)
        elif are_named:
            raise CaseError(f"{case.id}: {reason}")
    return able


def fitting(session: Session, cases: list[Case]) -> list[Case]:
    """Return the cases that can run here. Report all other cases, and record them as skipped."""
    reasons = [(case, session.setup.host.why_not(case)) for case in cases]
    for case, reason in reasons:
        if reason is not None:
            session.record.skip(case, case.id, reason)
            say(f"{case.id}: {reason}")
    return [case for case, reason in reasons if reason is None]


def measured(session: Session, cases: list[Case], *, as_json: bool) -> int:
    """Measure cases, print and write the results, and return the number of errors.

    Cases are launched one after another. Dry runs of several cases run at the same time.
    """
    refused = 0
    status: Status = "interrupted"
    before = signal.signal(signal.SIGTERM, end_by_signal)  # a cancelled job also writes its results so far
    try:
        session.begin(cases)
        for case in cases:
            try:
                session.measure(case, case.id)
            except AllocationOverError:
                raise
            except Exception as error:  # recorded as a failed result; the next case might succeed
                refused += 1
                why = error_text(error)
                say(why if case.id in why else f"{case.id}: {why}")
        status = "complete"
    finally:  # show and write the results so far, even after an interrupt or the end of an allocation
        session.end()
        try:
            _show(session, status, as_json=as_json)
        finally:
            signal.signal(signal.SIGTERM, before)
    return refused


def _show(session: Session, status: Status, *, as_json: bool) -> None:
    shown = session.record.session_file(status)
    interruption = summary.interruption(shown)
    if interruption is not None:
        say(interruption)
    if as_json:
        print(shown.as_json(), end="")
    else:
        out = console()
        width = max(out.width, 80) if out.is_terminal else None
        result_lines = outputs.lines(session.record, whole=True, color=out.is_terminal, width=width)
        changed = summary.case_changes(shown)
        for line in [*result_lines, *([""] if changed else []), *changed]:
            print(relative(line, Path.cwd()))
        for question, said in answer(shown).items():
            print("\n".join(["", question, *wrapped(relative(printable(said), Path.cwd()))]))
    outputs.write_files(session.record, status)
