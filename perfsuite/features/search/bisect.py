"""`perfsuite bisect`: find the commit, or the version of a package, that made a case slower."""

import json
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.cli.shared import (
    CountsWay,
    DryWay,
    Launcher,
    MaxPairs,
    Tolerance,
    WaitQuiet,
    Yes,
    asks,
    check_way,
    launcher_of,
    read,
)
from perfsuite.cli.shared import options as options_of_session
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.features.search import bisection as searching
from perfsuite.features.search.bisection import BisectFile, CandidateResult
from perfsuite.inputs.git import git
from perfsuite.launch.arm import Arm
from perfsuite.report.console import say
from perfsuite.report.progress import Progress
from perfsuite.report.text import between, percent, plural
from perfsuite.results.metric import described
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.session.against_arm import by_counts, by_times
from perfsuite.session.by_command import UNDECIDED, runnable, selected
from perfsuite.session.setup import DryHost, Host


@shares("cases", "store", "as_json")
def bisect(
    *,
    case: Annotated[str, typer.Argument(help="Id of the case.")],
    good: Annotated[str, typer.Option(help="Arm that is fast enough, such as a commit (see compare).")],
    bad: Annotated[
        str, typer.Option(help="Arm that is slower (default: this environment at its commit).")
    ] = ".",
    package: Annotated[
        str | None,
        typer.Option(
            help="Search the versions of this package. --good and --bad are then two of its versions."
        ),
    ] = None,
    dry: DryWay = False,
    counts: CountsWay = False,
    tolerance: Tolerance = None,
    max_pairs: MaxPairs = None,
    launcher: Launcher = None,
    wait_quiet: WaitQuiet = None,
    yes: Yes = False,
    shared: Shared,
) -> None:
    """Find the commit, or the version of a package, that made a case slower.

    With --dry or --counts, find the first commit with which a step does more work. Each commit then needs
    only one run.

    To continue a search that was interrupted, run the same command again. The exit status is 3 if the search
    ends with several suspects because some commits could not be decided, or if noise hides whether the bad
    arm is slower.
    """
    check_way(dry=dry, counts=counts, of_times={"tolerance": tolerance, "max-pairs": max_pairs})
    root = Path.cwd()
    most = read("max-pairs", max_pairs)
    options = options_of_session(store=shared.store, wait_quiet=wait_quiet, tolerance=tolerance)
    [chosen] = selected(shared.cases, [case], None)
    launches = None if dry else launcher_of(launcher)
    host = DryHost() if launches is None else Host(launches, options.store)
    runnable(host, [chosen], are_named=True)  # before anything is installed for an arm
    if package is None:
        history = searching.of_commits(good, bad, root=root, store=options.store)
    else:
        where = {"root": root, "store": options.store}
        history = searching.of_versions(package, good, bad, **where, consent=asks(yes=yes))
    machine_class = host.machine_for(chosen).hardware_class
    file, begun = searching.begun(options.store, chosen, history, tolerance, machine_class, dry, counts, most)
    if begun.steps:
        say(f"{len(begun.steps)} steps of this search are already known from {file}")

    good_run: list[Run] = []

    def compare(a: Arm, b: Arm, state: BisectFile) -> Measurement:
        progress = Progress(line=say, cases=1)
        if launches is None or counts:
            known_a = good_run[0] if good_run else None
            session = by_counts(options, progress, launches, (a, b), known_a, state.metric)
        else:
            how = {"max_pairs": most, "tolerance": state.tolerance, "metric": state.metric}
            session = by_times(options, progress, launches, (a, b), **how, explains=False)
        try:
            result = session.measure(chosen, chosen.id)
            documents.write(session.record.directory.results, session.record.session_file("complete"))
            good_run[:] = result.before[:1]
            return result
        finally:
            session.setup.lock.release()

    state = begun
    try:
        for state in searching.search(begun, history, compare):
            documents.write(file, state)
            step = state.steps[-1]
            left = plural(len(state.suspects), "suspect")
            say(f"{_name(step.name)}: {as_text(step)}; {left} left")
    except searching.UndecidedError as error:
        say(str(error))
        raise typer.Exit(UNDECIDED) from None
    if shared.as_json:
        typer.echo(json.dumps(documents.plain(state), indent=1))
    else:
        typer.echo("\n".join(result_lines(state, package, root)))
    raise typer.Exit(0 if len(state.suspects) == 1 else UNDECIDED)


def _name(name: str) -> str:
    return name if len(name) < 40 else name[:12]  # abbreviate commits, but not versions


def as_text(step: CandidateResult) -> str:
    """Describe the result of a step of the search."""
    if step.change is None:
        return f"{step.outcome} ({step.why})"
    interval = "" if step.interval is None else f" (99% interval {between(step.interval)})"
    return f"{step.outcome}, {percent(step.change)}{interval}, {plural(step.launches, 'launch')}"


def result_lines(state: BisectFile, package: str | None, root: Path) -> list[str]:
    """Describe the result of a search in lines of text."""
    *others, first = state.suspects
    launches = sum(step.launches for step in state.steps)
    used = f"{plural(len(state.steps), 'step')}, {plural(launches, 'launch')}"
    skipped = [
        f"  skipped: {_name(step.name)}: {step.why}" for step in state.steps if step.outcome == "skipped"
    ]
    if others:
        names = ", ".join(map(_name, state.suspects))
        return [f"one of these made the case worse: {names} ({used})", *skipped]
    assert state.metric is not None
    step = next(step for step in state.steps if step.name == first)
    first_bad = f"version of {package}: {first}"
    if package is None:
        first_bad = "commit: " + git("log", "-1", "--format=%H %an %as%n    %s", first, cwd=root).rstrip()
    label = f"{described(state.metric).label}: " if step.change is not None else ""
    change = f"{label}{as_text(step)}, compared with {_name(state.good)}"
    return [f"the first bad {first_bad}", f"  {change} ({used})", *skipped]
