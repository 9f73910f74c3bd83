"""Let the agents of a job know whether its driver is alive, and whether the driver wants the job to end.

There are two leases, because either of them can get lost:

- An agent's stdin is a pipe that closes when the driver ends. In a Slurm step, the pipe goes through `srun`.
- The driver keeps changing the text in the file `RunDir.lease`. The text stops changing if the driver dies
  together with `srun`. The text can also request the end of the job. It is overwritten in place, which works
  on a full disk and is visible at once on NFS.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from perfsuite.errors import FileError
from perfsuite.inputs.files import LARGEST_OWN, read_text

BEAT_S = 1.0  # seconds until the driver writes the next text
LOOK_S = 0.25  # seconds between an agent's checks of the text
LOST_S = 300.0
"""Seconds without a new text after which the driver is assumed to be dead, although stdin is still open.

This must be long. When a shared file system fails over to another server, the driver cannot write for 30 to
120 s. In addition, an agent might read an old text from a cache. A long time does little harm: agents
need the text only if `srun` dies together with the driver, because otherwise stdin closes.
"""
LEASE_S = "PERFSUITE_LEASE_S"
"""Environment variable that an agent gets if its driver can be on another machine. Its value is `LOST_S`. If
both are on the same machine, the kernel reports the driver's death, so the agent does not get the variable.
If a driver on the same machine is stopped with SIGSTOP, its job still goes on."""
NO_SIGN = "no sign of perfsuite's driver"

Wish = Literal["go", "end"]


class Beats:
    """The driver's side of the lease. It writes the text from a separate thread, and ignores write errors."""

    def __init__(self, file: Path, *, beat_s: float = BEAT_S) -> None:
        self._file = file
        self._beat_s = beat_s
        self._wish: Wish = "go"
        self._changed = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="perfsuite-lease", daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._changed.set()
        self._thread.join()

    def end_job(self) -> None:
        """Ask the agents to end the job. Each agent first lets its processes write their stacks."""
        self._wish = "end"
        self._changed.set()

    def _work(self) -> None:
        for count in itertools.count(1):
            self._changed.wait(self._beat_s)
            self._changed.clear()
            if self._is_over:
                return
            with contextlib.suppress(OSError), self._file.open("r+") as file:
                file.write(text_of(count, self._wish))


def text_of(count: int, wish: Wish) -> str:
    """Return the text that the driver writes into its file.

    All texts have the same length, and `count` makes each of them different.
    """
    return f"{count:010d} {wish:3}\n"


class Lease:
    """An agent's side of both leases.

    It calls `on_end` if the driver ends the job, and `on_lost` if the driver is gone.
    """

    def __init__(self, file: Path, on_end: Callable[[], object], on_lost: Callable[[str], object]) -> None:
        self._file = file
        self._on_end = on_end
        self._on_lost = on_lost
        self._lost_s = float(os.environ.get(LEASE_S, "inf"))

    def hold(self) -> None:
        """Watch both leases, each in a thread. Processes that are started from now on get an empty stdin."""
        self._pipe = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        for watch in (self._hold_stdin, self._hold_text):
            threading.Thread(target=watch, name="perfsuite-lease", daemon=True).start()

    def _hold_stdin(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._pipe, 1024):
                pass
        self._on_lost("perfsuite's driver is gone: its end of stdin is closed")

    def _hold_text(self) -> None:
        last = ""
        silent_s = 0.0
        while True:
            with contextlib.suppress(OSError, ValueError, FileError):
                text = read_text(self._file, LARGEST_OWN)
                if text.rstrip().endswith("end"):
                    self._on_end()
                    return
                if text not in ("", last):
                    last = text
                    silent_s = 0.0
            if silent_s > self._lost_s:
                self._on_lost(f"{NO_SIGN} for {self._lost_s:g} s")
                return
            time.sleep(LOOK_S)
            # Do not count the time that the read took. A shared file system that makes reads slow also delays
            # the driver's writes.
            silent_s += LOOK_S
