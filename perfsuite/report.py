"""What people and machines read at the end: table, explanations, JSON. Imports neither torch nor pytest."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from perfsuite.data import Data, plain
from perfsuite.hardware import Machine
from perfsuite.judge import Check, Outcome, Verdict
from perfsuite.metric import TOKENS_PER_S
from perfsuite.result import Figures, Run

STYLES: dict[Outcome, str] = {
    "passed": "green",
    "improved": "green",
    "recorded": "cyan",
    "regressed": "red",
    "failed": "red",
}


NARROWEST = 116
"""Columns of a table. With fewer rich would cut the verdict, the last one, short without a word."""


class Result(Data):
    """One case of a session: what was measured and what it means."""

    nodeid: str
    case_id: str
    framework: str
    runs: tuple[Run, ...]
    """Its launches, in the order they were made."""
    verdict: Verdict
    baseline_file: str | None
    directory: str
    """The files of the launches."""

    @property
    def figures(self) -> Figures:
        """The median of each figure over the launches that have it."""
        names = Figures.model_fields
        told = {name: [getattr(run.figures, name) for run in self.runs] for name in names}
        known = {name: [v for v in values if v is not None] for name, values in told.items()}
        return Figures(**{name: median(values) for name, values in known.items() if values})

    @property
    def measured_steps(self) -> list[float]:
        """Step times in the windows of all launches, in seconds."""
        return [step for run in self.runs for step in run.measured_steps]


class Skipped(Data):
    """A case that this machine cannot run."""

    nodeid: str
    case_id: str
    framework: str
    reason: str


def table(results: Sequence[Result], *, color: bool, width: int) -> str:
    """The results as a terminal table, fitted into `width` columns."""
    grid = Table(box=None, header_style="bold", pad_edge=False, show_edge=False)
    grid.add_column("case", overflow="fold", ratio=1, min_width=20)
    for heading in ("tokens/s", "per device", "p50 ms", "p95 ms", "memory", "MFU", "vs base", "launches"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    for result in results:
        outcome = result.verdict.outcome
        grid.add_row(result.case_id, *_cells(result), f"[{STYLES.get(outcome, 'yellow')}]{outcome}")
    console = Console(
        file=io.StringIO(),
        width=max(width, NARROWEST),
        force_terminal=color,
        color_system="standard" if color else None,
    )
    console.print(grid)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _cells(result: Result) -> list[str]:
    f = result.figures
    speed = next((c for c in result.verdict.checks if c.metric == TOKENS_PER_S.name), None)
    change = None if speed is None or speed.worsening is None else 1 / (1 + speed.worsening) - 1
    return [
        "-" if f.tokens_per_s is None else f"{f.tokens_per_s:,.0f}",
        "-" if f.tokens_per_s_per_device is None else f"{f.tokens_per_s_per_device:,.0f}",
        "-" if f.step_s_p50 is None else f"{1e3 * f.step_s_p50:.1f}",
        "-" if f.step_s_p95 is None else f"{1e3 * f.step_s_p95:.1f}",
        "-" if f.peak_memory_bytes is None else amount(f.peak_memory_bytes, "bytes"),
        "-" if f.mfu is None else f"{f.mfu:.1%}",
        "-" if change is None else f"{round(change, 3) + 0.0:+.1%}",
        str(len(result.runs)),
    ]


def explanation(result: Result) -> str:
    """Everything about one result in words: each metric against its baseline, failures, what changed."""
    verdict = result.verdict
    lines = [f"{result.case_id}: {verdict.outcome} after {_plural(len(result.runs), 'launch')}"]
    lines += [f"  {reason}" for reason in verdict.reasons]
    lines += [f"  {sentence(check)}" for check in verdict.checks]
    notes = Counter(note for run in result.runs for note in run.notes)
    lines += [f"  note: {note}" + (f" ({n} launches)" if n > 1 else "") for note, n in notes.items()]
    for machine in {run.machine for run in result.runs}:
        if machine.device == "cuda" and machine.note:
            lines.append(f"  note: {machine.note}")
    if verdict.changed:
        lines.append("  changed since the baseline: " + "; ".join(verdict.changed))
    if result.baseline_file:
        lines.append(f"  baseline: {result.baseline_file}")
    lines.append(f"  files of the launches: {result.directory}")
    for run in result.runs:
        if run.failure is not None and run.failure.traceback:
            where = "" if run.failure.rank is None else f" of rank {run.failure.rank}"
            traceback = run.failure.traceback.rstrip().splitlines()
            lines += [f"  traceback{where}:", *(f"    {line}" for line in traceback)]
    return "\n".join(lines)


def sentence(check: Check) -> str:
    """A check in words: what was measured, against what, by how much, allowed how much, how sure."""
    text = f"{check.label}: {amount(check.measured, check.unit)}"
    if check.baseline is not None:
        text += f", baseline {amount(check.baseline, check.unit)}"
    if check.worsening is not None:
        text += f": {_change(check, check.worsening)}"
        if check.interval is not None:
            low, high = check.interval
            text += f" (99 % interval {low:+.1%} to {high:+.1%})"
        text += f", {check.tolerance:.1%} allowed: {check.outcome}"
    elif check.outcome == "failed" or check.outcome == "inconclusive":
        text += f": {check.outcome}"
    if check.blind:
        text += f"; blind: this gate finds only {check.minimum_detectable:.1%} or more reliably"
    return f"{text}; {check.note}" if check.note else text


def _change(check: Check, worsening: float) -> str:
    more = "more" if worsening >= 0 else "less"
    what = {"tokens/s": f"{more} time per token", "bytes": more, "": more}[check.unit]
    return f"{abs(worsening):.1%} {what}"


def amount(value: float | None, unit: str) -> str:
    """A figure for people: bytes in binary units, tokens/s with separators."""
    if value is None:
        return "not measured"
    if unit == "bytes":
        size, name = (2**30, "GiB") if value >= 2**30 else (2**20, "MiB")
        return f"{value / size:.2f} {name}" if name == "GiB" else f"{value / size:.1f} {name}"
    return f"{value:,.0f}" if unit else f"{value:.2f}"


def _plural(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}es"


def to_json(
    machine: Machine,
    results: Sequence[Result],
    skipped: Sequence[Skipped],
    *,
    status: Literal["complete", "interrupted"],
) -> dict[str, Any]:
    """For machines: every verdict with its figures and steps."""
    return {
        "schema_version": 1,
        "perfsuite": version("perfsuite"),
        "status": status,
        "machine": plain(machine),
        "results": [
            {
                "nodeid": result.nodeid,
                "case_id": result.case_id,
                "framework": result.framework,
                "outcome": result.verdict.outcome,
                "figures": plain(result.figures),
                "verdict": plain(result.verdict),
                "runs": [plain(run) for run in result.runs],
                "baseline_file": result.baseline_file,
                "directory": result.directory,
            }
            for result in results
        ],
        "skipped": [plain(skip) for skip in skipped],
    }
