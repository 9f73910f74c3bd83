"""`perfsuite export`: export the results of a session for other programs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from perfsuite import documents
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.errors import FileError
from perfsuite.features.exports import formats
from perfsuite.report import summary
from perfsuite.report.console import console
from perfsuite.report.text import plural
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import SessionDir, stored_results


@shares("store")
def export(
    *,
    output_format: Annotated[
        Literal["hud", "openmetrics"],
        typer.Option(
            "--format", help="Format: hud (PyTorch HUD's benchmark database) or openmetrics (Prometheus)."
        ),
    ],
    session: Annotated[
        Path | None,
        typer.Argument(help="Directory or results.json of a session (default: the newest session)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write to this file instead of standard output.")
    ] = None,
    shared: Shared,
) -> None:
    """Export the tokens/s, peak memory and outcome of each case of a session, for use in another program.

    For failed and unhealthy cases, only the outcome is exported. These cases, and cases whose work was not
    counted, are listed on standard error.
    """
    file = session or stored_results(shared.store)[-1]
    content = documents.read(SessionDir(file).results if file.is_dir() else file, SessionFile)
    if content.arms:
        raise FileError(
            f"{file} compares two arms and is not the result of one environment. Give another session"
        )
    remarks = [*filter(None, [summary.interruption(content)])]
    dry = sum(content.dry or result.dry for result in content.results)
    if dry:
        remarks.append(f"left out: {plural(dry, 'dry run')}, because a dry run measures nothing")
    for result in formats.newest(content):
        counts = formats.outcomes(result)["counts"]
        if not formats.figures(result):
            reason = result.no_evidence or "nothing was measured"
            remarks.append(f"no numbers for {result.case_id}: {reason}")
        elif counts == "not counted":
            unknown = "it is unknown whether the work of a step has changed"
            remarks.append(f"{result.case_id}: {counts}, so {unknown}")
    text = formats.FORMATS[output_format](content)
    for remark in remarks:
        console(stderr=True).print(remark, style="yellow")
    if out is None:
        typer.echo(text, nl=False)
    else:
        documents.write_text(out, text)
