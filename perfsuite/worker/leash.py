"""Ends a rank when the process that started it dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

ANCESTOR_PID = "PERFSUITE_ANCESTOR_PID"
"""Environment variable: the process without which this one has no purpose. The driver, for the launcher; the
launcher, for all that it starts."""


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Be sent a signal by the kernel when the parent process dies, however it dies (Linux)."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
    ancestor = os.environ.get(ANCESTOR_PID)
    if ancestor is not None and not _is_alive(int(ancestor)):
        os._exit(1)  # it died before the kernel was asked


def _is_alive(pid: int) -> bool:
    """A zombie is dead: it only waits for its own parent to look."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    state = status.rpartition(")")[2].split()[0]  # behind the name, which may hold anything
    return state not in "ZX"
