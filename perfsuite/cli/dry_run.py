"""`perfsuite dry-run`: runs cases at their full size without their hardware.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.dry import cases as found
from perfsuite.dry.machine import Device
from perfsuite.errors import CaseError, told
from perfsuite.report.progress import Progress, silent
from perfsuite.report.terminal import console, explanation
from perfsuite.results.session_file import Status
from perfsuite.results.store import BASELINES, STORE
from perfsuite.session import DryHost, DrySession, Options, session_file
from perfsuite.verdict.judge import Policy

CASES = Path("bench_cases")

Ids = Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="ids of cases")]
Expression = Annotated[str | None, typer.Option("-k", help="instead of ids: pytest's expression for them")]
Rank = Annotated[int | None, typer.Option(help="the rank to run (default: those that tell what all do)")]
DeviceOption = Annotated[
    Device | None, typer.Option(help="what to pretend (default: the GPU that the case is meant for)")
]
AsJson = Annotated[bool, typer.Option("--json", help="for machines: what --perf-json writes")]
Directory = Annotated[Path, typer.Option("--cases", help="directory of the cases")]
Baselines = Annotated[Path, typer.Option(help="reviewed baselines")]
LocalStore = Annotated[Path, typer.Option(help="local store; its baselines/ come second")]


def dry_run(
    case: Ids = None,
    k: Expression = None,
    rank: Rank = None,
    device: DeviceOption = None,
    json_output: AsJson = False,
    cases: Directory = CASES,
    baselines: Baselines = BASELINES,
    store: LocalStore = STORE,
) -> None:
    """What does a step of a case do at its full size, and will it fit? One process, no hardware, seconds.

    Exit status 1 if the counts are worse than their baseline's, or a dry run fails; 2 if a case was refused.
    """
    session = DrySession(
        Options(root=Path.cwd(), store=store, baselines=baselines, policy=Policy()),
        Progress(line=silent),
        host=DryHost(device),
        ranks=None if rank is None else (rank,),
    )
    chosen = selected(cases, case or [], k)
    status: Status = "interrupted"
    refused = False
    try:
        for each in chosen:
            try:
                if k is not None and (reason := session.host.why_not(each)) is not None:
                    session.record_skip(each, each.id, reason)
                    typer.echo(f"{each.id}: {reason}", err=True)
                    continue
                measurement = session.measure(each, each.id)
            except Exception as error:  # the others may do better
                refused = True
                typer.echo(told(error), err=True)
                continue
            if not json_output:
                console().print(explanation(measurement), highlight=False, markup=False, soft_wrap=True)
        status = "complete"
    finally:
        content = session_file(session, status)
        if session.results:
            documents.write(session.directory.results, content)
        if json_output:
            typer.echo(json.dumps(documents.plain(content), indent=1))
    if refused:
        raise typer.Exit(2)
    if any(map(session.options.is_failing, session.results)):
        raise typer.Exit(1)


def selected(directory: Path, ids: list[str], expression: str | None) -> list[Case]:
    """Return the cases of a directory by their ids, or by an expression. Raises `CaseError` for neither."""
    if bool(ids) == (expression is not None):
        raise CaseError("name the cases by their ids, or select them by -k: one of both")
    if not directory.exists():
        raise CaseError(f"--cases {directory}: no such directory. Name the one that holds your cases")
    return found.by_id(directory, ids) if ids else found.by_expression(directory, str(expression))
