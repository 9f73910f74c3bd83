"""`perfsuite compare`: launches two environments in turn and says which is slower.

It is `pytest --perf-against` without a test. Imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from perfsuite.cli.cases import (
    CASES,
    AsJson,
    Cases,
    Expression,
    Ids,
    Inject,
    Launcher,
    LocalStore,
    MaxPairs,
    Report,
    WaitQuiet,
    fitting,
    measure,
    options,
    read,
    say,
    selected,
    shared,
)
from perfsuite.cli.fraction import fraction
from perfsuite.errors import CaseError
from perfsuite.launch.launchers import launcher as launcher_of
from perfsuite.report.progress import Progress
from perfsuite.session.begin import against_arm
from perfsuite.session.session import Session

UNDECIDED = 3
"""Exit status where no case is slower, and one is not decided: inconclusive, or on an unhealthy machine."""

Tolerance = Annotated[
    str | None,
    typer.Option(help="growth of the time per token that matters: 3% (default: a gate's on such a device)"),
]


def compare(
    against: Annotated[str, shared("against")],
    arm: Annotated[str, typer.Option(help="what may be slower; without it this environment, as it is")] = ".",
    case: Ids = None,
    k: Expression = None,
    cases: Cases = CASES,
    tolerance: Tolerance = None,
    max_pairs: MaxPairs = None,
    inject: Inject = None,
    report: Report = None,
    json_output: AsJson = False,
    store: LocalStore = None,
    launcher: Launcher = None,
    wait_quiet: WaitQuiet = None,
) -> None:
    """Which of two environments is slower? Launches alternate between them; no baseline is needed.

    Exit status 1 if a case is slower or larger in arm B, or fails; 3 if none is, and one is not decided.
    """
    chosen = options(store=store, inject=inject, wait_quiet=wait_quiet)
    directory = read("report", report)
    progress = Progress(line=say)
    session = against_arm(
        chosen,
        progress,
        launcher_of(launcher),
        (("--against", against), ("--arm", arm)),
        read("max-pairs", max_pairs),
        None if tolerance is None else fraction("--tolerance", tolerance),
    )
    asked = selected(cases, case, k)
    fits = fitting(session, asked)
    if session.skipped and k is None:
        raise CaseError(f"{session.skipped[0].case_id}: {session.skipped[0].reason}")
    progress.cases = len(fits)
    measure(session, fits, report=directory, json_output=json_output)
    raise typer.Exit(_status(session))


def _status(session: Session) -> int:
    """The exit status: of the worst case."""
    if any(map(session.setup.options.is_failing, session.results)):
        return 1
    is_decided = [result.outcome in ("passed", "improved") for result in session.results]
    return 0 if is_decided and all(is_decided) else UNDECIDED
