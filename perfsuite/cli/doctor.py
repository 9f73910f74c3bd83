"""`perfsuite doctor`: checks the machine, and shows a table or JSON. Imports neither torch nor pytest."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer
from rich.text import Text

from perfsuite import documents
from perfsuite.cli.doctor_checks import Row, Status, examine
from perfsuite.launch.lock import machine_lock
from perfsuite.launch.machine import detect
from perfsuite.report.terminal import console

STYLES: dict[Status, str] = {"pass": "green", "fail": "red", "unknown": "yellow"}


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="look at the machine only: no training, some seconds")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the rows as JSON on standard output")] = False,
) -> None:
    """Does this machine measure truly? Run it before the first night here.

    Looks at torch, driver, permissions and other processes; trains a small model to compare clocks and memory
    counters; then makes some launches on every device for their noise. Exit status 1 if a check fails.
    """
    machine, err = detect(), console(stderr=True)
    with contextlib.nullcontext() if quick else machine_lock(err.print):
        rows = examine(machine, quick=quick, say=lambda text: err.print(f"perfsuite doctor: {text} ..."))
    if as_json:
        typer.echo(
            json.dumps({"schema_version": 1, "rows": [documents.plain(row) for row in rows]}, indent=1)
        )
    else:
        _show(rows)
    if any(row.status == "fail" for row in rows):
        raise typer.Exit(1)


def _show(rows: list[Row]) -> None:
    """Print the rows, each with its advice below, and how many passed."""
    out = console()
    width = max(len(row.check) for row in rows) + 2
    for row in rows:
        style = STYLES[row.status]
        out.print(Text.assemble((f"{row.status:<9}", style), (f"{row.check:<{width}}", "bold"), row.found))
        if row.advice is not None:
            out.print(Text(f"{'':<{9 + width}}-> {row.advice}", style=style))
    failed = sum(row.status == "fail" for row in rows)
    unknown = sum(row.status == "unknown" for row in rows)
    out.print(f"{len(rows) - failed - unknown} passed, {failed} failed, {unknown} unknown")
