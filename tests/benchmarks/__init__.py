"""Measurements of perfsuite itself. They are run by hand (`make figures`), and nothing passes or fails."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles

from perfsuite import Case, Machine
from perfsuite.measure import USUAL, Launching, launch_once
from perfsuite.results.run import Run


def launched(case: Case, machine: Machine, directory: Path, how: Launching = USUAL) -> Run:
    """Launch a case once. Raises `RuntimeError` if the launch fails."""
    run = launch_once(case, machine, directory, how)
    if run.failure is not None:
        raise RuntimeError(run.failure.message)
    return run


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown. Each row is printed at once, since the next row can take a while."""
    for cells in (headings, ["---"] * len(headings)):
        print(f"| {' | '.join(cells)} |")
    for cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)


def show_ratios(what: str, ratios: Sequence[float], of: str) -> None:
    """Print the quartiles of ratios. `what` is their name, and `of` is their number, such as `12 pairs`."""
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    print(f"{what}: median {middle:.4f}, middle half {low:.4f} to {high:.4f}, {of}", flush=True)
