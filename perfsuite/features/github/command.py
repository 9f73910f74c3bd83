"""`perfsuite github issue | comment | propose`: report on GitHub with `gh`."""

import json
import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import Field

from perfsuite import documents
from perfsuite.cli.shared import Hardware, Out, Reason
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.errors import CaseError, FileError, ToolError
from perfsuite.features.github.issue import (
    LONGEST,
    Answer,
    GhCall,
    ask_gh,
    fitting,
    gh,
    open_issue,
    steps,
    unlinked,
)
from perfsuite.inputs.files import read_text
from perfsuite.inputs.git import COMMITTER, git
from perfsuite.report import markdown
from perfsuite.report.console import console, say
from perfsuite.report.safe_text import visible
from perfsuite.report.summary import headline, interruption
from perfsuite.report.text import plural
from perfsuite.results.outcome import QUIET
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import BEFORE_AFTER
from perfsuite.results.trend import Drift, Trend

app = typer.Typer(
    no_args_is_help=True,
    hidden=True,  # meant for workflows
    help="Report on GitHub, with the command gh and the token in GH_TOKEN.",
)

_COMMIT = re.compile("[0-9a-f]{40}([0-9a-f]{24})?")


@app.command()
def issue(
    results: Annotated[list[Path], typer.Argument(help="Results (results.json) of the sessions of a night.")],
    run_url: Annotated[str, typer.Option(help="URL of the job's page.", envvar="RUN_URL")],
    trend: Annotated[
        Path | None, typer.Option(help="Output of `perfsuite history trend --json`, to include its drifts.")
    ] = None,
) -> None:
    """Open, update or close the GitHub issue of each hardware class after a night."""
    by_class = defaultdict[str, tuple[list[Measurement], list[Drift]]](lambda: ([], []))
    cut_short = defaultdict[str, list[str]](list)
    for file in results:
        session = documents.read(file, SessionFile)
        own_class = session.machine.hardware_class
        _ = by_class[own_class]  # add the class even if nothing ran, because it can have an open issue
        for result in session.results:
            by_class[result.hardware_class or own_class][0].append(result)
        interrupted = interruption(session)
        if interrupted is not None:
            for affected in {own_class, *(result.hardware_class or own_class for result in session.results)}:
                cut_short[affected].append(interrupted)
    drifts_found = None if trend is None else documents.read(trend, Trend)
    if drifts_found is not None and not drifts_found.sessions:
        drifts_found = None  # an empty history does not show that drifts are gone
    for finding in () if drifts_found is None else drifts_found.failing:
        by_class[finding.hardware_class][1].append(finding)
    for hardware_class, (measured, drifts) in by_class.items():
        before = open_issue(hardware_class)
        open_drifts = None if drifts_found is None else drifts
        why = cut_short[hardware_class]
        calls = steps(hardware_class, measured, before, run_url, open_drifts, cut_short=why)
        for call in calls:
            gh(call)
        done = ", ".join(" ".join(call.arguments[:2]) for call in calls) or "nothing to do"
        console().print(f"{hardware_class}: {'; '.join([done, *why])}")


@app.command()
def comment(
    results: Annotated[list[Path], typer.Argument(help="Results (results.json) of the sessions of a job.")],
    run_url: Annotated[str, typer.Option(help="URL of the job's page.", envvar="RUN_URL")],
    pull_request: Annotated[
        int | None,
        typer.Option(help="Number of the pull request (default: the one in GITHUB_REF)."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the comment and of the check.")] = "perfsuite",
    commit: Annotated[
        str,
        typer.Option(
            help="Measured commit of the pull request, to which the check is attached (default: the commit "
            "in the results).",
            envvar="HEAD_SHA",
        ),
    ] = "",
) -> None:
    """Report on a pull request: one comment, kept up to date, and a check that is red, green or neutral.

    The check is red if a case is worse or fails. It is neutral if a session did not end or has no results, if
    a case was not decided or not reached, if a case of arm A was not compared, or if a reviewed baseline no
    longer belongs to a case. The check is attached to the commit that was measured.
    """
    if not re.fullmatch(r"[\w .-]{1,60}", name):
        raise CaseError(f"--name {name!r}: expected up to 60 letters, digits, spaces, dots and hyphens")
    if commit and not _COMMIT.fullmatch(commit):
        raise CaseError(f"--commit {commit!r}: expected a full commit hash of 40 hexadecimal digits")
    number = _number() if pull_request is None else pull_request
    sessions = [documents.read(file, SessionFile) for file in results]
    mark = f"<!-- perfsuite: comment {name} -->"
    asked = _pull_request(number, mark)
    measured = commit or _measured(sessions, asked)
    outcome = conclusion(sessions)
    text = commented(sessions, run_url, mark, moved_on(measured, asked.head))
    ours = asked.comment
    new = ("pr", "comment", str(number), "--body-file", "-")
    gh(GhCall(new if ours is None else ("api", "--method", "PATCH", ours, "--field", "body=@-"), text))
    is_other_judge = any(
        session.judge_changes is not None and session.judge_changes.base and session.judge_changes.sentences
        for session in sessions
    )
    title = headline(sessions) + ("; this branch changes the files that judge it" if is_other_judge else "")
    output = {"title": title, "summary": f"[The job]({run_url})"}
    check = {"name": name, "head_sha": measured, "status": "completed", "conclusion": outcome}
    fields = json.dumps({**check, "details_url": run_url, "output": output})
    gh(GhCall(("api", "--method", "POST", "repos/{owner}/{repo}/check-runs", "--input", "-"), fields))
    done = "new comment" if ours is None else "updated comment"
    typer.echo(f"pull request {number}: {done}, check {name} of {measured[:12]}: {outcome}")


def _number() -> int:
    ref = os.environ.get("GITHUB_REF", "")
    match = re.fullmatch(r"refs/pull/(\d+)/.*", ref)
    if match is None:
        raise CaseError(f"GITHUB_REF is {ref!r}, which is not a pull request: give --pull-request NUMBER")
    return int(match[1])


class PullRequest(NamedTuple):
    """Data about a pull request on GitHub."""

    number: int
    head: str  # the newest commit
    commits: frozenset[str]
    comment: str | None  # the API path of the comment by this token's account; None if there is none


class _Comment(Answer):
    url: str
    is_ours: bool = Field(validation_alias="viewerDidAuthor")
    body: str


class _Commit(Answer):
    oid: str


class _Viewed(Answer):
    head: str = Field(validation_alias="headRefOid")
    comments: list[_Comment]
    commits: list[_Commit]


class _Parent(Answer):
    sha: str


class _Merge(Answer):
    parents: list[_Parent]


def _pull_request(number: int, mark: str) -> PullRequest:
    answer = ask_gh(_Viewed, "pr", "view", str(number), "--json", "headRefOid,comments,commits")
    ours = (posted.url for posted in answer.comments if posted.is_ours and mark in posted.body)
    match = re.search(r"#issuecomment-(\d+)$", next(ours, ""))
    return PullRequest(
        number=number,
        head=answer.head,
        commits=frozenset(commit.oid for commit in answer.commits),
        comment=f"repos/{{owner}}/{{repo}}/issues/comments/{match[1]}" if match else None,
    )


def _measured(sessions: Sequence[SessionFile], of: PullRequest) -> str:
    """Return which commit of the pull request the sessions measured.

    The job of a pull request checks out a merge commit of the base and the pull request. If the
    sessions measured this merge commit, its second parent is returned. Raises `CaseError` if the commit
    cannot be determined.
    """
    recorded = {session.commit for session in sessions}
    shown = ", ".join(sorted(str(commit and commit[:12]) for commit in recorded))
    commit = recorded.pop() if len(recorded) == 1 else None
    if commit is None:
        raise CaseError(
            f"the results are of commit {shown}, but a check is attached to exactly one measured commit. "
            "Give it with --commit"
        )
    commits = of.commits | {of.head}
    if commit in commits:
        return commit
    try:
        answer = ask_gh(_Merge, "api", f"repos/{{owner}}/{{repo}}/commits/{commit}")
        parents = [parent.sha for parent in answer.parents]
    except ToolError:  # the commit was never pushed
        parents = []
    if len(parents) == 2 and parents[1] in commits:
        return str(parents[1])
    raise CaseError(
        f"the results are of commit {shown}, which is not a commit or merge of pull request {of.number}. "
        "With --commit, give the commit that was measured"
    )


def moved_on(measured: str, head: str) -> str:
    """Return a sentence if the pull request has a newer commit than `measured`. Otherwise, return ""."""
    if measured == head:
        return ""
    return f"Measured: {measured[:12]}. The pull request is now at {head[:12]}, which was not measured."


def commented(sessions: list[SessionFile], run_url: str, mark: str, note: str = "") -> str:
    """Return the text of a comment: the note, and the summary of a job.

    The text is cut to GitHub's limit. It contains no mentions.
    """
    whole = unlinked(markdown.render(sessions)).splitlines()
    if note:
        whole = [f"**{markdown.text(note)}**", "", *whole]
    lines = fitting(whole, LONGEST - len(mark) - len(run_url))
    lines += ["", "The rest is left out."] if len(lines) < len(whole) else []
    open_parts = "".join(lines).count("<details>") - "".join(lines).count("</details>")
    return "\n".join([*lines, *["</details>"] * open_parts, "", f"[The job]({run_url})", mark])


def conclusion(sessions: Sequence[SessionFile]) -> str:
    """Return the result of sessions in GitHub's terms: `failure`, `neutral` or `success`.

    It is a `success` only if every session ended and measured something, every case of arm A was compared,
    and every reviewed baseline belongs to a case.
    """
    results = [result for session in sessions for result in session.results]
    open_ones = [result for result in results if result.excused is None and not result.shadow]
    if any(result.outcome in ("failed", "regressed") for result in open_ones):
        return "failure"
    has_ended = all(session.status == "complete" and session.results for session in sessions)
    is_cut_short = any(skip.not_reached for session in sessions for skip in session.skipped)
    has_all_cases = all(session.has_all_cases and not session.unclaimed for session in sessions)
    is_whole = bool(sessions) and has_ended and has_all_cases and not is_cut_short
    is_green = is_whole and all(result.outcome in QUIET for result in open_ones)
    return "success" if is_green else "neutral"


@app.command()
@shares("baselines")
def propose(
    *,
    hardware: Hardware,
    reason: Reason,
    out: Out = Path("out"),
    measured: Annotated[
        Path | None, typer.Option(help="Copy baselines (*.json) from this directory, a job's artifact.")
    ] = None,
    shared: Shared,
) -> None:
    """Open a pull request with new baselines. Its text shows the numbers before and after."""
    baselines = shared.baselines
    for name, given in (("hardware", hardware), ("reason", reason)):
        if not given.strip():
            raise CaseError(f"--{name} is empty: give the hardware that was measured, and the reason")
    gh(GhCall(("--version",)))  # if gh is missing, fail before the branch is pushed
    here = Path()
    if measured is not None:
        copied = _copied(measured, baselines)
        say(f"{plural(copied, 'baseline')} copied from {measured}")
    if not git("status", "--porcelain", "--ignore-submodules=dirty", "--", str(baselines), cwd=here):
        raise FileError(
            f"nothing in {baselines} differs from the commit that is checked out. "
            "First run `perfsuite baseline refresh`"
        )
    branch = f"baselines-{re.sub('[^a-zA-Z0-9.-]', '-', hardware)}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    start = git("branch", "--show-current", cwd=here).strip() or git("rev-parse", "HEAD", cwd=here).strip()
    git("checkout", "--quiet", "-b", branch, cwd=here)
    git("add", "--", str(baselines), cwd=here)
    git(*COMMITTER, "commit", "--quiet", "-m", f"Baselines of {hardware}", "--", str(baselines), cwd=here)
    git("push", "--quiet", "origin", "HEAD", cwd=here)
    before_after = out / BEFORE_AFTER
    text = (
        visible(read_text(before_after, errors="replace"))
        if before_after.is_file() and not before_after.is_symlink()
        else ""
    )
    create = ("pr", "create", "--title", f"Baselines of {hardware}", "--head", branch)
    body = f"{unlinked(markdown.text(reason))}\n\n{fenced(text[:LONGEST])}\n"
    try:
        made = gh(GhCall((*create, "--body-file", "-"), body))
    except ToolError as error:
        git("checkout", "--quiet", start, cwd=here)
        raise ToolError(
            f"{error}. The baselines are pushed, in the branch {branch}. To open its pull request, run: "
            f"{shlex.join(['gh', *create, '--body', reason])}"
        ) from None
    typer.echo(made.strip())


def _copied(source: Path, baselines: Path) -> int:
    """Copy baselines, and return their number. Ignore other files: the job might have run untrusted code."""
    if baselines.is_relative_to(Path.cwd()):  # a path from pytest's ini file is absolute
        baselines = baselines.relative_to(Path.cwd())
    if baselines.is_absolute():
        raise CaseError(
            f"--baselines {baselines}: give a path relative to the repository, as in the artifact"
        )
    root = source / baselines
    if not root.is_dir():
        raise FileError(f"--measured {source}: there is no directory {root}")
    files = [file for file in root.rglob("*.json") if file.is_file() and not file.is_symlink()]
    for file in files:
        target = baselines / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target, follow_symlinks=False)
    return len(files)


def fenced(text: str) -> str:
    """Return text as a Markdown code block. Nothing in the text can end the block."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"
