"""The picture of the HTML report on the pages: `make pictures`. The other pictures need no browser."""

import tempfile
from pathlib import Path

from perfsuite.report.html.page import render
from tests.browser import chromium
from tests.sample_reports import PAGES, session

WIDTH = 1200
HEIGHT = 1000


def main() -> None:
    """Draw the upper part of the report of the sample session."""
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        file = Path(directory) / "report.html"
        file.write_text(render([session()]), encoding="utf-8")
        browser.screen(WIDTH, HEIGHT)
        browser.open(file.as_uri())
        browser.wait_for_frame()
        browser.screenshot(PAGES / "images" / "report.png")


if __name__ == "__main__":
    main()
