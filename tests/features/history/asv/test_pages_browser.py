"""Tests of asv's pages in a browser: what they draw, and that they load everything from a local server."""

import shutil
from collections.abc import Iterator

import pytest

import tests.browser
from tests.browser import Browser, served
from tests.features.history.asv.conftest import CASES, Published
from tests.features.history.asv.local_scripts import use_local_scripts

browser = tests.browser.browser  # pytest finds a fixture by its name in the module
pytestmark = pytest.mark.browser

GPT2 = "gpt2-tiny.1x2.fp32"
INK = """(() => {
    const canvas = document.querySelector(arguments[0]);
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(new Uint32Array(pixels.buffer)).size;
})()"""
"""Returns the number of colours on a canvas, which is 1 if nothing is drawn."""
WRITES_DOWN_WHAT_IS_WRITTEN = """
window.written = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.written.push(text);
    return fillText.call(this, text, ...rest);
};
"""
"""Records the text that asv draws on a canvas, because text cannot be read from a canvas."""


@pytest.fixture(scope="module")
def address(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pages = shutil.copytree(published.root / "out/html", tmp_path_factory.mktemp("pages") / "html")
    use_local_scripts(pages)
    with served(pages) as url:
        yield url


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Browser]:
    """Yield a browser. Then check that its console is empty, and that it used only this address."""
    browser.screen(1280)
    yield browser
    assert browser.console() == []
    asked = browser.requests()
    assert asked
    assert [url for url in asked if not url.startswith(f"{address}/")] == []


def listed(page: Browser, selector: str) -> list[str]:
    """Wait until elements exist, and return their texts."""
    page.wait(f"document.querySelectorAll('{selector}').length > 0")
    texts = page.evaluate(f"[...document.querySelectorAll('{selector}')].map(each => each.textContent)")
    assert isinstance(texts, list)
    return texts


def test_the_grid_draws_every_benchmark(page: Browser, address: str) -> None:
    page.open(f"{address}/index.html")
    page.wait("document.querySelectorAll('.benchmark-plot canvas.flot-base').length === 3")
    metrics = ("peak_memory", "seconds_per_step", "seconds_per_token")
    assert listed(page, ".benchmark-text") == [f"1x2.fp32.{metric}" for metric in metrics]
    assert listed(page, ".benchmark-group h1") == ["gpt2-tiny"]
    assert page.evaluate(INK, ".benchmark-plot canvas.flot-base") > 1


def test_a_graph_has_a_line_axes_and_parameters(page: Browser, address: str) -> None:
    source = {"source": WRITES_DOWN_WHAT_IS_WRITTEN}
    page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    page.open(f"{address}/index.html#{GPT2}.seconds_per_step")
    ticks = "#main-graph .flot-y-axis .flot-tick-label"
    page.wait("document.querySelectorAll('#main-graph canvas.flot-base').length === 1")
    page.wait(f"document.querySelectorAll('{ticks}').length > 1")
    assert page.evaluate(INK, "#main-graph canvas.flot-base") > 2
    assert {"milliseconds", "commits"} <= set(page.evaluate("window.written"))
    assert "100" in listed(page, ticks)
    [shown] = listed(page, "#graphdisplay-navigation")
    for parameter in ("micro_batch", "framework", "options", "h100-80gb-sxm"):
        assert parameter in shown


def test_lists_regressions_and_every_case(page: Browser, address: str) -> None:
    page.open(f"{address}/index.html#regressions")
    larger, slower = sorted(listed(page, "#regressions-body tbody tr"))
    assert f"{GPT2}.seconds_per_token(fake, 64, 1, 1, max_warmup_steps5-steps20)" in slower
    assert "1.1" in slower
    assert f"{GPT2}.peak_memory(fake, 64, 4, 1, " in larger
    page.open(f"{address}/index.html#summarylist")
    assert len(listed(page, "#summarylist-body tbody tr")) == 3 * len(CASES)
