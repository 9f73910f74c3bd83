"""Ends a rank when the process that started it dies."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    pass


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
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
