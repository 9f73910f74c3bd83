from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsuite.case.fault import Fault
from perfsuite.worker import recorder as recording
from perfsuite.worker.faults import Injector
from perfsuite.worker.memory import CudaMemory, HostMemory
from perfsuite.worker.recorder import Recorder
from perfsuite.worker.timers import CudaTimer, HostTimer, SimulatedTimer, clock_for
from tests.worker.fake_gpu import GPU, FakeAllocator, FakeGPU


def after_steps(
    recorder: Recorder, *seconds: float, work: Callable[[float], object] | None = None
) -> Recorder:
    """After steps in each of which some time has passed."""
    recorder.start()
    for each in seconds:
        (work or recorder.timer.sleep)(each)
        recorder.boundary()
    recorder.finish()
    return recorder


def test_steps_are_timed_and_what_is_done_between_them_is_not() -> None:
    timer = SimulatedTimer()
    recorder = after_steps(Recorder(timer, probe=lambda: timer.sleep(7)), 3, 1, 2)
    assert recorder.step_s == [3, 1, 2]
    assert recorder.probe_s == [7, 7, 7]
    assert recorder.wall_s == 6


def test_the_cpu_time_of_a_step_is_without_what_is_done_between_steps() -> None:
    class CountingTimer(SimulatedTimer):
        spent = 0.0

        def cpu(self) -> float:
            return self.spent

    timer = CountingTimer()

    def spend(seconds: float) -> None:
        timer.spent += seconds

    recorder = Recorder(timer, probe=lambda: spend(7))
    spend(100)
    recorder.start()
    for seconds in (3, 1, 2):
        spend(seconds)
        timer.sleep(50)  # waiting takes no CPU time
        recorder.boundary()
    spend(5)
    recorder.finish()
    assert recorder.cpu_s == [3, 1, 2]


def test_threads_count_and_sleep_does_not() -> None:
    recorder = Recorder(HostTimer())
    recorder.start()
    worker = threading.Thread(target=lambda: sum(range(2_000_000)))
    worker.start()
    worker.join()
    recorder.boundary()
    time.sleep(0.2)
    recorder.boundary()
    recorder.finish()
    busy, asleep = recorder.cpu_s
    assert busy > 4 * asleep


def test_a_simulated_clock_knows_no_cpu_time() -> None:
    recorder = after_steps(Recorder(SimulatedTimer()), 1)
    assert recorder.cpu_s == []


class Marks:
    """Stands for a `Counting`: keeps what it was told, with the clock."""

    def __init__(self, timer: SimulatedTimer) -> None:
        self.timer = timer
        self.told: list[tuple[str, float]] = []

    def end_step(self) -> None:
        self.told.append(("end", self.timer.host()))

    def begin_step(self) -> None:
        self.told.append(("begin", self.timer.host()))


def test_counting_ends_before_and_begins_after_what_is_done_between_steps() -> None:
    timer = SimulatedTimer()
    recorder = Recorder(timer, probe=lambda: timer.sleep(7), before_end=lambda step, recorder: timer.sleep(2))
    marks = Marks(timer)
    recorder.counting = marks  # type: ignore[assignment]
    recorder.start()
    timer.sleep(3)
    recorder.boundary()
    assert marks.told == [("end", 3), ("begin", 12)]


class HostPeak(HostMemory):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def release(self) -> None: ...

    def reset_peak(self) -> None:
        self.told.append("reset")

    def begin_counting(self) -> None:
        self.told.append("begin")

    def end_counting(self) -> None:
        self.told.append("end")


@pytest.mark.parametrize("counts", [True, False])
def test_the_peak_begins_after_the_counted_steps(counts: bool) -> None:
    timer, memory = SimulatedTimer(), HostPeak()
    recorder = Recorder(timer, memory=memory)
    if counts:
        recorder.counting = Marks(timer)  # type: ignore[assignment]
    recorder.start()
    at: list[int] = []
    for step in range(1, 7):
        recorder.boundary()
        at += [step] * (len(memory.told) - len(at))
    told = list(zip(at, memory.told, strict=True))
    assert told == ([(1, "reset"), (2, "begin"), (4, "end")] if counts else [(1, "reset")])


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
    recorder = Recorder(SimulatedTimer(), memory=(memory := HostMemory()))
    recorder.start()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    del held
    recorder.boundary()
    assert memory.read().peak < 30 * 2**20
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    del held
    recorder.boundary()
    recorder.finish()
    assert memory.read().peak > 60 * 2**20


def test_a_collection_happens_at_a_fixed_step_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = SimulatedTimer()
    collected: list[int] = []
    recorder = Recorder(timer)
    recorder.start()

    def collect(generation: int) -> None:
        collected.append(generation)
        timer.sleep(5)

    monkeypatch.setattr(gc, "collect", collect)
    for _ in range(2 * recording.GC_EVERY):
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


def test_progress_is_told_seldom_and_at_the_end() -> None:
    timer, told = SimulatedTimer(), list[int]()
    recorder = Recorder(timer)
    recorder.on_progress = told.append
    recorder.start()
    for _ in range(20):
        timer.sleep(0.2)
        recorder.boundary()
    assert told == [3, 6, 9, 12, 15, 18]
    recorder.finish()
    assert told[6:] == [20]


def test_before_end_sees_the_running_step() -> None:
    recorder = Recorder(SimulatedTimer(), before_end=lambda step, recorder: recorder.lengthen(1))
    assert after_steps(recorder, 2).step_s == [4]


def test_on_a_gpu_steps_are_events_on_its_stream_and_it_is_waited_for_once(gpu: FakeGPU) -> None:
    timer, probe = clock_for(GPU)
    assert probe is None
    recorder = after_steps(Recorder(timer), 30, 10, 20, work=partial(gpu.work, ahead_ms=1000))
    assert gpu.waits == [0, 60], "nothing waits for the device between steps"
    assert recorder.step_s == pytest.approx([0.03, 0.01, 0.02])


def test_progress_is_what_the_gpu_has_finished_not_what_it_was_given(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    recorder = Recorder(CudaTimer(GPU))
    recorder.on_progress = told.append
    monkeypatch.setattr(recording, "PROGRESS_EVERY_S", -1)
    recorder.start()
    for _ in range(6):
        gpu.work(10, ahead_ms=25)
        recorder.boundary()
    assert told == [0, 0, 0, 1, 2, 3]
    assert gpu.waits == [0]


def test_an_injected_slowdown_of_a_gpu_is_as_large_as_asked_and_waits_for_no_step(gpu: FakeGPU) -> None:
    injector = Injector(Fault.parse("slowdown=30%"), is_last_rank=True)
    recorder = Recorder(CudaTimer(GPU), before_end=injector.before_end)
    after_steps(
        recorder, 9000, 400, *[100] * 17, work=partial(gpu.work, ahead_ms=50)
    )  # compiled in the first
    assert len(gpu.waits) == 3, "to start, to see how long a cycle takes, and in the end"
    assert recorder.step_s[:2] == pytest.approx([9, 0.4])
    assert recorder.step_s[6:] == pytest.approx([0.13] * 13), "of the step as it was, not as it became"


def test_an_injected_stall_of_a_gpu(gpu: FakeGPU) -> None:
    injector = Injector(Fault.parse("stall=4"), is_last_rank=True)
    recorder = Recorder(CudaTimer(GPU), before_end=injector.before_end)
    after_steps(recorder, *[100] * 16, work=partial(gpu.work, ahead_ms=10))
    assert recorder.step_s[8:] == pytest.approx([0.1, 0.1, 0.1, 0.3] * 2)


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
