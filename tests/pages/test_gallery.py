"""Tests that the page of ten regressions shows the stored results and nothing else."""

import pytest

from tests.benchmarks.hindsight.gallery import PAGE, SHOWN, WHERE, entries, with_entries
from tests.benchmarks.hindsight.pairs import PAIRS, Pair
from tests.benchmarks.hindsight.results import read

RESULTS = read()
SHOWN_PAIRS = [pair for pair in PAIRS if pair.name in SHOWN]


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_entries(page), "run `make samples`"


def test_ten_pairs_show_every_kind_that_was_found() -> None:
    assert len(SHOWN_PAIRS) == len(SHOWN) == 10
    regressed_pairs = {name for (name, _), result in RESULTS.items() if result.outcome == "found"}
    kinds = {pair.kind for pair in PAIRS if pair.name in regressed_pairs}
    assert {pair.kind for pair in SHOWN_PAIRS} == kinds == set(WHERE)


@pytest.mark.parametrize("pair", SHOWN_PAIRS, ids=lambda pair: pair.name)
def test_an_entry_has_the_stored_line_and_its_thread(pair: Pair) -> None:
    lines = {result.first for (name, _), result in RESULTS.items() if name == pair.name}
    assert all(result.outcome == "found" for (name, _), result in RESULTS.items() if name == pair.name)
    text = " ".join(entries().split())
    assert len([line for line in lines if " ".join(line.split()) in text]) == 1
    assert pair.link in text
