"""`perfsuite compare`: launches two environments in turn and says which is slower.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.fault import Fault
from perfsuite.cli.dry_run import CASES, Expression, Ids, selected
from perfsuite.cli.fraction import fraction
from perfsuite.compare import Comparison
from perfsuite.errors import AllocationOverError, BusyError, CaseError, told
from perfsuite.launch.arm import resolve
from perfsuite.launch.launchers import launcher
from perfsuite.launch.quiet import WAIT_S
from perfsuite.report import markdown, summary
from perfsuite.report.html import page
from perfsuite.report.progress import Progress
from perfsuite.report.terminal import console, explanation, table
from perfsuite.report.text import relative
from perfsuite.results.session_file import SessionFile, Status
from perfsuite.results.store import BASELINES, STORE
from perfsuite.session import Host, Options, session_file
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.paired_test import MAX_PAIRS, MIN_CHANGED

UNDECIDED = 3
"""Exit status where no case is slower, and one is not decided: inconclusive, or on an unhealthy machine."""

ArmA = Annotated[
    str,
    typer.Option(
        "--a",
        help="what to compare with: NAME=VALUE, path/to/python, a git commit or COMMIT:LOCKFILE, with spaces "
        "between them",
    ),
]
ArmB = Annotated[str, typer.Option("--b", help="what may be slower; without it this environment, as it is")]
Cases = Annotated[Path, typer.Option("--cases", help="directory of the cases")]
Tolerance = Annotated[
    str | None,
    typer.Option(help="growth of the time per token that matters: 3% (default: a gate's on such a device)"),
]
MaxPairs = Annotated[
    int, typer.Option(min=MIN_CHANGED, max=MAX_PAIRS, help="pairs of launches of a case at the most")
]
Inject = Annotated[str | None, typer.Option(help="inject a fault into arm B: slowdown=10%")]
Report = Annotated[Path | None, typer.Option(help="write index.html and summary.md to this directory")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines: every verdict, launch and step")]
LocalStore = Annotated[Path, typer.Option(help="local store, for worktrees and the files of the launches")]
LauncherName = Annotated[str, typer.Option("--launcher", help="what starts the launches: local or slurm")]
WaitQuiet = Annotated[
    int, typer.Option(min=0, help="most seconds to wait for others on the machine; 0: launch again at once")
]


def compare(
    a: ArmA,
    b: ArmB = ".",
    case: Ids = None,
    k: Expression = None,
    cases: Cases = CASES,
    tolerance: Tolerance = None,
    max_pairs: MaxPairs = MAX_PAIRS,
    inject: Inject = None,
    report: Report = None,
    json_output: AsJson = False,
    store: LocalStore = STORE,
    launcher_name: LauncherName = "",
    wait_quiet: WaitQuiet = int(WAIT_S),
) -> None:
    """Which of two environments is slower? Launches alternate between them; no baseline is needed.

    Exit status 1 if a case is slower or larger in arm B, or fails; 3 if none is, and one is not decided.
    """
    if inject is not None:
        Fault.parse(inject, "--inject")
    root = Path.cwd()
    arms = tuple(resolve(option, text, root=root, store=store) for option, text in (("--a", a), ("--b", b)))
    options = Options(
        root=root,
        store=store,
        baselines=BASELINES,
        policy=Policy(),
        inject=inject,
        wait_quiet_s=wait_quiet,
    )
    chosen = selected(cases, case or [], k)
    progress = Progress(line=say, cases=len(chosen))
    session = Comparison(
        options,
        progress,
        Host(launcher(launcher_name), store),
        arms=arms,
        max_pairs=max_pairs,
        tolerance=None if tolerance is None else fraction("--tolerance", tolerance),
    )
    fitting = [each for each in chosen if _fits(session, each, is_named=k is None)]
    status: Status = "interrupted"
    try:
        for each in fitting:
            try:
                session.measure(each, each.id)
            except (AllocationOverError, BusyError):
                raise
            except Exception as error:  # a failed result; the others may do better
                typer.echo(f"{each.id}: {told(error)}", err=True)
        status = "complete"
    finally:
        session.lock.release()
        _show(session, status, report, json_output=json_output)
    raise typer.Exit(_status(session))


def _fits(session: Comparison, case: Case, *, is_named: bool) -> bool:
    """Whether this machine can run a case; else it is passed over. Raises `CaseError` if it was named."""
    reason = session.host.why_not(case)
    if reason is not None and is_named:
        raise CaseError(f"{case.id}: {reason}")
    if reason is not None:
        session.record_skip(case, case.id, reason)
        typer.echo(f"{case.id}: {reason}", err=True)
    return reason is None


def say(text: str) -> None:
    """Print a line of progress, apart from the result."""
    typer.echo(text, err=True)


def _show(session: Comparison, status: Status, report: Path | None, *, json_output: bool) -> None:
    """Print what was found, and write it as files."""
    content = session_file(session, status)
    if json_output:
        typer.echo(json.dumps(documents.plain(content), indent=1))
    else:
        _print(session, content)
    if report is not None:  # first of all: it may lie on another disk than a store that is full
        documents.write_text(report / "index.html", page.render([content]))
        documents.write_text(report / "summary.md", markdown.render([content]))
    documents.write(session.directory.results, content)


def _print(session: Comparison, content: SessionFile) -> None:
    out = console()
    for line in summary.arm_lines(content.arms):
        out.print(relative(line, Path.cwd()))
    width = max(out.width, 80) if out.is_terminal else None
    if session.results:
        typer.echo(table(session.results, color=out.is_terminal, width=width))
    for result in session.results:
        out.print(f"\n{relative(explanation(result), Path.cwd())}")


def _status(session: Comparison) -> int:
    """The exit status: of the worst case."""
    if any(map(session.options.is_failing, session.results)):
        return 1
    is_decided = [result.outcome in ("passed", "improved") for result in session.results]
    return 0 if is_decided and all(is_decided) else UNDECIDED
