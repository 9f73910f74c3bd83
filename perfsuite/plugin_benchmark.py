"""Recorded step times become an ordinary pytest-benchmark benchmark, through its public API only.

Its timer is read once, when its fixture is built, so the clock must be in the marker before that. `pedantic`
never calibrates, so each round is exactly one replayed step. Imports no pytest itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn


class ReplayClock:
    """A timer whose value changes only when a step is replayed."""

    __name__ = "optimizer_step_clock"  # stands in the JSON as options.timer

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time, in seconds."""
        return self.now


def replay(benchmark: Any, clock: ReplayClock, step_s: Sequence[float]) -> None:
    """Let `benchmark` measure each of `step_s` (seconds), exactly."""
    steps = iter([*step_s, *step_s])  # --benchmark-cprofile makes one more call

    def arm() -> None:
        clock.now = 0.0

    def step() -> None:
        clock.now = next(steps)

    benchmark.pedantic(step, setup=arm, rounds=len(step_s), iterations=1, warmup_rounds=0)


def raise_in(benchmark: Any, error: BaseException) -> NoReturn:
    """Raise `error` in a way that tells `benchmark` that it has nothing to show."""

    def fail() -> None:
        raise error

    benchmark.pedantic(fail)
    raise error
