"""Measures the cost of the HTML report: its size, and the time to make it and to open it in Chromium.

Two reports are made. Each has 100 cases on 8 GPUs, and each case has three launches of 70 to 120 steps. In
the first report, a quarter of the sections are open, as after a usual session. In the second report, all
cases regressed and every section is open.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

from perfsuite.report.html.page import render
from tests.browser import Browser, chromium
from tests.sessions import make_session

CASES = 100
OPENED = 5


def main() -> None:
    """Print the measurements of both reports."""
    for name, kind_of in (("as they come", None), ("all regressed", lambda number: "regressed")):
        session = make_session(CASES, kind_of)
        began = time.perf_counter()
        page = render([session])
        rendered_s = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as directory, chromium() as browser:
            file = Path(directory) / "report.html"
            file.write_text(page, encoding="utf-8")
            opened_s = median(_open(browser, file) for _ in range(OPENED))
        print(
            f"report of {CASES} cases, {name}: {len(page.encode()) / 2**20:.2f} MiB, "
            f"made in {rendered_s:.2f} s, opened in {opened_s:.2f} s "
            f"(median of {OPENED}, until the load event and one frame)"
        )


def _open(browser: Browser, file: Path) -> float:
    began = time.perf_counter()
    browser.open(file.as_uri())
    browser.wait_for_frame()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
