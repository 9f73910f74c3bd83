from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from perfsuite.worker.clock.memory import CudaMemory, HostMemory, keep_peaks, memory_for
from tests.worker.fake_gpu import GPU, FakeAllocator


def test_host_memory_is_the_peak_above_its_start() -> None:
    memory = memory_for(torch.device("cpu"))
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    del held
    assert 60 * 2**20 < memory.read().peak < 90 * 2**20
    memory.reset_peak()
    assert memory.read().peak < 30 * 2**20, "the earlier peak is forgotten"
    assert memory.read().method == "VmHWM above VmRSS before the model"


def test_gpu_memory_is_that_of_its_allocator(allocator: FakeAllocator) -> None:
    memory = memory_for(GPU)
    assert isinstance(memory, CudaMemory)
    allocator.stats["num_alloc_retries"] = 5
    allocator.allocate(100)
    read = memory.read()
    assert (read.peak, read.reserved, read.alloc_retries) == (100, 120, 3)
    memory.reset_peak()
    assert (memory.read().peak, memory.read().reserved) == (0, 0)


@pytest.mark.parametrize(
    "owner", [torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory], ids=str
)
def test_resetting_peaks_in_a_script_keeps_ours(allocator: FakeAllocator, owner: Any) -> None:
    keep_peaks()
    held = owner.reset_peak_memory_stats  # like `from torch.cuda import ...` in the script's first lines
    memory = CudaMemory(GPU)
    allocator.allocate(100)
    held()
    allocator.allocate(70)
    held()
    assert allocator.stats["allocated_bytes.all.peak"] == 0, (
        "the script's own peak is reset, because the script requested it"
    )
    assert (memory.read().peak, memory.read().reserved) == (100, 120)


def test_unreadable_peaks_end_no_training(allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_peaks()
    memory = CudaMemory(GPU)
    monkeypatch.setattr(torch.cuda, "memory_stats", Mock(side_effect=RuntimeError("no statistics")))
    torch.cuda.reset_peak_memory_stats()
    with pytest.raises(RuntimeError, match="no statistics"):
        memory.read()


def test_gpu_peaks_exclude_what_counting_keeps(allocator: FakeAllocator) -> None:
    memory = CudaMemory(GPU)
    memory.begin_counting()
    allocator.allocate(100)
    memory.end_counting()
    allocator.allocate(70)
    assert memory.read().peak == 70
    assert allocator.emptied == 1, "reserved memory excludes what counting keeps, too"


def write_status(proc: Path, **kib: int) -> None:
    """Write the memory of a process as the kernel does."""
    (proc / "status").write_text("".join(f"{key}:\t{size:8} kB\n" for key, size in kib.items()))


def test_a_read_only_clear_refs_is_said(tmp_path: Path) -> None:
    write_status(tmp_path, VmRSS=100, VmHWM=100)
    (tmp_path / "clear_refs").mkdir()  # so that nothing can be written to it
    assert HostMemory(proc=str(tmp_path)).read().method == (
        "VmHWM above VmRSS before the model; peak not reset (clear_refs is read-only)"
    )


def test_memory_excludes_code_of_counting(tmp_path: Path) -> None:
    write_status(tmp_path, VmRSS=100, VmHWM=100, RssFile=10)
    memory = HostMemory(proc=str(tmp_path))
    memory.begin_counting()
    write_status(tmp_path, VmRSS=100, VmHWM=100, RssFile=13)
    memory.end_counting()
    write_status(tmp_path, VmRSS=100, VmHWM=150, RssFile=13)
    assert memory.read().peak == 1024 * (150 - 100 - 3)
