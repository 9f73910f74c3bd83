"""`perfsuite bisect`: find the commit, or the version of a package, with which a case became slower."""

import json
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import bisection as searching
from perfsuite import documents
from perfsuite.bisection import BisectFile, Step
from perfsuite.cli import cases as shared
from perfsuite.inputs.git import git
from perfsuite.launch.arm import Arm
from perfsuite.report.progress import Progress
from perfsuite.report.text import between, percent, plural
from perfsuite.results.metric import described
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.results.store import CASES
from perfsuite.session.against_arm import by_counts, by_times
from perfsuite.session.session import session_file
from perfsuite.session.setup import DryHost, Host


def bisect(
    case: Annotated[str, typer.Argument(help="the id of the case")],
    good: Annotated[str, typer.Option(help="an arm that is fast enough: a commit; see perfsuite compare")],
    bad: Annotated[str, typer.Option(help="an arm that is slower; this environment, as committed")] = ".",
    package: Annotated[
        str | None, typer.Option(help="search the versions of this package: --good and --bad are two of them")
    ] = None,
    dry: shared.DryWay = False,
    counts: shared.CountsWay = False,
    cases: shared.Cases = CASES,
    tolerance: shared.Tolerance = None,
    max_pairs: shared.MaxPairs = None,
    json_output: Annotated[bool, typer.Option("--json", help="for machines: every step")] = False,
    store: shared.LocalStore = None,
    launcher: shared.Launcher = None,
    wait_quiet: shared.WaitQuiet = None,
    yes: shared.Yes = False,
) -> None:
    """Since which commit, or which version of a package, is a case slower? Goes on where it was cut short.

    With --dry or --counts: since when does a step of it do more? Each commit then takes one run.

    Exit status 0 if that is found; 3 if several are left, as the others could not be told apart, or if noise
    hides whether the bad arm is slower.
    """
    shared.check_way(dry=dry, counts=counts, of_times={"tolerance": tolerance, "max-pairs": max_pairs})
    root = Path.cwd()
    most = shared.read("max-pairs", max_pairs)
    options = shared.options(store=store, wait_quiet=wait_quiet)
    [chosen] = shared.selected(cases, [case], None)
    launches = None if dry else shared.launcher_of(launcher)
    host = DryHost() if launches is None else Host(launches, options.store)
    shared.runnable(host, [chosen], are_named=True)  # before anything is installed for an arm
    if package is None:
        history = searching.of_commits(good, bad, root=root, store=options.store)
    else:
        where = {"root": root, "store": options.store}
        history = searching.of_versions(package, good, bad, **where, consent=shared.asks(yes=yes))
    machine_class = host.machine_for(chosen).hardware_class
    file, known = searching.begun(options.store, chosen, history, tolerance, machine_class, dry, counts, most)
    if known.steps:
        shared.say(f"{len(known.steps)} steps are known from {file}")

    good_run: list[Run] = []

    def compare(a: Arm, b: Arm, known: BisectFile) -> Measurement:
        progress = Progress(line=shared.say, cases=1)
        if launches is None or counts:
            known_a = good_run[0] if good_run else None
            session = by_counts(options, progress, launches, (a, b), known_a, known.metric)
        else:
            how = {"max_pairs": most, "tolerance": known.tolerance, "metric": known.metric}
            session = by_times(options, progress, launches, (a, b), **how, explains=False)
        try:
            result = session.measure(chosen, chosen.id)
            documents.write(session.directory.results, session_file(session, "complete"))
            good_run[:] = result.before[:1]
            return result
        finally:
            session.setup.lock.release()

    found = known
    try:
        for found in searching.search(known, history, compare):
            documents.write(file, found)
            step = found.steps[-1]
            left = plural(len(found.suspects), "suspect")
            shared.say(f"{_name(step.name)}: {as_text(step)}; {left} left")
    except searching.UndecidedError as error:
        shared.say(str(error))
        raise typer.Exit(shared.UNDECIDED) from None
    if json_output:
        typer.echo(json.dumps(documents.plain(found), indent=1))
    else:
        typer.echo("\n".join(result_lines(found, package, root)))
    raise typer.Exit(0 if len(found.suspects) == 1 else shared.UNDECIDED)


def _name(name: str) -> str:
    return name if len(name) < 40 else name[:12]  # a version in full, a commit abbreviated


def as_text(step: Step) -> str:
    """Describe the result of a step."""
    if step.change is None:
        return f"{step.outcome} ({step.why})"
    interval = "" if step.interval is None else f" (99 % interval {between(step.interval)})"
    return f"{step.outcome}, {percent(step.change)}{interval}, {plural(step.launches, 'launch')}"


def result_lines(found: BisectFile, package: str | None, root: Path) -> list[str]:
    """Describe the result of a search in lines of text."""
    *others, first = found.suspects
    launches = sum(step.launches for step in found.steps)
    used = f"{plural(len(found.steps), 'step')}, {plural(launches, 'launch')}"
    skipped = [
        f"  skipped: {_name(step.name)}: {step.why}" for step in found.steps if step.outcome == "skipped"
    ]
    if others:
        names = ", ".join(map(_name, found.suspects))
        return [f"one of these is the first bad one: {names} ({used})", *skipped]
    assert found.metric is not None
    step = next(step for step in found.steps if step.name == first)
    told = f"version of {package}: {first}"
    if package is None:
        told = "commit: " + git("log", "-1", "--format=%H %an %as%n    %s", first, cwd=root).rstrip()
    label = f"{described(found.metric).label}: " if step.change is not None else ""
    change = f"{label}{as_text(step)}, compared with {_name(found.good)}"
    return [f"the first bad {told}", f"  {change} ({used})", *skipped]
