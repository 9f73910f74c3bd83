"""`perfsuite bisect`: finds the commit, or the version of a package, with which a case became slower.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import bisection as searching
from perfsuite import documents
from perfsuite.bisection import BisectFile, Step
from perfsuite.case.case import Case
from perfsuite.cli.cases import (
    CASES,
    Cases,
    Launcher,
    LocalStore,
    MaxPairs,
    WaitQuiet,
    options,
    read,
    say,
    selected,
)
from perfsuite.cli.compare import UNDECIDED, Tolerance
from perfsuite.cli.fraction import fraction
from perfsuite.errors import CaseError
from perfsuite.git import git
from perfsuite.launch.arm import Arm
from perfsuite.launch.launchers import launcher as launcher_of
from perfsuite.report.progress import Progress
from perfsuite.report.text import between, percent, plural
from perfsuite.results.metric import described
from perfsuite.results.session_file import Measurement
from perfsuite.session.against_arm import AgainstArm
from perfsuite.session.host import Host
from perfsuite.session.session import Session, session_file
from perfsuite.session.setup import Setup
from perfsuite.verdict.paired_test import MAX_PAIRS


def bisect(
    case: Annotated[str, typer.Argument(help="the id of the case")],
    good: Annotated[str, typer.Option(help="an arm that is fast enough: a commit; see perfsuite compare")],
    bad: Annotated[str, typer.Option(help="an arm that is slower; this environment, as committed")] = ".",
    package: Annotated[
        str | None, typer.Option(help="search the versions of this package: --good and --bad are two of them")
    ] = None,
    cases: Cases = CASES,
    tolerance: Tolerance = None,
    max_pairs: MaxPairs = None,
    json_output: Annotated[bool, typer.Option("--json", help="for machines: every step")] = False,
    store: LocalStore = None,
    launcher: Launcher = None,
    wait_quiet: WaitQuiet = None,
) -> None:
    """Since which commit, or which version of a package, is a case slower? Goes on where it was cut short.

    Exit status 0 if that is found; 3 if several are left, as the others could not be told apart, or if noise
    hides whether the bad arm is slower.
    """
    root = Path.cwd()
    least = None if tolerance is None else fraction("--tolerance", tolerance)
    most = read("max-pairs", max_pairs) or MAX_PAIRS
    chosen_options = options(store=store, wait_quiet=wait_quiet)
    directory = chosen_options.store
    [chosen] = selected(cases, [case], None)
    if package is None:
        history = searching.of_commits(good, bad, root=root, store=directory)
    else:
        history = searching.of_versions(package, good, bad, root=root, store=directory)
    host = Host(launcher_of(launcher), directory)
    if (reason := host.why_not(chosen)) is not None:
        raise CaseError(f"{case}: {reason}")
    file = searching.state_file(
        directory,
        chosen,
        history,
        history.arm(history.good),
        host.machine_for(chosen).hardware_class,
        tolerance,
        most,
    )
    known = searching.begun(file, case, history)
    if known.steps:
        say(f"{len(known.steps)} steps are known from {file}")

    def compare(a: Arm, b: Arm, tolerance: float | None, metric: str | None) -> Measurement:
        setup = Setup(chosen_options, Progress(line=say, cases=1), host)
        way = AgainstArm(setup, (a, b), max_pairs=most, tolerance=tolerance, metric=metric, explains=False)
        return _compared(Session(setup, way), chosen)

    def save(now: BisectFile) -> None:
        documents.write(file, now)
        step, left = now.steps[-1], plural(len(now.suspects), "suspect")
        say(f"{_name(step.name)}: {as_text(step)}; {left} left")

    try:
        found = searching.search(known, history, compare, save, tolerance=least)
    except searching.UndecidedError as error:
        say(str(error))
        raise typer.Exit(UNDECIDED) from None
    if json_output:
        typer.echo(json.dumps(documents.plain(found), indent=1))
    else:
        typer.echo("\n".join(result_lines(found, package, root)))
    raise typer.Exit(0 if len(found.suspects) == 1 else UNDECIDED)


def _compared(session: Session, case: Case) -> Measurement:
    try:
        result = session.measure(case, case.id)
        documents.write(session.directory.results, session_file(session, "complete"))
        return result
    finally:
        session.setup.lock.release()


def _name(name: str) -> str:
    """A version as it is, a commit in short."""
    return name if len(name) < 40 else name[:12]


def as_text(step: Step) -> str:
    """Return what a step found out, in words."""
    if step.change is None:
        return f"{step.outcome} ({step.why})"
    interval = "" if step.interval is None else f" (99 % interval {between(step.interval)})"
    return f"{step.outcome}, {percent(step.change)}{interval}, {plural(step.launches, 'launch')}"


def result_lines(found: BisectFile, package: str | None, root: Path) -> list[str]:
    """Return what a search found, as lines of text."""
    *others, first = found.suspects
    launches = sum(step.launches for step in found.steps)
    used = f"{plural(len(found.steps), 'step')}, {plural(launches, 'launch')}"
    skipped = [f"  skipped: {_name(step.name)}: {step.why}" for step in found.steps if step.why]
    if others:
        names = ", ".join(map(_name, found.suspects))
        return [f"one of these is the first bad one: {names} ({used})", *skipped]
    assert found.metric is not None
    step = next(step for step in found.steps if step.name == first)
    told = f"version of {package}: {first}" if package else f"commit: {_commit(first, root)}"
    change = f"{described(found.metric).label}: {as_text(step)}, compared with {_name(found.good)}"
    return [f"the first bad {told}", f"  {change} ({used})", *skipped]


def _commit(name: str, root: Path) -> str:
    return git("log", "-1", "--format=%H %an %as%n    %s", name, cwd=root).rstrip()
