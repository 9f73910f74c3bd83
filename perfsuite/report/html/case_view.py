"""Prepare one case for the HTML page: numbers as tables of text, and series as charts."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from perfsuite.case.case import Unit
from perfsuite.report import counts, profile, slopes, spans
from perfsuite.report.columns import (
    EXPECTED_SHARE,
    LAUNCHES,
    MEMORY_CHANGE,
    SPEED_CHANGE,
    Cell,
    Column,
    figure,
    speed_in,
)
from perfsuite.report.explained import explained
from perfsuite.report.html import charts, tables
from perfsuite.report.html.charts import Band, Figure
from perfsuite.report.html.next_steps import next_steps
from perfsuite.report.text import NONE, plural
from perfsuite.results.amounts import duration
from perfsuite.results.metric import MFU, PEAK_MEMORY, ROOFLINE_SHARE, STEP_S_P50, TOKENS_PER_S
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile

MOST_ENTRIES = 8
"""Maximum number of `RankCounts` on the page. Ranks with equal counts share an entry, but in a large job
every rank can have an entry of its own."""


def case_view(
    result: Measurement,
    session: SessionFile,
    *,
    anchor: str,
    columns: Sequence[Column],
    commands: Collection[str],
) -> dict[str, Any]:
    """Return a case's content for the template.

    `anchor` is unique. `columns` has the columns of the overview, and `commands` has the names of perfsuite's
    commands.
    """
    runs = result.runs
    check = result.verdict.counts
    band = _band(result)
    loss = charts.losses(runs, key=f"{anchor}:loss")
    shown = result.counts[:MOST_ENTRIES]
    others = result.counts[MOST_ENTRIES:]
    return {
        "anchor": anchor,
        "result": result,
        "commit": session.commit,
        "next_steps": next_steps(result, session, commands=commands),
        "explained": explained(result),
        "cells": {column.heading: column.cell(result) or Cell(NONE, None) for column in columns},
        "checks": tables.checks(result, anchor),
        "findings": None if check is None else counts.table_of_findings(check, result.verdict.against),
        "ranks": shown,
        "ranks_left_out": sum(len(entry.ranks) for entry in others),
        "profile": profile.tables(result),
        "launches": tables.launches(result, () if result.dry else runs),
        "spans": spans.table(spans.of_result(result)),
        "slopes": slopes.table(() if result.dry else runs),
        "before": tables.launches(result, result.before),
        "steps": _steps(result, band, anchor),
        "band": band,
        "loss": None if loss is None else Figure(loss, _loss_caption(runs)),
        "health": tables.health(runs),
        "settings": tables.settings(runs),
    }


def overview(unit: Unit, extra: Sequence[Column] = ()) -> list[Column]:
    """Return the columns of the overview. Speeds are in `unit`. `extra` has additional columns."""
    judged = [speed_in(unit), SPEED_CHANGE, figure(STEP_S_P50), figure(PEAK_MEMORY), MEMORY_CHANGE]
    columns = [*judged, figure(MFU), figure(ROOFLINE_SHARE), EXPECTED_SHARE, *extra, LAUNCHES]
    together = "vs\N{NO-BREAK SPACE}baseline"  # prevents a line break in the heading
    return [column._replace(heading=column.heading.replace("vs baseline", together)) for column in columns]


def _band(result: Measurement) -> Band | None:
    """Return the baseline's median step time and the longest allowed step time, calculated from tokens/s."""
    check = result.verdict.check(TOKENS_PER_S.name)
    speeds = [(run.figures.tokens_per_s, run.figures.step_s_p50) for run in result.runs]
    tokens_per_step = next((speed * step_s for speed, step_s in speeds if speed and step_s), None)
    if check is None or not check.baseline or tokens_per_step is None:
        return None
    baseline_s = tokens_per_step / check.baseline
    band = Band(baseline_s, baseline_s * (1 + TOKENS_PER_S.bound(-check.allowed)))
    return band if math.isfinite(band.allowed_s) else None


def _steps(result: Measurement, band: Band | None, anchor: str) -> list[Figure]:
    range_s = charts.step_range(result.runs, band)
    figures = []
    for number, run in enumerate(result.runs, 1):
        if run.step_s:
            title = f"Launch {number}: time of each step"
            key = f"{anchor}:steps-{number}"
            chart = charts.steps(run, key=key, title=title, range_s=range_s, band=band)
            figures.append(Figure(chart, _steps_caption(result, number, run, range_s[1])))
    return figures


def _steps_caption(result: Measurement, number: int, run: Run, highest_s: float) -> str:
    parts = [f"Launch {number}"]
    if run.figures.step_s_p50 is not None:
        parts[0] += f": median {duration(run.figures.step_s_p50)}"
    if number in result.verdict.unhealthy_launches:
        parts.append("set aside because the machine was unhealthy")
    beyond = charts.beyond(run, highest_s)
    if beyond:
        step = max(beyond, key=lambda step: run.step_s[step])
        longest = f"{duration(run.step_s[step])} at step {step}"
        measured = " measured" if run.measured_steps else ""
        parts.append(
            f"1{measured} step is off the scale (▲): {longest}"
            if len(beyond) == 1
            else f"{len(beyond)}{measured} steps are off the scale (▲), the longest {longest}"
        )
    lost = sum(not math.isfinite(step_s) for step_s in run.step_s)
    if lost:
        parts.append(f"gap in the line: {plural(lost, 'step')} without a finite time")
    return "; ".join(parts) + "."


def _loss_caption(runs: Sequence[Run]) -> str:
    curves = [run.loss for run in runs if run.loss]
    several = f" ({len(curves)} launches overlaid)" if len(curves) > 1 else ""
    return f"Loss, mean over ranks{several}. Final value: {curves[-1][-1]:.4f}."
