"""Timings of perfsuite itself, run by hand: `make figures`. Not tests: nothing here passes or fails."""

from collections.abc import Iterable, Sequence


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown, each row at once: the next may take a while."""
    for cells in (headings, ["---"] * len(headings)):
        print(f"| {' | '.join(cells)} |")
    for cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)
