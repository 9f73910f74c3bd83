"""Keep a GitHub issue open for each hardware class on which cases have regressed or drifted."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from perfsuite.documents import explain
from perfsuite.errors import ToolError
from perfsuite.report import markdown
from perfsuite.report.explained import explained
from perfsuite.report.markdown import code
from perfsuite.report.safe_text import printable
from perfsuite.report.text import cut
from perfsuite.results.session_file import Measurement
from perfsuite.results.trend import Drift

T = TypeVar("T")

LABEL = "perfsuite"
MOST_CAUSES = 3  # maximum number of lines that explain why a case is slower, most certain first
LONGEST = 60_000  # maximum number of characters in the text of an issue: GitHub allows 65,536
_LISTED = re.compile(r"^<!-- perfsuite: (.*) -->\s*\Z", re.MULTILINE)
"""Matches the last line of an issue's text. This line is hidden, and lists the subjects of the issue."""
_DRIFT = "drift of "  # prefix of a subject that is a drift and not a case


class Issue(NamedTuple):
    """An open issue."""

    number: int
    body: str

    @property
    def subjects(self) -> list[str] | None:
        """The cases and drifts for which the issue is open. None if somebody has broken the list by hand."""
        match = _LISTED.search(self.body)
        try:
            listed = json.loads(match[1]) if match else None
        except (ValueError, RecursionError):
            return None
        return [str(subject) for subject in listed] if isinstance(listed, list) else None


class GhCall(NamedTuple):
    """One call of `gh`: its arguments, and the text on its standard input."""

    arguments: tuple[str, ...]
    text: str = ""


def title(hardware_class: str) -> str:
    """Return the title that identifies the issue of a hardware class."""
    return f"Performance regressions on {re.sub(r'[^a-zA-Z0-9.+-]', '_', hardware_class)}"


def steps(
    hardware_class: str,
    results: Sequence[Measurement],
    issue: Issue | None,
    run_url: str,
    drifts: Sequence[Drift] | None = None,
    *,
    cut_short: Sequence[str] = (),
) -> list[GhCall]:
    """Return the `gh` commands to run after a nightly run. They open, update or close an issue.

    `drifts` are the open regressions of this hardware class over many nights, or None if nobody searched for
    them. `cut_short` contains a reason for each session that was interrupted.

    An issue is closed when all of its cases were measured again and are good, and none of its drifts is still
    found. A case keeps the issue open if it was not measured, if its verdict is inconclusive or unhealthy,
    or if its work was not counted although it has a baseline of counts. If a session was interrupted, nothing
    counts as good: no case is removed from the issue, and the issue is not closed. An issue is never
    closed if the hidden list of its subjects cannot be read. The issue gets a new list as soon as something
    is bad.
    """
    failed = [result for result in results if result.outcome == "failed" and result.excused is None]
    regressed = [result for result in results if result.outcome == "regressed" and result.excused is None]
    bad = {result.case_id: _of_result(result) for result in (*failed, *regressed)}
    bad |= {f"{_DRIFT}{drift.case}, {drift.metric}": _of_drift(drift) for drift in drifts or ()}
    good = set() if cut_short else {result.case_id for result in results if _is_good(result)}
    waived = [_of_result(result) for result in results if result.excused == "waived"]
    subjects = None if issue is None else issue.subjects
    for subject in subjects or ():
        is_gone = subject in good or (drifts is not None and not cut_short and subject.startswith(_DRIFT))
        if not is_gone and subject not in bad:
            why = "not known to be good again (not measured, not counted, or not decided)"
            if cut_short:
                why = "kept until a complete session finds it good"
            bad[subject] = f"- {code(subject)}: {why}. If this case is gone, close this issue by hand"
    if issue is None:
        label = GhCall(("label", "create", LABEL, "--force", "--description", "Opened by perfsuite"))
        create = ("issue", "create", "--title", title(hardware_class), "--label", LABEL, "--body-file", "-")
        return [label, GhCall(create, _body(bad, waived, run_url, cut_short))] if bad else []
    if bad:
        edit = ("issue", "edit", str(issue.number), "--body-file", "-")
        return [GhCall(edit, _body(bad, waived, run_url, cut_short))]
    if cut_short:
        return []
    gone = f"Closed, because every case and drift in this issue is good again or waived ({run_url})."
    close = GhCall(("issue", "close", str(issue.number), "--comment", gone))
    return [] if subjects is None else [close]


def _is_good(result: Measurement) -> bool:
    counts = result.verdict.counts
    is_hidden = counts is not None and counts.outcome == "not counted" and counts.baseline_file is not None
    return result.excused == "waived" or (result.outcome in ("passed", "improved") and not is_hidden)


def _of_result(result: Measurement) -> str:
    explanation = explained(result)
    lines = [
        *explanation.why[:MOST_CAUSES],
        *explanation.reasons,
        *explanation.decisive,
        *cut(explanation.findings, MOST_CAUSES),
        *explanation.prices,
    ]
    lines += [*explanation.excuses, *explanation.not_counted, *explanation.changed]
    outcome, _, evidence = explanation.verdict.partition(" ")
    return "\n  - ".join([f"- {code(result.case_id)}: **{outcome}** {evidence}", *map(_plain, lines)])


def _of_drift(finding: Drift) -> str:
    state = (
        "**worse** over many nights. Fix this before you measure a new baseline, because a new baseline "
        "would accept the regression"
    )
    return "\n  - ".join([f"- {code(finding.case)}: {state}", *map(_plain, finding.sentences())])


def _body(bad: Mapping[str, str], waived: Sequence[str], run_url: str, cut_short: Sequence[str]) -> str:
    """Return the text of an issue. Its last line is hidden, and lists the subjects for `Issue.subjects`."""
    listed = json.dumps(sorted(bad)).replace(">", "\\u003e")  # so that no subject can end the HTML comment
    hidden = f"<!-- perfsuite: {listed} -->"
    texts = [*(f"- **{_plain(why)}**" for why in cut_short), *bad.values(), *waived]
    shown = fitting(texts, LONGEST - len(hidden))
    left = len(texts) - len(shown)
    if left:
        shown.append(f"- and {left} more")
    end = "perfsuite updates this text, and closes the issue when all cases and drifts in it are good."
    return "\n".join([f"As of {run_url}:", "", *shown, "", end, hidden])


def fitting(texts: Sequence[str], most: int) -> list[str]:
    """Return the first texts that together fit in `most` characters, including line ends."""
    return list(texts[: sum(length <= most for length in accumulate(len(text) + 1 for text in texts))])


def _plain(text: str) -> str:
    """Escape untrusted text, so that GitHub finds no markup, mentions or issue links in it."""
    return unlinked(markdown.text(printable(text)[:500]))


def unlinked(escaped: str) -> str:
    """Prevent mentions and issue links in escaped Markdown.

    GitHub would find them even if `@` and `#` are written as HTML entities.
    """
    return escaped.replace("&#64;", "@\u200b").replace("&#35;", "#\u200b")


def open_issue(hardware_class: str) -> Issue | None:
    """Return the open issue of a hardware class, or None. Raises `ToolError` if `gh` fails."""
    search = ("issue", "list", "--state", "open", "--label", LABEL, "--limit", "200")
    listed = ask_gh(list[_Listed], *search, "--json", "number,title,body")
    matching = (Issue(issue.number, issue.body) for issue in listed if issue.title == title(hardware_class))
    return next(matching, None)


class Answer(BaseModel):
    """The expected fields of an answer of `gh`. Other fields are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)


class _Listed(Answer):
    number: int
    title: str
    body: str


def ask_gh(kind: type[T], *arguments: str) -> T:
    """Call `gh` and parse its JSON. Raises `ToolError` if `gh` fails or a field is missing."""
    printed = gh(GhCall(arguments))
    try:
        return TypeAdapter(kind).validate_python(json.loads(printed))
    except ValidationError as error:
        command = " ".join(arguments[:2])
        raise ToolError(f"gh {command} printed an unexpected answer: {explain(error)}") from None
    except (ValueError, RecursionError) as error:
        command = " ".join(arguments[:2])
        raise ToolError(f"gh {command} did not print JSON ({error}): {printed[:200]!r}") from None


def gh(step: GhCall) -> str:
    """Call `gh` and return its output. Raises `ToolError`, with the error message of `gh`."""
    try:
        command = ["gh", *step.arguments]
        done = subprocess.run(
            command, input=step.text, capture_output=True, encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        raise ToolError(f"gh, GitHub's command line, cannot be started: {error.strerror}") from error
    if done.returncode:
        raise ToolError(f"gh {' '.join(step.arguments[:2])}: {done.stderr.strip() or 'failed'}")
    return done.stdout
