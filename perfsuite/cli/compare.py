"""`perfsuite compare`: compare two arms, like `pytest --perf-against` but without a test."""

from collections.abc import Collection
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
from perfsuite.session.against_arm import AgainstArm, ByDryRuns, by_counts, by_times, resolved
from perfsuite.session.by_command import UNDECIDED, fitting, measured, runnable, selected
from perfsuite.session.case_changes import Selection, case_changes
from perfsuite.session.record import Record
from perfsuite.session.session import Session
from perfsuite.session.setup import DryHost, Host, Setup


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
    chosen = options(
        store=shared.store,
        counted_steps=counted_steps,
        interconnect=interconnect,
        tolerance=tolerance,
        inject=inject,
        wait_quiet=wait_quiet,
        report=report_directory(out),
    )
    progress = Progress(line=say)
    launches = launcher_of(launcher)
    pairs = read("max-pairs", max_pairs)
    if not case and k is None:
        k = ""  # all cases of the directory
    asked = selected(shared.cases, case, k)
    host = DryHost() if dry else Host(launches, chosen.store)
    # Check this before anything is installed for an arm.
    if not runnable(host, asked, are_named=k is None):
        setup = Setup(chosen, progress, host)
        session = Session(ByDryRuns(setup) if dry else AgainstArm(setup))
        fitting(session, asked)
        measured(session, [], as_json=shared.as_json)
        raise typer.Exit(UNDECIDED)
    words = (("--against", against), ("--arm", arm))
    arms = a, b = resolved(chosen, words, asks(yes=yes), driver=None if dry else host.machine.driver)
    if dry or counts:
        session = by_counts(chosen, progress, None if dry else launches, arms)
    else:
        session = by_times(chosen, progress, launches, arms, max_pairs=pairs)
    if not dry:
        session.setup.host = host  # this host has already examined the machine
    fits = fitting(session, asked)
    if session.record.skipped and k is None:
        raise CaseError(f"{session.record.skipped[0].case_id}: {session.record.skipped[0].reason}")
    progress.cases = len(fits)
    selects = () if k is None else ("-k", k)
    wanted = Selection(paths=(shared.cases,), words=selects, asked=k is not None, is_directory_of_cases=True)
    changes, unknown = case_changes(arms, wanted, chosen.store)
    session.record.case_changes = changes
    session.record.cases_unknown = unknown
    measured(session, fits, as_json=shared.as_json)
    worse = [result for result in session.record.results if chosen.is_failing(result)]
    if worse:
        if can_be_bisected(a, b, against, extensions.names(COMMANDS)):
            way = " --dry" if dry else " --counts" if counts else ""
            say(f"To find the commit: perfsuite bisect {worse[0].case_id} --good {against} --bad {arm}{way}")
        raise typer.Exit(1)
    raise typer.Exit(0 if _is_decided(session.record) else UNDECIDED)


def can_be_bisected(a: Arm, b: Arm, against: str, installed: Collection[str]) -> bool:
    """Return whether the arms are two commits and nothing else, so that `perfsuite bisect` can help.

    `against` has the words of arm A. `installed` are the names of the commands.
    """
    are_commits = a.commit is not None and b.commit is not None and a.commit != b.commit
    return are_commits and " " not in against and "bisect" in installed


def _is_decided(record: Record) -> bool:
    """Return whether every case of both arms was compared, with a clear verdict."""
    is_clear = all(result.outcome in ("passed", "improved") for result in record.results)
    return bool(record.results) and is_clear and record.has_all_cases
