"""No training at all: a simulated clock and loss. Drives the whole pipeline in tests, without torch."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from perfsuite.frameworks.base import Framework, Ranks, Workload
from perfsuite.results.rank_report import Memory

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.worker.recorder import Recorder


class Fake(Framework):
    """Steps of `step_ms` simulated milliseconds with relative `noise`; no time passes."""

    name: ClassVar[str] = "fake"
    needs_torch: ClassVar[bool] = False

    step_ms: float = Field(default=10, gt=0)
    noise: float = Field(default=0.01, ge=0, lt=0.3)
    memory_mb: int = Field(default=100, gt=0)

    def build(self, case: Case, ranks: Ranks, recorder: Recorder) -> Workload:
        """A loop that moves the recorder's simulated clock."""
        timer = recorder.timer
        assert isinstance(timer, SimulatedTimer)
        draw = random.Random(case.seed + ranks.rank)

        def run(steps: int) -> list[float]:
            for step in range(steps):
                slow_start = 3 if step == 0 else 1
                timer.now += self.step_ms / 1e3 * slow_start * math.exp(self.noise * draw.gauss(0, 1))
                recorder.boundary()
            return [6.0 * 0.9**step + 1 for step in range(steps)]

        memory = Memory(peak=self.memory_mb * 10**6, method="simulated")
        return Workload(run=run, data_parallel=ranks.world_size, memory=lambda: memory)


class SimulatedTimer:
    """A clock that stands still unless it is moved. It sleeps by moving."""

    name = "simulated"

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        """Now, simulated."""
        return self.now

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def settle(self) -> None:
        """Nothing to wait for."""

    def is_past(self, mark: float) -> bool:
        """Always."""
        return True

    def since(self, start: float) -> float | None:
        """The difference to now."""
        return self.now - start

    def host(self) -> float:
        """Now, simulated."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds
