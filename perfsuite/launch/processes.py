"""The processes of a job: how they are marked, found and killed. Imports neither torch nor pytest."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from perfsuite.errors import LaunchError

KILL_S = 60
"""Seconds in which a killed process has to be gone."""
RESCAN_S = 2.0
"""Seconds between looks for new processes of a job: each reads every process of the machine."""
JOB_MARK = "PERFSUITE_JOB"
"""Environment variable that every process of a job inherits: a value of its own for each job."""


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


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes of a job but this one, whatever session they have put themselves in."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(JOB_MARK) == mark and process.pid != os.getpid()
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def sweep(mark: str) -> None:
    """Kill every process of a job but this one. Raises `LaunchError` if one cannot be killed."""
    deadline = time.monotonic() + KILL_S
    while left := marked(mark):  # a process may fork while it is being killed
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in left)
            raise LaunchError(
                f"processes {pids} of this job cannot be killed (waiting for a driver?): "
                "whatever is measured next would share the machine with them; look at dmesg"
            )
