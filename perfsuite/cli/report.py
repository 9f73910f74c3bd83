"""`perfsuite report`: show sessions in the terminal, or as a report."""

import json
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.cli.cases import AsJson, Report, read
from perfsuite.errors import CaseError, FileError
from perfsuite.report import summary
from perfsuite.report.console import console
from perfsuite.report.terminal import explanation, preflight_text, table
from perfsuite.report.text import relative
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import STORE, Store
from perfsuite.session.outputs import write_report

LocalStore = Annotated[Path, typer.Option("--store", help="Local store, where sessions are.")]


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RESULTS.json]...", help="Of one or more sessions. Default: the newest here."
        ),
    ] = None,
    report: Report = None,
    store: LocalStore = STORE,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="In the terminal, explain the cases that passed, too.")
    ] = False,
) -> None:
    """Show what sessions found out, in the terminal or as a report; the exit status is no verdict."""
    directory = read("report", report)
    sessions = [documents.read(file, SessionFile) for file in files or stored(store)[-1:]]
    if as_json and directory is not None:
        raise CaseError("--json with --report: a report has its results.json; leave one of them out")
    if as_json:
        content = [json.loads(session.as_json()) for session in sessions]  # the same as in the files
        typer.echo(json.dumps(content if len(content) > 1 else content[0], indent=1))
        return
    if directory is None:
        _show(sessions, verbose=verbose)
        return
    for file in write_report(directory, *sessions):
        typer.echo(f"written: {file}", err=True)


def stored(store: Path) -> list[Path]:
    """Return the `results.json` of all sessions in a store, newest last. Raises `FileError` without any."""
    files = Store(store).results()
    if files:
        return files
    where = Store(store).sessions
    raise FileError(f"no session in {where}: measure first (pytest bench_cases), or name a results.json")


def _show(sessions: list[SessionFile], *, verbose: bool) -> None:
    out = console()
    for session in sessions:
        for name, value in summary.provenance(session).items():
            out.print(f"{name:<12}{value}")
        interruption = summary.interruption(session)
        if interruption is not None:
            out.print(interruption)
        for line in summary.judge_changes_told([session.judge_changes]):
            out.print(line)
        changed = summary.case_changes(session)
        if changed:
            out.print("\n".join(changed))
        out.print()
        for found in session.preflights:
            out.print(f"{preflight_text(found)}\n")
        for note in (*summary.machine_notes(session.results), *session.waivers):
            out.print(f"note: {note}")
        if session.results:
            width = max(out.width, 80) if out.is_terminal else None
            typer.echo(table(session.results, color=out.is_terminal, width=width))
            out.print()
        for result in session.results:
            if verbose or summary.needs_words(result):
                out.print(f"{relative(explanation(result, whole=verbose), Path.cwd())}\n")
        if not verbose:
            short = summary.in_short(session.results)
            if short:
                out.print("\n".join([*short, ""]))
        for skip in session.skipped:
            out.print(f"skipped {skip.case_id}: {skip.reason}")
    out.print(summary.headline(sessions))
