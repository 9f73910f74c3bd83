"""Tests of the page of a history in a real browser, opened as a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.browser
from perfsuite.features.history import page as history_page
from tests.browser import Browser
from tests.features.history import test_page
from tests.report.html.test_page_browser import CONTRAST

browser = tests.browser.browser  # pytest finds fixtures by their names in the module
root = test_page.root
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def file(root: Path) -> Path:
    return history_page.write(root, root / "history", root / "trainer", commit_url=test_page.URL)


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Browser]:
    browser.screen(1280)
    browser.open(file.as_uri())
    yield browser
    assert browser.console() == []
    assert browser.requests() == [file.as_uri()]


@pytest.mark.parametrize("width", [360, 390, 768, 1440])
def test_nothing_is_wider_than_the_screen(page: Browser, width: int) -> None:
    page.screen(width)
    page.wait_for_frame()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    edges = "[...document.querySelectorAll('h1, p, li, .name, .newest, svg')]"
    assert (
        page.evaluate(f"{edges}.filter((one) => one.getBoundingClientRect().right > innerWidth).length") == 0
    )


@pytest.mark.parametrize(("width", "rows"), [(1280, 1), (390, 2)])
def test_charts_are_side_by_side_or_stacked(page: Browser, width: int, rows: int) -> None:
    page.screen(width)
    page.wait_for_frame()
    tops, widths = page.evaluate("""(() => {
      const charts = [...document.querySelector('.line').querySelectorAll('svg')];
      const frames = charts.map((each) => each.getBoundingClientRect());
      return [frames.map((each) => Math.round(each.top)), frames.map((each) => each.width)];
    })()""")
    assert len(set(tops)) == rows
    assert min(widths) > 250


@pytest.mark.parametrize(("dark", "ground"), [(False, "rgb(255, 255, 255)"), (True, "rgb(17, 21, 26)")])
def test_text_has_enough_contrast(page: Browser, dark: bool, ground: str) -> None:
    page.screen(1280, dark=dark)
    page.wait_for_frame()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    texts = ["h1", ".name", ".newest", ".spark text", ".badge", "p.quiet"]
    texts += [f".changes .{state}" for state in ("worse", "better", "past")]
    ratios = page.evaluate(CONTRAST, texts)
    assert {what: ratio for what, ratio in ratios.items() if ratio < 4.5} == {}
    assert len(ratios) == len(texts)
