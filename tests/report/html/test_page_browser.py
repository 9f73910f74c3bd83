"""Tests of the HTML report in a real browser, opened as a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Keys

import tests.browser
from perfsuite.report.html.page import render
from tests.browser import Browser
from tests.counted import make_entries
from tests.report.html.test_page import make_evil
from tests.samples import make_compared, make_run, make_session_file
from tests.sessions import make_explained, make_session

browser = tests.browser.browser  # pytest finds a fixture by its name in the module
pytestmark = pytest.mark.browser

CONTRAST = """(() => {
  // The relative luminance of WCAG 2.2. The background is that of the nearest opaque parent.
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = parse(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return [r, g, b];
      if (alpha !== 0) throw new Error(`half transparent background: ${at.className}`);
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const selector of arguments[0]) {
    const element = document.querySelector(selector);
    const style = getComputedStyle(element);
    const color = parse(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(color), light(behind(element.closest("svg")?.parentElement ?? element))];
    found[selector] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "index.html"
    session = make_session()
    explained = [
        make_explained(result) if result.outcome == "regressed" else result for result in session.results
    ]
    path.write_text(render([session.replace(results=tuple(explained))]), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Browser]:
    browser.screen(1280)
    browser.open(file.as_uri())
    yield browser
    assert browser.console() == []
    assert browser.requests() == [file.as_uri()]


def shown(page: Browser, what: str = "dataset.verdict") -> list[Any]:
    """Return the value `what` of each visible row, from top to bottom."""
    rows = "[...document.querySelectorAll('#overview tbody tr')].filter((row) => row.checkVisibility())"
    values = page.evaluate(f"{rows}.map((row) => row.{what})")
    assert isinstance(values, list)
    return values


def click(page: Browser, text: str, where: str = "") -> None:
    """Click the button whose text begins with `text`."""
    page.driver.find_element("xpath", f"{where}//button[starts-with(., '{text}')]").click()


def type_filter(page: Browser, text: str) -> None:
    box = page.driver.find_element("id", "text")
    box.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE, text)


WORST = ["failed", "regressed", "regressed"]


def test_table_starts_worst_first(page: Browser) -> None:
    assert shown(page)[:3] == WORST
    assert len(shown(page)) == page.evaluate("document.querySelectorAll('.case').length") == 14


@pytest.mark.parametrize(("clicks", "direction"), [(1, "ascending"), (2, "descending")])
def test_table_sorts_by_a_clicked_column(page: Browser, clicks: int, direction: str) -> None:
    for _ in range(clicks):
        click(page, "tokens/s", "//thead")
    assert page.evaluate("document.querySelector('[aria-sort]').ariaSort") == direction
    figures = [text.replace(",", "") for text in shown(page, "cells[3].textContent")]
    assert figures[-1] == "\N{EN DASH}"  # unknown values stay last
    values = [int(figure) for figure in figures[:-1]]
    assert values == sorted(values, reverse=direction == "descending")


def test_table_returns_to_worst_first(page: Browser) -> None:
    click(page, "tokens/s", "//thead")
    click(page, "tokens/s", "//thead")
    click(page, "verdict", "//thead")
    assert page.evaluate("document.querySelectorAll('[aria-sort]').length") == 1
    assert shown(page)[:3] == WORST


def test_table_sorts_with_the_keyboard(page: Browser) -> None:
    page.evaluate("document.querySelectorAll('thead button')[1].focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    names = shown(page, "cells[1].textContent")
    assert names == sorted(names)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_filters_by_text(page: Browser) -> None:
    type_filter(page, "GPT2 b1-")
    assert shown(page) == ["regressed", "unhealthy"]
    assert page.evaluate("document.getElementById('shown').textContent") == "2 of 14 cases"
    cases = "[...document.querySelectorAll('.case')].filter((each) => each.checkVisibility())"
    assert page.evaluate(f"{cases}.length") == 2


def test_filters_by_verdict_and_text(page: Browser) -> None:
    type_filter(page, "GPT2 b1-")
    page.driver.find_element("css selector", "input[value=regressed]").click()
    assert shown(page) == ["unhealthy"]
    type_filter(page, "")
    assert len(shown(page)) == 12


def test_a_filter_can_match_nothing(page: Browser) -> None:
    type_filter(page, "no such case")
    assert shown(page) == []
    assert page.evaluate("document.getElementById('nothing').checkVisibility()")


def test_link_unfolds_its_case(page: Browser, file: Path) -> None:
    page.evaluate("document.querySelector('#overview tr:last-child a').click()")
    assert page.evaluate("document.querySelector('.case:last-child > details').open")
    page.wait_for_frame()  # the browser scrolls in the next frame
    assert page.evaluate(
        "document.querySelector('.case:last-child').getBoundingClientRect().top < innerHeight"
    )
    for name, count in (("Open all", 14), ("Close all", 0)):
        click(page, name)
        assert page.evaluate("document.querySelectorAll('.case > details[open]').length") == count
    anchor = "case-fake-llama-3.1-8b-s256-b1-bf16-mixed-ac_full-1x8"
    page.open(f"{file.as_uri()}#{anchor}")
    assert page.evaluate("document.getElementById(arguments[0]).firstElementChild.open", anchor)
    page.open(file.as_uri())


def test_charts_are_drawn_within_their_frames(page: Browser) -> None:
    click(page, "Open all")
    drawn = page.evaluate("""[...document.querySelectorAll('figure svg')].map((svg) => {
      svg.scrollIntoView();
      const frame = svg.getBoundingClientRect();
      const line = svg.querySelector('.line').getBoundingClientRect();
      return [frame.width, frame.height, line.width, frame.right - line.right, frame.bottom - line.bottom];
    })""")
    assert len(drawn) > 50
    for width, height, line, right, bottom in drawn:
        assert width > 250
        assert height > 50
        assert line > 0.5 * width
        assert min(right, bottom) >= 0


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(page: Browser, width: int) -> None:
    page.screen(width)
    click(page, "Open all")
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true })")
    page.wait_for_frame()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    overview = "document.getElementById('overview')"
    assert page.evaluate(f"{overview}.scrollWidth <= {overview}.parentElement.clientWidth")
    cut = "[...document.querySelectorAll('h1, h2, h3, p, li, figcaption, caption span')]"
    assert page.evaluate(f"{cut}.filter((one) => one.getBoundingClientRect().right > innerWidth).length") == 0


def test_a_phone_shows_each_metrics_change(page: Browser) -> None:
    page.screen(390)
    page.wait_for_frame()
    seen = page.evaluate("""[...document.querySelectorAll('.case > details[open] table')]
      .filter((table) => table.textContent.includes('99% interval'))
      .flatMap((table) => [...table.querySelectorAll('th, td')])
      .filter((cell) => cell.cellIndex === 2)
      .map((cell) => [cell, cell.closest('.scroll')].map((each) => each.getBoundingClientRect().right))
    """)
    assert len(seen) > 8
    assert all(right <= edge for right, edge in seen)


def test_cases_are_found_by_their_whole_ids(page: Browser) -> None:
    type_filter(page, "fake-gpt2-xl-s256-b1-bf16-mixed-ac_full-1x8")
    assert len(shown(page)) == 1
    type_filter(page, "")


def test_an_open_case_begins_with_the_cause(page: Browser) -> None:
    seen = page.evaluate("""[...document.querySelectorAll('.folded')].map((reason) =>
      [reason.closest('details').open, reason.checkVisibility()])""")
    assert seen
    assert {is_open != is_shown for is_open, is_shown in seen} == {True}


def test_names_of_spans_stay_in_view_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    """The names and arms remain visible even if the table is scrolled to the right."""
    counted = make_run(counts=make_entries())
    compared = make_compared().replace(runs=(counted,), before=(counted,))
    file = tmp_path / "index.html"
    file.write_text(render([make_session_file(compared)]), encoding="utf-8")
    browser.screen(390)
    browser.open(file.as_uri())
    browser.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true })")
    seen = browser.evaluate("""(() => {
      const scroll = document.querySelector('.spans');
      scroll.scrollLeft = scroll.scrollWidth;
      const frame = scroll.getBoundingClientRect();
      const cells = [...scroll.querySelectorAll('tr > :nth-child(-n + 2)')];
      return [scroll.scrollLeft, ...cells.map((each) => each.getBoundingClientRect().left - frame.left)];
    })()""")
    scrolled, *lefts = seen
    assert scrolled > 0
    assert {round(left) for left in lefts} == {0, 104}


@pytest.mark.parametrize(("dark", "ground"), [(False, "rgb(255, 255, 255)"), (True, "rgb(17, 21, 26)")])
def test_text_has_enough_contrast(page: Browser, dark: bool, ground: str) -> None:
    page.screen(1280, dark=dark)
    page.wait_for_frame()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    outcomes = ["failed", "regressed", "unhealthy", "improved", "recorded", "passed"]
    texts = ["h1", "dt", "dd", "caption span", "thead button", "td.num", "a[href^='#case']", "legend"]
    texts += ["#shown", "pre", "figcaption", ".reasons li", ".buttons button", ".chart .tick"]
    ratios = page.evaluate(CONTRAST, [*texts, *(f".badge.{outcome}" for outcome in outcomes)])
    assert {what: ratio for what, ratio in ratios.items() if ratio < 4.5} == {}
    assert len(ratios) == 20


def test_print_hides_the_controls_and_is_light(page: Browser, tmp_path: Path) -> None:
    page.screen(1280, dark=True)
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.evaluate("document.getElementById('filter').checkVisibility()")
    assert page.evaluate("document.querySelector('td.extra').checkVisibility()")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_every_case_is_visible_without_scripts(page: Browser, file: Path) -> None:
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    page.open(file.as_uri())
    visible = [row.is_displayed() for row in page.driver.find_elements("css selector", "#overview tbody tr")]
    assert visible == [True] * 14
    assert not page.driver.find_element("id", "filter").is_displayed()
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_markup_in_data_runs_no_script(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "evil.html"
    file.write_text(render([make_evil()]), encoding="utf-8")
    browser.open(file.as_uri())
    assert browser.evaluate("[document.scripts.length, document.images.length]") == [1, 0]
    assert (browser.console(), browser.requests()) == ([], [file.as_uri()])
    bad = "<script>document.title = 'owned'</script><img src='https://example.org/x.png'>"
    file.write_text(render([make_session(1)]).replace("</main>", f"{bad}</main>"), encoding="utf-8")
    browser.open(file.as_uri())
    assert browser.evaluate("document.title") == "perfsuite: 1 passed, 3 skipped"
    assert sum("Content Security Policy" in message for message in browser.console()) == 2
