"""What people read at the end: table and explanations. Imports neither torch nor pytest."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfsuite.case.case import Unit
from perfsuite.report.summary import known_issue, notes, speed, speed_change, speed_unit
from perfsuite.report.text import amount, percent, plural, rate, sentence
from perfsuite.results.metric import in_unit
from perfsuite.results.outcome import Outcome
from perfsuite.results.session_file import Result

STYLES: dict[Outcome, str] = {
    "passed": "green",
    "improved": "green",
    "recorded": "cyan",
    "regressed": "red",
    "failed": "red",
}


NARROW = 120
"""Columns, below which a case's id stands on a line of its own and some figures are left out."""
WIDEST = 10_000
"""Columns of a table that nothing limits: more than any needs."""
PIPED = 200
"""Columns of a table that goes into a file or another program."""


def console(*, stderr: bool = False) -> Console:
    """Prints text as it is, on lines as long as they are: to rich, `[data]` and `:data:` could be markup."""
    made = Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED  # and not the 80 columns that rich believes in
    return made


def table(results: Sequence[Result], *, color: bool, width: int | None) -> str:
    """The results as a terminal table in `width` columns (80 or more); None: as wide as it needs."""
    narrow = width is not None and width < NARROW
    grid = Table(box=None, header_style="bold", pad_edge=False, show_edge=False)
    if not narrow:
        grid.add_column("case", overflow="fold", ratio=1, min_width=20)
    unit = speed_unit(results)
    figures = [_figures(result, unit, narrow=narrow) for result in results]
    for heading in figures[0]:
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    for result, told in zip(results, figures, strict=True):
        outcome = result.verdict.outcome
        verdict = Text.assemble((outcome, STYLES.get(outcome, "yellow")))
        if result.excused is not None:
            verdict = Text.assemble((result.excused, "yellow"))
        if result.shared:
            verdict.append(" (shared)", "yellow")
        grid.add_row(*([] if narrow else [result.case_id]), *told.values(), verdict)
    text = io.StringIO()
    Console(
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


def _figures(result: Result, unit: Unit, *, narrow: bool) -> dict[str, str]:
    """By column heading; speeds are under `unit`."""
    f, change = result.figures, speed_change(result)
    told = {
        f"{unit}/s": "-" if f.tokens_per_s is None else speed(f.tokens_per_s, result.unit, unit),
        "per device": "-" if f.tokens_per_s_per_device is None else rate(f.tokens_per_s_per_device),
        "p50 ms": "-" if f.step_s_p50 is None else f"{1e3 * f.step_s_p50:.1f}",
        "p95 ms": "-" if f.step_s_p95 is None else f"{1e3 * f.step_s_p95:.1f}",
        "memory": "-" if f.peak_memory_bytes is None else amount(f.peak_memory_bytes, "bytes"),
        "MFU": "-" if f.mfu is None else f"{f.mfu:.1%}",
        "vs base": "-" if change is None else percent(change),
        "launches": str(len(result.runs)),
    }
    left_out = {"per device", "launches"} if narrow else set()
    return {heading: value for heading, value in told.items() if heading not in left_out}


def explanation(result: Result) -> str:
    """Everything about one result in words: each metric against its baseline, failures, what changed."""
    verdict = result.verdict
    lines = [f"{result.case_id}: {verdict.outcome} after {plural(len(result.runs), 'launch')}"]
    lines += [f"  {reason}" for reason in verdict.reasons]
    lines += [f"  {sentence(check)}" for check in verdict.checks]
    if result.shared:
        lines.append("  shared: others used the machine; the figures are shown, nothing is judged by them")
    if (known := known_issue(result)) is not None:
        lines.append(f"  {known}")
    figures = result.figures
    if figures.step_jitter is not None:
        lines.append(f"  p95/p50 of a step: {figures.step_jitter:.2f} (not judged)")
    if figures.gpu_utilisation is not None:
        lines.append(f"  GPU utilisation: {figures.gpu_utilisation:.0f} %")
    if figures.energy_per_token_j is not None:
        per = in_unit("mJ per token", result.unit)
        lines.append(f"  energy: {1e3 * figures.energy_per_token_j:.2f} {per}")
    if figures.own_tokens_per_s is not None and figures.tokens_per_s is not None:
        apart = figures.own_tokens_per_s / figures.tokens_per_s - 1
        own = f"{rate(figures.own_tokens_per_s)} {result.unit}/s"
        lines.append(f"  {result.framework}'s own log: {own} ({apart:+.1%} beside this clock)")
    lines += [f"  note: {note}" for note in notes(result)]
    if verdict.changed:
        lines.append("  changed since the baseline: " + "; ".join(verdict.changed))
    if result.baseline_file:
        meant = "; if that is meant, accept a new one, or delete it if it is not reviewed"
        differs = verdict.failure in ("unlike", "loss") and bool(result.runs) and not result.runs[-1].failure
        lines.append(f"  baseline: {result.baseline_file}{meant if differs else ''}")
    lines.append(f"  files of the launches: {result.directory}")
    for run in result.runs:
        if run.failure is not None and run.failure.traceback:
            where = "" if run.failure.rank is None else f" of rank {run.failure.rank}"
            traceback = run.failure.traceback.rstrip().splitlines()
            lines += [f"  traceback{where}:", *(f"    {line}" for line in traceback)]
    return "\n".join(lines)
