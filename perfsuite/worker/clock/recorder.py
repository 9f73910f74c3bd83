"""Time every optimizer step of one process, for any framework. perfsuite's work between steps is excluded.

On a GPU, events mark the start and the end of each step, so the host need not wait for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.results.counts import FIRST_COUNTED
from perfsuite.results.rank_report import SpanTimes
from perfsuite.worker.clock import startup_clock
from perfsuite.worker.clock.timers import HostTimer

if TYPE_CHECKING:
    from perfsuite.results.rank_report import Memory
    from perfsuite.worker.clock.collector import CollectorClock
    from perfsuite.worker.clock.levels import MemoryLevels
    from perfsuite.worker.clock.loaders import DataWait
    from perfsuite.worker.clock.memory import CudaMemory, HostMemory
    from perfsuite.worker.clock.profiling import Profiling
    from perfsuite.worker.clock.startup_clock import StartUp
    from perfsuite.worker.counting.growth import Growth
    from perfsuite.worker.counting.steps import Counting

PROGRESS_EVERY_S = 0.5
UNSETTLED_STEPS = 2  # number of steps at the start of a launch. Their times do not represent later steps
USUAL_OF_STEPS = 20  # number of recent steps whose median time estimates the length of the running step


class Recorder:
    """Times each optimizer step of one process.

    `probe` is a fixed piece of work that runs after each step and is timed separately. `before_end` injects
    faults. It is called with the step's index, just before the end of the step is stamped.

    The peak of `memory` is reset after the first step, because in that step, libraries can allocate memory
    that they need only once. It is reset again after the steps whose work is counted.
    """

    def __init__(
        self,
        timer: HostTimer,
        *,
        probe: Callable[[], object] | None = None,
        before_end: Callable[[int, Recorder], None] | None = None,
        memory: HostMemory | CudaMemory | None = None,
        progress_every_s: float = PROGRESS_EVERY_S,
    ) -> None:
        self.timer = timer
        self._progress_every_s = progress_every_s
        self.memory = memory
        # A function that is called with the number of finished steps, at most every `progress_every_s`
        # seconds and at the end.
        self.on_progress: Callable[[int], object] = lambda step: None
        self.counting: Counting | None = None  # counts the work of some steps
        self.profiling: Profiling | None = None  # profiles some steps; set only in a profiled launch
        self.growth: Growth | None = None  # counts objects at three step boundaries
        self.levels: MemoryLevels | None = None  # reads the memory in use at some step boundaries
        self.collector: CollectorClock | None = None  # times Python's garbage collector
        # A function that is called between steps, with the number of steps that have ended.
        self.between_steps: Callable[[int], object] | None = None
        self.data_wait: DataWait | None = None  # times the wait for batches; None if it is not measured
        self.cpu_s: list[float] = []  # CPU seconds of this process in each step; empty if unknown
        self.probe_s: list[float] = []
        self.gc_s: list[float] = []  # seconds of Python's garbage collector in each step; empty if unknown
        # The start-up of this process. None if it is unknown, or if the first step has not ended.
        self.start_up: StartUp | None = None
        self.wall_s = 0.0  # host seconds from `start` to `finish`, without perfsuite's work between steps
        self.elapsed_s = 0.0  # host seconds from `start` to `finish`, with perfsuite's work between steps
        self.uptime_s: float | None = None  # like `elapsed_s`, but from the kernel's uptime. None if unknown
        self._probe = probe
        self._before_end = before_end
        self._starts = OwnList[Any]()
        self._ends = OwnList[Any]()
        # The index of a step -> the seconds that an injected fault added to it.
        self._lengthened_s: dict[int, float] = {}
        self._past = 0  # number of steps that the device is known to have finished
        self._clock_optimizer: Any = None
        self._is_finished = False
        self._begun_at = self._between_s = self._progress_at = 0.0
        self._cpu_at: float | None = None
        self._gc_at = 0.0
        self._uptime_at: float | None = None
        self._peak: Memory | None = None  # the peak before the late counted step, if there is such a step

    def start(self) -> None:
        """Collect garbage, release cached memory, and begin the first step."""
        gc.collect()  # garbage from building the job must not count in a step
        if self.collector is not None:
            self.collector.start()
        if self.memory is not None:
            self.memory.release()
        self.timer.settle()
        self._uptime_at = self.timer.uptime()
        self._begun_at = self.timer.host()
        self._begin_step()

    def after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End a step if `optimizer` is the first optimizer that has stepped.

        Steps of other optimizers are ignored. This is a hook for `register_optimizer_step_post_hook`.
        """
        if self._clock_optimizer is None:
            self._clock_optimizer = optimizer
        if optimizer is self._clock_optimizer:
            self.boundary()

    def boundary(self) -> None:
        """End the running step and begin the next one."""
        if self.counting is not None:
            self.counting.end_step()
        if self._before_end is not None:
            self._before_end(self.steps, self)
        self._ends.append(self.timer.stamp())
        cpu = self.timer.cpu()
        if cpu is not None and self._cpu_at is not None:
            self.cpu_s.append(cpu - self._cpu_at)
        if self.data_wait is not None:
            self.data_wait.end_step()
        if self.collector is not None:
            self.gc_s.append(self.collector.seconds - self._gc_at)
        ended_at = self.timer.host()
        if startup_clock.is_running():
            self.timer.settle()  # wait until the device has finished the first step
            self.start_up = startup_clock.end()
        self._settle_memory()
        if self.levels is not None:
            self.levels.boundary(self.steps)
        if self.growth is not None and self.growth.is_due(self.steps):
            self._count_objects(self.growth)
        if ended_at - self._progress_at > self._progress_every_s:
            self._progress_at = ended_at
            self.on_progress(self._steps_past())
        if self.between_steps is not None:
            self.between_steps(self.steps)
        if self._probe is not None:
            probe_at = self.timer.host()
            self._probe()
            self.probe_s.append(self.timer.host() - probe_at)
        if self.counting is not None:
            self.counting.begin_step()
        if self.profiling is not None:
            self.profiling.boundary(self.steps)
        self._between_s += self.timer.host() - ended_at
        self._begin_step()

    def _count_objects(self, growth: Growth) -> None:
        """Count objects. The memory that counting needs is excluded from the peak."""
        if self.memory is not None:
            self.memory.fold()
        growth.count()
        if self.memory is not None:
            self.memory.go_on()

    def _begin_step(self) -> None:
        if self.data_wait is not None:
            self.data_wait.begin_step()
        self._gc_at = 0.0 if self.collector is None else self.collector.seconds
        self._cpu_at = self.timer.cpu()
        self._starts.append(self.timer.stamp())

    def _settle_memory(self) -> None:
        if self.memory is None:
            return
        if self.steps == 1:
            self.memory.reset_peak()
        if self.counting is None:
            return
        if self.steps == FIRST_COUNTED - 1:
            self.memory.begin_counting()
        elif self.steps == self.counting.steps.until:
            self.memory.end_counting()
        elif self.steps + 1 == self.counting.steps.late:
            self._peak = self.memory.read()

    def peak_memory(self) -> Memory | None:
        """Return the peak memory so far. The late counted step, after the measured steps, is left out."""
        if self._peak is None and self.memory is not None:
            return self.memory.read()
        return self._peak

    def finish(self) -> None:
        """Wait for the device, and stop the clock after the last step. Later calls have no effect."""
        if self._is_finished:
            return
        self._is_finished = True
        self.timer.settle()
        self.elapsed_s = self.timer.host() - self._begun_at
        self.wall_s = self.elapsed_s - self._between_s
        if self._uptime_at is not None:
            uptime = self.timer.uptime()
            if uptime is not None:
                self.uptime_s = uptime - self._uptime_at
        self.on_progress(self.steps)
        if self.collector is not None:
            self.collector.stop()

    @property
    def start_up_spans(self) -> dict[str, SpanTimes]:
        """The seconds of each part of the start-up, with span names as keys. Empty if they are unknown."""
        seconds = {} if self.start_up is None else self.start_up.seconds
        return {name: SpanTimes(seconds=(duration_s,)) for name, duration_s in seconds.items()}

    def sleep(self, seconds: float) -> None:
        """Let time pass in the running step, for a framework that trains nothing."""
        self.timer.sleep(seconds)

    @property
    def steps(self) -> int:
        """The number of optimizer steps that have ended so far."""
        return len(self._ends)

    @property
    def step_s(self) -> list[float]:
        """The seconds of each step. They are valid only after `finish`."""
        return [self.timer.seconds(start, end) for start, end in zip(self._starts, self._ends, strict=False)]

    def lengthen(self, share: float) -> None:
        """Inject a fault: lengthen the running step by a share of the median time of recent steps.

        The first steps are not lengthened.
        """
        past = self._steps_past()
        lengths = [
            self.timer.seconds(self._starts[step], self._ends[step]) - self._lengthened_s.get(step, 0)
            for step in range(max(UNSETTLED_STEPS, past - USUAL_OF_STEPS), past)
        ]
        if lengths:
            self._lengthened_s[self.steps] = added = share * median(lengths)
            self.timer.sleep(added)

    def _steps_past(self) -> int:
        while self._past < self.steps and self.timer.is_past(self._ends[self._past]):
            self._past += 1
        return self._past
