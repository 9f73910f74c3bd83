"""Where each process of a job stands when it hangs. Imports neither torch nor pytest.

A process that calls `listen` writes the stacks of its threads to a file of its own when it is sent `SIGNAL`.
The handler is C code of the standard library (`faulthandler`): it works in whatever the process waits for.
Only those that listen are sent the signal: it would end any other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable

import psutil

from perfsuite.results.run_dir import RunDir

SIGNAL = signal.SIGUSR1
WAIT_S = 5
"""For the stacks to be written: at the most, and only if a process does not react."""
POLL_S = 0.1
MAX_LINES = 40
"""Told of the stacks of one process."""
MAX_PLACES = 8
"""Told of a job: processes with the same stacks are one."""


def listen(run_dir: RunDir, rank: int | None) -> None:
    """Write this process's stacks when it is sent `SIGNAL`. `rank` is None where it may be none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(run_dir.stacks(rank, os.getpid()), flags, 0o644)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def ask(run_dir: RunDir, processes: Iterable[psutil.Process]) -> None:
    """Have those of these processes that listen write their stacks; return when they have."""
    files = {pid: file for _, pid, file in run_dir.all_stacks()}  # of two, the one for which it is a rank
    asked = []
    for process in processes:
        if process.pid in files:
            with contextlib.suppress(psutil.Error):
                process.send_signal(SIGNAL)
                asked.append(files[process.pid])
    before: list[int] = []
    until = time.monotonic() + WAIT_S
    while asked and time.monotonic() < until:
        sizes = [file.stat().st_size for file in asked]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(POLL_S)


def told(run_dir: RunDir) -> str:
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
