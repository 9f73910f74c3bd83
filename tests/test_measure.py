from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsuite import measure
from perfsuite.frameworks.fake import SimulatedTimer
from perfsuite.measure import CudaMemory, CudaTimer, HostMemory, HostTimer, Recorder


def test_steps_are_timed_and_what_is_done_between_them_is_not() -> None:
    timer = SimulatedTimer()
    recorder = Recorder(timer, probe=lambda: timer.sleep(7))
    recorder.start()
    for seconds in (3, 1, 2):
        timer.sleep(seconds)
        recorder.boundary()
    recorder.finish()
    assert recorder.step_s == [3, 1, 2]
    assert recorder.probe_s == [7, 7, 7]
    assert recorder.wall_s == 6


def test_what_a_library_does_after_its_last_step_is_not_counted() -> None:
    timer = SimulatedTimer()
    recorder = Recorder(timer)
    recorder.start()
    timer.sleep(3)
    recorder.boundary()
    recorder.finish()
    timer.sleep(100)
    recorder.finish()
    assert recorder.wall_s == 3


def test_the_garbage_collector_rests_while_the_clock_runs() -> None:
    recorder = Recorder(SimulatedTimer())
    recorder.start()
    assert not gc.isenabled()
    recorder.finish()
    assert gc.isenabled()


def test_the_peak_of_the_first_step_is_forgotten() -> None:
    recorder = Recorder(SimulatedTimer(), memory=HostMemory())
    recorder.start()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    del held
    recorder.boundary()
    assert recorder.memory is not None
    assert recorder.memory.read().peak < 30 * 2**20
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    del held
    recorder.boundary()
    recorder.finish()
    assert recorder.memory.read().peak > 60 * 2**20


def test_a_collection_happens_at_a_fixed_step_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = SimulatedTimer()
    collected: list[int] = []
    recorder = Recorder(timer)
    recorder.start()

    def collect(generation: int) -> None:
        collected.append(generation)
        timer.sleep(5)

    monkeypatch.setattr(gc, "collect", collect)
    for _ in range(2 * measure.GC_EVERY):
        timer.sleep(1)
        recorder.boundary()
    recorder.finish()
    assert collected == [1, 1]
    assert set(recorder.step_s) == {1}


def test_the_first_optimizer_is_the_clock() -> None:
    """torchtitan, for one, has optimizers within optimizers: a step must count once."""
    weight = torch.nn.Parameter(torch.ones(2))
    first, second = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
    recorder = Recorder(HostTimer())
    hook = register_optimizer_step_post_hook(recorder.after_optimizer_step)
    recorder.start()
    for _ in range(3):
        weight.sum().backward()
        first.step()
        second.step()
    recorder.finish()
    hook.remove()
    first.step()
    assert len(recorder.step_s) == 3
    assert all(seconds > 0 for seconds in recorder.step_s)
    assert sum(recorder.step_s) <= recorder.wall_s


def test_progress_is_told_seldom() -> None:
    timer, told = SimulatedTimer(), list[int]()
    recorder = Recorder(timer)
    recorder.on_progress = told.append
    recorder.start()
    for _ in range(20):
        timer.sleep(0.2)
        recorder.boundary()
    assert told == [3, 6, 9, 12, 15, 18]


def test_before_end_sees_the_running_step() -> None:
    timer = SimulatedTimer()

    def double(step: int, recorder: Recorder) -> None:
        recorder.lengthen(1)

    recorder = Recorder(timer, before_end=double)
    recorder.start()
    timer.sleep(2)
    recorder.boundary()
    recorder.finish()
    assert recorder.step_s == [4]


def test_host_memory_is_the_peak_above_the_level_before() -> None:
    memory = HostMemory()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    del held
    assert 60 * 2**20 < memory.read().peak < 90 * 2**20


def test_the_probe_is_the_same_work_each_time() -> None:
    probe = measure.cpu_probe()
    probe()
    probe()


class FakeEvent:
    """Stands in for `torch.cuda.Event`: remembers when it was recorded, in a device's milliseconds."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_on_a_gpu_steps_are_events_and_the_device_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(FakeEvent.now_ms))
    recorder = Recorder(CudaTimer())
    FakeEvent.now_ms = 0
    recorder.start()
    for milliseconds in (30, 10, 20):
        FakeEvent.now_ms += milliseconds
        recorder.boundary()
    assert waits == [0], "nothing waits for the device between steps"
    recorder.finish()
    assert waits == [0, 60]
    assert recorder.step_s == pytest.approx([0.03, 0.01, 0.02])


def test_on_a_gpu_memory_comes_from_the_caching_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {"num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    memory = CudaMemory()
    stats |= {"num_alloc_retries": 5, "allocated_bytes.all.peak": 100, "reserved_bytes.all.peak": 120}
    read = memory.read()
    assert (read.peak, read.reserved, read.alloc_retries) == (100, 120, 3)


def test_a_read_only_clear_refs_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_open = open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path == "/proc/self/clear_refs":
            raise PermissionError
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    assert "not reset" in HostMemory().read().method
