"""`perfsuite dry-run`: runs cases at full size without their hardware; `pytest --perf-dry` without a test."""

from __future__ import annotations

from typing import Annotated

import typer

from perfsuite.cli import cases as shared
from perfsuite.dry.machine import Device
from perfsuite.report.progress import Progress
from perfsuite.session.begin import dry


def dry_run(
    case: shared.Ids = None,
    k: shared.Expression = None,
    rank: Annotated[
        int | None, typer.Option(help="the rank to run (default: those that tell what all do)")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="what to pretend (default: the GPU that the case is meant for)")
    ] = None,
    json_output: shared.AsJson = False,
    cases: shared.Cases = shared.CASES,
    baselines: shared.Baselines = None,
    store: shared.LocalStore = None,
) -> None:
    """What does a step of a case do at its full size, and will it fit? One process, no hardware, seconds.

    Exit status 1 if the counts are worse than their baseline's, or a dry run fails; 2 if a case was refused.
    """
    chosen = shared.selected(cases, case, k)
    options = shared.options(store=store, baselines=baselines)
    progress = Progress(line=shared.say, cases=len(chosen))
    session = dry(options, progress, device, None if rank is None else (rank,))
    fits = chosen if k is None else shared.fitting(session, chosen)  # one that is named tells itself why not
    progress.cases = len(fits)
    if shared.measure(session, fits, json_output=json_output):
        raise typer.Exit(2)
    if any(map(options.is_failing, session.results)):
        raise typer.Exit(1)
