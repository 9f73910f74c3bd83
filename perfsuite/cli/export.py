"""`perfsuite export`: writes the figures of a session as other programs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from perfsuite import documents
from perfsuite.cli.report import newest
from perfsuite.errors import FileError
from perfsuite.report import export as exports
from perfsuite.report.terminal import console
from perfsuite.report.text import plural
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import STORE, SessionDir


def export(
    output_format: Annotated[
        Literal["hud", "openmetrics", "bencher"],
        typer.Option(
            "--format",
            help="PyTorch HUD's benchmark database, OpenMetrics text (Prometheus), or Bencher Metric Format.",
        ),
    ],
    session: Annotated[
        Path | None,
        typer.Argument(help="A session's directory, or its results.json. Default: the newest here."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file, whole or not at all.")] = None,
    store: Annotated[Path, typer.Option(help="Local store, where sessions are.")] = STORE,
) -> None:
    """Write tokens/s, peak memory and outcome of each case of a session for another program.

    Figures of failed and unhealthy cases are left out. These cases, and those whose counts are not known, are
    named on standard error.
    """
    file = session or newest(store)
    content = documents.read(SessionDir(file).results if file.is_dir() else file, SessionFile)
    if content.arms:
        raise FileError(
            f"{file} compares two arms, whose figures are none of a night: name a session's results"
        )
    remarks = []
    if dry := sum(content.dry or result.dry for result in content.results):
        remarks.append(f"left out: {plural(dry, 'dry run')}, which measured nothing")
    for result in exports.newest(content):
        if not exports.figures(result):
            reason = result.no_evidence or "nothing of it was measured"
            remarks.append(f"no figures of {result.case_id}: {reason}")
        elif (counts := exports.outcomes(result)["counts"]) == "not counted":
            remarks.append(f"{result.case_id}: {counts}, so a step may do other work")
    text = exports.FORMATS[output_format](content)
    for remark in remarks:
        console(stderr=True).print(remark, style="yellow")
    if output is None:
        typer.echo(text, nl=False)
    else:
        documents.write_text(output, text)
