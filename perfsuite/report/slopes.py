"""Describe the trends of step time and memory over the measured steps of launches. Pure."""

from collections.abc import Sequence

from perfsuite.report.text import Table
from perfsuite.results.amounts import signed
from perfsuite.results.rank_report import RESIDENT_MEMORY
from perfsuite.results.run import Run, Slope
from perfsuite.results.session_file import Measurement

FASTER = 100 * 2**20  # bytes in `STEPS` steps
STEPS = 1000  # a change is reported as the growth over this many steps: the growth in a single step is tiny


def sentences(runs: Sequence[Run], before: Sequence[Run] = ()) -> list[str]:
    """Describe the slopes of the last launch in words. Slopes that might be 0 are left out.

    If `before` contains the launches of arm A, each slope is followed by that of arm A's last launch.
    """
    of_arm_a = {slope.name: slope for slope in (before[-1].slopes if before else ())}
    lines = []
    for slope in runs[-1].slopes if runs else ():
        low, high = slope.interval
        if low <= 0 <= high:
            continue
        name, change, interval = _cells(slope)
        then = of_arm_a.get(slope.name)
        compared = "" if then is None else f"; arm A: {_change(then.per_step, then)}"
        lines.append(f"{name}: {change} in {STEPS:,} steps, {interval}{compared}")
    return lines


def grows_faster(result: Measurement) -> str | None:
    """Describe the growth of resident memory if it is clearly faster in arm B than in arm A.

    The growth is clearly faster if arm B's 95% interval lies at least `FASTER` above that of arm A. Returns
    None if the growth is not clearly faster, or if the growth of an arm is unknown.
    """
    if not (result.before and result.runs):
        return None
    then, now = (
        next((slope for slope in run.slopes if slope.name == RESIDENT_MEMORY), None)
        for run in (result.before[-1], result.runs[-1])
    )
    if then is None or now is None or STEPS * (now.interval[0] - then.interval[1]) < FASTER:
        return None
    return f"{_change(now.per_step, now)} in {STEPS:,} steps, arm A: {_change(then.per_step, then)}"


def table(runs: Sequence[Run]) -> Table:
    """Return the slopes of all launches as a table."""
    rows = [(str(number), *_cells(slope)) for number, run in enumerate(runs, 1) for slope in run.slopes]
    caption = (
        f"The growth over {STEPS:,} steps, from a line fitted to the measured steps. The interval assumes "
        "that the step times are independent of each other, and so are the changes between levels of memory."
    )
    headers = ("launch", "of", f"in {STEPS:,} steps", "95% interval")
    return Table(caption=caption, headers=headers, rows=rows, text_columns=2)


def _cells(slope: Slope) -> tuple[str, str, str]:
    change, low, high = (_change(per_step, slope) for per_step in (slope.per_step, *slope.interval))
    name = slope.name if slope.rank is None else f"{slope.name} of rank {slope.rank}"
    return name, change, f"{low} to {high}"


def _change(per_step: float, slope: Slope) -> str:
    return signed(STEPS * per_step, slope.unit)
