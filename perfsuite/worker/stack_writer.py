"""Makes a process write its stacks when it is asked, in a job that hangs. Imports neither torch nor pytest.

A process that calls `listen` writes the stacks of its threads to a file of its own when it receives
`STACKS_SIGNAL`. The handler is C code of the standard library (`faulthandler`), which works whatever the
process waits for. The signal would end any other process: only those that listen are sent it.
"""

from __future__ import annotations

import faulthandler
import os

from perfsuite.results.run_dir import NODE, STACKS_SIGNAL, RunDir


def listen(run_dir: RunDir, rank: int | None) -> None:
    """Write this process's stacks when it receives `STACKS_SIGNAL`. `rank`: None if it may be no rank."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(run_dir.stacks(rank, os.getpid(), int(os.environ.get(NODE, "0"))), flags, 0o644)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
