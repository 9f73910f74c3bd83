"""The processes of a job as its agent sees them: who they are, and the CPU time that they used."""

from __future__ import annotations

import contextlib

import psutil


class JobProcesses:
    """A process and its descendants: the agent of a job, which lives as long as the job."""

    def __init__(self, pid: int) -> None:
        self.pids = {pid}
        """Every process that the job ever had: NVML lists the dead for a while."""
        self._agent = psutil.Process(pid)
        self._processes = [self._agent]

    def scan(self) -> None:
        """Look for processes that were born since. Reads every process of the machine."""
        with contextlib.suppress(psutil.Error):
            self._processes = [self._agent, *self._agent.children(recursive=True)]
            self.pids |= {process.pid for process in self._processes}

    def cpu_s(self) -> float:
        """Return the CPU seconds of the living, and of the dead whose parent has waited for them."""
        seconds = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds
