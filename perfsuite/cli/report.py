"""`perfsuite report`: show sessions in the terminal, or as a report."""

import json
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.cli.shared import report_directory
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.errors import CaseError
from perfsuite.report import common_change, summary
from perfsuite.report.console import console
from perfsuite.report.terminal import explanation, preflight_text, table
from perfsuite.report.text import relative, wrapped
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import stored_results
from perfsuite.session.outputs import write_report


@shares("store", "as_json")
def report(
    *,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RESULTS.json",
            help="Results of one or more sessions (default: the newest in the store).",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write a report into this directory.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="In the terminal, also explain the cases that passed.")
    ] = False,
    shared: Shared,
) -> None:
    """Show the results of sessions, in the terminal or as a report.

    The exit status does not depend on the verdicts.
    """
    directory = report_directory(out)
    sessions = [documents.read(file, SessionFile) for file in files or stored_results(shared.store)[-1:]]
    if shared.as_json and directory is not None:
        raise CaseError("--json excludes --out (a report already has results.json): leave one of them out")
    if shared.as_json:
        content = [json.loads(session.as_json()) for session in sessions]  # the same content as in the files
        typer.echo(json.dumps(content if len(content) > 1 else content[0], indent=1))
        return
    if directory is None:
        _show(sessions, verbose=verbose)
        return
    for file in write_report(directory, *sessions):
        typer.echo(f"written: {file}", err=True)


def _show(sessions: list[SessionFile], *, verbose: bool) -> None:
    out = console()
    for session in sessions:
        origin = summary.provenance(session)
        width = max(map(len, origin)) + 2
        for name, value in origin.items():
            out.print(f"{name:<{width}}{value}")
        interruption = summary.interruption(session)
        if interruption is not None:
            out.print(interruption)
        for line in summary.judge_change_lines([session.judge_changes]):
            out.print(line)
        changed = summary.case_changes(session)
        if changed:
            out.print("\n".join(changed))
        out.print()
        for preflight in session.preflights:
            out.print(f"{preflight_text(preflight)}\n")
        for note in (*summary.machine_notes(session.results), *session.waivers):
            out.print(f"note: {note}")
        if session.results:
            columns = max(out.width, 80) if out.is_terminal else None
            typer.echo(table(session.results, color=out.is_terminal, width=columns))
            out.print()
        for sentence in common_change.sentences(session.results, session.reference):
            out.print("\n".join([*wrapped(sentence, indent=""), ""]))
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
