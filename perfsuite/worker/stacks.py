"""Where each process of a job stands when it hangs. Imports neither torch nor pytest.

A process that calls `listen` writes the stacks of its threads to a file of its own when it is sent `SIGNAL`.
The handler is C code of the standard library (`faulthandler`): it works in whatever the process waits for.
Only those that listen are sent the signal: it would end any other.
"""

from __future__ import annotations

import faulthandler
import os
import signal

from perfsuite.results.run_dir import RunDir

SIGNAL = signal.SIGUSR1


def listen(run_dir: RunDir, rank: int | None) -> None:
    """Write this process's stacks when it is sent `SIGNAL`. `rank` is None where it may be none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.open(run_dir.stacks(rank, os.getpid()), flags, 0o644)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
