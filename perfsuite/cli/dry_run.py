"""`perfsuite dry-run`: `pytest --perf-dry` without a test."""

from typing import Annotated

import typer

from perfsuite.cli.shared import Expression, Ids, Interconnect, options
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.dry.machine import Device
from perfsuite.report.console import say
from perfsuite.report.progress import Progress
from perfsuite.session.by_command import UNDECIDED, fitting, measured, selected
from perfsuite.session.dry import dry_session


@shares("cases", "baselines", "store", "as_json")
def dry_run(
    *,
    case: Ids = None,
    k: Expression = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Rank to run (default: the first rank, and the last rank if the ranks differ)."),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Device to simulate (default: the GPU that the case is meant for).")
    ] = None,
    interconnect: Interconnect = None,
    shared: Shared,
) -> None:
    """Show the work of a step at full size, and whether training fits into memory. This needs no GPU.

    The exit status is 1 if counts are worse than in their baseline, or if a dry run fails. It is 2 if a case
    was refused, and 3 if no case was run dry or if a case could not be judged.
    """
    chosen = selected(shared.cases, case, k)
    progress = Progress(line=say, cases=len(chosen))
    ranks = None if rank is None else (rank,)
    chosen_options = options(store=shared.store, baselines=shared.baselines, interconnect=interconnect)
    session = dry_session(chosen_options, progress, device, ranks)
    # Keep a case that was given by its id but cannot be run, so that the reason for refusing it is reported.
    fits = chosen if k is None else fitting(session, chosen)
    progress.cases = len(fits)
    if measured(session, fits, as_json=shared.as_json):
        raise typer.Exit(2)
    results = session.record.results
    if any(map(session.setup.options.is_failing, results)):
        raise typer.Exit(1)
    if not results or any(result.outcome == "inconclusive" for result in results):
        raise typer.Exit(UNDECIDED)
