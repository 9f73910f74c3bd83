"""Shows what a simulated gate can detect: a table and a sentence for people, JSON for machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from perfsuite.report.terminal import plain_table
from perfsuite.verdict.power import NoiseModel, PowerRow, PowerTable

FOUND = 0.95
"""Share of the sessions that must find a drop for it to be called detectable."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The noise between launches of unchanged code on a hardware class, as the plugin pools it."""

    hardware_class: str
    baselines: int
    """Number of baselines that could be read."""
    launches: int
    """Number of their launches."""
    baseline_launches: int
    """Launches of a baseline, the median over the baselines."""
    sigma: float
    degrees_of_freedom: float
    session_sigma: float
    """Standard deviation of a session against a baseline, the median over the baselines; 0 if unknown."""
    probe_exponent: float
    left_out: tuple[str, ...]
    """Baseline files that could not be read."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What is simulated. Noise, tolerance and drops are fractions, not percent."""

    sigma: float
    tolerance: float
    baseline_launches: int
    max_launches: int
    degrees: int | None
    """Degrees of freedom of the noise; None: it is known from the baseline's own launches alone."""
    noise_model: NoiseModel
    session_sigma: float = 0.0
    """Standard deviation of what all launches of a session share against the baseline; the gate knows it."""
    drops: tuple[float, ...]
    trials: int
    seed: int


def is_blind(gate: Gate, table: PowerTable) -> bool:
    """Tell whether the gate often misses its tolerance: it says so, and the simulation does not refute it."""
    finds_it = any(row.drop == gate.tolerance and row.regressed >= FOUND for row in table.rows)
    return table.minimum_detectable_drop > gate.tolerance and not finds_it


def sentence(gate: Gate, table: PowerTable) -> str:
    """Say in one sentence what the gate can and cannot do."""
    smallest, level = table.minimum_detectable_drop, percent(gate.tolerance)
    rows = {row.drop: row for row in table.rows}
    found = _found(rows.get(gate.tolerance), gate.trials)
    alarms = _alarms(rows.get(0.0), gate.trials)
    if not is_blind(gate, table):
        just = (
            f"it could hold a tolerance down to {percent(smallest)}"
            if smallest <= gate.tolerance
            else f"only just: {table.blind:.0%} of its verdicts call themselves blind"
        )
        return f"This gate finds slowdowns as large as its tolerance of {level}{found}{alarms}; {just}."
    surely = (
        f"only slowdowns of {percent(smallest)} and more" if math.isfinite(smallest) else "no slowdown at all"
    )
    return (
        f"This gate is BLIND to slowdowns as small as its tolerance of {level}{found}: about 95 times in 100 "
        f"it finds {surely}{alarms}; a steadier machine, more launches (in the baseline, or at the most "
        "today) or a wider tolerance would mend it."
    )


def _found(row: PowerRow | None, trials: int) -> str:
    """Say how often a slowdown of the size of the tolerance was found; nothing if it was not simulated."""
    if row is None:
        return ""
    return (
        f" (found in {share(row.regressed, trials)} of the sessions, "
        f"missed in {share(row.passed + row.improved, trials)}, "
        f"inconclusive in {share(row.inconclusive, trials)})"
    )


def _alarms(row: PowerRow | None, trials: int) -> str:
    """Say how often unchanged code was called regressed; nothing if it was not simulated."""
    if row is None:
        return ""
    return (
        f", and calls unchanged code regressed in {share(row.regressed, trials)} "
        f"after {row.mean_launches:.1f} launches on average"
    )


def percent(value: float) -> str:
    """Format a fraction in percent, to three digits."""
    return f"{100 * value:.3g} %"


def share(value: float, trials: int) -> str:
    """Format a share in percent. What was not seen in n trials is under 3/n at 95 % confidence, not 0."""
    if value == 0:
        return f"under {300 / trials:.2g} %" if trials > 3 else "none"
    return f"{100 * value:.2f} %"


def _source(gate: Gate, measured: Measured | None) -> str:
    """Say where the noise is from, and its relative standard error, 1 / sqrt(2 degrees of freedom)."""
    if measured is None:
        return f"{percent(gate.sigma)} between launches, as given"
    doubt = 1 / math.sqrt(2 * measured.degrees_of_freedom)
    corrected = (
        f", corrected by the probe (exponent {measured.probe_exponent:.2f})"
        if measured.probe_exponent
        else ""
    )
    return (
        f"{percent(gate.sigma)} between launches, give or take {doubt:.0%} of it: {measured.baselines} "
        f"baselines ({measured.launches} launches) of {measured.hardware_class}{corrected}"
    )


def _sessions(measured: Measured | None) -> str:
    """Say how far sessions are apart."""
    if measured is None:
        return "taken to be alike"
    if not measured.session_sigma:
        return "taken to be alike: no baseline has launches of two (perfsuite baseline accept --sessions 3)"
    return f"apart from the baseline by up to {percent(measured.session_sigma)} (standard deviation)"


def render(gate: Gate, measured: Measured | None, table: PowerTable) -> RenderableType:
    """Render what was simulated, a table with a row for each drop, and the sentence, for a terminal."""
    grid = plain_table(())
    heads = ["true\nslowdown", "\nfound", "false\nalarms", "\ninconclusive", "\npassed", "\nimproved"]
    heads += ["launches\nused", "fixed\n5 %", f"fixed\n{percent(gate.tolerance)}"]
    for heading in heads:
        grid.add_column(heading, justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*_cells(row))
    return Group(
        Text(sentence(gate, table)),
        "",
        *(Text.assemble((f"{name:<12}", "bold"), value) for name, value in _facts(gate, measured)),
        "",
        grid,
        Text("percent of the sessions; slowdown: more time per token"),
        Text("fixed: one sample against one, and a fixed threshold"),
    )


def _facts(gate: Gate, measured: Measured | None) -> list[tuple[str, str]]:
    """Return name and value of each thing that was simulated."""
    known = (
        "the baseline's own launches" if gate.degrees is None else f"{gate.degrees} pooled degrees of freedom"
    )
    launches = f"{gate.baseline_launches} launches in the baseline, at most {gate.max_launches} today"
    return [
        ("noise", f"{_source(gate, measured)} ({gate.noise_model})"),
        ("sessions", _sessions(measured)),
        ("known from", known),
        ("gate", f"tolerance {percent(gate.tolerance)}, {launches}"),
        ("simulated", f"{gate.trials:,} sessions for each slowdown, seed {gate.seed}"),
    ]


def _cells(row: PowerRow) -> list[str]:
    """Return the cells of a row, in percent. A regression without a true slowdown is a false alarm."""
    shares = [row.inconclusive, row.passed, row.improved]
    regressed = f"{100 * row.regressed:.2f}"
    return [
        f"{100 * row.drop:g} %",
        regressed if row.drop > 0 else "-",
        "-" if row.drop > 0 else regressed,
        *(f"{100 * share:.2f}" for share in shares),
        f"{row.mean_launches:.2f}",
        *(f"{100 * share:.2f}" for share in (row.fixed_5_percent, row.fixed_tolerance)),
    ]


def as_json(gate: Gate, measured: Measured | None, table: PowerTable) -> dict[str, Any]:
    """Return the gate, the noise it was simulated with, and what it found. Shares and drops are fractions."""
    smallest = table.minimum_detectable_drop
    rows = {row.drop: row for row in table.rows}
    unchanged, at = rows.get(0.0), rows.get(gate.tolerance)
    return {
        "schema_version": 1,
        **asdict(gate),
        "measured": asdict(measured) if measured else None,
        "minimum_detectable_drop": smallest if math.isfinite(smallest) else None,
        "blind": is_blind(gate, table),
        "blind_share": table.blind,
        "false_alarm_rate": unchanged.regressed if unchanged else None,
        "detection_rate_at_tolerance": at.regressed if at else None,
        "rows": [asdict(row) for row in table.rows],
        "sentence": sentence(gate, table),
    }
