"""Writes docs/gallery.md: ten regressions from the stored results, with at least one of each kind found."""

from pathlib import Path

from perfsuite.report.text import wrapped
from tests.benchmarks.hindsight.pairs import PAIRS, Pair
from tests.benchmarks.hindsight.results import Result, newest, read

PAGE = Path(__file__).parents[3] / "docs" / "gallery.md"
BEGIN = "<!-- made by: make samples -->\n"
END = "<!-- end of the output of make samples -->\n"
SHOWN = (
    "accelerate-3762",
    "transformers-39395",
    "torchmetrics-2638",
    "transformers-30010",
    "pytorch-181761",
    "datasets-7207",
    "diffusers-4260",
    "pytorch-lightning-20594",
    "peft-1147",
    "transformers-42805",
)
WHERE = {
    "step": "in every step",
    "growth": "in the objects that each step keeps",
    "data": "in the work for each batch",
    "start-up": "before the first step",
    "some steps": "in only some steps",
    "event": "in a checkpoint",
    "dtype": "in the precision of the weights",
}


def entries() -> str:
    """Return the generated part of the page as Markdown."""
    pairs = {pair.name: pair for pair in PAIRS}
    results = newest(read())
    return "\n".join(_entry(number, pairs[name], results[name]) for number, name in enumerate(SHOWN, 1))


def _entry(number: int, pair: Pair, result: Result) -> str:
    line = "\n".join(wrapped(result.first, indent=""))
    how = " It was found in a dry run that simulates H100s." if pair.dry else ""
    what = pair.what[0].upper() + pair.what[1:]
    return (
        f"## {number}. {what}\n\n"
        f"{pair.link}: good {_released(pair.good)}, bad {_released(pair.bad)}. "
        f"The regression appears {WHERE[pair.kind]}.{how}\n\n"
        f"```text\n{line}\n```\n"
    )


def _released(arm: str) -> str:
    """Return the first word of an arm, which is the library: `accelerate 1.11.0`."""
    return arm.split()[0].replace("==", " ")


def with_entries(page: str) -> str:
    """Return the page with the current entries between its markers."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{entries()}\n{END}{after}"


def write() -> None:
    """Write the entries into the page."""
    PAGE.write_text(with_entries(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
