"""How many launches a verdict may cost, and how much worse a metric may become."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfsuite.results.metric import TOKENS_PER_S, Metric
from perfsuite.results.outcome import Check
from perfsuite.verdict.sequential import MAX_LAUNCHES

MAX_UNHEALTHY = 3
"""Minimum number of unhealthy launches that make the verdict `unhealthy`. The verdict is not `unhealthy`
while the healthy launches are in the majority."""


def waives_nothing(checks: Sequence[Check]) -> bool:
    """Return False: no regression of these checks is waived."""
    return False


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The number of launches that a verdict may cost, the tolerance of tokens/s, and the waivers."""

    # Maximum number of launches, including those that are set aside. With 1 or 2 healthy launches, times
    # cannot show a regression, so the verdict is only a quick look: `passed` or `inconclusive`.
    max_launches: int = MAX_LAUNCHES
    # Minimum number of healthy launches, whatever they show. It applies even if it exceeds `max_launches`.
    min_launches: int = 1
    record_launches: int = 3  # number of healthy launches needed to record a baseline if there is none
    max_unhealthy: int = MAX_UNHEALTHY  # with 1, the first unhealthy launch can end the case
    tolerance: float | None = None  # tolerance of tokens/s; None: the usual tolerance of the metric
    # Whether waivers cover every regression among the checks of a case.
    waives: Callable[[Sequence[Check]], bool] = waives_nothing

    def tolerance_of(self, metric: Metric, device: str) -> float:
        """Return the tolerance of a metric: the share by which its cost may grow."""
        if self.tolerance is not None and metric.name == TOKENS_PER_S.name:
            return self.tolerance
        return metric.tolerance(device)

    @property
    def most(self) -> int:
        """The maximum number of launches, including those that are set aside: at least `min_launches`."""
        return max(self.max_launches, self.min_launches)
