import builtins
from typing import Any

import pytest
import torch

from perfsuite.results.rank_report import LIVE_MEMORY, PINNED_MEMORY, RESIDENT_MEMORY
from perfsuite.worker.clock.levels import MOST_READINGS, MemoryLevels

GPU = torch.device("cuda", 0)


def after(levels: MemoryLevels, steps: int) -> MemoryLevels:
    for step in range(1, steps + 1):
        levels.boundary(step)
    return levels


@pytest.mark.parametrize(("steps", "interval"), [(50, 1), (100, 1), (101, 2), (1000, 10)])
def test_a_launch_has_few_readings(steps: int, interval: int) -> None:
    levels = after(MemoryLevels(torch.device("cpu"), steps), steps)
    (resident,) = levels.bytes_at.values()
    assert [*resident] == [*range(interval, steps + 1, interval)]
    assert len(resident) <= MOST_READINGS


def test_resident_set_is_as_large_as_the_process() -> None:
    levels = after(MemoryLevels(torch.device("cpu"), 1), 1)
    with open("/proc/self/status") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert levels.bytes_at[RESIDENT_MEMORY][1] == pytest.approx(kib * 1024, rel=0.05)


def test_on_a_gpu_live_and_pinned_memory_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 if device == GPU else 0)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 9})
    levels = after(MemoryLevels(GPU, 2), 2).bytes_at
    assert (levels[LIVE_MEMORY], levels[PINNED_MEMORY]) == ({1: 7, 2: 7}, {1: 9, 2: 9})


def test_what_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a level cannot be read once, its earlier values are left out, too."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("an allocator of its own")

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)  # a torch that does not count host memory
    levels = MemoryLevels(GPU, 3)
    levels.boundary(1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", fails)
    monkeypatch.setattr(builtins, "open", fails)
    levels.boundary(2)
    levels.boundary(3)
    monkeypatch.undo()
    assert levels.bytes_at == {}
    why = "not read between the steps (RuntimeError: an allocator of its own)"
    assert levels.notes == [f"{kind}: {why}" for kind in (RESIDENT_MEMORY, LIVE_MEMORY)]
