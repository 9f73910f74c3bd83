"""Prepares one case of the HTML page: its figures as tables of text, its series as charts. Pure.

Imports neither torch nor pytest. Text is escaped where it becomes HTML: in the template and in the charts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfsuite.case.case import Unit
from perfsuite.report import summary
from perfsuite.report.columns import (
    LAUNCHES,
    MEMORY_CHANGE,
    SPEED_CHANGE,
    Column,
    figure,
    speed_in,
)
from perfsuite.report.explained import Explained, explained
from perfsuite.report.html import charts, tables
from perfsuite.report.html.charts import Band, Figure
from perfsuite.report.html.counts_view import CountsView, counts_view
from perfsuite.report.html.profile_view import profile_tables
from perfsuite.report.table import NONE, Table
from perfsuite.results.amounts import duration
from perfsuite.results.metric import MFU, PEAK_MEMORY, ROOFLINE_SHARE, STEP_S_P50, TOKENS_PER_S
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of the overview: its text, and the number that rows are sorted by."""

    text: str
    number: float | None


@dataclass(frozen=True, kw_only=True)
class CaseView:
    """What the template shows of one case."""

    anchor: str
    result: Measurement
    summary: dict[str, Cell]
    hardware: str
    reason: str
    checks: Table | None
    counts: CountsView | None
    told: Explained
    profile: list[Table]
    since: str
    """Heads the list of what changed."""
    launches: Table | None
    """None where nothing was launched."""
    before: Table | None
    """The launches of arm A; None where no arms were compared."""
    steps: list[Figure]
    band: Band | None
    compared: bool
    """Whether a metric was compared with a baseline."""
    corrected: bool
    """Whether the verdict corrects for the machine's own speed. The charts do not."""
    loss: Figure | None
    health: list[Table]
    health_summary: str
    settings: Table
    notes: list[str]
    command: str
    commit: str | None

    @property
    def verdict(self) -> str:
        """The outcome in a word, or what excuses a failure."""
        return summary.verdict(self.result)

    @property
    def marks(self) -> list[str]:
        """The marks beside the verdict."""
        return summary.marks(self.result)


def case_view(
    result: Measurement, session: SessionFile, *, anchor: str, columns: Sequence[Column]
) -> CaseView:
    """Return everything about one case. `anchor` is unique in the page, whose overview has `columns`."""
    runs = result.runs
    band = _band(result)
    loss = charts.losses(runs, key=f"{anchor}:loss", title="Loss of each launch by step")
    return CaseView(
        anchor=anchor,
        result=result,
        summary={column.heading: _cell(column, result) for column in columns},
        hardware=result.hardware_class or NONE,
        reason=summary.reason(result),
        checks=tables.checks(result, anchor),
        counts=counts_view(result, anchor),
        told=explained(result),
        profile=profile_tables(result),
        since=summary.since(result.verdict),
        launches=tables.launches(result) if runs and not result.dry else None,
        before=tables.launches(result, result.before) if result.before else None,
        steps=_steps(result, band, anchor),
        band=band,
        compared=any(check.baseline is not None for check in result.verdict.checks),
        corrected=any(check.probe_exponent is not None for check in result.verdict.checks),
        loss=None if loss is None else Figure(chart=loss, caption=_loss_caption(runs)),
        health=tables.health(runs),
        health_summary=tables.health_summary(runs),
        settings=tables.settings(runs),
        notes=summary.notes(result),
        command=_command(result, session),
        commit=session.commit,
    )


def overview(unit: Unit, extra: Sequence[Column] = ()) -> list[Column]:
    """Make the columns of the page's overview. Speeds are in `unit`; `extra` are columns of some cases."""
    columns = [
        speed_in(unit),
        SPEED_CHANGE,
        figure(STEP_S_P50),
        figure(PEAK_MEMORY),
        MEMORY_CHANGE,
        figure(MFU),
        figure(ROOFLINE_SHARE),
        *extra,
        LAUNCHES,
    ]
    together = "vs\N{NO-BREAK SPACE}baseline"  # such a heading is not broken there
    return [replace(column, heading=column.heading.replace("vs baseline", together)) for column in columns]


def _cell(column: Column, result: Measurement) -> Cell:
    value = column.value(result)
    number = value if value is not None and math.isfinite(value) else None
    return Cell(text=column.cell(result, missing=NONE), number=number)


def _band(result: Measurement) -> Band | None:
    """The baseline's median step time, computed from its tokens/s, and that time plus the tolerance."""
    check = result.verdict.check(TOKENS_PER_S.name)
    speeds = [(run.figures.tokens_per_s, run.figures.step_s_p50) for run in result.runs]
    tokens_per_step = next((speed * step_s for speed, step_s in speeds if speed and step_s), None)
    if check is None or not check.baseline or tokens_per_step is None:
        return None
    baseline_s = tokens_per_step / check.baseline
    band = Band(baseline_s=baseline_s, allowed_s=baseline_s * (1 + TOKENS_PER_S.bound(-check.allowed)))
    return band if math.isfinite(band.allowed_s) else None


def _steps(result: Measurement, band: Band | None, anchor: str) -> list[Figure]:
    range_s = charts.step_range(result.runs, band)
    figures = []
    for number, run in enumerate(result.runs, 1):
        if not run.step_s:
            continue
        title = f"Launch {number}: time of each step"
        key = f"{anchor}:steps-{number}"
        chart = charts.steps(run, key=key, title=title, range_s=range_s, band=band)
        figures.append(Figure(chart=chart, caption=_steps_caption(result, number, run, range_s[1])))
    return figures


def _steps_caption(result: Measurement, number: int, run: Run, highest_s: float) -> str:
    parts = [f"Launch {number}"]
    if run.figures.step_s_p50 is not None:
        parts[0] += f": median {duration(run.figures.step_s_p50)}"
    if number in result.verdict.unhealthy_launches:
        parts.append("set aside, the machine was not well")
    if beyond := charts.beyond(run, highest_s):
        step = max(beyond, key=lambda step: run.step_s[step])
        longest = f"{duration(run.step_s[step])} at step {step}"
        measured = " measured" if run.measured_steps else ""
        parts.append(
            f"1{measured} step is off the scale (▲): {longest}"
            if len(beyond) == 1
            else f"{len(beyond)}{measured} steps are off the scale (▲), the longest {longest}"
        )
    if lost := sum(not math.isfinite(step_s) for step_s in run.step_s):
        parts.append(f"{lost} without a finite time: a gap in the line")
    if len(run.step_s) > 2 * charts.BUCKETS:
        per = len(run.step_s) / charts.BUCKETS
        parts.append(f"of every {per:.0f} steps the shortest and the longest are drawn")
    return "; ".join(parts) + "."


def _loss_caption(runs: Sequence[Run]) -> str:
    curves = [run.loss for run in runs if run.loss]
    caption = "Loss, mean over ranks" + (
        f": {len(curves)} launches over each other" if len(curves) > 1 else ""
    )
    caption += f"; at the end {curves[-1][-1]:.4f}"
    longest = max(map(len, curves))
    if longest > 2 * charts.BUCKETS:
        caption += f"; of every {longest / charts.BUCKETS:.0f} steps the lowest and the highest are drawn"
    return caption + "."


def _command(result: Measurement, session: SessionFile) -> str:
    inject = next((run.inject for run in result.runs if run.inject is not None), None)
    if session.arms:
        a, b = session.arms
        fault = ["--inject", inject] if inject else []
        tolerance = _own_tolerance(result)
        return shlex.join(
            ["perfsuite", "compare", "--against", a.text, "--arm", b.text, *fault, *tolerance, result.case_id]
        )
    if result.dry:
        device = [f"--device={result.runs[-1].machine.device}"] if result.runs else []
        return shlex.join(["perfsuite", "dry-run", *device, result.case_id])
    return shlex.join(["pytest", result.nodeid, *([f"--perf-inject={inject}"] if inject else [])])


def _own_tolerance(result: Measurement) -> list[str]:
    """The option by which a comparison was given its tolerance; nothing where it has that of a gate."""
    check = result.verdict.check(TOKENS_PER_S.name)
    usual = TOKENS_PER_S.bound(TOKENS_PER_S.tolerance(result.runs[0].machine.device))
    if check is None or check.allowed == usual:
        return []
    return ["--tolerance", f"{100 * TOKENS_PER_S.bound(-check.allowed):g}%"]
