"""`perfsuite compare` and `dry-run`, and what the commands share that measure cases.

They are `pytest --perf-against` and `pytest --perf-dry` without a test.
"""

import contextlib
import errno
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import hardware_error
from perfsuite.dry import cases as found
from perfsuite.dry.machine import Device
from perfsuite.errors import AllocationOverError, BusyError, CaseError, told
from perfsuite.launch.launchers import launcher as launcher_of
from perfsuite.report.progress import Progress
from perfsuite.report.terminal import console
from perfsuite.report.text import relative
from perfsuite.results.session_file import Measurement, Status
from perfsuite.session import outputs
from perfsuite.session.against_arm import by_counts, by_times, resolved
from perfsuite.session.against_baseline import dry_session
from perfsuite.session.option_table import BY_NAME, fraction, options_of
from perfsuite.session.session import Session, session_file
from perfsuite.session.setup import Options

CASES = Path("bench_cases")
UNDECIDED = 3
"""Exit status where no case is slower, and one is not decided: inconclusive, or on an unhealthy machine."""
MOST_TOLERANCE = 0.5


def say(text: str) -> None:
    """Print a line of progress, apart from the result."""
    typer.echo(text, err=True)


def option(name: str) -> Any:
    """An option that pytest has, too, as one of a command."""
    row = BY_NAME[name]
    return typer.Option(f"--{name}", help=row.help_with_default, metavar=row.metavar or None)


def directory(name: str, description: str) -> Any:
    """An option for a directory, there or not. A name that is too long is the system's `OSError`."""
    return typer.Option(f"--{name}", help=description, callback=_possible)


def _possible(path: Path) -> Path:
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # Python 3.13 finds nothing in such a directory, and is content
            raise
    return path


def tolerance(text: str) -> float:
    """Read `1%` or `0.01`, above 0 and up to `MOST_TOLERANCE`."""
    if not 0 < (value := fraction(text)) <= MOST_TOLERANCE:
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
Launcher = Annotated[str | None, option("launcher")]
WaitQuiet = Annotated[str | None, option("wait-quiet")]
MaxPairs = Annotated[str | None, option("max-pairs")]
Inject = Annotated[str | None, option("inject")]
Report = Annotated[str | None, option("report")]


DryWay = Annotated[bool, typer.Option("--dry", help="by what a step does, in one dry run of each arm")]
CountsWay = Annotated[bool, typer.Option("--counts", help="by what a step does, in one launch of each arm")]
TimesWay = Annotated[bool, typer.Option("--times", help="by times and memory of pairs of launches (default)")]


def compare(
    against: Annotated[str, option("against")],
    arm: Annotated[str, typer.Option(help="what may be slower; without it this environment, as it is")] = ".",
    case: Ids = None,
    k: Expression = None,
    dry: DryWay = False,
    counts: CountsWay = False,
    times: TimesWay = False,
    cases: Cases = CASES,
    tolerance: Tolerance = None,
    max_pairs: MaxPairs = None,
    inject: Inject = None,
    report: Report = None,
    json_output: AsJson = False,
    store: LocalStore = None,
    launcher: Launcher = None,
    wait_quiet: WaitQuiet = None,
) -> None:
    """Which of two environments is slower, or does more in a step? No baseline is needed.

    With several of --dry, --counts and --times each case takes the first of them that can tell.

    Exit status 1 if a case is worse in arm B, or fails; 3 if none is, and one is not decided.
    """
    if dry and inject is not None:
        raise CaseError("--dry with --inject: a dry run only counts; leave one of them out")
    if (dry or counts) and not times:
        refuse_without_times({"tolerance": tolerance, "max-pairs": max_pairs}, "add --times")
    chosen = options(store=store, inject=inject, wait_quiet=wait_quiet, report=report)
    progress, launches = Progress(line=say), launcher_of(launcher)
    arms = a, b = resolved(chosen, (("--against", against), ("--arm", arm)))
    pairs = read("max-pairs", max_pairs)
    ways: dict[str, Callable[[], Session]] = {}
    if dry:
        ways["dry runs"] = lambda: by_counts(chosen, progress, None, arms)
    if counts:
        ways["counts of one launch of each arm"] = lambda: by_counts(chosen, progress, launches, arms)
    if times or not ways:
        ways["times"] = lambda: by_times(
            chosen, progress, launches, arms, max_pairs=pairs, tolerance=tolerance
        )
    left = selected(cases, case, k)
    with _shown(json_output=json_output) as sessions:
        for way, begun in ways.items():
            session, is_last = begun(), way == [*ways][-1]
            fits = fitting(session, left)
            if is_last and session.skipped and k is None:
                raise CaseError(f"{session.skipped[0].case_id}: {session.skipped[0].reason}")
            sessions[way] = session
            progress.cases += len(fits)
            _measure(session, fits)
            if not is_last:  # the next way takes what this one cannot tell
                session.skipped, session.results = [], list(filter(_tells, session.results))
                told = {each.case_id for each in session.results}
                left = [each for each in left if each.id not in told]
    results = [result for session in sessions.values() for result in session.results]
    if worse := [*filter(chosen.is_failing, results)]:
        if None not in (a.commit, b.commit) and a.commit != b.commit and " " not in against:
            way = " --dry" if worse[0].dry else " --counts" if worse[0].by_counts else ""
            say(f"Which commit did it: perfsuite bisect {worse[0].case_id} --good {against} --bad {arm}{way}")
        raise typer.Exit(1)
    is_decided = [result.outcome in ("passed", "improved") for result in results]
    raise typer.Exit(0 if is_decided and all(is_decided) else UNDECIDED)


def refuse_without_times(of_times: Mapping[str, object], instead: str) -> None:
    """Raise `CaseError` if an option that only times have was given, by its name, for counts alone."""
    for name, value in of_times.items():
        if value is not None:
            raise CaseError(
                f"--{name} is for times, and counts are compared exactly: {instead}, or leave it out"
            )


def _tells(result: Measurement) -> bool:
    """Whether nothing dearer is needed: a dry run that fails in arm A, too, is no verdict on arm B."""
    if result.dry and (result.verdict.failure == "not_dry" or any(run.failure for run in result.before)):
        return False
    return result.outcome not in ("inconclusive", "unhealthy")


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
    session = dry_session(
        options(store=store, baselines=baselines), progress, device, None if rank is None else (rank,)
    )
    fits = chosen if k is None else fitting(session, chosen)  # one that is named tells itself why not
    progress.cases = len(fits)
    with _shown(json_output=json_output) as sessions:
        sessions["dry runs"] = session
        refused = _measure(session, fits)
    if refused:
        raise typer.Exit(2)
    if any(map(session.setup.options.is_failing, session.results)):
        raise typer.Exit(1)


def read(name: str, value: str | None) -> Any:
    """What the value of a shared option means. Raises `CaseError` for a bad one."""
    return BY_NAME[name].read(f"--{name}", value)


def options(**given: str | None) -> Options:
    """The options of a session in this directory, of the values of shared options."""
    names = {name.replace("_", "-"): value for name, value in given.items()}
    return options_of(Path.cwd(), {name: read(name, value) for name, value in names.items()})


def check_asked(hardware: str, cases: Path) -> None:
    """Raise `CaseError` for a marker of no hardware, or a directory of cases that there is not."""
    if (error := hardware_error(hardware)) is not None:
        raise CaseError(f"--hardware {hardware}: {error}")
    if not cases.is_dir():
        raise CaseError(f"--cases {cases}: no such directory. Name the one that holds your cases")


def selected(directory: Path, ids: list[str] | None, expression: str | None) -> list[Case]:
    """Return the cases of a directory by their ids, or by an expression. Raises `CaseError` for neither."""
    if bool(ids) == (expression is not None):
        raise CaseError("name the cases by their ids, or select them by -k: one of both")
    if not directory.exists():
        raise CaseError(f"--cases {directory}: no such directory. Name the one that holds your cases")
    return found.by_id(directory, ids) if ids else found.by_expression(directory, str(expression))


def _measure(session: Session, cases: list[Case]) -> int:
    """Measure cases one after another. Returns how many could not be."""
    refused = 0
    try:
        for case in cases:
            try:
                session.measure(case, case.id)
            except (AllocationOverError, BusyError):
                raise
            except Exception as error:  # a failed result; the others may do better
                refused += 1
                why = told(error)
                say(why if case.id in why else f"{case.id}: {why}")
    finally:
        session.setup.lock.release()
    return refused


def fitting(session: Session, cases: list[Case]) -> list[Case]:
    """Return the cases that can be run here. The others are told, and skipped."""
    reasons = [(case, session.setup.host.why_not(case)) for case in cases]
    for case, reason in reasons:
        if reason is not None:
            session.record_skip(case, case.id, reason)
            say(f"{case.id}: {reason}")
    return [case for case, reason in reasons if reason is None]


@contextlib.contextmanager
def _shown(*, json_output: bool) -> Iterator[dict[str, Session]]:
    """Print and write at the end what the sessions found that were put in, by their names if several did.

    An interrupt, or the end of an allocation, leaves what was found until then.
    """
    sessions: dict[str, Session] = {}
    status: Status = "interrupted"
    try:
        yield sessions
        status = "complete"
    finally:
        if sessions:
            _show(sessions, status, json_output=json_output)


def _show(sessions: Mapping[str, Session], status: Status, *, json_output: bool) -> None:
    if json_output:
        files = [documents.plain(session_file(session, status)) for session in sessions.values()]
        typer.echo(json.dumps(files if len(files) > 1 else files[0], indent=1))
    else:
        out = console()
        width = max(out.width, 80) if out.is_terminal else None
        for name, session in sessions.items():
            if len(sessions) > 1:
                if not (session.results or session.skipped):
                    continue
                typer.echo(f"\nby {name}:")
            for line in outputs.lines(session, whole=True, color=out.is_terminal, width=width):
                typer.echo(relative(line, Path.cwd()))
    outputs.write_files(list(sessions.values()), status)
