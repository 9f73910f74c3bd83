"""Prepares the counts of one case of the HTML page: tables of text and bars. Pure.

Imports neither torch nor pytest. Text is escaped where it becomes HTML: in the template and in the charts.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.report import counts as told
from perfsuite.report.html import charts
from perfsuite.report.html.charts import Figure
from perfsuite.report.table import Table
from perfsuite.report.text import plural
from perfsuite.results.amounts import amount, signed
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.outcome import CountCheck
from perfsuite.results.session_file import Measurement

MOST_FINDINGS = 50
MOST_ENTRIES = 8
"""Entries of ranks on the page: where each of 64 ranks has other bytes, the first ones tell enough."""


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What a step of some ranks did."""

    ranks: str
    in_short: str
    tables: list[Table]
    bars: list[Figure]


@dataclass(frozen=True, kw_only=True)
class CountsView:
    """What the page shows of the counts of one case."""

    judged: str | None
    """The verdict of the counts in words; None where they were not judged."""
    findings: Table | None
    """What is not as in the baseline."""
    remarks: list[str]
    """What was not judged, and why."""
    ranks: list[RankView]
    left_out: str | None
    """The ranks that are not shown."""


def counts_view(result: Measurement, anchor: str) -> CountsView | None:
    """Return the counts of a case; None where nothing was counted. `anchor` begins the charts' ids."""
    check, shown = result.verdict.counts, result.counts[:MOST_ENTRIES]
    if check is None and not shown:
        return None
    left = sum(len(entry.ranks) for entry in result.counts[MOST_ENTRIES:])
    return CountsView(
        judged=None if check is None else told.judged(check, result.verdict.against),
        findings=None if check is None else _findings(check, result.verdict.against or "baseline"),
        remarks=[] if check is None else told.remarks(check),
        ranks=[_rank(entry, f"{anchor}:counts-{number}") for number, entry in enumerate(shown, 1)],
        left_out=f"The step of {plural(left, 'rank')} more is in results.json." if left else None,
    )


def _findings(check: CountCheck, against: str) -> Table | None:
    rows = [
        (
            each.field,
            "listed" if each.outcome == "passed" else each.outcome,
            amount(each.before, each.unit),
            amount(each.now, each.unit),
            signed(each.now - each.before, each.unit),
            each.ranks,
            each.sentence,
        )
        for each in check.findings
    ]
    caption = f"What a step does otherwise than in the {against}. What is listed was not judged."
    if left := len(rows) - MOST_FINDINGS:
        caption += f" {left} more are in results.json." if left > 0 else ""
    headers = ("count", "verdict", against, "now", "change", "ranks", "in words")
    table = Table(
        caption=caption, headers=headers, rows=rows[:MOST_FINDINGS], text_columns=2, last_text_columns=2
    )
    return table if rows else None


def _rank(entry: RankCounts, key: str) -> RankView:
    counts, name = entry.counts, told.ranks(entry)
    return RankView(
        ranks=name,
        in_short=told.in_short(counts),
        tables=told.tables(counts),
        bars=_bars(counts, name, key),
    )


def _bars(counts: Counts, name: str, key: str) -> list[Figure]:
    """Bytes by kind of collective, and what lived at the peak."""
    drawn = [("messages", "Bytes of collectives in a step, by kind and dtype.", told.bytes_by_kind(counts))]
    if counts.memory is not None:
        caption = f"Live tensors at the peak of {amount(counts.memory.peak, 'bytes')}, by part."
        drawn.append(("peak", caption, told.peak_by_part(counts.memory)))
    return [
        Figure(chart=charts.parts(parts, key=f"{key}-{kind}", title=f"{name}: {caption}"), caption=caption)
        for kind, caption, amounts in drawn
        if (parts := {part: size for part, size in amounts.items() if size})
    ]
