"""Asks every process of a job for its stacks, before the job is killed. Imports neither torch nor pytest.

psutil is imported when it is used: ranks load this module with the agent, and must not need it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from perfsuite.results.run_dir import STACKS_SIGNAL, RunDir

if TYPE_CHECKING:
    import psutil

WAIT_S = 5
"""Seconds that the stacks are waited for, if a process does not write any."""
POLL_S = 0.1


def ask(run_dir: RunDir, processes: Iterable[psutil.Process], node: int = 0) -> None:
    """Have those of a node's processes that listen write their stacks. Return when the files grow no more.

    A process that became a rank after it began to listen has two files: it writes into that of its rank.
    """
    import psutil

    files = {pid: file for _, pid, file in run_dir.all_stacks(node)}  # ranks come last, so that theirs stays
    expected = []
    for process in processes:
        if process.pid in files:
            with contextlib.suppress(psutil.Error):
                process.send_signal(STACKS_SIGNAL)
                expected.append(files[process.pid])
    before: list[int] = []
    until = time.monotonic() + WAIT_S
    while expected and time.monotonic() < until:
        sizes = [file.stat().st_size for file in expected]
        if all(sizes) and sizes == before:
            return
        before = sizes
        time.sleep(POLL_S)
