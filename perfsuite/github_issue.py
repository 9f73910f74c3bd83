"""One GitHub issue per hardware class while cases regress there: opened, updated, closed when they are good.

Driver side; imports neither torch nor pytest. GitHub is asked through its command line, `gh`, which runners
have and which takes its token from the environment.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from perfsuite import data
from perfsuite.errors import GitHubError, PerfsuiteError
from perfsuite.report import sentence
from perfsuite.results import Result, SessionFile

LABEL = "perfsuite"
MOST_SHOWN = 40
"""Cases told in full: an issue holds 65,536 characters."""
_LISTED = re.compile(r"<!-- perfsuite: (\[.*\]) -->")
"""Where an issue's text keeps the ids of its cases."""


class Issue(NamedTuple):
    """An open issue."""

    number: int
    body: str

    @property
    def cases(self) -> list[str]:
        """The ids of the cases that it was opened or kept open for."""
        found = _LISTED.search(self.body)
        return [str(case_id) for case_id in json.loads(found[1])] if found else []


class Step(NamedTuple):
    """One call of `gh`: its arguments and what it reads."""

    arguments: tuple[str, ...]
    text: str = ""


def title(hardware_class: str) -> str:
    """By which the issue of a hardware class is found again."""
    return f"Performance regressions on {hardware_class}"


def steps(hardware_class: str, results: Sequence[Result], issue: Issue | None, run_url: str) -> list[Step]:
    """What to tell GitHub after a night: nothing, open an issue, update it, or close it.

    An issue closes when each of its cases was measured again and is good. One that was not measured, or whose
    verdict is inconclusive or unhealthy, is still open.
    """
    bad = {
        r.case_id: r for r in results if r.outcome == "regressed" or (r.outcome == "failed" and not r.excused)
    }
    good = {r.case_id for r in results if r.outcome in ("passed", "improved")}
    unsolved = [case_id for case_id in (issue.cases if issue else []) if case_id not in good | bad.keys()]
    if bad or unsolved:
        text = _body(bad, unsolved, run_url)
        if issue is None:
            create = (
                "issue",
                "create",
                "--title",
                title(hardware_class),
                "--label",
                LABEL,
                "--body-file",
                "-",
            )
            return [
                Step(("label", "create", LABEL, "--force", "--description", "Opened by perfsuite")),
                Step(create, text),
            ]
        return [Step(("issue", "edit", str(issue.number), "--body-file", "-"), text)]
    if issue is not None:
        gone = f"Gone: every case of this issue is good again ({run_url})."
        return [Step(("issue", "close", str(issue.number), "--comment", gone))]
    return []


def _body(bad: dict[str, Result], unsolved: list[str], run_url: str) -> str:
    lines = [f"As of {run_url}:", ""]
    for case_id, result in list(bad.items())[:MOST_SHOWN]:
        lines.append(f"- `{case_id}`: **{result.outcome}** after {len(result.runs)} launches")
        lines += [f"  - {_plain(reason)}" for reason in result.verdict.reasons]
        lines += [f"  - {_plain(sentence(c))}" for c in result.verdict.checks if c.outcome == "regressed"]
        if result.verdict.changed:
            lines.append(f"  - changed since the baseline: {_plain('; '.join(result.verdict.changed))}")
    if len(bad) > MOST_SHOWN:
        lines.append(f"- and {len(bad) - MOST_SHOWN} more")
    lines += [f"- `{case_id}`: not measured again, or not known" for case_id in unsolved[:MOST_SHOWN]]
    lines += ["", "perfsuite keeps this text up to date, and closes the issue when all of them are good."]
    lines.append(f"<!-- perfsuite: {json.dumps(sorted([*bad, *unsolved]))} -->")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text of a failed process, so that it is neither a mention nor markup."""
    return " ".join(text.split())[:500].replace("@", "@\u200b").replace("<", "&lt;").replace("`", "'")


def open_issue(hardware_class: str) -> Issue | None:
    """The open issue of that hardware class."""
    asked = (
        "issue",
        "list",
        "--state",
        "open",
        "--label",
        LABEL,
        "--limit",
        "200",
        "--json",
        "number,title,body",
    )
    for each in json.loads(gh(Step(asked))):
        if each["title"] == title(hardware_class):
            return Issue(each["number"], each["body"])
    return None


def gh(step: Step) -> str:
    """What `gh` prints. Raises `GitHubError` with what it said."""
    try:
        done = subprocess.run(
            ["gh", *step.arguments], input=step.text, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise GitHubError(f"gh, GitHub's command line, cannot be started: {error.strerror}") from error
    if done.returncode:
        raise GitHubError(f"gh {' '.join(step.arguments[:2])}: {done.stderr.strip() or 'failed'}")
    return done.stdout


def issue(
    results: Annotated[list[Path], typer.Argument(help="results.json of the night's sessions.")],
    run_url: Annotated[str, typer.Option(help="Where the night can be looked at.", envvar="RUN_URL")],
) -> None:
    """Open, update or close the GitHub issue of each hardware class after a night, by gh and its token."""
    console = Console(soft_wrap=True, highlight=False)
    try:
        by_class: dict[str, list[Result]] = {}
        for file in results:
            session = data.read(file, SessionFile)
            by_class.setdefault(session.machine.hardware_class, []).extend(session.results)
        for hardware_class, measured in by_class.items():
            told: Any = steps(hardware_class, measured, open_issue(hardware_class), run_url)
            for step in told:
                gh(step)
            done = ", ".join(" ".join(step.arguments[:2]) for step in told) or "nothing to do"
            console.print(f"{hardware_class}: {done}")
    except PerfsuiteError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(1) from None
