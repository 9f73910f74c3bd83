"""Decides which process of a launch is a rank: the first one that trains as it. Imports no torch.

Stages of a shell script, a child process, or workers may train as well. Each adds a line to the rank's file.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.results.rank_report import Evidence, RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash

Standing = Literal["first", "next", "child", "second"]
"""`first`: nobody has trained as this rank. `next`: who did has ended by itself. `child`: an ancestor of this
process trains as it. `second`: another process does, or has been measured."""
TRAINS, GIVEN, TWICE, OVER = "trains", "given", "twice", "over"


class Claim:
    """The lines of one rank: `trains PID HOST` of each process, `given EVIDENCE`, `twice`, `over`."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._report = run_dir.rank(rank)
        self._path = run_dir.training(rank)

    def stand(self) -> Standing:
        """Add this process, which is about to train as this rank. Returns how it stands to the one before."""
        host = socket.gethostname()
        mine = f"{os.getpid()} {host}"
        self._add(TRAINS, mine)  # before it reads: of two that begin at once, one is the second
        processes = self._all(TRAINS)
        before = processes[: processes.index(mine)]
        if not before:
            return "first"
        pid, _, where = before[-1].partition(" ")
        if where == host and int(pid) in leash.ancestors():
            return "child"
        try:
            failure = documents.read(self._report, RankReport).failure
            has_ended_by_itself = failure is not None and failure.kind in ("crash", "out_of_memory")
        except FileError:
            has_ended_by_itself = where == host and not leash.is_alive(int(pid))
        return "next" if has_ended_by_itself else "second"

    def give(self, evidence: Evidence) -> None:
        """Tell what the model was given in the second step."""
        self._add(GIVEN, evidence.model_dump_json())

    def given(self) -> Evidence | None:
        """Return what the model was given, None if that is not told yet."""
        told = self._all(GIVEN)
        return Evidence.model_validate_json(told[-1]) if told else None

    def told_twice(self) -> None:
        """Say that two processes train as this rank: the first one has yet to hear of it."""
        self._add(TWICE)

    def is_twice(self) -> bool:
        """Whether two processes have trained as this rank."""
        return bool(self._all(TWICE))

    def over(self) -> None:
        """Say that this rank's report is written. Where that fails, the others wait for it in vain."""
        with contextlib.suppress(OSError):
            self._add(OVER)

    def is_over(self) -> bool:
        """Whether this rank's report is written, by the last process that trains as it."""
        return [word for word, _ in self._lines() if word != TWICE][-1:] == [OVER]

    def _add(self, word: str, told: str = "") -> None:
        with self._path.open("a") as file:
            file.write(f"{word} {told}\n")

    def _all(self, wanted: str) -> list[str]:
        return [told for word, told in self._lines() if word == wanted]

    def _lines(self) -> list[tuple[str, str]]:
        whole, _, _ = self._path.read_text().rpartition("\n") if self._path.exists() else ("", "", "")
        return [(word, told) for word, _, told in (line.partition(" ") for line in whole.splitlines())]
