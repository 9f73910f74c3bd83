"""The README's pictures of reports, from real results: `make pictures [RESULTS="a/results.json ..."]`.

In docs/images, report.png is the HTML report of the given sessions, or of the newest one in the store, down
to the first case that needs attention; terminal.svg is their table as a terminal shows it. `make pictures`
then has history_picture.py take history.png.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from perfsuite import documents
from perfsuite.cli.report import newest
from perfsuite.report.html.page import render
from perfsuite.report.summary import needs_words, verdict
from perfsuite.report.terminal import explanation, table
from perfsuite.results.session_file import Measurement, SessionFile
from tests.browser import chromium

WIDTH, HEIGHT = 1200, 1630
COLUMNS = 140


def main() -> None:
    """Write both."""
    images = Path(__file__).parents[2] / "docs" / "images"
    images.mkdir(exist_ok=True)
    files = [Path(name) for name in sys.argv[1:]] or [newest(Path(".perfsuite"))]
    sessions = [documents.read(file, SessionFile) for file in files]
    report(sessions, images / "report.png")
    terminal([result for session in sessions for result in session.results], images / "terminal.svg")


def report(sessions: list[SessionFile], picture: Path) -> None:
    """The upper part of the page."""
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        file = Path(directory) / "report.html"
        file.write_text(render(sessions), encoding="utf-8")
        browser.screen(WIDTH, HEIGHT)
        browser.open(file.as_uri())
        browser.wait_for_frame()
        browser.screenshot(picture)


def terminal(results: list[Measurement], picture: Path) -> None:
    """The table, and the explanation of the first regression."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(table(results, color=True, width=COLUMNS)), soft_wrap=True)
    telling = [result for result in results if needs_words(result) and verdict(result) == "regressed"]
    for result in telling[:1]:
        console.print()
        console.print(Text(explanation(result).replace(f"{Path.cwd()}/", "")))
    svg = console.export_svg(title="perfsuite report")
    # No fonts from a content delivery network: the viewer's own monospace font will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    picture.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
