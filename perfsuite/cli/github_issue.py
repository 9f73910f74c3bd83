"""One GitHub issue per hardware class while cases regress or drift there: opened, updated, closed when good.

Driver side; imports neither torch nor pytest. GitHub is asked through its command line, `gh`, which runners
have and which takes its token from the environment.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from perfsuite import documents
from perfsuite.errors import GitHubError
from perfsuite.history.trend import Finding, Trend
from perfsuite.report.terminal import console
from perfsuite.report.text import sentence
from perfsuite.results.session_file import Result, SessionFile

LABEL = "perfsuite"
LONGEST = 60_000
"""Characters of a text: an issue holds 65,536."""
_LISTED = re.compile(r"<!-- perfsuite: (\[.*\]) -->")
"""Where an issue's text keeps its subjects."""
_DRIFT = "drift of "


class Issue(NamedTuple):
    """An open issue."""

    number: int
    body: str

    @property
    def subjects(self) -> list[str]:
        """What it was opened or kept open for: ids of cases, and drifts."""
        found = _LISTED.search(self.body)
        return [str(subject) for subject in json.loads(found[1])] if found else []


class Step(NamedTuple):
    """One call of `gh`: its arguments and what it reads."""

    arguments: tuple[str, ...]
    text: str = ""


def title(hardware_class: str) -> str:
    """By which the issue of a hardware class is found again."""
    return f"Performance regressions on {hardware_class}"


def steps(
    hardware_class: str,
    results: Sequence[Result],
    issue: Issue | None,
    run_url: str,
    drifts: Sequence[Finding] | None = None,
) -> list[Step]:
    """What to tell GitHub after a night: nothing, open an issue, update it, or close it.

    `drifts` are the open worsenings of this hardware class, None if nobody looked for them. An issue closes
    when each of its cases was measured again and is good, and none of its drifts is there any more. A case
    that was not measured, or whose verdict is inconclusive or unhealthy, keeps it open.
    """
    bad = {result.case_id: _of_result(result) for result in results if _is_bad(result)}
    bad |= {_subject(finding): _of_drift(finding) for finding in drifts or ()}
    good = {result.case_id for result in results if result.outcome in ("passed", "improved")}
    known = issue.subjects if issue is not None else []
    if drifts is not None:
        good |= {subject for subject in known if subject.startswith(_DRIFT)}
    for subject in known:
        if subject not in good | bad.keys():
            bad[subject] = f"- `{subject}`: not measured again, or not known"
    if bad and issue is None:
        create = ("issue", "create", "--title", title(hardware_class), "--label", LABEL, "--body-file", "-")
        return [
            Step(("label", "create", LABEL, "--force", "--description", "Opened by perfsuite")),
            Step(create, _body(bad, run_url)),
        ]
    if bad and issue is not None:
        return [Step(("issue", "edit", str(issue.number), "--body-file", "-"), _body(bad, run_url))]
    if issue is not None:
        gone = f"Gone: all that this issue was open for is good again ({run_url})."
        return [Step(("issue", "close", str(issue.number), "--comment", gone))]
    return []


def _is_bad(result: Result) -> bool:
    return result.outcome == "regressed" or (result.outcome == "failed" and result.excused is None)


def _subject(finding: Finding) -> str:
    return f"{_DRIFT}{finding.case}, {finding.metric}"


def _of_result(result: Result) -> str:
    verdict = result.verdict
    said = [*verdict.reasons, *(sentence(check) for check in verdict.checks if check.outcome == "regressed")]
    if verdict.changed:
        said.append(f"changed since the baseline: {'; '.join(verdict.changed)}")
    heading = f"- `{result.case_id}`: **{result.outcome}** after {len(result.runs)} launches"
    return "\n  - ".join([heading, *map(_plain, said)])


def _of_drift(finding: Finding) -> str:
    heading = f"- `{finding.case}`: **worse** over many nights; a baseline measured since would accept it"
    return "\n  - ".join([heading, *map(_plain, finding.sentences())])


def _body(told: Mapping[str, str], run_url: str) -> str:
    """As much as an issue holds. The hidden line is how `Issue.subjects` knows them all the next night."""
    hidden = f"<!-- perfsuite: {json.dumps(sorted(told))} -->"
    lines, space = [f"As of {run_url}:", ""], LONGEST - len(hidden)
    for number, text in enumerate(told.values()):
        space -= len(text) + 1
        if space < 0:
            lines.append(f"- and {len(told) - number} more")
            break
        lines.append(text)
    lines += ["", "perfsuite keeps this text up to date, and closes the issue when all of them are good."]
    return "\n".join([*lines, hidden])


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
    trend: Annotated[
        Path | None, typer.Option(help="What `perfsuite history trend --json FILE` wrote: drifts count, too.")
    ] = None,
) -> None:
    """Open, update or close the GitHub issue of each hardware class after a night, by gh and its token."""
    by_class: dict[str, list[Result]] = {}
    for file in results:
        session = documents.read(file, SessionFile)
        whole = session.machine.hardware_class
        by_class.setdefault(whole, [])
        for result in session.results:
            by_class.setdefault(result.hardware_class or whole, []).append(result)
    found = documents.read(trend, Trend).failing if trend is not None else []
    for finding in found:
        by_class.setdefault(finding.hardware_class, [])
    for hardware_class, measured in by_class.items():
        drifts = [finding for finding in found if finding.hardware_class == hardware_class]
        before = open_issue(hardware_class)
        told = steps(hardware_class, measured, before, run_url, None if trend is None else drifts)
        for step in told:
            gh(step)
        done = ", ".join(" ".join(step.arguments[:2]) for step in told) or "nothing to do"
        console().print(f"{hardware_class}: {done}")
