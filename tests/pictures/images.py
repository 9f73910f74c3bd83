"""The pictures of docs/images, what they are made from, and a record of the pages that were photographed.

An SVG is compared with what today's code draws. A PNG depends on the browser, so `made_from.json` has a
digest of the page that the PNG shows.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from perfsuite.features.history import page
from perfsuite.report.html.page import render
from tests.browser import chromium
from tests.features.history.live import write_sample_history
from tests.pictures import architecture, detection, messages
from tests.sample_reports import PAGES, picture, session

IMAGES = PAGES / "images"
RECORD = IMAGES / "made_from.json"


@cache
def history() -> str:
    """Return the page of the sample history."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_sample_history(root)
        return page.write(root, root / "history", root / "trainer").read_text(encoding="utf-8")


class Photograph(NamedTuple):
    """A photograph of the upper part of a page."""

    html: Callable[[], str]
    width: int
    height: int


DRAWN: Mapping[str, Callable[[], str]] = {
    "architecture.svg": architecture.picture,
    "detection.svg": detection.picture,
    "terminal.svg": picture,
}
PHOTOGRAPHS: Mapping[str, Photograph] = {
    "report.png": Photograph(lambda: render([session()]), 1200, 1000),
    "history.png": Photograph(history, 1200, 790),
    "comment.png": Photograph(messages.comment, 1000, 590),
    "message.png": Photograph(messages.chat, 1000, 130),
}


def digest(html: str) -> str:
    """Return a digest of a page."""
    return hashlib.sha256(html.encode()).hexdigest()


def recorded() -> dict[str, str]:
    """Return the digest of the page that each PNG was made from."""
    digests: dict[str, str] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return digests


def draw() -> None:
    """Write the SVGs."""
    for name, drawn in DRAWN.items():
        (IMAGES / name).write_text(drawn(), encoding="utf-8")


def photograph() -> None:
    """Write the PNGs whose pages have changed, and record what they were made from."""
    digests = recorded()
    pages = {name: photographed.html() for name, photographed in PHOTOGRAPHS.items()}
    stale = {name: html for name, html in pages.items() if digests.get(name) != digest(html)}
    if not stale:
        return
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        browser.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        for name, html in stale.items():
            file = Path(directory) / "page.html"
            file.write_text(html, encoding="utf-8")
            browser.screen(PHOTOGRAPHS[name].width, PHOTOGRAPHS[name].height)
            browser.open(file.as_uri())
            browser.wait_for_frame()
            browser.screenshot(IMAGES / name)
    made = {name: digest(html) for name, html in pages.items()}
    RECORD.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
