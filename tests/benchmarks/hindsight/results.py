"""What came of the pairs, as a file and as the table of the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.hindsight.pairs import Pair
from tests.benchmarks.hindsight.table import PAIRS

FILE = Path(__file__).with_name("results.json")
PAGE = Path("docs/evidence/hindsight.md")
BEGIN, END = "<!-- made by: make hindsight -->\n", "<!-- end of what make hindsight made -->\n"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the gate said of a pair."""

    name: str
    outcome: str
    """`found`, `found, cause later`, `missed` or `cannot run`; if unchanged `silent` or `false finding`."""
    first: str
    """The first line that it said."""
    seconds: int
    """Of both launches, without what pip took."""


def read() -> dict[str, Result]:
    """The results so far, by the name of the pair."""
    found = json.loads(FILE.read_text()) if FILE.exists() else []
    return {each["name"]: Result(**each) for each in found}


def write(results: Mapping[str, Result]) -> None:
    """Write the results, in the order of the pairs; those of pairs that are gone are left out."""
    found = [asdict(results[pair.name]) for pair in PAIRS if pair.name in results]
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def tables(results: Mapping[str, Result]) -> str:
    """The tables of the page, in Markdown."""
    regressions = [pair for pair in PAIRS if pair.is_regression]
    unchanged = [pair for pair in PAIRS if not pair.is_regression]
    outcomes = [results[pair.name].outcome for pair in regressions if pair.name in results]
    ran = [each for each in outcomes if each != "cannot run"]
    silent = [results[pair.name].outcome for pair in unchanged if pair.name in results]
    return "\n".join(
        [
            f"{len(regressions)} regressions, of which {len(ran)} ran: {ran.count('found')} were found, with "
            f"the cause in the first line, {ran.count('found, cause later')} with the cause in a later line, "
            f"{ran.count('missed')} were missed. {len(silent)} unchanged pairs: "
            f"{silent.count('false finding')} false findings.\n",
            "| thread | good, bad | what a step of the bad one does more | verdict | first line | s |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_row(pair, results.get(pair.name)) for pair in regressions),
            "\n| unchanged pair | script | verdict | s |",
            "| --- | --- | --- | --- |",
            *(_unchanged_row(pair, results.get(pair.name)) for pair in unchanged),
            "",
        ]
    )


def _row(pair: Pair, result: Result | None) -> str:
    outcome, first, seconds = "not run", pair.cannot, ""
    if result is not None and not pair.cannot:
        outcome, first, seconds = result.outcome, f"`{result.first}`", str(result.seconds)
        if pair.why_missed and outcome != "found":
            first = f"{first}. {pair.why_missed}"
    elif pair.cannot:
        outcome = "cannot run here"
    return _line(pair.thread, f"{pair.good}, {pair.bad}", pair.what, outcome, first, seconds)


def _unchanged_row(pair: Pair, result: Result | None) -> str:
    if result is None:
        return _line(f"{pair.good}, {pair.bad}", pair.script, f"not run {pair.cannot}".strip(), "")
    said = "" if result.outcome == "silent" else f": `{result.first}`"
    return _line(f"{pair.good}, {pair.bad}", pair.script, f"{result.outcome}{said}", str(result.seconds))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def write_page(results: Mapping[str, Result]) -> None:
    """Put the tables into the page, between its two marks."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}")
