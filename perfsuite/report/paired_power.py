"""Shows what a simulated paired comparison can detect: a table and a sentence, or JSON for machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from perfsuite.report.power import Measured, percent, share
from perfsuite.report.terminal import plain_table
from perfsuite.verdict.paired_power import PairedTable


@dataclass(frozen=True, kw_only=True)
class PairedGate:
    """What is simulated. Noise, drift, tolerance and changes are fractions, not percent."""

    sigma: float
    drift: float
    """Standard deviation of the machine's walk after 24 launches: see `perfsuite.verdict.paired_power`."""
    tolerance: float
    max_pairs: int
    changes: tuple[float, ...]
    trials: int
    seed: int


def sentence(gate: PairedGate, table: PairedTable) -> str:
    """Say in a few sentences what the comparison can and cannot do."""
    rows, said = {row.change: row for row in table.rows}, []
    if (at := rows.get(gate.tolerance)) is not None:
        found = share(at.slower, gate.trials)
        said.append(f"A change as large as the tolerance, {percent(gate.tolerance)}, is found in {found}.")
    if (unchanged := rows.get(0.0)) is not None:
        false = share(unchanged.slower + unchanged.faster, gate.trials)
        pairs = f"{unchanged.mean_pairs:.1f} pairs on average"
        said.append(f"Unchanged code is called slower or faster in {false}, after {pairs}.")
    smallest = table.minimum_detectable
    stated = percent(smallest) if math.isfinite(smallest) else "none"
    blind = f": it calls itself BLIND to {percent(gate.tolerance)}" if smallest > gate.tolerance else ""
    said.append(
        f"The comparison itself states {stated} as the smallest change that it finds 95 times in 100{blind}. "
        "Where launches are disturbed that is optimistic."
    )
    return " ".join(said)


def render(gate: PairedGate, measured: Measured | None, table: PairedTable) -> RenderableType:
    """Render what was simulated, a table with a row for each change, and the sentence, for a terminal."""
    grid = plain_table(())
    for heading in ("true\nchange", "\nslower", "\nfaster", "incon-\nclusive", "\nsame", "pairs\nused"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for row in table.rows:
        shares = (row.slower, row.faster, row.inconclusive, row.same)
        cells = [
            f"{100 * row.change:g} %",
            *(f"{100 * each:.2f}" for each in shares),
            f"{row.mean_pairs:.2f}",
        ]
        grid.add_row(*cells)
    source = f" ({measured.hardware_class})" if measured else ", as given"
    facts = (
        ("noise", f"{percent(gate.sigma)} between launches{source}; 1 launch in 20 is 10 % slow"),
        ("drift", f"{percent(gate.drift)} of the machine within 24 launches"),
        ("comparison", f"tolerance {percent(gate.tolerance)}, at most {gate.max_pairs} pairs of launches"),
        ("simulated", f"{gate.trials:,} comparisons for each change, seed {gate.seed}"),
    )
    return Group(
        Text(sentence(gate, table)),
        "",
        *(Text.assemble((f"{name:<12}", "bold"), value) for name, value in facts),
        "",
        grid,
        Text("percent of the comparisons"),
    )


def as_json(gate: PairedGate, measured: Measured | None, table: PairedTable) -> dict[str, Any]:
    """Return the comparison, the noise it was simulated with, and what it found. Shares are fractions."""
    smallest = table.minimum_detectable
    return {
        "schema_version": 1,
        **asdict(gate),
        "measured": asdict(measured) if measured else None,
        "minimum_detectable": smallest if math.isfinite(smallest) else None,
        "blind": smallest > gate.tolerance,
        "rows": [asdict(row) for row in table.rows],
        "sentence": sentence(gate, table),
    }
