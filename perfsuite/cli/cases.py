"""What commands share that measure cases: `compare` and `dry-run`. Imports neither torch nor pytest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.dry import cases as found
from perfsuite.errors import AllocationOverError, BusyError, CaseError, told
from perfsuite.report.terminal import console
from perfsuite.report.text import relative
from perfsuite.results.session_file import Status
from perfsuite.session import outputs
from perfsuite.session.option_table import BY_NAME, options_of
from perfsuite.session.options import Options
from perfsuite.session.session import Session, session_file

CASES = Path("bench_cases")


def say(text: str) -> None:
    """Print a line of progress, apart from the result."""
    typer.echo(text, err=True)


def shared(name: str) -> Any:
    """An option that pytest has, too, as one of a command."""
    option = BY_NAME[name]
    told = f"{option.help} (default: {option.told.replace('`', '')})" if option.told else option.help
    return typer.Option(f"--{name}", help=told, metavar=option.metavar or None)


Ids = Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="ids of cases")]
Expression = Annotated[str | None, typer.Option("-k", help="instead of ids: pytest's expression for them")]
Cases = Annotated[Path, typer.Option("--cases", help="directory of the cases")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines: print what --perf-json writes")]
LocalStore = Annotated[str | None, shared("store")]
Baselines = Annotated[str | None, shared("baselines")]
Launcher = Annotated[str | None, shared("launcher")]
WaitQuiet = Annotated[str | None, shared("wait-quiet")]
MaxPairs = Annotated[str | None, shared("max-pairs")]
Inject = Annotated[str | None, shared("inject")]
Report = Annotated[str | None, shared("report")]


def read(name: str, value: str | None) -> Any:
    """What the value of a shared option means. Raises `CaseError` for a bad one."""
    return BY_NAME[name].read(f"--{name}", value)


def options(**given: str | None) -> Options:
    """The options of a session in this directory, of the values of shared options."""
    values = {name.replace("_", "-"): value for name, value in given.items()}
    return options_of(Path.cwd(), {name: read(name, value) for name, value in values.items()})


def selected(directory: Path, ids: list[str] | None, expression: str | None) -> list[Case]:
    """Return the cases of a directory by their ids, or by an expression. Raises `CaseError` for neither."""
    if bool(ids) == (expression is not None):
        raise CaseError("name the cases by their ids, or select them by -k: one of both")
    if not directory.exists():
        raise CaseError(f"--cases {directory}: no such directory. Name the one that holds your cases")
    return found.by_id(directory, ids) if ids else found.by_expression(directory, str(expression))


def measure(session: Session, cases: list[Case], *, report: Path | None = None, json_output: bool) -> int:
    """Measure cases one after another, print and write what was found. Returns how many could not be.

    An interrupt, or the end of an allocation, leaves what was found until then.
    """
    status: Status = "interrupted"
    refused = 0
    try:
        for case in cases:
            try:
                session.measure(case, case.id)
            except (AllocationOverError, BusyError):
                raise
            except Exception as error:  # a failed result; the others may do better
                refused += 1
                why = told(error)
                say(why if case.id in why else f"{case.id}: {why}")
        status = "complete"
    finally:
        session.setup.lock.release()
        _show(session, status, report, json_output=json_output)
    return refused


def fitting(session: Session, cases: list[Case]) -> list[Case]:
    """Return the cases that can be run here. The others are told, and skipped."""
    fits = []
    for case in cases:
        if (reason := session.setup.host.why_not(case)) is None:
            fits.append(case)
        else:
            session.record_skip(case, case.id, reason)
            say(f"{case.id}: {reason}")
    return fits


def _show(session: Session, status: Status, report: Path | None, *, json_output: bool) -> None:
    """Print what was found, and write it as files."""
    if json_output:
        typer.echo(json.dumps(documents.plain(session_file(session, status)), indent=1))
    else:
        out = console()
        width = max(out.width, 80) if out.is_terminal else None
        for line in outputs.lines(session, whole=True, color=out.is_terminal, width=width):
            typer.echo(relative(line, Path.cwd()))
    outputs.write_files(session, status, report=report)
