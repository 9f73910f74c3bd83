"""The metrics: unit, direction and tolerance. Pure; imports neither torch nor pytest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A gated figure of a run. Unit and direction have no default: nobody shall guess them."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    tolerance_cpu: float
    """Relative change for the worse that is let pass on a machine without accelerator, which is noisy."""
    tolerance_gpu: float

    def tolerance(self, device: str) -> float:
        """The relative change for the worse that is let pass."""
        return self.tolerance_cpu if device == "cpu" else self.tolerance_gpu

    def worsening(self, now: float, before: float) -> float:
        """By how much `now` is worse than `before`, relative to `before`; negative if it is better."""
        if before == 0:  # memory on a CPU may be
            return 0.0 if now == 0 else math.copysign(math.inf, now if self.better == "lower" else -now)
        change = now / before - 1
        return -change if self.better == "higher" else change


TOKENS_PER_S = Metric(
    name="tokens_per_s", unit="tokens/s", better="higher", tolerance_cpu=0.15, tolerance_gpu=0.03
)
PEAK_MEMORY = Metric(
    name="peak_memory_bytes", unit="bytes", better="lower", tolerance_cpu=0.15, tolerance_gpu=0.01
)

GATED = (TOKENS_PER_S, PEAK_MEMORY)
