"""`perfsuite compare`: launches two environments in turn and says which is slower.

It is `pytest --perf-against` without a test.
"""

from __future__ import annotations

from typing import Annotated

import typer

from perfsuite.cli import cases as shared
from perfsuite.errors import CaseError
from perfsuite.launch.launchers import launcher as launcher_of
from perfsuite.report.progress import Progress
from perfsuite.session.begin import against_arm


def compare(
    against: Annotated[str, shared.option("against")],
    arm: Annotated[str, typer.Option(help="what may be slower; without it this environment, as it is")] = ".",
    case: shared.Ids = None,
    k: shared.Expression = None,
    cases: shared.Cases = shared.CASES,
    tolerance: shared.Tolerance = None,
    max_pairs: shared.MaxPairs = None,
    inject: shared.Inject = None,
    report: shared.Report = None,
    json_output: shared.AsJson = False,
    store: shared.LocalStore = None,
    launcher: shared.Launcher = None,
    wait_quiet: shared.WaitQuiet = None,
) -> None:
    """Which of two environments is slower? Launches alternate between them; no baseline is needed.

    Exit status 1 if a case is slower or larger in arm B, or fails; 3 if none is, and one is not decided.
    """
    options = shared.options(store=store, inject=inject, wait_quiet=wait_quiet)
    directory = shared.read("report", report)
    progress = Progress(line=shared.say)
    arms = ("--against", against), ("--arm", arm)
    pairs = shared.read("max-pairs", max_pairs)
    session = against_arm(options, progress, launcher_of(launcher), arms, pairs, tolerance)
    fits = shared.fitting(session, shared.selected(cases, case, k))
    if session.skipped and k is None:
        raise CaseError(f"{session.skipped[0].case_id}: {session.skipped[0].reason}")
    progress.cases = len(fits)
    shared.measure(session, fits, report=directory, json_output=json_output)
    if any(map(options.is_failing, session.results)):
        raise typer.Exit(1)
    is_decided = [result.outcome in ("passed", "improved") for result in session.results]
    raise typer.Exit(0 if is_decided and all(is_decided) else shared.UNDECIDED)
