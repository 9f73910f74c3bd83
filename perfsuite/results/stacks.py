"""The stacks that the processes of a hanging job wrote, as one text."""

from __future__ import annotations

import re

from perfsuite.results.run_dir import RunDir

MAX_LINES = 40
"""Told of the stacks of one process."""


MAX_PLACES = 8
"""Told of a job: processes with the same stacks are one."""


def read_stacks(run_dir: RunDir) -> str:
    """What was written, the most telling first; empty if nothing was.

    First the ranks that stand where the fewest others do. Of two such places, first the one outside of torch:
    the others wait for it inside, in a collective.
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
