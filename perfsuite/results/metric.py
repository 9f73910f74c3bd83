"""The gated metrics: unit, direction, tolerance. Pure; imports neither torch nor pytest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from perfsuite.case.case import Unit


def in_unit(text: str, unit: Unit) -> str:
    """A text about tokens, said of what a case counts."""
    return text.replace("token", unit.removesuffix("s"))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A gated figure of a run. Unit and direction have no default: nobody shall guess them."""

    name: str
    """The field of `Figures` that holds it."""
    label: str
    unit: str
    better: Literal["higher", "lower"]
    tolerance_cpu: float
    """Relative change for the worse that is let pass on a machine without accelerator, which is noisy."""
    tolerance_gpu: float
    exact_on_gpu: bool = False
    """Whether an accelerator repeats it to the digit, so that no statistics are needed there."""

    def counting(self, unit: Unit) -> Metric:
        """The same of a case that counts this: in the label and in the unit."""
        return replace(self, label=in_unit(self.label, unit), unit=in_unit(self.unit, unit))

    def tolerance(self, device: str) -> float:
        """The relative change for the worse that is let pass."""
        return self.tolerance_cpu if device == "cpu" else self.tolerance_gpu

    def cost(self, value: float) -> float:
        """The figure as a cost, for which lower is better: what `perfsuite.verdict.sequential` judges."""
        return value if self.better == "lower" else 1 / value

    def worsening(self, now: float, before: float) -> float:
        """By how much the cost grew, relative to before: +0.05 is 5 % slower, or larger."""
        return self.cost(now) / self.cost(before) - 1


TOKENS_PER_S = Metric(
    name="tokens_per_s",
    label="tokens/s",
    unit="tokens/s",
    better="higher",
    tolerance_cpu=0.15,
    tolerance_gpu=0.03,
)
TOKENS_PER_S_MEAN = Metric(
    name="tokens_per_s_mean",
    label="tokens/s with stalls",
    unit="tokens/s",
    better="higher",
    tolerance_cpu=0.20,
    tolerance_gpu=0.05,
)
"""By the mean step, so that rare long steps count. Noisier than the median, hence the wider tolerance.

It alone judges stalls. Where steps stall now and then, any measure of the slowest steps (p95/p50, the mean of
the slowest tenth) jumps with how many of them fall into a window, by more than the change to be found.
"""
PEAK_MEMORY = Metric(
    name="peak_memory_bytes",
    label="peak memory",
    unit="bytes",
    better="lower",
    tolerance_cpu=0.20,
    tolerance_gpu=0.01,
    exact_on_gpu=True,
)

SPEEDS = {"tokens/s": "token", "samples/s": "sample"}
"""Units of metrics whose cost is time, and what that is the time of."""
GATED = (TOKENS_PER_S, TOKENS_PER_S_MEAN, PEAK_MEMORY)
