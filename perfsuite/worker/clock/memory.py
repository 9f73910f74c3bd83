"""Read the peak memory of one process: the resident set on a CPU, the allocator's counters on a GPU."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from perfsuite.results.rank_report import Memory
from perfsuite.worker.hooks import calls


class HostMemory:
    """Measures the peak of the resident set (VmHWM), minus its size when this object was created (VmRSS).

    The peak is reset with clear_refs. See proc(5).
    """

    def __init__(self, level_at: str = "before the model", *, proc: str = "/proc/self") -> None:
        """`proc` is the directory in which the kernel describes this process."""
        self._status = f"{proc}/status"
        self._clear_refs = f"{proc}/clear_refs"
        self.method = f"VmHWM above VmRSS {level_at}"
        self._peak = 0
        self.reset_peak()
        self._level = self._status_bytes("VmRSS")

    def release(self) -> None:
        """Do nothing, because freed host memory has either left the process or will be reused."""

    def reset_peak(self) -> None:
        """Forget the peak so far. Later peaks are still measured from the size at construction."""
        self._peak = 0
        self.go_on()

    def fold(self) -> None:
        """Keep the peak so far. Memory used from now until `go_on` does not count as the training's."""
        self._peak = max(self._peak, self._status_bytes("VmHWM"))

    def go_on(self) -> None:
        """Resume measuring. The peak that was stored by `fold` is not lost."""
        try:
            with open(self._clear_refs, "w") as file:
                file.write("5")
        except OSError:
            why = "; peak not reset (clear_refs is read-only)"
            self.method = self.method.removesuffix(why) + why

    def begin_counting(self) -> None:
        """Record the size of the mapped files.

        The counted steps load code that only counting needs. `end_counting` excludes the size of this code.
        """
        self._mapped = self._status_bytes("RssFile")

    def end_counting(self) -> None:
        """Forget the peak of the counted steps, and the memory of the code that they loaded."""
        self._level += self._status_bytes("RssFile") - self._mapped
        self.reset_peak()

    def read(self) -> Memory:
        """Return the peak since construction or `reset_peak`."""
        self.fold()
        return Memory(peak=max(self._peak - self._level, 0), method=self.method)

    def _status_bytes(self, key: str) -> int:
        """Return a field of proc_pid_status(5) in bytes, or 0 if there is no such field."""
        with open(self._status) as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:")), 0)


class CudaMemory:
    """Reads the caching allocator's peaks since construction or the last `reset_peak`.

    The peaks are kept even if a script resets the allocator's counters (`keep_peaks`).
    """

    method = "torch.cuda.memory_stats"
    counting: ClassVar[weakref.WeakSet[CudaMemory]] = weakref.WeakSet()

    def __init__(self, device: Any) -> None:
        self.device = device
        self._peak = self._reserved = 0
        self._error: Exception | None = None
        keep_peaks()
        self.counting.add(self)
        self.reset_peak()

    def release(self) -> None:
        """Release unused cached blocks, so that `reserved` covers only the steps."""
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Forget the peaks and the allocation retries so far."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._peak = self._reserved = 0
        self._retries = self._stat("num_alloc_retries")

    def begin_counting(self) -> None:
        """Do nothing, because `end_counting` discards the peak of the counted steps."""

    def end_counting(self) -> None:
        """Forget the peak of the counted steps, and release the blocks that were cached for them."""
        self.release()
        self.reset_peak()

    def fold(self) -> None:
        """Keep the peaks so far, before a script resets them. Errors are raised by `read`, not here."""
        try:
            self._peak = max(self._peak, self._stat("allocated_bytes.all.peak"))
            self._reserved = max(self._reserved, self._stat("reserved_bytes.all.peak"))
        except Exception as error:
            self._error = error

    def go_on(self) -> None:
        """Do nothing: between `fold` and `go_on`, objects are counted, which uses no device memory."""

    def read(self) -> Memory:
        """Return the peaks and retries since construction or `reset_peak`."""
        self.fold()
        if self._error is not None:
            raise self._error
        return Memory(
            peak=self._peak,
            reserved=self._reserved,
            alloc_retries=self._stat("num_alloc_retries") - self._retries,
            method=self.method,
        )

    def _stat(self, key: str) -> int:
        return int(torch.cuda.memory_stats(self.device).get(key, 0))


def memory_for(device: Any) -> HostMemory | CudaMemory:
    """Start measuring the peak memory of a `torch.device`: GPU memory, or host memory for a CPU."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def keep_peaks() -> None:
    """Make each `CudaMemory` store its peaks before torch's `reset_peak_memory_stats` resets them.

    Call this before a script imports `reset_peak_memory_stats` by name.
    """

    def fold(*args: Any, **kwargs: Any) -> None:
        for memory in tuple(CudaMemory.counting):
            memory.fold()

    for owner in (torch.cuda.memory, torch.cuda, torch.accelerator.memory, torch.accelerator):
        if not hasattr(owner.reset_peak_memory_stats, "is_watched"):
            calls.before(owner, "reset_peak_memory_stats", fold)
