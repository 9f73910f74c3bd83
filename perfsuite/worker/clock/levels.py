"""Read the memory in use by a process at step boundaries. Imports torch only on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from perfsuite.results.rank_report import LIVE_MEMORY, PINNED_MEMORY, RESIDENT_MEMORY

MOST_READINGS = 100  # maximum number of readings per launch and kind of memory. 100 are enough to fit a slope
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryLevels:
    """Reads the memory levels after every n-th step.

    If reading a kind of memory fails, that kind is not read again, and a note says why.
    """

    def __init__(self, device: Any, steps: int) -> None:
        self.notes: list[str] = []
        self.bytes_at: dict[str, dict[int, int]] = {}  # kind of memory -> number of ended steps -> bytes
        self._every = -(-steps // MOST_READINGS)
        self._readers: dict[str, Callable[[], int | None]] = {RESIDENT_MEMORY: _resident}
        if device.type == "cuda":
            self._readers |= {LIVE_MEMORY: lambda: _live(device), PINNED_MEMORY: _pinned}

    def boundary(self, steps: int) -> None:
        """Read all levels if a reading is due after this number of steps."""
        if steps % self._every:
            return
        for kind, read in [*self._readers.items()]:
            try:
                level = read()
            except Exception as error:  # for example because of a custom allocator, or if there is no /proc
                level = None
                self.notes.append(f"{kind}: not read between the steps ({type(error).__name__}: {error})")
            if level is None:
                del self._readers[kind]
                self.bytes_at.pop(kind, None)
            else:
                self.bytes_at.setdefault(kind, {})[steps] = level


def _resident() -> int:
    """Return the size of the resident set in bytes, from proc_pid_statm(5)."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def _live(device: Any) -> int:
    """Return the bytes of live tensors on a GPU, as the caching allocator counts them."""
    import torch

    return int(torch.cuda.memory_allocated(device))


def _pinned() -> int | None:
    """Return the bytes of pinned host memory in use, or None if torch does not count them."""
    import torch

    return torch.cuda.host_memory_stats().get("allocated_bytes.current")
