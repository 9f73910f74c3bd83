"""Prepares the counts of one case of the HTML page: tables of text and bars. Pure.

Imports neither torch nor pytest. Text is escaped where it becomes HTML: in the template and in the charts.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.report import counts as told
from perfsuite.report.html import charts
from perfsuite.report.html.charts import Figure
from perfsuite.report.html.tables import NONE, Table
from perfsuite.report.text import plural
from perfsuite.results.counts import PHASES, Counts, RankCounts, StepMemory, group_name
from perfsuite.results.outcome import CountCheck
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.count_sentences import amount

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
            told.change(each),
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
        caption=caption, headers=headers, rows=rows[:MOST_FINDINGS], text_columns=2, figure_columns=3
    )
    return table if rows else None


def _rank(entry: RankCounts, key: str) -> RankView:
    counts, name = entry.counts, told.ranks(entry)
    tables = [_collectives(counts), _work(counts), _memory(counts.memory), _compiled(counts)]
    return RankView(
        ranks=name,
        in_short=told.in_short(counts),
        tables=[table for table in tables if table is not None],
        bars=_bars(counts, name, key),
    )


def _collectives(counts: Counts) -> Table | None:
    rows = [
        (
            each.kind,
            group_name(each.ranks, each.apart),
            each.dtype or NONE,
            each.phase,
            amount(each.count, "calls"),
            amount(each.bytes, "bytes"),
        )
        for each in told.largest_first(counts.collectives)
    ]
    caption = "Bytes are those of whole messages: what is gathered, what is to be scattered, what is reduced."
    headers = ("collective", "group", "dtype", "phase", "calls", "bytes")
    return (
        Table(caption=caption, headers=headers, rows=rows, text_columns=4, figure_columns=2) if rows else None
    )


def _work(counts: Counts) -> Table:
    by_phase = (counts.flops, counts.kernels, counts.host_reads)
    rows = [
        (
            phase,
            amount(counts.flops.get(phase, 0), "FLOP"),
            *(amount(calls.get(phase, 0), "calls") for calls in by_phase[1:]),
        )
        for phase in PHASES
        if any(amounts.get(phase) for amounts in by_phase)
    ]
    sums = [sum(amounts.values()) for amounts in by_phase]
    rows.append(("step", amount(sums[0], "FLOP"), *(amount(each, "calls") for each in sums[1:])))
    caption = "FLOPs of matrix products, convolutions and attention. A host read waits for the device."
    if counts.compiled is not None:
        caption += " Kernels are those outside of compiled code."
    if counts.without_flops:
        caption += f" FLOPs are {told.without_flops(counts)}."
    for way, count in counts.device_copies.items():
        caption += f" Copied {way}: {plural(count, 'time')}."
    return Table(
        caption=caption, headers=("phase", "FLOPs", "kernels", "host reads"), rows=rows, figure_columns=3
    )


def _memory(memory: StepMemory | None) -> Table | None:
    if memory is None:
        return None
    rows = [
        (f"peak, {told.peak_in(memory)}", amount(memory.peak, "bytes")),
        ("saved for backward", amount(memory.saved_for_backward, "bytes")),
        ("more after the step than before", amount(memory.growth, "bytes")),
        ("allocations", amount(memory.allocations, "calls")),
    ]
    caption = "Live tensors: each storage once, without what the allocator adds."
    return Table(caption=caption, headers=("memory", "of the step"), rows=rows, figure_columns=1)


def _compiled(counts: Counts) -> Table | None:
    if (made := counts.compiled) is None:
        return None
    rows = [
        ("graphs", amount(made.graphs, "calls")),
        ("recompilations", amount(made.recompilations, "calls")),
        ("generated kernels", amount(made.kernels, "calls")),
        ("calls of other kernels", amount(made.extern_calls, "calls")),
        *((f"graph break: {reason}", amount(count, "calls")) for reason, count in made.breaks.items()),
    ]
    caption = "What torch.compile made of the model, over the whole launch."
    return Table(caption=caption, headers=("compiled", "number"), rows=rows, figure_columns=1)


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
