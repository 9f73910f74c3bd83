"""The page that a CI job shows for a night.

It has the summary of the report or, until there is a report, the reason why nothing was measured.
"""

import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.inputs.files import read_text
from perfsuite.report.summary import needs_words, reason
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import Store
from perfsuite.session.outputs import write_report

NOTHING = """\
Nothing was measured: {}

The log of the job says more.

<!-- night: {} -->
"""
"""The page until there is a report. It has a reason, and the id of the night."""
BEGUN = re.compile(r"<!-- night: (\w+) -->")


class Page:
    """The file `summary.md` in the directory of a night.

    Before a night measures anything, it writes into this file that nothing was measured, and why. The report
    replaces this text. If the night is killed in between, the file still has the id of the night. By
    this id, `--only-summary` finds the session of the killed night in a store that other nights use too.
    """

    def __init__(self, out: Path, store: Path) -> None:
        self.file = out / "summary.md"
        self.store = Store(store)
        self.night = uuid.uuid4().hex  # id of the night, which its sessions record (`NIGHT`)

    def begin(self, why: str) -> None:
        """Remove the report of an earlier night, and begin a new page with the first reason."""
        for name in ("index.html", "results.json"):
            (self.file.parent / name).unlink(missing_ok=True)
        self.explain(why)

    def explain(self, why: str) -> None:
        """Write why nothing was measured."""
        from perfsuite.report import markdown  # imported here, because other commands do not need Jinja

        documents.write_text(self.file, NOTHING.format(markdown.text(why), self.night))

    def sessions(self) -> list[Path]:
        """Return the results of this night, from the oldest session to the newest."""
        return self.store.results_of_night(self.night)

    def has_report(self) -> bool:
        """Whether a report has replaced the reason."""
        return BEGUN.search(self._text()) is None

    def sessions_of_killed(self) -> list[Path]:
        """Return the results of a night that was killed before it had a report.

        The list is empty if the night has a report, or if it left no results.
        """
        begun = BEGUN.search(self._text())
        return [] if begun is None else self.store.results_of_night(begun[1])

    def complete(self, sessions: Sequence[Path]) -> list[str]:
        """Write the report of the newest of these sessions, if the page has none.

        Returns the lines that the CI job has to print. GitHub reads them as annotations; other CIs need none.
        """
        if not sessions:
            return []
        content = documents.read(sessions[-1], SessionFile)
        if not self.has_report():
            write_report(self.file.parent, content)
        return github_annotations(content.results) if os.environ.get("GITHUB_ACTIONS") == "true" else []

    def append_to_job(self) -> None:
        """Append the page to the file that GitHub shows as the summary of the job, if there is one."""
        page = os.environ.get("GITHUB_STEP_SUMMARY")
        if page:
            with Path(page).open("a", encoding="utf-8") as shown:
                shown.write(self._text())

    def _text(self) -> str:
        return read_text(self.file, errors="replace")


def github_annotations(results: Sequence[Measurement]) -> list[str]:
    """Return annotations that GitHub Actions shows next to the case files.

    A worse or failed case is an error. Other cases that need attention are warnings. Each annotation is one
    line.
    """
    lines = []
    for result in results:
        if needs_words(result) and result.excused is None:
            level = "error" if result.outcome in ("failed", "regressed") and not result.shadow else "warning"
            file = result.nodeid.partition("::")[0]
            title = f"{result.outcome}: {result.case_id}"
            where = f"file={_escaped(file, ':,')},title={_escaped(title, ':,')}"
            lines.append(f"::{level} {where}::{_escaped(reason(result) or result.outcome)}")
    return lines


def _escaped(text: str, more: str = "") -> str:
    """Escape text in a workflow command, in the same way as GitHub's toolkit."""
    for letter in f"%\r\n{more}":
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
