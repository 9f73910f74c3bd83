"""Writes what people read in the terminal at the end: the table and explanations.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, OverflowMethod
from rich.table import Table
from rich.text import Text

from perfsuite.case.case import Unit
from perfsuite.report import counts, dry_facts, profile, summary
from perfsuite.report.columns import LAUNCHES, SPEED_CHANGE, Column, figure, of_cases, speed_in
from perfsuite.report.summary import known_issue, notes, speed_unit
from perfsuite.report.text import plural, printable, rate, sentence, value
from perfsuite.results.metric import (
    CPU_S_PER_STEP,
    ENERGY_PER_TOKEN,
    GPU_UTILISATION,
    MFU,
    PEAK_MEMORY,
    ROOFLINE_SHARE,
    STEP_JITTER,
    STEP_S_P50,
    STEP_S_P95,
    TOKENS_PER_S_PER_DEVICE,
    Metric,
    extra_metrics,
)
from perfsuite.results.outcome import STYLES
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement

NARROW = 120
"""Columns of a terminal below which a case's id has a line of its own, and some figures are left out."""
WIDEST = 10_000
"""Columns of a table that nothing limits; no table needs so many."""
PIPED = 200
"""Columns of a table that goes into a file or another program."""


class _Console(Console):
    """Prints what others wrote without being told by it what to do."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: rich would take `[data]` and `:data:` for markup."""
    made = _Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED  # and not the 80 columns that rich believes in
    return made


def plain_table(headings: Iterable[str], *, overflow: OverflowMethod = "ellipsis") -> Table:
    """Return a table without lines. `overflow` says what becomes of text that is wider than the terminal."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        made.add_column(heading, overflow=overflow)
    return made


def table(results: Sequence[Measurement], *, color: bool, width: int | None) -> str:
    """Return the cases as a table of `width` columns (80 or more); None: as wide as it needs."""
    narrow = width is not None and width < NARROW
    grid = plain_table(())
    if not narrow:
        grid.add_column("case", overflow="fold", ratio=1, min_width=20)
    columns = of_cases(results, _columns(speed_unit(results), narrow=narrow))
    for column in columns:
        grid.add_column(column.heading, justify="right", no_wrap=True)
    only_dry = summary.only_dry(results)
    grid.add_column("dry run" if only_dry else "verdict", no_wrap=True)
    for result in results:
        style = STYLES[summary.verdict(result)]
        verdict = Text.assemble((style.word, style.colour))
        for mark in summary.marks(result):
            if mark in ("shared", "not counted") or (mark == "dry run" and not only_dry):
                verdict.append(f" ({mark})", "" if mark == "dry run" else "yellow")
        grid.add_row(
            *([] if narrow else [result.case_id]), *(column.cell(result) for column in columns), verdict
        )
    text = io.StringIO()
    _Console(
        file=text,
        width=width or WIDEST,
        force_terminal=color,
        color_system="standard" if color else None,
        markup=False,
        emoji=False,
    ).print(grid)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    if narrow:
        heading, *rows = lines
        named = [
            line for result, row in zip(results, rows, strict=True) for line in (result.case_id, f"  {row}")
        ]
        lines = [f"  {heading}", *named]
    return "\n".join(lines)


def _columns(unit: Unit, *, narrow: bool) -> list[Column]:
    """The columns between case and verdict."""
    wide = [] if narrow else [figure(TOKENS_PER_S_PER_DEVICE)]
    return [
        speed_in(unit),
        *wide,
        *(_in_ms(metric) for metric in (STEP_S_P50, STEP_S_P95)),
        figure(PEAK_MEMORY),
        figure(MFU),
        replace(SPEED_CHANGE, heading="vs base"),
        *([] if narrow else [LAUNCHES]),
    ]


def _in_ms(metric: Metric) -> Column:
    """The column of a time, with the unit in its heading, which keeps the table narrow."""
    return replace(
        figure(metric),
        heading=f"{metric.heading} ms",
        format=lambda result, seconds: f"{1e3 * seconds:.1f}",
    )


def explanation(result: Measurement, *, whole: bool = True) -> str:
    """Return everything about one case in words: metrics beside their baseline, failures, what changed.

    If not `whole`, a launched case goes without what no verdict needs: figures that are not judged, and what
    a step did.
    """
    whole = whole or result.dry
    verdict = result.verdict
    lines = [f"{result.case_id}: {verdict.outcome} {_by_what(result)}"]
    lines += [f"  {line}" for line in profile.because(verdict)]
    lines += [f"  {reason}" for reason in verdict.reasons]
    lines += [f"  {line}" for line in _judged_counts(result)]
    lines += [f"  {sentence(check, verdict.against)}" for check in verdict.checks]
    if result.shared:
        lines.append("  shared: others used the machine; its figures are shown, and counts alone are judged")
    if (known := known_issue(result)) is not None:
        lines.append(f"  {known}")
    lines += [f"  {line}" for line in _shown(result) if whole]
    lines += [f"  {line}" for line in dry_facts.lines(result.dry_facts, result.unit)]
    lines += [f"  {line}" for line in counts.lines(result.counts) if whole]
    lines += [f"  note: {note}" for note in notes(result)]
    if verdict.changed:
        lines.append(f"  {summary.since(verdict)}: " + "; ".join(verdict.changed))
    if result.baseline_file:
        meant = "; if that is meant, accept a new one, or delete it if it is not reviewed"
        differs = verdict.failure in ("unlike", "loss") and bool(result.runs) and not result.runs[-1].failure
        lines.append(f"  baseline: {result.baseline_file}{meant if differs else ''}")
    if verdict.counts is not None and verdict.counts.baseline_file:
        lines.append(f"  baseline of the counts: {verdict.counts.baseline_file}")
    lines += [f"  {line}" for line in profile.traces(result)]
    lines.append(f"  files of the {'dry run' if result.dry else 'launches'}: {result.directory}")
    lines += _tracebacks(result.before, ", arm A")
    lines += _tracebacks(result.runs, ", arm B" if result.before else "")
    return printable("\n".join(lines))


def _tracebacks(runs: Sequence[Run], where: str) -> list[str]:
    lines = []
    for run in runs:
        if run.failure is not None and run.failure.traceback:
            rank = "" if run.failure.rank is None else f" of rank {run.failure.rank}"
            traceback = run.failure.traceback.rstrip().splitlines()
            lines += [f"  traceback{rank}{where}:", *(f"    {line}" for line in traceback)]
    return lines


def _by_what(result: Measurement) -> str:
    """The evidence: so many launches, or a dry run of a machine that need not be there."""
    if result.dry:
        return f"by a dry run as if on {result.runs[-1].machine.device_name}"
    if result.before:
        return f"after {plural(len(result.runs), 'pair')} of launches"
    return f"after {plural(len(result.runs), 'launch')}"


def _judged_counts(result: Measurement) -> list[str]:
    """The counts beside the baseline's: the verdict, then each finding and remark."""
    check = result.verdict.counts
    if check is None:
        return []
    by_rank = len(result.counts) > 1
    told = [*counts.findings(check, by_rank=by_rank), *counts.listed(check, by_rank=by_rank)]
    judged = counts.judged(check, result.verdict.against)
    return [f"counts: {judged}", *(f"  {line}" for line in (*told, *counts.remarks(check)))]


def _shown(result: Measurement) -> list[str]:
    """The figures that are shown and never judged, one line each."""
    figures, judged = result.figures, {check.metric for check in result.verdict.checks}
    built_in = (STEP_JITTER, ROOFLINE_SHARE, CPU_S_PER_STEP, GPU_UTILISATION, ENERGY_PER_TOKEN)
    shown = [metric for metric in built_in if metric.name not in judged]
    extra = [metric for metric in extra_metrics([figures]) if metric.judged == "shown"]
    lines = [
        f"{metric.label}: {value(metric.counting(result.unit), metric.of(figures))} (not judged)"
        for metric in (*shown, *extra)
        if metric.of(figures) is not None
    ]
    if figures.own_tokens_per_s is not None and figures.tokens_per_s is not None:
        apart = figures.own_tokens_per_s / figures.tokens_per_s - 1
        reported = f"{rate(figures.own_tokens_per_s)} {result.unit}/s"
        lines.append(f"reported by {result.framework}: {reported} ({apart:+.1%} beside this clock)")
    return lines
