"""Processes as a test looks for them: any of them may end while it looks."""

import psutil


def arguments(process: psutil.Process) -> list[str]:
    """A process's command line in words; none of a process that has ended, reaped by its parent or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
