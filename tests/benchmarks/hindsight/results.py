"""Stores the results of the pairs in a file, and shows them in the tables of the page."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.hindsight.pairs import PAIRS, Pair

FILE = Path(__file__).with_name("results.json")
PAGE = Path("docs/evidence/hindsight.md")
ALIKE = "not reproduced: "
BEGIN = "<!-- made by: make hindsight -->\n"
END = "<!-- end of the output of make hindsight -->\n"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of the gate for a pair."""

    name: str
    outcome: str
    """The grade: `found`, `found, cause later`, `missed` or `cannot run`. For an unchanged pair, it is
    `silent` or `false finding`."""
    first: str
    """The first line that the gate printed."""
    seconds: int
    """Seconds of both launches, without the time for pip."""
    busy: bool = False
    """Whether other programs used the machine's cores when the launches began."""
    began: str = ""
    """When the launches began, such as `2026-11-29 12:10`. It is empty for runs before this was recorded."""


Results = Mapping[tuple[str, bool], Result]
"""The last results of each pair, by name and `busy`: one on a quiet machine and one on a busy machine."""


def read() -> dict[tuple[str, bool], Result]:
    """Return the stored results."""
    entries = [Result(**fields) for fields in json.loads(FILE.read_text())] if FILE.exists() else []
    return {(result.name, result.busy): result for result in entries}


def write(results: Results) -> None:
    """Write the results in the order of the pairs. Pairs that cannot be run are left out."""
    keys = [(pair.name, busy) for pair in PAIRS if not pair.cannot for busy in (False, True)]
    entries = [asdict(results[key]) for key in keys if key in results]
    FILE.write_text(json.dumps(entries, indent=1) + "\n")


def newest(results: Results) -> dict[str, Result]:
    """Return the last result of each pair. If it is unknown which is last, take the quiet machine's."""
    in_order = sorted(results.values(), key=lambda result: (result.began, not result.busy))
    return {result.name: result for result in in_order}


def tables(all_results: Results) -> str:
    """Return the generated part of the page as Markdown: the results on a quiet and on a busy machine."""
    quiet_ones = {name: result for (name, busy), result in all_results.items() if not busy}
    busy_ones = {name: result for (name, busy), result in all_results.items() if busy}
    results = newest(all_results)
    again = [(quiet, busy_ones[name]) for name, quiet in quiet_ones.items() if name in busy_ones]
    alike = [quiet for quiet, busy in again if (quiet.outcome, quiet.first) == (busy.outcome, busy.first)]
    regressions = [pair for pair in PAIRS if pair.is_regression]
    tried = [pair for pair in regressions if not pair.cannot]
    alike_both = [pair for pair in regressions if pair.cannot.startswith(ALIKE)]
    cannot = [pair for pair in regressions if pair.cannot and pair not in alike_both]
    others = [*cannot, *(pair for pair in tried if pair.name not in results)]
    grades = [results[pair.name].outcome for pair in tried if pair.name in results]
    first = grades.count("found")
    later = grades.count("found, cause later")
    kinds = dict.fromkeys(pair.kind for pair in regressions)
    by_kind = "; ".join(_of_kind(kind, regressions, results) for kind in kinds)
    ran = len(grades) + len(alike_both)
    unchanged = [pair for pair in PAIRS if not pair.is_regression and pair.name in results]
    silent = [results[pair.name].outcome for pair in unchanged].count("silent")
    not_run = [pair for pair in PAIRS if not pair.is_regression and pair.name not in results]
    return "\n".join(
        [
            f"**{first + later} of {ran} regressions were found**, {first} with the cause in the first line. "
            f"Of the other {ran - first - later}, {len(alike_both)} do not show in a step of our scripts, "
            f"and {grades.count('missed')} were missed for another reason. Another {len(others)} "
            f"regressions were not run. {len(again)} pairs were run both on a quiet machine and on a busy "
            f"one. For {len(alike)} of these, the verdict and the first line are the same.\n\n"
            f"Regressions found, by where they appear: {by_kind}.\n",
            "| thread: good, bad | regression | verdict | first line | where | seconds |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_row(pair, results[pair.name], all_results) for pair in tried if pair.name in results),
            f"\nNot found, because a step of our scripts does not show the regression ({len(alike_both)}):\n",
            *(f"- {pair.link}: {pair.cannot.removeprefix(ALIKE)}." for pair in alike_both),
            f"\nNot run ({len(others)}):\n",
            *(f"- {pair.link}: {pair.cannot or _untried(pair)}." for pair in others),
            f"\n{silent} of {len(unchanged)} unchanged pairs were silent:\n",
            *(f"- {script}: {'; '.join(pairs)}" for script, pairs in _by_script(unchanged, results).items()),
            *([f"\nUnchanged pairs that were not run ({len(not_run)}):\n"] if not_run else []),
            *(f"- `{pair.script}`: {_arms(pair)}" for pair in not_run),
            "",
        ]
    )


def _of_kind(kind: str, regressions: Sequence[Pair], results: Mapping[str, Result]) -> str:
    """Return how many regressions of one kind were found, for example `growth 2 of 3`."""
    pairs = [pair for pair in regressions if pair.kind == kind]
    ran = [results[pair.name].outcome for pair in pairs if not pair.cannot and pair.name in results]
    alike = [pair for pair in pairs if pair.cannot.startswith(ALIKE)]
    return f"{kind} {sum(outcome.startswith('found') for outcome in ran)} of {len(ran) + len(alike)}"


def _untried(pair: Pair) -> str:
    return f"not run yet ({pair.kind}: {pair.what})"


def code(text: str) -> str:
    """Return a text as code in Markdown. Its fence is longer than each row of backquotes in the text."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _row(pair: Pair, result: Result, results: Results) -> str:
    took = (results.get((pair.name, busy)) for busy in (False, True))
    seconds = " / ".join("-" if measured is None else str(measured.seconds) for measured in took)
    missed = f". {pair.why_missed}" if pair.why_missed and result.outcome == "missed" else ""
    first = f"{code(result.first.removeprefix('regressed: '))}{missed}"
    cells = (f"{pair.link}: {_arms(pair)}", pair.what, result.outcome, first, pair.kind, seconds)
    return f"| {' | '.join(cells)} |"


def _by_script(unchanged: Sequence[Pair], results: Mapping[str, Result]) -> dict[str, list[str]]:
    """Return the unchanged pairs of each script. A pair that was not silent is shown with its finding."""
    sentences: dict[str, list[str]] = {}
    for pair in unchanged:
        result = results[pair.name]
        said = "" if result.outcome == "silent" else f" ({result.outcome}: {code(result.first)})"
        sentences.setdefault(f"`{pair.script}`", []).append(f"{_arms(pair)}{said}")
    return sentences


def _arms(pair: Pair) -> str:
    """Return the releases that differ, then the shared ones in brackets: `trl 0.23.0, 0.22.2 (...)`."""
    good, bad = ([word.replace("==", " ") for word in arm.split()] for arm in (pair.good, pair.bad))
    if good == bad:
        return f"{' '.join(good)} twice"
    shared = [word for word in good if word in bad]
    others = [word.split()[-1] for word in bad if word not in shared]
    end = f" ({', '.join(shared)})" if shared else ""
    return f"{', '.join([*(word for word in good if word not in shared), *others])}{end}"


def write_page(results: Results) -> None:
    """Write the tables into the page, between its two markers."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}")
