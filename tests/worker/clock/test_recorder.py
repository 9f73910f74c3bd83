import gc
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock, call

import pytest
import torch

from perfsuite.results.counts import StepsToCount
from perfsuite.results.rank_report import Memory
from perfsuite.worker.clock.collector import CollectorClock
from perfsuite.worker.clock.levels import MemoryLevels
from perfsuite.worker.clock.recorder import Recorder
from perfsuite.worker.clock.timers import CudaTimer, HostTimer, SimulatedTimer, clock_for
from perfsuite.worker.counting.growth import Growth
from perfsuite.worker.counting.steps import ONE_STEP, Counting
from tests.samples import known
from tests.worker.fake_gpu import GPU, FakeGPU
from tests.worker.loops import in_a_thread


def after_steps(
    recorder: Recorder, *seconds: float, work: Callable[[float], object] | None = None
) -> Recorder:
    """Return the recorder after steps that took these times."""
    recorder.start()
    for pause_s in seconds:
        (work or recorder.timer.sleep)(pause_s)
        recorder.boundary()
    recorder.finish()
    return recorder


def test_times_steps_without_what_lies_between() -> None:
    timer = SimulatedTimer()
    recorder = after_steps(Recorder(timer, probe=lambda: timer.sleep(7)), 3, 1, 2)
    assert recorder.step_s == [3, 1, 2]
    assert recorder.probe_s == [7, 7, 7]
    timer.sleep(100)  # like a library that goes on after the last step
    recorder.finish()
    assert recorder.wall_s == 6
    assert recorder.cpu_s == [], "a simulated clock has no CPU time"


class Computing(SimulatedTimer):
    """A simulated clock with a simulated CPU clock."""

    cpu_s = 0.0

    def cpu(self) -> float:
        return self.cpu_s

    def compute(self, seconds: float) -> None:
        self.cpu_s += seconds


def test_cpu_time_excludes_work_between_steps() -> None:
    timer = Computing()
    recorder = Recorder(timer, probe=lambda: timer.compute(7))
    timer.compute(100)
    assert after_steps(recorder, 3, 1, 2, work=timer.compute).cpu_s == [3, 1, 2]


def test_threads_count_and_sleep_does_not() -> None:
    def work(seconds: float) -> None:
        in_a_thread(lambda: sum(range(2_000_000)))

    busy, asleep = (after_steps(Recorder(HostTimer()), 0.1, work=act).cpu_s[0] for act in (work, time.sleep))
    assert busy > 4 * asleep


def test_counting_excludes_work_between_steps() -> None:
    timer = SimulatedTimer()
    calls = list[tuple[str, float]]()
    recorder = Recorder(timer, probe=lambda: timer.sleep(7), before_end=lambda step, recorder: timer.sleep(2))
    counting = recorder.counting = Mock()
    counting.end_step.side_effect = lambda: calls.append(("end", timer.host()))
    counting.begin_step.side_effect = lambda: calls.append(("begin", timer.host()))
    after_steps(recorder, 3)
    assert calls == [("end", 3), ("begin", 12)]


@pytest.mark.parametrize("counts", [True, False])
def test_the_peak_begins_after_the_counted_steps(counts: bool) -> None:
    memory = Mock()
    recorder = Recorder(SimulatedTimer(), memory=memory)
    recorder.counting = Mock(steps=ONE_STEP) if counts else None
    recorder.start()
    assert memory.method_calls == [call.release()]
    calls = []
    for step in range(1, 7):
        memory.reset_mock()
        recorder.boundary()
        calls += [(step, name) for name, _, _ in memory.method_calls]
    counted = [(2, "begin_counting"), (4, "end_counting")]
    assert calls == [(1, "reset_peak"), *(counted if counts else ())]
    recorder.finish()


def test_reads_the_peak_before_counting_a_late_step() -> None:
    memory = Mock()
    recorder = Recorder(SimulatedTimer(), memory=memory)
    recorder.counting = Mock(steps=StepsToCount(until=4, late=6))
    before, after = (Memory(peak=peak, method="") for peak in (1, 2))
    memory.read.side_effect = [before, after]

    after_steps(recorder, *[0.1] * 6)

    assert recorder.peak_memory() == before


@pytest.mark.parametrize("is_on", [True, False])
def test_keeps_the_trainings_collector_settings(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds = gc.get_threshold()
    if not is_on:
        gc.disable()
    try:
        after_steps(Recorder(SimulatedTimer()), *[1] * 100)
        assert (gc.isenabled(), gc.get_threshold()) == (is_on, thresholds)
    finally:
        gc.enable()


def test_the_collectors_time_is_that_of_each_step() -> None:
    """A collection between two steps, for example to count objects, is not included."""
    timer = SimulatedTimer()
    recorder = Recorder(timer, probe=lambda: collector.collect(100))
    collector = recorder.collector = FakeCollector(timer)
    after_steps(recorder, 3, 0, 2, work=collector.collect)
    assert recorder.gc_s == [3, 0, 2]
    assert not collector.is_on


class FakeCollector(CollectorClock):
    """A garbage collector that runs only when a test calls it."""

    is_on = False

    def __init__(self, timer: SimulatedTimer) -> None:
        super().__init__(timer.host)
        self.timer = timer

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def collect(self, seconds: float) -> None:
        self._see("start", {})
        self.timer.sleep(seconds)
        self._see("stop", {})


def test_counting_objects_is_in_no_step_or_peak() -> None:
    timer = SimulatedTimer()
    calls = Mock()
    recorder = Recorder(timer, memory=calls.memory)
    growth = recorder.growth = Mock(wraps=Growth(2, 4))
    calls.attach_mock(growth.count, "count")
    growth.count.side_effect = lambda: timer.sleep(5)
    after_steps(recorder, *[1] * 5)
    assert [name for name, *_ in calls.method_calls] == [
        *("memory.release", "memory.reset_peak"),
        *["memory.fold", "count", "memory.go_on"] * 3,
    ]
    assert set(recorder.step_s) == {1}


def test_perfsuite_keeps_no_object_in_a_step(gpu: FakeGPU) -> None:
    """The recorder does everything that it does between steps on a GPU.

    There, each time stamp is an object.
    """
    recorder = Recorder(CudaTimer(GPU), probe=lambda: None, before_end=lambda step, recorder: None)
    recorder.collector = CollectorClock(recorder.timer.host)
    recorder.levels = MemoryLevels(torch.device("cpu"), 100)
    recorder.growth = growth = Growth(20, 100)
    recorder.between_steps = lambda step: None
    recorder.counting = Counting(lambda: None)
    after_steps(recorder, *[10] * 100, work=partial(gpu.work, ahead_ms=0))
    assert len(recorder.step_s) == 100
    kept = known(growth.result())
    assert (kept.total, kept.graphs, kept.graphs_left) == (0, 0, 0)


def test_the_first_optimizer_is_the_clock() -> None:
    """torchtitan, for example, has optimizers within optimizers. A step must count once."""
    recorder = Recorder(HostTimer())
    first = object()
    second = object()
    recorder.start()
    for optimizer in (first, second) * 3:
        recorder.after_optimizer_step(optimizer, (), {})
    recorder.finish()
    assert len(recorder.step_s) == 3
    assert all(seconds > 0 for seconds in recorder.step_s)
    assert sum(recorder.step_s) <= recorder.wall_s


def test_progress_is_told_seldom_and_at_the_end() -> None:
    recorder = Recorder(SimulatedTimer())
    progress = list[int]()
    recorder.on_progress = progress.append
    after_steps(recorder, *[0.2] * 20)
    assert progress == [3, 6, 9, 12, 15, 18, 20]


def test_gpu_steps_are_events_awaited_once(gpu: FakeGPU) -> None:
    timer, probe = clock_for(GPU)
    assert probe is None
    recorder = after_steps(Recorder(timer), 30, 10, 20, work=partial(gpu.work, ahead_ms=1000))
    assert gpu.waits == [0, 60], "nothing waits for the device between steps"
    assert recorder.step_s == pytest.approx([0.03, 0.01, 0.02])


def test_progress_is_what_the_gpu_has_finished(gpu: FakeGPU) -> None:
    recorder = Recorder(CudaTimer(GPU), progress_every_s=-1)
    progress = list[int]()
    recorder.on_progress = progress.append
    after_steps(recorder, *[10] * 6, work=partial(gpu.work, ahead_ms=25))
    assert progress == [0, 0, 0, 1, 2, 3, 6]
    assert gpu.waits == [0, 60]


def test_gpu_slowdown_is_exact_and_never_waits(gpu: FakeGPU) -> None:
    recorder = Recorder(CudaTimer(GPU), before_end=lambda step, recorder: recorder.lengthen(0.3))
    compiling = [9000, 400]
    after_steps(recorder, *compiling, *[100] * 17, work=partial(gpu.work, ahead_ms=50))
    assert len(gpu.waits) == 3, "the recorder waits at the start, once to measure a cycle, and at the end"
    assert recorder.step_s[:2] == pytest.approx([9, 0.4])
    assert recorder.step_s[6:] == pytest.approx([0.13] * 13), (
        "the slowdown is relative to the original step, not to the step that became slower"
    )
