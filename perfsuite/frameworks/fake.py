"""A framework that does not train, for tests of perfsuite without torch. Clock and loss are simulated."""

import math
import random
from typing import ClassVar

from pydantic import Field

from perfsuite.case.case import Case
from perfsuite.frameworks.base import Framework, LaunchPlan, Ranks, StepClock, Workload
from perfsuite.results.rank_report import Memory


class Fake(Framework):
    """Options of a simulation in which no real time passes."""

    name: ClassVar[str] = "fake"

    step_ms: float = Field(default=10, gt=0, le=1e7)
    """Median step time in milliseconds. The first step takes three times as long."""
    noise: float = Field(default=0.01, ge=0, lt=0.3)
    """Standard deviation of the logarithm of the step time."""
    memory_mb: int = Field(default=100, gt=0, le=10**9)
    """Peak memory in MB (10**6 bytes)."""

    def plan(self, case: Case) -> LaunchPlan:
        return LaunchPlan(needs_torch=False)

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build a loop that advances the simulated clock.

        The loss approaches 1. Each step reduces the distance of the loss from 1 by a tenth.
        """
        draw = random.Random(case.seed + ranks.rank)

        def run(steps: int) -> list[float]:
            for step in range(steps):
                slow_start = 3 if step == 0 else 1
                clock.sleep(self.step_ms / 1e3 * slow_start * math.exp(self.noise * draw.gauss(0, 1)))
                clock.boundary()
            return [6.0 * 0.9**step + 1 for step in range(steps)]

        memory = Memory(peak=self.memory_mb * 10**6, method="simulated")
        return Workload(run=run, data_parallel=ranks.world_size, memory=lambda: memory)
