"""Describe the trends of step time and memory over the measured steps of launches. Pure."""

from collections.abc import Sequence

from perfsuite.report.text import Table
from perfsuite.results.amounts import signed
from perfsuite.results.run import Run, Slope

STEPS = 1000  # number of steps for which a change is reported: the change in a single step is tiny


def sentences(runs: Sequence[Run]) -> list[str]:
    """Describe the slopes of the last launch in words."""
    slopes = runs[-1].slopes if runs else ()
    return [
        f"{name}: {change} in {STEPS:,} steps, {interval}" for name, change, interval in map(_cells, slopes)
    ]


def table(runs: Sequence[Run]) -> Table:
    """Return the slopes of all launches as a table."""
    rows = [(str(number), *_cells(slope)) for number, run in enumerate(runs, 1) for slope in run.slopes]
    caption = (
        f"The growth over {STEPS:,} steps, from a line fitted to the measured steps. The interval assumes "
        "that the values are independent of each other."
    )
    headers = ("launch", "of", f"in {STEPS:,} steps", "95% interval")
    return Table(caption=caption, headers=headers, rows=rows, text_columns=2)


def _cells(slope: Slope) -> tuple[str, str, str]:
    change, low, high = (_change(per_step, slope) for per_step in (slope.per_step, *slope.interval))
    name = slope.name if slope.rank is None else f"{slope.name} of rank {slope.rank}"
    return name, change, f"{low} to {high}"


def _change(per_step: float, slope: Slope) -> str:
    return signed(STEPS * per_step, slope.unit)
