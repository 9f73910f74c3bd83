from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsuite.case.fault import Fault
from perfsuite.frameworks.fake import SimulatedTimer
from perfsuite.worker import recorder as measure
from perfsuite.worker.faults import Injector
from perfsuite.worker.recorder import CudaMemory, CudaTimer, HostMemory, HostTimer, Recorder


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


GPU = torch.device("cuda", 3)


class FakeGPU:
    """Stands in for GPU 3 while the current device is another: a queue of work that the host runs ahead of.

    `ahead_ms` of work are queued and not yet done; an event is past when the work before it is.
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

            def elapsed_time(self, end: Event) -> float:
                assert end.query()
                return end.at - self.at

        class Current:
            def __init__(self, device: torch.device) -> None:
                self.index = device.index

            def __enter__(self) -> None:
                self.before, gpu.current = gpu.current, self.index

            def __exit__(self, *error: object) -> None:
                gpu.current = self.before

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", Current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current stream of", device))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        self.waits.append(self.queued_ms)
        self.done_ms = self.queued_ms

    def sleep(self, cycles: int) -> None:
        assert self.current == GPU.index
        self.queued_ms += cycles / self.cycles_per_ms

    def work(self, milliseconds: float, *, ahead_ms: float) -> None:
        """Queued by the host, which is then so far ahead."""
        self.queued_ms += milliseconds
        self.done_ms = max(self.done_ms, self.queued_ms - ahead_ms)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


def test_on_a_gpu_steps_are_events_on_its_stream_and_it_is_waited_for_once(gpu: FakeGPU) -> None:
    timer, probe = measure.clock_for(GPU)
    assert probe is None
    recorder = Recorder(timer)
    recorder.start()
    for milliseconds in (30, 10, 20):
        gpu.work(milliseconds, ahead_ms=1000)
        recorder.boundary()
    assert gpu.waits == [0], "nothing waits for the device between steps"
    recorder.finish()
    assert gpu.waits == [0, 60]
    assert recorder.step_s == pytest.approx([0.03, 0.01, 0.02])


def test_progress_is_what_the_gpu_has_finished_not_what_it_was_given(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    recorder = Recorder(CudaTimer(GPU))
    recorder.on_progress = told.append
    monkeypatch.setattr(measure, "PROGRESS_EVERY_S", -1)
    recorder.start()
    for _ in range(6):
        gpu.work(10, ahead_ms=25)
        recorder.boundary()
    assert told == [0, 0, 0, 1, 2, 3]
    assert gpu.waits == [0]


def test_an_injected_slowdown_of_a_gpu_is_as_large_as_asked_and_waits_for_no_step(gpu: FakeGPU) -> None:
    injector = Injector(Fault.parse("slowdown=30%"), is_last_rank=True)
    recorder = Recorder(CudaTimer(GPU), before_end=injector.before_end)
    recorder.start()
    for milliseconds in (9000, 400, *[100] * 17):  # compiled in the first
        gpu.work(milliseconds, ahead_ms=50)
        recorder.boundary()
    assert len(gpu.waits) == 2, "to start, and to see how long a cycle takes"
    recorder.finish()
    assert recorder.step_s[:2] == pytest.approx([9, 0.4])
    assert recorder.step_s[6:] == pytest.approx([0.13] * 13), "of the step as it was, not as it became"


def test_where_the_host_sets_the_pace_an_injected_slowdown_lengthens_a_step_as_well(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay of the device alone would end before the host has more work for it."""
    spun: list[float] = []
    monkeypatch.setattr(HostTimer, "sleep", lambda timer, seconds: spun.append(seconds))
    CudaTimer(GPU).sleep(0.25)
    assert spun == [0.25]
    assert gpu.queued_ms - gpu.waits[-1] == pytest.approx(250)


def test_an_injected_stall_of_a_gpu(gpu: FakeGPU) -> None:
    injector = Injector(Fault.parse("stall=4"), is_last_rank=True)
    recorder = Recorder(CudaTimer(GPU), before_end=injector.before_end)
    recorder.start()
    for _ in range(16):
        gpu.work(100, ahead_ms=10)
        recorder.boundary()
    recorder.finish()
    assert recorder.step_s[8:] == pytest.approx([0.1, 0.1, 0.1, 0.3] * 2)


class FakeAllocator:
    """Stands in for the caching allocator of GPU 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stats = {"num_alloc_retries": 2}
        self.emptied = 0
        monkeypatch.setattr(torch.cuda, "memory_stats", self.memory_stats)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        for owner in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
            monkeypatch.setattr(owner, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(CudaMemory, "counting", weakref.WeakSet())

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


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator(monkeypatch)


def test_on_a_gpu_memory_comes_from_its_caching_allocator(allocator: FakeAllocator) -> None:
    memory = CudaMemory(GPU)
    allocator.stats["num_alloc_retries"] = 5
    allocator.allocate(100)
    read = memory.read()
    assert (read.peak, read.reserved, read.alloc_retries) == (100, 120, 3)
    memory.reset_peak()
    assert (memory.read().peak, memory.read().reserved) == (0, 0)


@pytest.mark.parametrize(
    "owner", [torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory], ids=str
)
def test_a_script_that_resets_the_peaks_does_not_lose_ours(allocator: FakeAllocator, owner: Any) -> None:
    measure.keep_peaks()
    held = owner.reset_peak_memory_stats  # as `from torch.cuda import ...` in the script's first lines
    memory = CudaMemory(GPU)
    allocator.allocate(100)
    held()
    allocator.allocate(70)
    held()
    assert allocator.stats["allocated_bytes.all.peak"] == 0, "the script's own figures are as it asks"
    assert (memory.read().peak, memory.read().reserved) == (100, 120)


def test_what_the_allocator_keeps_for_nobody_is_given_back_before_the_first_step(
    allocator: FakeAllocator,
) -> None:
    recorder = Recorder(SimulatedTimer(), memory=CudaMemory(GPU))
    assert allocator.emptied == 0
    recorder.start()
    assert allocator.emptied == 1
    recorder.boundary()
    recorder.finish()
    assert allocator.emptied == 1


def test_a_read_only_clear_refs_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_open = open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path == "/proc/self/clear_refs":
            raise PermissionError
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    assert "not reset" in HostMemory().read().method
