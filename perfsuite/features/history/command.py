"""`perfsuite history add | pull | push | failures | list | publish | trend`: keep results for years."""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from perfsuite.cli.shared_options import Shared, shares
from perfsuite.errors import CaseError, FileError, GitError
from perfsuite.features.history import notify as webhook
from perfsuite.features.history import page, verdicts
from perfsuite.features.history import store as history
from perfsuite.features.history import trend as trends
from perfsuite.features.history.asv import export as asv
from perfsuite.features.history.store import Place, StoredResult
from perfsuite.frameworks.base import require
from perfsuite.inputs.git import COMMITTER, git
from perfsuite.report import summary
from perfsuite.report.console import console, plain_table, print_rows
from perfsuite.report.text import plural
from perfsuite.results.amounts import amount
from perfsuite.results.store import Store, stored_results
from perfsuite.results.trend import Trend

app = typer.Typer(
    no_args_is_help=True,
    help="Keep results for years, show them, and find trends.",
)

HISTORY = Store().history
History = Annotated[Path, typer.Option("--history", help="Directory of the history.")]
HardwareClass = Annotated[
    str, typer.Option("--hardware-class", help="Pattern of hardware classes, with the wildcards * and ?.")
]
CaseGlob = Annotated[str, typer.Option("--case", help="Pattern of case ids, with the wildcards * and ?.")]
BRANCH = "perfsuite-history"
WORKTREE = Path("history")
PUSHES = 3  # maximum number of attempts to push, if other jobs push at the same time
NOTHING_KEPT = 1  # exit status if no result of the given sessions can be kept
Since = Annotated[
    datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Read only sessions from this day on.")
]
Notify = Annotated[
    str | None,
    typer.Option(
        metavar="VARIABLE",
        help="Environment variable with the address of a Slack or Mattermost webhook. Cases whose state "
        "changed since the night before are posted there.",
    ),
]
Branch = Annotated[
    str, typer.Option("--branch", help="Branch whose commits are read (default: the current branch).")
]


@app.command()
@shares("store")
def add(
    *,
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Results (results.json) of sessions (default: all sessions in the local store)."),
    ] = None,
    history_dir: History = HISTORY,
    notify: Notify = None,
    shared: Shared,
) -> None:
    """Add sessions to a history. Adding a session again changes nothing.

    Failed and unhealthy results, and results with an injected fault, are left out and listed. So are
    sessions without a commit or with uncommitted changes. An unhealthy result is kept if its only problem is
    that the case was slower although nothing had changed. The exit status is 1 if no result of the given
    sessions can be kept. It is 2 if a file cannot be read; the other files are still added.
    """
    status = _added(results or stored_results(shared.store), history_dir, notify)
    if results and status == NOTHING_KEPT:
        console(stderr=True).print("nothing to keep in " + ", ".join(map(str, results)), style="red")
    raise typer.Exit(status if results or status != NOTHING_KEPT else 0)


def _added(files: Sequence[Path], history_dir: Path, notify: str | None) -> int:
    """Add sessions to a history, and return the exit status."""
    if notify is not None and not notify.isidentifier():  # never printed, because it could be a secret
        raise CaseError("--notify: give the name of the variable that holds the address, not the address")
    out = console()
    kept = 0
    bad = False
    written = list[Path]()
    for file in files:
        try:
            added = history.add(history_dir, file)
        except FileError as error:
            console(stderr=True).print(f"not added: {error}", style="red")
            bad = True
            continue
        interruption = summary.interruption(added.session)
        if interruption is not None:
            out.print(f"{file}: {interruption}", style="yellow")
        for reason in added.left_out:
            out.print(f"left out of {file}: {reason}", style="yellow")
        for path in added.written:
            out.print(f"added: {path}")
        if added.was_added_before:
            out.print(f"already added: {file}")
        kept += added.kept
        written += added.written
    if notify is not None:
        out.print(webhook.announce(notify, history_dir, written, files))
    if bad:
        return 2
    return 0 if kept else NOTHING_KEPT


@app.command(hidden=True)
def pull(history_dir: History = WORKTREE) -> None:
    """Check out the branch of the history, `perfsuite-history`, in a directory.

    Commits that were never pushed are kept, and are put after those of origin. If neither origin nor this
    repository has the branch, a new and empty branch is created.
    """
    here = Path()
    if (history_dir / ".git").exists():
        held = git("branch", "--show-current", cwd=history_dir).strip()
        if held != BRANCH:
            raise FileError(
                f"{history_dir} has {held or 'a commit'} checked out, not {BRANCH}. Give an empty directory"
            )
        _refuse_ignored(history_dir)
        git("worktree", "remove", str(history_dir), cwd=here)  # fails if there are uncommitted changes
    git("worktree", "prune", cwd=here)
    on_origin = git("ls-remote", "--heads", "origin", BRANCH, cwd=here)
    if git("branch", "--list", BRANCH, cwd=here):
        git("worktree", "add", "--force", str(history_dir), BRANCH, cwd=here)
        if on_origin:
            _rebase(history_dir)
    elif on_origin:
        _fetch(here)
        git("worktree", "add", "--force", "-B", BRANCH, str(history_dir), f"origin/{BRANCH}", cwd=here)
    else:
        git("worktree", "add", "--force", "--detach", str(history_dir), cwd=here)
        git("checkout", "--quiet", "--orphan", BRANCH, cwd=history_dir)
        git("rm", "-r", "--force", "--quiet", "--ignore-unmatch", ".", cwd=history_dir)
    typer.echo(f"{BRANCH} is checked out in {history_dir}" + ("" if on_origin else " (a new branch)"))


def _refuse_ignored(history_dir: Path) -> None:
    """Raise `GitError` if git ignores some of the files, because git would delete them with the worktree."""
    ignored = git("ls-files", "--others", "--ignored", "--exclude-standard", cwd=history_dir).splitlines()
    if ignored:
        raise GitError(
            f"{history_dir} contains {plural(len(ignored), 'file')} that git ignores, such as {ignored[0]}: "
            "move them to another directory, or commit them (git add --force)"
        )


def _fetch(directory: Path) -> None:
    git("fetch", "--quiet", "origin", f"+refs/heads/{BRANCH}:refs/remotes/origin/{BRANCH}", cwd=directory)


def _rebase(history_dir: Path) -> None:
    """Put the commits that were never pushed after those of origin."""
    _fetch(history_dir)
    try:
        git(*COMMITTER, "rebase", "--quiet", f"origin/{BRANCH}", cwd=history_dir)
    except GitError as error:
        with contextlib.suppress(GitError):  # a rebase that could not begin cannot be aborted
            git("rebase", "--abort", cwd=history_dir)
        raise GitError(
            f"{BRANCH} has commits that were never pushed, and they conflict with those of origin ({error}). "
            f"Resolve this in {history_dir} (git rebase origin/{BRANCH}), push, and run this command again"
        ) from None


def _push(history_dir: Path) -> None:
    """Push the branch. If another job has pushed in the meantime, put the other job's commits first."""
    for _ in range(PUSHES - 1):
        with contextlib.suppress(GitError):
            git("push", "--quiet", "origin", BRANCH, cwd=history_dir)
            return
        if git("ls-remote", "--heads", "origin", BRANCH, cwd=history_dir):
            _rebase(history_dir)
    git("push", "--quiet", "origin", BRANCH, cwd=history_dir)


@app.command(hidden=True)
def push(
    results: Annotated[list[Path], typer.Argument(help="Results (results.json) of sessions.")],
    history_dir: History = WORKTREE,
    notify: Notify = None,
) -> None:
    """Pull the branch of the history, add sessions, and push the branch.

    The exit status is that of `add`, with one exception: it is 0 if nothing can be kept and the branch does
    not exist yet, for example after a first night without baselines.
    """
    pull(history_dir)
    status = _added(results, history_dir, notify)  # what could be added is pushed even if other files are bad
    if status == NOTHING_KEPT:
        console(stderr=True).print("nothing to keep in " + ", ".join(map(str, results)), style="red")
    # Patterns of the user, such as `*.json` in core.excludesFile, can match the files of the history.
    git("add", "--all", "--force", cwd=history_dir)
    if git("status", "--porcelain", "--ignore-submodules=dirty", cwd=history_dir):
        git(*COMMITTER, "commit", "--quiet", "-m", "Results of a night", cwd=history_dir)
    if not git("branch", "--list", BRANCH, cwd=history_dir):  # a branch exists only after its first commit
        typer.echo(f"nothing was pushed: {BRANCH} is created with the first result that can be kept")
        raise typer.Exit(0 if status == NOTHING_KEPT else status)
    _push(history_dir)
    raise typer.Exit(status)


@app.command()
@shares("as_json")
def failures(
    *,
    history_dir: History = HISTORY,
    hardware_class: HardwareClass = "*",
    case: CaseGlob = "*",
    since: Since = None,
    shared: Shared,
) -> None:
    """List the cases that failed, or would have failed without shadow mode.

    The column `taken back` shows the first later night in which the case passed with the same baseline.
    """
    nights = verdicts.by_case(history_dir, hardware_class=hardware_class, case=case, since=since)
    if not nights and case != "*" and not verdicts.by_case(history_dir, case=case):
        raise history.no_case(history_dir, case)
    if (
        not nights
        and hardware_class != "*"
        and not history.places(history_dir, hardware_class=hardware_class)
    ):
        raise FileError(f"{history_dir} has no session on {hardware_class}. See: perfsuite history list")
    failed_nights = [failure for case_nights in nights for failure in verdicts.failures(case_nights)]
    names = ("hardware_class", "case", "night", "verdict", "taken_back")
    grid = plain_table(name.replace("_", " ") for name in names)
    rows = []
    for night, back in failed_nights:
        cells = (night.place.hardware_class, night.case, _day(night.place), night.word)
        later = None if back is None else _day(back.place)
        rows.append(dict(zip(names, (*cells, later), strict=True)))
        grid.add_row(*cells, later or "no")
    if failed_nights or shared.as_json:
        print_rows(rows, grid, as_json=shared.as_json)
    if shared.as_json:
        return
    backs = [night.place.commit == back.place.commit for night, back in failed_nights if back is not None]
    shadows = sum(night.verdict.shadow for night, _ in failed_nights)
    sessions = plural(len({night.place.file for case_nights in nights for night in case_nights}), "session")
    console().print(
        f"{plural(len(failed_nights) - shadows, 'failure')} in {sessions}, and {shadows} more in shadow "
        f"mode. In {len(backs)} of these failures, the case later passed with the same baseline "
        f"({sum(backs)} at the same commit)"
    )


def _day(place: Place) -> str:
    return f"{place.day[:4]}-{place.day[4:6]}-{place.day[6:]} {place.commit[:8]}"


@app.command("list")
@shares("as_json")
def list_history(
    *,
    history_dir: History = HISTORY,
    hardware_class: HardwareClass = "*",
    case: CaseGlob = "*",
    since: Since = None,
    shared: Shared,
) -> None:
    """List the cases of a history, with the number of sessions and the newest values per hardware class."""
    rows = defaultdict[tuple[str, str], list[tuple[str, StoredResult]]](list)
    cases = history.read_cases(history_dir)
    wanted = history.matching(cases, case)
    for place in history.places(history_dir, hardware_class=hardware_class, since=since):
        session = place.read(cases)
        when = f"{session.started_at:%Y-%m-%d} {place.commit[:8]}"
        for result in session.results:
            if result.case in wanted:
                rows[place.hardware_class, cases[result.case].id].append((when, result))
    headings = ("hardware class", "case", "sessions", "first", "last", "ms/step", "memory", "verdicts")
    grid = plain_table(headings)
    listed = list[dict[str, object]]()
    for (of_class, case_id), row in sorted(rows.items(), key=itemgetter(0)):
        first, _ = row[0]
        last, newest = row[-1]
        outcomes = Counter(result.outcome for _, result in row)
        step_s = history.middle(newest.step_s_p50)
        peak = history.middle(newest.peak_memory_bytes)
        entry = {"hardware_class": of_class, "case": case_id, "sessions": len(row), "first": first}
        figures = {"step_s_p50": step_s, "peak_memory_bytes": peak, "verdicts": outcomes}
        listed.append({**entry, "last": last, **figures})
        counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        texts = (f"{1000 * (step_s or math.nan):.1f}", amount(peak, "bytes"), counted)
        grid.add_row(of_class, case_id, str(len(row)), first, last, *texts)
    if listed or shared.as_json:
        print_rows(listed, grid, as_json=shared.as_json)
    else:
        console().print(f"no case in {history_dir} matches")


@app.command()
@shares("baselines")
def publish(
    *,
    out: Annotated[
        Path, typer.Option("--out", help="Directory that is used only for the pages. Its files are replaced.")
    ],
    history_dir: History = HISTORY,
    repo: Annotated[Path, typer.Option(help="Full clone of the repository with the cases.")] = Path(),
    branch: Branch = "",
    commit_url: Annotated[
        str, typer.Option(help="URL prefix of links to commits. The hash of the commit is appended.")
    ] = "#",
    shared: Shared,
) -> None:
    """Write a history as a page (OUT/html/history.html) and as asv's pages, which load scripts from a CDN."""
    require("asv", "numpy", purpose="to publish a history")
    exported = asv.export(history_dir, repo, out, branch=branch, commit_url=commit_url)
    _print_unplaced(exported.unplaced)
    html = asv.publish(out, commits=exported.commits)
    kept = f"{plural(len(exported.commits), 'commit')}, {len(exported.unplaced)} left out"
    own = page.write(
        html, history_dir, repo, branch=branch, commit_url=commit_url, baselines=shared.baselines
    )
    console().print(f"pages of {kept}: {own}")
    console().print(
        f"asv's pages, in the same folder, need a server: python -m http.server --directory {html}"
    )


@app.command()
@shares("baselines", "as_json")
def trend(
    *,
    history_dir: History = HISTORY,
    hardware_class: HardwareClass = "*",
    case: CaseGlob = "*",
    since: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d"],
            help="Report changes from this day on (default: the last 90 days, and older regressions that are "
            "still there).",
        ),
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(help="Clone of the repository with the cases. It shows the order of the commits."),
    ] = None,
    branch: Branch = "",
    shared: Shared,
) -> None:
    """Find when a case became slower or larger, gradually or at once, and what else changed then.

    A regression counts as accepted if the reviewed baseline of the case was measured later, at the new level.
    The exit status is 1 if a regression is still there and not accepted. An empty history is not an error.
    """
    require("numpy", purpose="to find trends")
    result = trends.trend(
        history_dir,
        hardware_class=hardware_class,
        case=case,
        since=since.date() if since else None,
        repo=repo,
        branch=branch,
        baselines=shared.baselines,
    )
    if shared.as_json:
        typer.echo(result.as_json(), nl=False)
    elif not result.sessions:
        typer.echo(f"{history_dir} has no session yet")
    else:
        _print_trend(result)
    if result.failing:
        raise typer.Exit(1)


def _print_trend(result: Trend) -> None:
    _print_unplaced(result.unplaced)
    for machine in result.machine:
        console().print("\n  ".join(machine.sentences()), markup=False, highlight=False)
    for finding in result.findings:
        change, *rest = finding.sentences()
        paragraph = Text.assemble(
            (finding.case, "bold"),
            f" on {finding.hardware_class}\n  {change}: ",
            (finding.state, "red" if finding.open else ""),
            *(f"\n  {sentence}" for sentence in rest),
        )
        console().print(paragraph)
    console().print(
        f"{result.series} series in {result.sessions} sessions, changes since {result.since}: "
        f"{len(result.failing)} still worse, {len(result.findings) - len(result.failing)} others"
    )


def _print_unplaced(unplaced: Mapping[str, str]) -> None:
    for commit, reason in unplaced.items():
        console().print(f"left out: commit {commit[:12]}: {reason}", style="yellow")
