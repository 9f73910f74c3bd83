"""What people and machines read at the end: table, explanations, JSON. Imports neither torch nor pytest."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from perfsuite.data import Data, plain
from perfsuite.hardware import Machine
from perfsuite.judge import Outcome, Verdict, amount, sentence
from perfsuite.metric import TOKENS_PER_S
from perfsuite.result import Run

STYLES: dict[Outcome, str] = {
    "passed": "green",
    "improved": "green",
    "recorded": "cyan",
    "unhealthy": "yellow",
    "regressed": "red",
    "failed": "red",
}


class Result(Data):
    """One case of a session: what was measured and what it means, or why it was skipped."""

    nodeid: str
    case_id: str
    framework: str
    run: Run
    verdict: Verdict
    baseline_file: str | None
    directory: str
    """The files of the launch."""


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
    for heading in ("tokens/s", "per device", "p50 ms", "p95 ms", "memory", "MFU", "vs base"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    for result in results:
        grid.add_row(
            result.case_id, *_cells(result), f"[{STYLES[result.verdict.outcome]}]{result.verdict.outcome}"
        )
    console = Console(
        file=io.StringIO(),
        width=max(width, 100),
        force_terminal=color,
        color_system="standard" if color else None,
    )
    console.print(grid)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


def _cells(result: Result) -> list[str]:
    f = result.run.figures
    speed = next((c for c in result.verdict.checks if c.metric == TOKENS_PER_S.name), None)
    return [
        "-" if f.tokens_per_s is None else f"{f.tokens_per_s:,.0f}",
        "-" if f.tokens_per_s_per_device is None else f"{f.tokens_per_s_per_device:,.0f}",
        "-" if f.step_s_p50 is None else f"{1e3 * f.step_s_p50:.1f}",
        "-" if f.step_s_p95 is None else f"{1e3 * f.step_s_p95:.1f}",
        amount(f.peak_memory_bytes, "bytes"),
        "-" if f.mfu is None else f"{f.mfu:.1%}",
        "-" if speed is None or speed.worsening is None else f"{round(-speed.worsening, 3) + 0.0:+.1%}",
    ]


def explanation(result: Result) -> str:
    """Everything about one result in words: each metric against its baseline, failures, what changed."""
    verdict, run = result.verdict, result.run
    lines = [f"{result.case_id}: {verdict.outcome}"]
    lines += [f"  {reason}" for reason in verdict.reasons]
    lines += [f"  {sentence(check)}" for check in verdict.checks]
    if run.failure is None and run.slowest_rank is not None and run.case.topology.world_size > 1:
        measured = f"{len(run.measured_steps)} of {len(run.step_s)} steps measured"
        lines.append(f"  slowest rank: {run.slowest_rank}; {measured}")
    lines += [f"  note: {note}" for note in run.notes]
    if run.machine.device == "cuda" and run.machine.note:
        lines.append(f"  note: {run.machine.note}")
    if verdict.changed:
        lines.append("  changed since the baseline: " + "; ".join(verdict.changed))
    if result.baseline_file:
        lines.append(f"  baseline: {result.baseline_file}")
    lines.append(f"  files of the launch: {result.directory}")
    if run.failure is not None and run.failure.traceback:
        where = "" if run.failure.rank is None else f" of rank {run.failure.rank}"
        lines += [
            f"  traceback{where}:",
            *(f"    {line}" for line in run.failure.traceback.rstrip().splitlines()),
        ]
    return "\n".join(lines)


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
                "figures": plain(result.run.figures),
                "verdict": plain(result.verdict),
                "run": plain(result.run),
                "baseline_file": result.baseline_file,
                "directory": result.directory,
            }
            for result in results
        ],
        "skipped": [plain(skip) for skip in skipped],
    }
