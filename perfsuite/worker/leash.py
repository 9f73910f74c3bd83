"""Ties a process to its parent: ends it when that dies, and has it write its stacks when asked. No torch."""

import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from perfsuite.results.run_dir import ANCESTOR_PID, NODE, STACKS_SIGNAL, RunDir

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # by which an agent ends its job, a rank itself
PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent dies. Exits if `ANCESTOR_PID` is dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    ancestor = os.environ.get(ANCESTOR_PID)
    if ancestor is not None and not is_alive(int(ancestor)):
        os._exit(1)  # it died before the kernel could be told to watch it


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of descendants whose parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def is_alive(pid: int) -> bool:
    """Whether a process lives. A zombie is dead: it only waits for its parent to read its exit code."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def ancestors() -> list[int]:
    """Return the process ids of this process's parent, its parent's parent, and so on."""
    pids = []
    pid = os.getppid()
    while pid > 0 and pid not in pids:
        pids.append(pid)
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    return pids


def _stat(pid: int) -> list[str]:
    """Return proc_pid_stat(5) from behind the name, which may hold anything; empty if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def listen(run_dir: RunDir, rank: int | None) -> None:
    """Write this process's stacks into a file at each `STACKS_SIGNAL`. `rank`: None if it may be none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(run_dir.stacks(rank, os.getpid(), int(os.environ.get(NODE, "0"))), flags, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
