"""`perfsuite dry-run`: runs cases at their full size without their hardware.

It is `pytest --perf-dry` without a test. Imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import Annotated

import typer

from perfsuite.cli.cases import (
    CASES,
    AsJson,
    Baselines,
    Cases,
    Expression,
    Ids,
    LocalStore,
    fitting,
    measure,
    options,
    say,
    selected,
)
from perfsuite.dry.machine import Device
from perfsuite.report.progress import Progress
from perfsuite.session.begin import dry

Rank = Annotated[int | None, typer.Option(help="the rank to run (default: those that tell what all do)")]
DeviceOption = Annotated[
    Device | None, typer.Option(help="what to pretend (default: the GPU that the case is meant for)")
]


def dry_run(
    case: Ids = None,
    k: Expression = None,
    rank: Rank = None,
    device: DeviceOption = None,
    json_output: AsJson = False,
    cases: Cases = CASES,
    baselines: Baselines = None,
    store: LocalStore = None,
) -> None:
    """What does a step of a case do at its full size, and will it fit? One process, no hardware, seconds.

    Exit status 1 if the counts are worse than their baseline's, or a dry run fails; 2 if a case was refused.
    """
    chosen = selected(cases, case, k)
    progress = Progress(line=say, cases=len(chosen))
    ranks = None if rank is None else (rank,)
    session = dry(options(store=store, baselines=baselines), progress, device, ranks)
    fits = chosen if k is None else fitting(session, chosen)  # one that is named tells itself why not
    progress.cases = len(fits)
    if measure(session, fits, json_output=json_output):
        raise typer.Exit(2)
    if any(map(session.setup.options.is_failing, session.results)):
        raise typer.Exit(1)
