"""Processes as a test looks for them: any of them may end while it looks."""

from collections.abc import Iterable

import psutil


def arguments(process: psutil.Process) -> list[str]:
    """A process's command line in words; none of a process that has ended, reaped by its parent or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def agent_among(processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """The first of some processes that is an agent of perfsuite."""
    return next((each for each in processes if "perfsuite.launch.agent" in arguments(each)), None)
