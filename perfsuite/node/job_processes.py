"""The processes of a job as the driver sees them: who they are, and the CPU time that they used."""

from __future__ import annotations

import contextlib

import psutil

RESCAN_S = 2.0
"""Seconds between looks for new processes of a job: each reads every process of the machine."""


class JobProcesses:
    """The launcher of a job and its descendants; before `begin`, no process at all.

    Where other processes start the ranks (Slurm's steps, say) it finds nobody but the launcher.
    """

    def __init__(self) -> None:
        self.pids: set[int] = set()
        """Every process that the job ever had: NVML goes on to list the dead for a while."""
        self.scanned_at = -RESCAN_S
        self._launcher: psutil.Process | None = None
        self._processes: list[psutil.Process] = []

    def begin(self, pid: int) -> None:
        """Take the process `pid` for the launcher. One that is gone is no error."""
        with contextlib.suppress(psutil.Error):
            self._launcher = psutil.Process(pid)
            self._processes = [self._launcher]
        self.pids.add(pid)

    def scan(self, now: float | None = None) -> None:
        """Look for processes that were born since. `now`, if given, is kept as `scanned_at`."""
        if now is not None:
            self.scanned_at = now
        if self._launcher is None:
            return
        with contextlib.suppress(psutil.Error):
            self._processes = [self._launcher, *self._launcher.children(recursive=True)]
            self.pids |= {process.pid for process in self._processes}

    def cpu_s(self) -> float:
        """Return the CPU seconds of the living, and of the dead whose parent has waited for them."""
        seconds = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds
