"""What the HTML report costs: its size, the time to make it, and to open it in Chromium.

100 cases of three launches each, 70 to 120 steps, 8 GPUs: as they come (a quarter of the sections open), and
all of them regressed, with every section open.
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
    """Print the figures of both reports."""
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
