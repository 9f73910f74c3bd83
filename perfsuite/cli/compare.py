"""`perfsuite compare`: compare two arms, like `pytest --perf-against` but without a test."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import extensions
from perfsuite.cli.shared import (
    CountsWay,
    DryWay,
    Expression,
    Ids,
    Interconnect,
    Launcher,
    MaxPairs,
    Tolerance,
    WaitQuiet,
    Yes,
    asks,
    check_way,
    launcher_of,
    option,
    options,
    read,
    report_directory,
)
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.errors import CaseError
from perfsuite.extensions import COMMANDS
from perfsuite.launch.arm import Arm
from perfsuite.report.console import say
from perfsuite.report.progress import Progress
from perfsuite.session.by_command import UNDECIDED
from perfsuite.session.comparison import Comparison, is_decided


@shares("cases", "store", "as_json")
def compare(
    *,
    against: Annotated[str | None, option("against")] = None,
    arm: Annotated[str, typer.Option(help="Arm B, which might be slower (default: this environment).")] = ".",
    case: Ids = None,
    k: Expression = None,
    dry: DryWay = False,
    counts: CountsWay = False,
    interconnect: Interconnect = None,
    tolerance: Tolerance = None,
    max_pairs: MaxPairs = None,
    counted_steps: Annotated[str | None, option("counted-steps")] = None,
    inject: Annotated[str | None, option("inject")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write a report into this directory.")] = None,
    launcher: Launcher = None,
    wait_quiet: WaitQuiet = None,
    yes: Yes = False,
    shared: Shared,
) -> None:
    """Compare two environments without a baseline: is arm B slower, or does it do more in a step?

    The exit status is 1 if a case fails or is worse in arm B. Otherwise, it is 3 if a case is undecided or
    was not compared.
    """
    if against is None:
        raise CaseError("arm A is missing. Name it, for example with --against main")
    if dry and inject is not None:
        raise CaseError(
            "--dry and --inject cannot be combined, because a dry run only counts. Leave out one of them"
        )
    if interconnect is not None and not dry:
        raise CaseError("--interconnect describes simulated machines. Add --dry, or leave --interconnect out")
    check_way(dry=dry, counts=counts, of_times={"tolerance": tolerance, "max-pairs": max_pairs})
    comparison = Comparison(
        way="dry" if dry else "counts" if counts else "times",
        against=against,
        arm=arm,
        options=options(
            store=shared.store,
            counted_steps=counted_steps,
            interconnect=interconnect,
            tolerance=tolerance,
            inject=inject,
            wait_quiet=wait_quiet,
            report=report_directory(out),
        ),
        progress=Progress(line=say),
        launcher=launcher_of(launcher),
        consent=asks(yes=yes),
        max_pairs=read("max-pairs", max_pairs),
    )
    session = comparison.measure(shared.cases, case, k, as_json=shared.as_json)
    worse = [result for result in session.record.results if comparison.options.is_failing(result)]
    if worse:
        if can_be_bisected(session.mode.arms, against, extensions.names(COMMANDS)):
            way = " --dry" if dry else " --counts" if counts else ""
            say(f"To find the commit: perfsuite bisect {worse[0].case_id} --good {against} --bad {arm}{way}")
        raise typer.Exit(1)
    raise typer.Exit(0 if is_decided(session.record) else UNDECIDED)


def can_be_bisected(arms: Sequence[Arm], against: str, installed: Collection[str]) -> bool:
    """Return whether the arms are two commits and nothing else, so that `perfsuite bisect` can help.

    `against` is the text with which the user specified arm A. `installed` are the names of the commands.
    """
    a, b = arms
    are_commits = a.commit is not None and b.commit is not None and a.commit != b.commit
    return are_commits and " " not in against and "bisect" in installed
