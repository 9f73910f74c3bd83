"""Asks every process of a job for its stacks, before it is killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psutil

from perfsuite.results.run_dir import RunDir
from perfsuite.worker.stacks import SIGNAL

WAIT_S = 5
"""For the stacks to be written: at the most, and only if a process does not react."""


POLL_S = 0.1


def ask(run_dir: RunDir, processes: Iterable[psutil.Process]) -> None:
    """Have those of these processes that listen write their stacks; return when they have."""
    files = {pid: file for _, pid, file in run_dir.all_stacks()}  # of two, the one for which it is a rank
    asked = []
    for process in processes:
        if process.pid in files:
            with contextlib.suppress(psutil.Error):
                process.send_signal(SIGNAL)
                asked.append(files[process.pid])
    before: list[int] = []
    until = time.monotonic() + WAIT_S
    while asked and time.monotonic() < until:
        sizes = [file.stat().st_size for file in asked]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(POLL_S)
