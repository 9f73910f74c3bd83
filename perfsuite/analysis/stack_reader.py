"""Reads the stacks that the processes of a hanging job wrote. Imports neither torch nor pytest."""

from __future__ import annotations

import re

from perfsuite.results.run_dir import RunDir

MAX_LINES = 40
"""Lines that are shown of the stacks of one process."""
MAX_PLACES = 8
"""Different stacks that are shown of one job; processes with equal stacks count once."""


def read_stacks(run_dir: RunDir) -> str:
    """The stacks as one text; empty if no process wrote any.

    Stacks are sorted by their number of ranks, rarest first; of two with equally many, first the one outside
    of torch, because the other ranks wait in a collective. Stacks of processes without a rank come last.
    """
    places: dict[str, list[tuple[int | None, int]]] = {}
    for rank, pid, file in run_dir.all_stacks():
        if text := file.read_text(errors="replace").strip():
            text = re.sub(r"(?i)thread 0x[0-9a-f]+", "thread", text)
            threads = text.split("\n\n")[::-1]  # the main thread stands last
            places.setdefault("\n".join(threads), []).append((rank, pid))

    def telling(place: str) -> tuple[bool, int, bool]:
        where = places[place]
        innermost = place.splitlines()[1:2]
        return where[0][0] is None, len(where), any("/torch/" in line for line in innermost)

    ordered = sorted(places, key=telling)
    shown = [f"{_names(places[place])} stood here:\n{_cut(place)}" for place in ordered[:MAX_PLACES]]
    if len(ordered) > MAX_PLACES:
        shown.append(f"and {len(ordered) - MAX_PLACES} more places: see {run_dir.path}")
    return "\n".join(shown)


def _names(processes: list[tuple[int | None, int]]) -> str:
    return ", ".join(f"process {pid}" if rank is None else f"rank {rank}" for rank, pid in processes)


def _cut(place: str) -> str:
    lines = place.splitlines()
    return "\n".join(lines[:MAX_LINES] + ["  ..."] * (len(lines) > MAX_LINES))
