"""Decides which process of a launch is a rank: the first one that trains as it. Imports no torch.

Every Python process of a script attaches when it imports torch, and several may train: the stages of a shell
script, a probe in a child process, workers that share a rank. Each adds a line to the rank's file, which the
agent has made empty.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash

Standing = Literal["first", "next", "child", "second"]
"""`first`: nobody has trained as this rank. `next`: who did has ended by itself. `child`: an ancestor of this
process trains as it. `second`: another process does, or has been measured."""
OVER, TWICE = "over", "twice"


class Claim:
    """The lines of one rank: `PID HOST` of each process that trains as it, `over`, `twice`."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._report = run_dir.rank(rank)
        self._path = run_dir.training(rank)

    def stand(self) -> Standing:
        """Add this process, which is about to train as this rank. Returns how it stands to the one before."""
        host = socket.gethostname()
        mine = f"{os.getpid()} {host}"
        self._add(mine)  # before it reads: of two that begin at once, one is the second
        processes = [line for line in self._lines() if line not in (OVER, TWICE)]
        before = processes[: processes.index(mine)]
        if not before:
            return "first"
        pid, _, where = before[-1].partition(" ")
        if where == host and int(pid) in leash.ancestors():
            return "child"
        return "next" if self._has_ended_by_itself(int(pid), is_here=where == host) else "second"

    def _has_ended_by_itself(self, pid: int, *, is_here: bool) -> bool:
        try:
            failure = documents.read(self._report, RankReport).failure
        except FileError:
            return is_here and not leash.is_alive(pid)
        return failure is not None and failure.kind in ("crash", "out_of_memory")

    def told_twice(self) -> None:
        """Say that two processes train as this rank: the first one has yet to hear of it."""
        self._add(TWICE)

    def is_twice(self) -> bool:
        """Whether two processes have trained as this rank."""
        return TWICE in self._lines()

    def over(self) -> None:
        """Say that this rank's report is written. Where that fails, the others wait for it in vain."""
        with contextlib.suppress(OSError):
            self._add(OVER)

    def is_over(self) -> bool:
        """Whether this rank's report is written, by the last process that trains as it."""
        lines = [line for line in self._lines() if line != TWICE]
        return lines[-1:] == [OVER]

    def _add(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def _lines(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []
