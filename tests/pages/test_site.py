"""Tests of pages as Sphinx builds them: types on the reference page, and tables in a browser.

A few pages are built alone, because the whole site takes longer.
"""

import html
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, BeforeValidator, Field

import tests.browser
from perfsuite.case.model import FrozenMapping
from tests.browser import Browser, served
from tests.doc_pages import ROOT

browser = tests.browser.browser  # pytest finds a fixture by its name in the module

DOCS = ROOT / "docs"
SITE = runpy.run_path(str(DOCS / "conf.py"))
BUILT = ("reference", "verdicts", "options", "evidence/hindsight", "evidence/published")
WIDE = 1440
PHONE = 390
# The widths of the area that each table scrolls in, and of what is in it.
WIDTHS = """[...document.querySelectorAll("article .table-wrapper")]
    .map(wrapper => [wrapper.clientWidth, wrapper.scrollWidth])"""
# Names in the first column that take more than one line, but are not long.
TORN = """[...document.querySelectorAll("article td:first-child :is(code, a) .pre")]
    .filter(name => name.innerText.length < 24 && name.getClientRects().length > 1)
    .map(name => name.innerText)"""
INTERNALS = (
    *("Serializer(", "Validator(", "Undefined", "Annotated["),
    *("lambda", "<function", "<factory>", " object>", "~"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the pages of `BUILT`, as HTML."""
    source = tmp_path_factory.mktemp("docs")
    for name in BUILT:
        page = source / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / f"{name}.md", page)
    built = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "--quiet", "-c", str(DOCS), "-D", "root_doc=reference"]
    subprocess.run([*sphinx, str(source), str(built)], check=True, capture_output=True)
    return built


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as address:
        yield address


# Types


class Names(BaseModel):
    """A data class with checks."""

    one: Annotated[str, Field(min_length=1)] | None
    all: FrozenMapping[Annotated[int, Field(ge=1)]]


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        (Annotated[int, Field(ge=2, strict=True)] | None, int | None),
        (Annotated[tuple[str, ...], BeforeValidator(tuple)], tuple[str, ...]),
        (tuple[Annotated[int, Field(ge=1)], Annotated[str, Field(min_length=1)]], tuple[int, str]),
        (FrozenMapping[Annotated[int, Field(ge=1)]], Mapping[str, int]),
        (dict[str, int], dict[str, int]),
    ],
)
def test_a_type_is_shown_without_its_checks(annotation: Any, shown: Any) -> None:
    assert SITE["without_checks"](annotation) == shown


def test_fields_are_shown_with_plain_types() -> None:
    SITE["without_fields"](None, "class", "Names", Names)
    assert Names.__annotations__ == {"one": str | None, "all": Mapping[str, int]}


def signatures(page: Path) -> list[str]:
    """Return the text of each name that the reference page explains, for example `steps: int`."""
    marked = re.findall(r'<dt class="sig .*?</dt>', page.read_text(), re.DOTALL)
    texts = (html.unescape(re.sub(r"<[^>]+>", "", entry)) for entry in marked)
    return [" ".join(text.split()).removesuffix("¶") for text in texts]


@pytest.mark.launch
@pytest.mark.parametrize("internal", INTERNALS)
def test_the_reference_shows_no_internals(site: Path, internal: str) -> None:
    assert [line for line in signatures(site / "reference.html") if internal in line] == []


@pytest.mark.launch
@pytest.mark.parametrize("place", [str(ROOT), sys.prefix, sys.executable])
def test_the_reference_is_the_same_on_each_machine(site: Path, place: str) -> None:
    assert place not in (site / "reference.html").read_text()


@pytest.mark.launch
@pytest.mark.parametrize(
    "shown",
    [
        "config: Mapping[str, JsonValue]",  # a model's configuration
        "dp_shard_size: int",
        "env: Mapping[str, str]",
        "precision: Literal['fp32', 'bf16-mixed', 'fp16-mixed', 'bf16']",
        "pretend: Callable[[], None]",  # a field whose default is a function
        "python: str = sys.executable",
        "class perfsuite.frameworks.DryPlan",
        "class perfsuite.frameworks.StepClock",
    ],
)
def test_the_reference_shows_readable_types(site: Path, shown: str) -> None:
    assert shown in signatures(site / "reference.html")


# Tables


@pytest.mark.browser
@pytest.mark.parametrize("name", ["evidence/hindsight", "evidence/published", "verdicts", "options"])
def test_no_column_is_cut_on_a_wide_screen(browser: Browser, address: str, name: str) -> None:
    browser.screen(WIDE)
    browser.open(f"{address}/{name}.html")
    widths = browser.evaluate(WIDTHS)
    assert widths
    assert [(area, table) for area, table in widths if table > area] == []


@pytest.mark.browser
@pytest.mark.parametrize("name", ["verdicts", "options"])
def test_names_stay_whole_on_a_phone(browser: Browser, address: str, name: str) -> None:
    browser.screen(PHONE)
    browser.open(f"{address}/{name}.html")
    assert browser.evaluate("document.querySelectorAll('article td:first-child code').length > 5")
    assert browser.evaluate(TORN) == []


@pytest.mark.browser
def test_the_site_has_an_icon(browser: Browser, address: str) -> None:
    browser.open(f"{address}/verdicts.html")
    icon = browser.evaluate("document.querySelector('link[rel~=icon]').href")
    assert icon.startswith(address)
    browser.open(icon)
    assert browser.evaluate("document.documentElement.tagName") == "svg"
