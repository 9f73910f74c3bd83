"""`perfsuite report`: what sessions found out, in the terminal, as one HTML page, or as Markdown.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from perfsuite import data, html_report, markdown_report, summary
from perfsuite.errors import FileError, PerfsuiteError
from perfsuite.report import explanation, table
from perfsuite.results import SessionFile


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RESULTS.json]...", help="Of one or more sessions. Default: the newest here."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    markdown: Annotated[str | None, typer.Option(help="Write a short summary; - is standard output.")] = None,
    store: Annotated[Path, typer.Option(help="Local store, where sessions are.")] = Path(".perfsuite"),
) -> None:
    """Show what sessions found out: in the terminal, as HTML, as Markdown; the exit status is no verdict."""
    try:
        sessions = [data.read(file, SessionFile) for file in files or [newest(store)]]
        if html is not None:
            data.write_text(html, html_report.render(sessions))
        if markdown is not None and markdown != "-":
            data.write_text(Path(markdown), markdown_report.render(sessions))
    except PerfsuiteError as error:
        typer.echo(f"perfsuite report: {error}", err=True)
        raise typer.Exit(1) from None
    if markdown == "-":
        typer.echo(markdown_report.render(sessions))
    elif html is None and markdown is None:
        _show(sessions)


def newest(store: Path) -> Path:
    """The results of the newest session in a store. Raises `FileError` if there is none."""
    found = sorted(store.glob("runs/*/results.json"))
    if not found:
        raise FileError(f"no session in {store / 'runs'}: measure first, or name a results.json")
    return found[-1]


def _show(sessions: list[SessionFile]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for session in sessions:
        for name, value in summary.provenance(session).items():
            console.print(f"{name:<12}{value}")
        if (interruption := summary.interruption(session)) is not None:
            console.print(interruption)
        console.print()
        if session.results:
            width = max(console.width, 80) if console.is_terminal else 140
            typer.echo(table(session.results, color=console.is_terminal, width=width))
            console.print()
        for result in filter(summary.needs_words, session.results):
            console.print(explanation(result))
            console.print()
        for skip in session.skipped:
            console.print(f"skipped {skip.case_id}: {skip.reason}")
    console.print(summary.headline(sessions))
