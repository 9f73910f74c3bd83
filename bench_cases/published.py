"""Show published comparisons next to our own measurements.

    python -m bench_cases.published [NAME ...] [--store .perfsuite] [--results FILE ...] [--markdown]

A published number is shown for reference, with its source. It never decides a verdict. A twin is a case with
the same code path but a tiny model. A number that was measured on other hardware, or with a twin, is never
shown in place of the case's own measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from perfsuite import documents
from perfsuite.documents import Data, Document
from perfsuite.errors import CaseError, PerfsuiteError
from perfsuite.inputs.ini import STORE
from perfsuite.report import markdown
from perfsuite.report.console import console, plain_table
from perfsuite.results.amounts import amount
from perfsuite.results.dry_facts import Roofline
from perfsuite.results.metric import (
    GPU_UTILISATION,
    MFU,
    PEAK_MEMORY,
    RESERVED_MEMORY,
    ROOFLINE_SHARE,
    STEP_S_P50,
    TFLOPS_PER_DEVICE,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_DEVICE,
    Metric,
)
from perfsuite.results.outcome import UNMEASURED
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import Store

PUBLISHED = Path(__file__).with_suffix(".json")

QuantityName = Literal[
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "tflops_per_device",
    "step_s",
    "peak_memory_bytes",
    "reserved_memory_bytes",
    "gpu_utilisation",
    "relative_time",
    "unstated",
]


QUANTITIES: Mapping[QuantityName, Metric] = {
    "tokens_per_s": TOKENS_PER_S,
    "tokens_per_s_per_device": TOKENS_PER_S_PER_DEVICE,
    "mfu": MFU,
    "tflops_per_device": TFLOPS_PER_DEVICE,
    "step_s": replace(STEP_S_P50, label="iteration time"),
    "peak_memory_bytes": PEAK_MEMORY,
    "reserved_memory_bytes": replace(RESERVED_MEMORY, label="memory"),
    "gpu_utilisation": replace(GPU_UTILISATION, label="GPU usage"),
    # Time per token, divided by the time per token of the case `relative_to`: 1.2 is 20% slower. See
    # `_measured`.
    "relative_time": replace(TOKENS_PER_S, label="relative time"),
    # The source does not say what the number means. The number is shown next to tokens/s, without a ratio.
    "unstated": replace(TOKENS_PER_S, label="throughput"),
}
"""perfsuite's metric for each published quantity, labelled with the source's word for it."""
_WRITTEN: Mapping[QuantityName, Callable[[float], str]] = {
    "step_s": lambda step_s: f"{1e3 * step_s:,.0f} ms",
    "gpu_utilisation": "{:.1f}%".format,
    "relative_time": "{:.2f}".format,
    "unstated": "{:,.0f} tokens/s".format,
}
"""Formats for the quantities that published tables write in another form than perfsuite's reports."""


class PublishedFigure(Data):
    """One number of a published table. `value` is in perfsuite's unit; `reported` is the published text."""

    quantity: QuantityName
    value: float | None = None
    """None if the row reports no number (for example out of memory), or a number without a unit."""
    reported: str


class Row(Data):
    """One row of a published table, and the cases that measure it."""

    settings: tuple[str, ...]
    """The cells of the published table that describe the run."""
    devices: int = Field(ge=1)
    figures: tuple[PublishedFigure, ...] = Field(min_length=1)
    case: str = ""
    """Id of the case that reproduces this row."""
    no_case: str = ""
    """The reason why no case can represent this row. A row has either `case` or `no_case`."""
    twin: str | None = None
    """Id of the twin: a case with the same code path, but with a tiny model on a CPU."""
    two_node_twin: str | None = None
    """Id of a twin that runs on two nodes, if the row is about several nodes."""
    relative_to: str | None = None
    """For `relative_time`: id of the case that is the reference."""
    sweep: str | None = None
    """Name of the sweep. Rows of the same sweep differ only in the micro-batch."""
    note: str | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Row:
        if bool(self.case) is bool(self.no_case):
            raise ValueError(f"row {' / '.join(self.settings)} needs a case, or no_case with the reason")
        return self

    @property
    def twins(self) -> set[str]:
        """Return the ids of the cases that use the same code path on CPUs."""
        return {twin for twin in (self.twin, self.two_node_twin) if twin is not None}


class Comparison(Data):
    """A published table with its source, hardware and conditions."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    title: str
    source: str
    accelerator: str
    """As published, for example `H100 80GB`."""
    conditions: str
    """The conditions that all rows share."""
    headings: tuple[str, ...]
    """The columns of `Row.settings`."""
    rows: tuple[Row, ...] = Field(min_length=1)
    notes: tuple[str, ...] = ()
    """Notes that a reader needs for a fair comparison."""

    @property
    def quantities(self) -> list[QuantityName]:
        """Return the table's quantities. The ratio to our number is shown only for the first quantity."""
        return list(dict.fromkeys(figure.quantity for row in self.rows for figure in row.figures))


class PublishedFile(Document):
    """`published.json`: the published comparisons of a repository."""

    schema_version: Literal[1] = 1
    comparisons: tuple[Comparison, ...]

    def find(self, name: str) -> Comparison:
        """Return the comparison with this name. If none has it, raises `CaseError` with the known names."""
        for comparison in self.comparisons:
            if comparison.name == name:
                return comparison
        names = [comparison.name for comparison in self.comparisons]
        near = get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CaseError(f"unknown comparison {name!r}.{hint} Known: {', '.join(names)}.")


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """A published table next to our measurements, as text."""

    title: str
    source: str
    conditions: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def latest(sessions: Sequence[SessionFile]) -> dict[str, Measurement]:
    """Return the newest measurement of each case, by case id.

    Measurements with an injected fault are left out, and so are dry runs, which measure nothing.
    """
    newest: dict[str, Measurement] = {}
    for session in sorted(sessions, key=lambda session: session.started_at):
        for result in session.results:
            if not result.dry and not any(run.inject for run in result.runs):
                newest[result.case_id] = result
    return newest


def rooflines(sessions: Sequence[SessionFile]) -> dict[str, Roofline]:
    """Return the newest roofline of each case that has a dry run, by case id."""
    newest: dict[str, Roofline] = {}
    for session in sorted(sessions, key=lambda session: session.started_at):
        for result in session.results:
            limit = result.dry_facts.roofline
            if limit is not None:
                newest[result.case_id] = limit
    return newest


def compare(
    comparison: Comparison, results: Mapping[str, Measurement], limits: Mapping[str, Roofline] | None = None
) -> ComparisonTable:
    """Return the published table with our measurement next to each published number.

    `results` has the measurements by case id. `limits` has the rooflines of dry runs by case id.
    """
    limits = limits or {}
    first, *others = comparison.quantities
    has_limits = any(row.case in limits for row in comparison.rows)
    has_twins = any(row.twins & results.keys() for row in comparison.rows)
    label = QUANTITIES[first].label
    best = _best(comparison, results)
    rows = []
    for row in comparison.rows:
        result = results.get(row.case)
        published = _published(row, first)
        value = None if published is None else published.value
        measured = _measured(row, first, results)
        star = " ★" if row.case in best else ""
        cells = [
            *row.settings,
            published.reported if published else "-",
            _here(row, first, measured, result, comparison.accelerator) + star,
            f"{measured / value:.2f}" if first != "unstated" and measured and value else "-",
            *(_both(row, quantity, results) for quantity in others),
            *([_shares(row, result, limits.get(row.case))] if has_limits else []),
            _verdict(result),
        ]
        if has_twins:
            cells.append(_twins(row, results))
        rows.append(tuple(cells))
    return ComparisonTable(
        title=comparison.title,
        source=comparison.source,
        conditions=comparison.conditions,
        headers=(
            *comparison.headings,
            f"{label}, published",
            f"{label}, here",
            "ratio",
            *(f"{QUANTITIES[quantity].label}, published / here" for quantity in others),
            *([f"{ROOFLINE_SHARE.label}, published / here"] if has_limits else []),
            "verdict",
            *(["CPU twin"] if has_twins else []),
        ),
        rows=tuple(rows),
        notes=(*comparison.notes, *dict.fromkeys(row.note for row in comparison.rows if row.note)),
    )


def _published(row: Row, quantity: QuantityName) -> PublishedFigure | None:
    return next((figure for figure in row.figures if figure.quantity == quantity), None)


def _measured(row: Row, quantity: QuantityName, results: Mapping[str, Measurement]) -> float | None:
    result = results.get(row.case)
    if result is None:
        return None
    metric = QUANTITIES[quantity]
    measured = metric.of(result.figures)
    if quantity != "relative_time":
        return measured
    base = results.get(row.relative_to or row.case)
    if base is None or base.hardware_class != result.hardware_class:
        return None  # numbers from different hardware are not compared
    base_measured = metric.of(base.figures)
    return metric.cost(measured) / metric.cost(base_measured) if measured and base_measured else None


def _here(
    row: Row, quantity: QuantityName, measured: float | None, result: Measurement | None, accelerator: str
) -> str:
    if row.no_case:
        return f"no case: {row.no_case}"
    if result is None:
        return f"not run: needs {row.devices} x {accelerator}"
    if measured is None:
        return result.verdict.failure or "not measured"
    return _written(quantity, measured)


def _written(quantity: QuantityName, measured: float) -> str:
    write = _WRITTEN.get(quantity)
    return amount(measured, QUANTITIES[quantity].unit) if write is None else write(measured)


def _both(row: Row, quantity: QuantityName, results: Mapping[str, Measurement]) -> str:
    published = _published(row, quantity)
    measured = _measured(row, quantity, results)
    here = _written(quantity, measured) if measured is not None else "-"
    return f"{published.reported if published else '-'} / {here}"


def _shares(row: Row, result: Measurement | None, limit: Roofline | None) -> str:
    """Return the published and the measured speed as shares of the roofline of the accelerator."""
    published = None if limit is None else _published_share(row, limit)
    here = None if result is None else result.figures.roofline_share
    return " / ".join(
        "-" if share is None else amount(share, ROOFLINE_SHARE.unit) for share in (published, here)
    )


def _published_share(row: Row, limit: Roofline) -> float | None:
    """Return the published speed as a share of a roofline. None if the row reports no speed."""
    for figure in row.figures:
        if figure.value is None:
            continue
        if figure.quantity == "tokens_per_s":
            return limit.share(figure.value)
        if figure.quantity == "tokens_per_s_per_device":
            return limit.share(figure.value * row.devices)
        if figure.quantity == "step_s":
            return limit.step_s / figure.value
    return None


def _verdict(result: Measurement | None) -> str:
    if result is None:
        return "-"
    return result.excused or result.verdict.outcome


def _twins(row: Row, results: Mapping[str, Measurement]) -> str:
    found = {"": results.get(row.twin or ""), "on two nodes: ": results.get(row.two_node_twin or "")}
    return "; ".join(where + _twin(result) for where, result in found.items() if result is not None) or "-"


def _twin(result: Measurement) -> str:
    speed = result.figures.tokens_per_s
    return f"{speed:,.0f} tokens/s, {_verdict(result)}" if speed else _verdict(result)


def _best(comparison: Comparison, results: Mapping[str, Measurement]) -> set[str]:
    """Return the ids of the cases with the best batch, one for each sweep that was run."""
    sweeps: dict[str, list[Measurement]] = {}
    for row in comparison.rows:
        if row.sweep is not None:
            result = results.get(row.case)
            if result is not None:
                sweeps.setdefault(row.sweep, []).append(result)
    best = [best_batch(sweep) for sweep in sweeps.values()]
    return {result.case_id for result in best if result is not None}


def best_batch(results: Sequence[Measurement]) -> Measurement | None:
    """Return the fastest case (tokens/s) whose allocator never had to retry. None if there is no such case.

    If the allocator has to free its cache to serve a request, the step is slow and the next larger batch
    fails. If speeds are equal, the smallest batch is best. A case is never best if it failed, was unhealthy,
    or ran on a CPU, where the allocator's retries are unknown. Raises `CaseError` if the cases differ in more
    than `micro_batch`.
    """
    others = {result.runs[0].case.replace(micro_batch=1).id for result in results if result.runs}
    if len(others) > 1:
        raise CaseError(
            f"the cases of a sweep must differ only in micro_batch, but got {' and '.join(sorted(others))}"
        )
    fitting = [result for result in results if _fits(result)]
    return max(fitting, key=_tokens_per_s_then_smallest, default=None)


def _fits(result: Measurement) -> bool:
    return (
        result.outcome not in UNMEASURED
        and result.figures.tokens_per_s is not None
        and all(run.figures.alloc_retries == 0 for run in result.healthy_runs)
    )


def _tokens_per_s_then_smallest(result: Measurement) -> tuple[float, int]:
    return result.figures.tokens_per_s or 0, -result.runs[0].case.micro_batch


def as_markdown(table: ComparisonTable) -> str:
    """Return a comparison as a Markdown section."""
    grid = [table.headers, ("---",) * len(table.headers), *table.rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in _escaped(grid)]
    notes = [f"- {markdown.text(note)}" for note in table.notes]
    said = f"{table.source}. {table.conditions}."
    return "\n".join([f"## {markdown.text(table.title)}", "", said, "", *lines, "", *notes, ""])


def _escaped(rows: Iterable[Sequence[str]]) -> Iterable[list[str]]:
    return ([markdown.text(cell) for cell in row] for row in rows)


def show(table: ComparisonTable) -> None:
    """Print a comparison in the terminal."""
    out = console()
    out.print(table.title, style="bold")
    out.print(f"{table.source}. {table.conditions}.")
    grid = plain_table(table.headers)
    for cells in table.rows:
        grid.add_row(*cells)
    out.print(grid)
    for note in table.notes:
        out.print(f"- {note}")
    out.print()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the named comparisons (default: all) with the newest result of each of their cases."""
    parser = argparse.ArgumentParser(prog="python -m bench_cases.published", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="name of a comparison (default: all)")
    parser.add_argument(
        "--results", nargs="+", type=Path, help="results.json files (default: all files in the store)"
    )
    parser.add_argument("--store", type=Path, default=STORE, help="directory of the local store")
    parser.add_argument("--markdown", action="store_true", help="write Markdown")
    given = parser.parse_args(arguments)
    try:
        known = documents.read(PUBLISHED, PublishedFile)
        wanted = [known.find(name) for name in given.names] or known.comparisons
        files = given.results or Store(given.store).results()
        sessions = [documents.read(file, SessionFile) for file in files]
    except PerfsuiteError as error:
        sys.exit(f"bench_cases.published: {error}")
    results = latest(sessions)
    limits = rooflines(sessions)
    for each in wanted:
        table = compare(each, results, limits)
        if given.markdown:
            print(as_markdown(table))
        else:
            show(table)


if __name__ == "__main__":
    main()
