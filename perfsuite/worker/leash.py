"""Ends a process when the one that started it dies. Worker side; imports neither torch nor pytest."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from perfsuite.results.run_dir import ANCESTOR_PID

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which an agent ends its job; a rank ends itself alone."""


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent process dies, however it dies.

    See PR_SET_PDEATHSIG in prctl(2). Exits at once if the process of `ANCESTOR_PID` is dead already.
    """
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
    ancestor = os.environ.get(ANCESTOR_PID)
    if ancestor is not None and not is_alive(int(ancestor)):
        os._exit(1)  # it died before the kernel could be told to watch it


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of descendants whose parent ends. They stay descendants.

    See PR_SET_CHILD_SUBREAPER in prctl(2).
    """
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def is_alive(pid: int) -> bool:
    """Whether a process lives. A zombie is dead: it only waits for its parent to read its exit code."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    state = status.rpartition(")")[2].split()[0]  # behind the name, which may hold anything
    return state not in "ZX"


def ancestors() -> list[int]:
    """Return the process ids of this process's parent, its parent's parent, and so on."""
    found, pid = [], os.getppid()
    while pid > 0 and pid not in found:
        found.append(pid)
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(status.rpartition(")")[2].split()[1])
    return found
