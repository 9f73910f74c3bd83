"""`perfsuite report`: shows the results of sessions in the terminal, or as an HTML page and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.cli.cases import Report, read
from perfsuite.errors import FileError
from perfsuite.report import preflight, summary
from perfsuite.report.terminal import console, explanation, table
from perfsuite.report.text import relative
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import STORE, Store
from perfsuite.session.outputs import REPORT_FILES, write_report


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RESULTS.json]...", help="Of one or more sessions. Default: the newest here."
        ),
    ] = None,
    report: Report = None,
    store: Annotated[Path, typer.Option(help="Local store, where sessions are.")] = STORE,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="In the terminal, explain the cases that passed, too, and tell all figures.",
        ),
    ] = False,
) -> None:
    """Show what sessions found out, in the terminal or as a report; the exit status is no verdict."""
    directory = read("report", report)
    sessions = [documents.read(file, SessionFile) for file in files or [newest(store)]]
    if directory is None:
        _show(sessions, verbose=verbose)
        return
    write_report(directory, *sessions)
    for name in REPORT_FILES:
        typer.echo(f"written: {directory / name}", err=True)


def newest(store: Path) -> Path:
    """Return the results file of the newest session in a store. Raises `FileError` if there is none."""
    if found := Store(store).results():
        return found[-1]
    raise FileError(f"no session in {Store(store).sessions}: measure first, or name a results.json")


def _show(sessions: list[SessionFile], *, verbose: bool) -> None:
    out = console()
    for session in sessions:
        for name, value in summary.provenance(session).items():
            out.print(f"{name:<12}{value}")
        if (interruption := summary.interruption(session)) is not None:
            out.print(interruption)
        out.print()
        for found in session.preflights:
            out.print(f"{preflight.as_text(found)}\n")
        for note in summary.machine_notes(session.results):
            out.print(f"note: {note}")
        if session.results:
            width = max(out.width, 80) if out.is_terminal else None
            typer.echo(table(session.results, color=out.is_terminal, width=width))
            out.print()
        for result in session.results:
            if verbose or summary.needs_words(result):
                out.print(f"{relative(explanation(result, whole=verbose), Path.cwd())}\n")
        if not verbose and (short := summary.in_short(session.results)):
            out.print("\n".join([*short, ""]))
        for skip in session.skipped:
            out.print(f"skipped {skip.case_id}: {skip.reason}")
    out.print(summary.headline(sessions))
