"""Tests that the stored pages of releases describe their cases like new pages of `make releases`."""

import re
from pathlib import Path

import pytest

from perfsuite.features.search.releases_page import ON_CPUS, SENSE
from tests.benchmarks.hindsight.cases import CASES
from tests.benchmarks.hindsight.release_page import NOTES, noted

PAGES = Path(__file__).parents[3] / "docs" / "releases"
IDS = {case.id for case in CASES}  # the ids of scripts depend on the current directory
PACKAGES = sorted(NOTES["packages"])


def test_notes_precede_changes_of_releases() -> None:
    made = noted("# Releases of trl\n\nfirst\n\n- case\n\n## 1 → 2\n\nmore\n", "trl")
    head, change = made.split("\n## ")
    assert change == "1 → 2\n\nmore\n"
    assert head.startswith("# Releases of trl\n\nfirst\n\n- case\n\nThe scripts are small")
    assert head.endswith(NOTES["packages"]["trl"].strip() + "\n")


def test_every_page_has_notes() -> None:
    pages = {page.stem for page in PAGES.glob("*.md")} - {"index"}
    assert pages == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_edited_page_has_the_words_of_a_new_one(package: str) -> None:
    page = (PAGES / f"{package}.md").read_text()
    on_cpus = f"{ON_CPUS}\n\n" if " on CPUs, " in page else ""
    assert page.startswith(f"# Releases of {package}\n\n{SENSE}\n\n{on_cpus}")
    assert "->" not in page


@pytest.mark.parametrize("package", PACKAGES)
def test_edited_page_has_its_notes(package: str) -> None:
    page = (PAGES / f"{package}.md").read_text()
    assert NOTES["all"].strip() in page
    assert NOTES["packages"][package].strip() in page


@pytest.mark.parametrize("package", PACKAGES)
def test_a_page_says_where_each_case_ran(package: str) -> None:
    head = (PAGES / f"{package}.md").read_text().partition("\n## ")[0]
    places = re.findall(r"^- (\S+): (.*)$", head, re.MULTILINE)
    assert places
    assert {name for name, _ in places} <= {*IDS}
    ran = r"(dry run|launch) (on CPUs|as if on NVIDIA H100 80GB HBM3), (1 step|12 steps) counted"
    assert [(name, place) for name, place in places if not re.fullmatch(ran, place)] == []
