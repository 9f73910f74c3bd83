"""End this process when its parent ends, and dump this process's stacks on request. Imports no torch."""

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from perfsuite.results.run_dir import ANCESTOR_PID, NODE, STACKS_SIGNAL, RunDir

# Signals that make an agent end its job. A rank restores the default actions of these signals.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel signal this process when its parent dies.

    The environment variable `ANCESTOR_PID` can contain the id of an ancestor. If that ancestor is already
    dead, this process exits at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    ancestor = os.environ.get(ANCESTOR_PID)
    if ancestor is not None and not is_alive(int(ancestor)):
        os._exit(1)  # the ancestor died before the kernel began to watch it


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends (a child subreaper)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def is_alive(pid: int) -> bool:
    """Return whether a process is alive.

    A zombie is not alive, because it only waits until its parent reads its exit code.
    """
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def ancestors() -> list[int]:
    """Return the process ids of this process's ancestors, beginning with its parent."""
    pids = []
    pid = os.getppid()
    while pid > 0 and pid not in pids:
        pids.append(pid)
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    return pids


def _stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) that follow the process name, or nothing if there is no process.

    Only the text after the name is split into fields, because the name can contain spaces and parentheses.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def listen(run_dir: RunDir, rank: int | None) -> None:
    """From now on, dump this process's stacks into a file at each `STACKS_SIGNAL`.

    `rank` is None if the rank is unknown.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(run_dir.stacks(rank, os.getpid(), int(os.environ.get(NODE, "0"))), flags, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
