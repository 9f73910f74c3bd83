"""Fakes of a GPU and its allocator, for machines without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

GPU = torch.device("cuda", 3)


class FakeGPU:
    """A fake of GPU 3, while another device is the current one.

    It is a queue of work that the host fills in advance. `ahead_ms` is the queued work that is not done yet.
    An event is complete when the work before it is done.
    """

    cycles_per_ms = 1.5e6

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued_ms = self.done_ms = 0.0
        self.waits: list[float] = []
        self.current = 0
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                assert stream == ("current stream of", GPU)
                self.at = gpu.queued_ms

            def query(self) -> bool:
                return self.at <= gpu.done_ms

            def elapsed_time(self, end: "Event") -> float:
                assert end.query()
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", self.made_current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current stream of", device))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)

    @contextmanager
    def made_current(self, device: torch.device) -> Iterator[None]:
        before = self.current
        self.current = device.index
        yield
        self.current = before

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        self.waits.append(self.queued_ms)
        self.done_ms = self.queued_ms

    def sleep(self, cycles: int) -> None:
        assert self.current == GPU.index
        self.queued_ms += cycles / self.cycles_per_ms

    def work(self, milliseconds: float, *, ahead_ms: float) -> None:
        """Queue work from the host, which is then `ahead_ms` ahead of the device."""
        self.queued_ms += milliseconds
        self.done_ms = max(self.done_ms, self.queued_ms - ahead_ms)


class FakeAllocator:
    """A fake of the caching allocator of GPU 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stats = {"num_alloc_retries": 2}
        self.emptied = 0
        monkeypatch.setattr(torch.cuda, "memory_stats", self.memory_stats)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        for owner in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
            monkeypatch.setattr(owner, "reset_peak_memory_stats", self.reset)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == GPU
        return self.stats

    def empty_cache(self) -> None:
        self.emptied += 1

    def reset(self, device: object = None) -> None:
        self.allocate(0)
        self.stats["reserved_bytes.all.peak"] = 0

    def allocate(self, size: int) -> None:
        self.stats |= {"allocated_bytes.all.peak": size, "reserved_bytes.all.peak": size + 20}
