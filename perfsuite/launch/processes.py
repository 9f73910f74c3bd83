"""The processes of a job: how they are marked, found and killed. Imports neither torch nor pytest.

psutil is imported when it is used: ranks load this module with the agent, and must not need it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from perfsuite.errors import LaunchError

if TYPE_CHECKING:
    import psutil

KILL_S = 60
"""Seconds in which a killed process has to be gone."""
JOB_MARK = "PERFSUITE_JOB"
"""Environment variable that every process of a job inherits: a value of its own for each job."""


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes of a job but this one, whatever session they have put themselves in."""
    import psutil

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(JOB_MARK) == mark and process.pid != os.getpid()
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def sweep(mark: str) -> None:
    """Kill every process of a job but this one. Raises `LaunchError` if one cannot be killed."""
    import psutil

    deadline = time.monotonic() + KILL_S
    while left := marked(mark):  # a process may fork while it is being killed
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        if time.monotonic() > deadline:
            raise not_killed([process.pid for process in left])


def not_killed(pids: Iterable[int]) -> LaunchError:
    """Make the error of processes that outlive SIGKILL."""
    return LaunchError(
        f"processes {', '.join(map(str, pids))} of this job cannot be killed (waiting for a driver?): "
        "whatever is measured next would share the machine with them; look at dmesg"
    )
