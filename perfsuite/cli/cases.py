"""`perfsuite compare`, `dry-run` and `plan`, and the common parts of commands that measure cases.

The first two are `pytest --perf-against` and `pytest --perf-dry` without a test.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from perfsuite.bisection import MOST_TOLERANCE
from perfsuite.case.case import Case
from perfsuite.case.hardware import hardware_error
from perfsuite.dry import cases as found
from perfsuite.dry.machine import Device
from perfsuite.errors import AllocationOverError, CaseError, told
from perfsuite.launch import launchers
from perfsuite.launch.base import Launcher as AnyLauncher
from perfsuite.launch.installed import Consent
from perfsuite.report import summary
from perfsuite.report.console import console, plain_table, print_rows
from perfsuite.report.progress import Progress
from perfsuite.report.safe_text import printable
from perfsuite.report.text import plural, relative
from perfsuite.results.session_file import Status
from perfsuite.results.store import CASES, Store
from perfsuite.session import outputs
from perfsuite.session.against_arm import AgainstArm, ByDryRuns, by_counts, by_times, resolved
from perfsuite.session.case_changes import Selection, case_changes
from perfsuite.session.dry import dry_session
from perfsuite.session.option_table import BY_NAME, fraction, options_of
from perfsuite.session.plan import Planned, budget_for, past_of, planned
from perfsuite.session.session import Session, session_file
from perfsuite.session.setup import DryHost, Host, Options, Setup

NOT_KNOWN = "not known"
UNDECIDED = 3  # exit status: no case is slower, but one is undecided (inconclusive or unhealthy)


def say(text: str) -> None:
    """Print a line of progress on standard error, apart from the result."""
    typer.echo(printable(text), err=True)


def option(name: str) -> Any:
    """Return an option of pytest as an option of a command."""
    row = BY_NAME[name]
    return typer.Option(f"--{name}", help=row.help_with_default, metavar=row.metavar or None)


def launcher_of(name: str | None) -> AnyLauncher:
    """Return the launcher that `--launcher` names, or the default one; say which ones cannot be used."""
    for problem in launchers.installed().problems.values():
        say(problem)
    return launchers.launcher(name)


def tolerance(text: str) -> float:
    """Parse `1%` or `0.01`, above 0 and up to `MOST_TOLERANCE`."""
    value = fraction(text)
    if not 0 < value <= MOST_TOLERANCE:
        allowed = f"expected above 0% and up to {MOST_TOLERANCE:.0%}, in percent or as a fraction: 1% or 0.01"
        raise typer.BadParameter(f"{text!r}, {allowed}")
    return value


Ids = Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="ids of cases")]
Expression = Annotated[str | None, typer.Option("-k", help="pytest's expression in place of ids")]
Cases = Annotated[Path, typer.Option("--cases", help="directory of the cases")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines: print what --perf-json writes")]
RowsAsJson = Annotated[bool, typer.Option("--json", help="for machines: print the rows as JSON")]
Hardware = Annotated[str, typer.Option(help="the marker of the cases: h100")]
PytestOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- PYTEST OPTIONS]...", help="more options of pytest, which win over its own"),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        parser=tolerance,
        metavar="SHARE",
        help="growth of the time per token that matters: 3% (default: as for baselines)",
    ),
]
LocalStore = Annotated[str | None, option("store")]
Baselines = Annotated[str | None, option("baselines")]
Reviewed = Annotated[Path, typer.Option("--baselines", help="Directory of reviewed baselines.")]
Launcher = Annotated[str | None, option("launcher")]
WaitQuiet = Annotated[str | None, option("wait-quiet")]
MaxPairs = Annotated[str | None, option("max-pairs")]
Yes = Annotated[bool, typer.Option("--yes", help="download more than 1 GB of packages without asking")]
Inject = Annotated[str | None, option("inject")]
Report = Annotated[str | None, option("report")]


DryWay = Annotated[bool, typer.Option("--dry", help="by what a step does, in one dry run of each arm")]
CountsWay = Annotated[bool, typer.Option("--counts", help="by what a step does, in one launch of each arm")]


def compare(
    against: Annotated[str | None, option("against")] = None,
    arm: Annotated[str, typer.Option(help="what may be slower; without it this environment, as it is")] = ".",
    case: Ids = None,
    k: Expression = None,
    dry: DryWay = False,
    counts: CountsWay = False,
    cases: Cases = CASES,
    tolerance: Tolerance = None,
    max_pairs: MaxPairs = None,
    inject: Inject = None,
    report: Report = None,
    json_output: AsJson = False,
    store: LocalStore = None,
    launcher: Launcher = None,
    wait_quiet: WaitQuiet = None,
    yes: Yes = False,
) -> None:
    """Which of two environments is slower, or does more in a step? No baseline is needed.

    Exit status 1 if a case is worse in arm B, or fails; 3 if none is, and one is not decided.
    """
    if against is None:
        raise CaseError("nothing is named to compare with: add --against main, or another arm")
    if dry and inject is not None:
        raise CaseError("--dry with --inject: a dry run only counts; leave one of them out")
    check_way(dry=dry, counts=counts, of_times={"tolerance": tolerance, "max-pairs": max_pairs})
    chosen = options(store=store, inject=inject, wait_quiet=wait_quiet, report=report)
    progress = Progress(line=say)
    launches = launcher_of(launcher)
    pairs = read("max-pairs", max_pairs)
    asked = selected(cases, case, k)
    host = DryHost() if dry else Host(launches, chosen.store)
    if not runnable(host, asked, are_named=k is None):  # before anything is installed for an arm
        setup = Setup(chosen, progress, host)
        session = Session(setup, ByDryRuns(setup) if dry else AgainstArm(setup))
        session.waivers = ()
        fitting(session, asked)
        _measure(session, [], json_output=json_output)
        raise typer.Exit(UNDECIDED)
    arms = a, b = resolved(chosen, (("--against", against), ("--arm", arm)), asks(yes=yes))
    if dry or counts:
        session = by_counts(chosen, progress, None if dry else launches, arms)
    else:
        session = by_times(chosen, progress, launches, arms, max_pairs=pairs, tolerance=tolerance)
    if not dry:
        session.setup.host = host  # it has already examined the machine
    fits = fitting(session, asked)
    if session.skipped and k is None:
        raise CaseError(f"{session.skipped[0].case_id}: {session.skipped[0].reason}")
    progress.cases = len(fits)
    words = () if k is None else ("-k", k)
    wanted = Selection(paths=(cases,), words=words, asked=k is not None, is_directory_of_cases=True)
    session.case_changes, session.cases_unknown = case_changes(arms, wanted, chosen.store)
    _measure(session, fits, json_output=json_output)
    worse = [*filter(chosen.is_failing, session.results)]
    if worse:
        if None not in (a.commit, b.commit) and a.commit != b.commit and " " not in against:
            way = " --dry" if dry else " --counts" if counts else ""
            say(f"Which commit did it: perfsuite bisect {worse[0].case_id} --good {against} --bad {arm}{way}")
        raise typer.Exit(1)
    is_decided = [result.outcome in ("passed", "improved") for result in session.results]
    is_decided.append(session.has_all_cases)
    raise typer.Exit(0 if session.results and all(is_decided) else UNDECIDED)


def asks(*, yes: bool) -> Consent:
    """Return a function that announces a download of pip and, on a terminal, asks before a large one."""

    def consent(text: str, is_large: bool) -> bool:
        is_allowed = yes or not is_large
        if not is_allowed and not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False  # nobody can answer, and the error gives the size
        say(text)
        return is_allowed or typer.confirm("Download that much?", err=True)

    return consent


def check_way(*, dry: bool, counts: bool, of_times: Mapping[str, object]) -> None:
    """Raise `CaseError` for two ways at once, or for counts with options `of_times`, which are by name."""
    if dry and counts:
        raise CaseError("--dry with --counts: arms are compared one way; leave one of them out")
    for name, value in of_times.items():
        if (dry or counts) and value is not None:
            raise CaseError(f"--{name} is for times, and counts are compared exactly: leave it out")


def dry_run(
    case: Ids = None,
    k: Expression = None,
    rank: Annotated[
        int | None, typer.Option(help="the rank to run (default: those that tell what all do)")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="what to pretend (default: the GPU that the case is meant for)")
    ] = None,
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
    session = dry_session(options(store=store, baselines=baselines), progress, device, ranks)
    fits = chosen if k is None else fitting(session, chosen)  # a named case reports its own reason
    progress.cases = len(fits)
    if _measure(session, fits, json_output=json_output):
        raise typer.Exit(2)
    if any(map(session.setup.options.is_failing, session.results)):
        raise typer.Exit(1)


def plan(
    hardware: Hardware,
    k: Annotated[str, typer.Option("-k", help="only cases that pytest's expression selects, too")] = "",
    budget: Annotated[str | None, option("budget")] = None,
    as_json: RowsAsJson = False,
    cases: Cases = CASES,
    store: LocalStore = None,
) -> None:
    """What does each case cost in minutes and GPU hours, and in which order does a budget take them?

    By the launches in the store. A case that was never measured is expected to take what others on as many
    GPUs took (`~`). Nothing is launched.
    """
    check_asked(hardware, cases)
    most_s = read("budget", budget)
    chosen = found.by_expression(cases, k, hardware)
    past = past_of(Store(options(store=store).store).results())
    order = planned(chosen, past, datetime.now(UTC).date())
    limit = None if most_s is None else budget_for(order, most_s)
    grid = plain_table(("case", "last", "measured", "minutes", "GPU hours", "reached after"))
    rows = list[dict[str, object]]()
    never = list[str]()
    reached = list[Planned]()
    used = 0.0
    for each in order:
        cost = each.seconds
        before = each.past
        fits = most_s is None or used + (cost or 0.0) <= most_s
        if fits:
            reached.append(each)
            used += cost or 0.0
        # After a case of unknown cost, the beginning of the next one is unknown.
        is_known = all(done.seconds is not None for done in reached)
        last, day = ("never", "") if before is None else (before.outcome, before.started_at[:10])
        about = "~" if before is None else ""
        minutes = NOT_KNOWN if cost is None else f"{about}{cost / 60:,.1f}"
        of_gpus = NOT_KNOWN if each.gpu_hours is None else f"{about}{each.gpu_hours:,.1f}"
        after = "not reached"
        if fits:
            after = f"{used / 60:,.1f} min" if is_known else NOT_KNOWN
        grid.add_row(each.case.id, last, day, minutes, of_gpus, after)
        known = {"outcome": last, "day": day} if before else {"outcome": None, "day": None}
        costs = {"expected_s": cost, "gpu_hours": each.gpu_hours}
        reached_after = used if fits and is_known else None
        rows.append({"case": each.case.id, **known, **costs, "reached_after_s": reached_after})
        if limit is not None and cost is not None and cost > limit.seconds:
            never.append(f"{each.case.id}: {limit.told(each.case)}")
    print_rows(rows, grid, as_json=as_json)
    if as_json:
        return
    within = "" if most_s is None else f" of {len(order)} within {budget}"
    console().print("\n".join([*never, f"{plural(len(reached), 'case')}{within}: {total(reached)}"]))


def total(cases: Sequence[Planned]) -> str:
    """Return the total cost of cases, and the number of those whose cost is unknown."""
    known = [each for each in cases if each.seconds is not None]
    if not known:
        return "no cost is known" if cases else "0.0 min, 0.0 GPU hours"
    seconds = sum(each.seconds or 0.0 for each in known)
    hours = sum(each.gpu_hours or 0.0 for each in known)
    left = len(cases) - len(known)
    more = f" and {plural(left, 'case')} of unknown cost" if left else ""
    return f"{seconds / 60:,.1f} min, {hours:,.1f} GPU hours{more}"


def read(name: str, value: str | None) -> Any:
    """Parse the value of a shared option. Raises `CaseError` for a bad one."""
    return BY_NAME[name].read(f"--{name}", value)


def options(**given: str | None) -> Options:
    """Return the options of a session in this directory, from the values of shared options."""
    names = {name.replace("_", "-"): value for name, value in given.items()}
    return options_of(Path.cwd(), {name: read(name, value) for name, value in names.items()})


def check_asked(hardware: str, cases: Path) -> None:
    """Raise `CaseError` for an unknown hardware marker, or a missing directory of cases."""
    error = hardware_error(hardware)
    if error is not None:
        raise CaseError(f"--hardware {hardware}: {error}")
    if not cases.is_dir():
        raise CaseError(f"--cases {cases}: no such directory. Name the one that holds your cases")


def selected(directory: Path, ids: list[str] | None, expression: str | None) -> list[Case]:
    """Select the cases of a directory by id, or by expression. Raises `CaseError` for both, or neither."""
    if ids and expression is not None:
        raise CaseError("give case ids or -k, not both")
    if not ids and expression is None:
        raise CaseError("no case is named: give case ids or -k EXPRESSION")
    return found.by_id(directory, ids) if ids else found.by_expression(directory, str(expression))


def runnable(host: Host, cases: list[Case], *, are_named: bool) -> list[Case]:
    """Return the cases that `host` can run. Raises `CaseError` for one that it cannot, if `are_named`."""
    found = []
    for case in cases:
        reason = host.why_not(case)
        if reason is None:
            found.append(case)
        elif are_named:
            raise CaseError(f"{case.id}: {reason}")
    return found


def fitting(session: Session, cases: list[Case]) -> list[Case]:
    """Return the cases that can be run here. Report the others, and record them as skipped."""
    reasons = [(case, session.setup.host.why_not(case)) for case in cases]
    for case, reason in reasons:
        if reason is not None:
            session.record_skip(case, case.id, reason)
            say(f"{case.id}: {reason}")
    return [case for case, reason in reasons if reason is None]


def _measure(session: Session, cases: list[Case], *, json_output: bool) -> int:
    """Measure cases one after another, print and write the results, and return the number of errors."""
    refused = 0
    status: Status = "interrupted"
    before = signal.signal(signal.SIGTERM, _end)  # a cancelled job also leaves its results so far
    try:
        for case in cases:
            try:
                session.measure(case, case.id)
            except AllocationOverError:
                raise
            except Exception as error:  # it is a failed result; other cases may succeed
                refused += 1
                why = told(error)
                say(why if case.id in why else f"{case.id}: {why}")
        status = "complete"
    finally:  # an interrupt, or the end of an allocation, also leaves the results so far
        session.setup.lock.release()
        try:
            _show(session, status, json_output=json_output)
        finally:
            signal.signal(signal.SIGTERM, before)
    return refused


def _end(number: int, frame: object) -> None:
    """End this command with an exception, so that its results are written."""
    raise SystemExit(128 + number)


def _show(session: Session, status: Status, *, json_output: bool) -> None:
    shown = session_file(session, status)
    interruption = summary.interruption(shown)
    if interruption is not None:
        say(interruption)
    if json_output:
        typer.echo(shown.as_json(), nl=False)
    else:
        out = console()
        width = max(out.width, 80) if out.is_terminal else None
        found = outputs.lines(session, whole=True, color=out.is_terminal, width=width)
        changed = summary.case_changes(shown)
        for line in [*found, *([""] if changed else []), *changed]:
            typer.echo(relative(line, Path.cwd()))
    outputs.write_files(session, status)
