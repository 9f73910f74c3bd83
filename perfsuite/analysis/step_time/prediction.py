"""Predict the time of a step from the log of a dry run, and say what the time is spent on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perfsuite.analysis.step_time.streams import Durations, Machine, period_s
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Entry

SLOWED = 0.15
"""Share by which kernels are slower while NCCL's kernels run, because both use the same multiprocessors and
memory. This estimate was fixed before any published step was predicted. With 0 or 0.3 instead, the
predictions of published steps change by at most 4%."""
SLOWER_HOSTS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Factors of the host's time for which a step's time is predicted. With 0, the host takes no time."""
HOST_SETS_THE_PACE = 0.01  # if the device waits for the host for a larger share of a step, `of_layers` fails


class StepTime(NamedTuple):
    """The predicted seconds of a step, in parts. `total_s` is the sum of all parts."""

    matmul_s: float
    attention_s: float
    memory_s: float  # kernels without FLOPs
    slowed_s: float  # additional time of kernels that run at the same time as collectives
    exposed_s: float  # time during which the device waits for communication
    host_s: float  # time during which the device waits for the host

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self)


def step_time(step: Sequence[Entry], machine: Machine) -> StepTime:
    """Replay the reported step of a log. Raises `PredictionError` if the machine lacks a link.

    The parts come from three replays: with everything, without communication, and without the host. The time
    is never below that of the kernels alone, and does not grow if any bandwidth grows.
    """
    durations = Durations(step, machine)
    kernels_s = _kernels_s(step, durations, machine)
    without_links_s, exposed_s, slowed_s = _delays(step, durations, machine, kernels_s)
    overlapped = kernels_s / durations.kernels_s  # below 1 if streams compute at the same time
    return StepTime(
        matmul_s=overlapped * durations.of_kind["matmul"],
        attention_s=overlapped * durations.of_kind["attention"],
        memory_s=overlapped * durations.of_kind["memory"],
        slowed_s=slowed_s,
        exposed_s=exposed_s,
        host_s=without_links_s - kernels_s,
    )


def by_host(step: Sequence[Entry], machine: Machine) -> tuple[tuple[float, float], ...]:
    """Return the seconds of a step for each factor in `SLOWER_HOSTS`, as pairs. Raises `PredictionError`."""
    durations = Durations(step, machine)
    kernels_s = _kernels_s(step, durations, machine)
    return tuple(
        (factor, sum(_delays(step, durations, machine.with_host(factor), kernels_s)))
        for factor in SLOWER_HOSTS
    )


def total_s(step: Sequence[Entry], machine: Machine) -> float:
    """Return the seconds of a step. A step can have no kernels. Raises `PredictionError`."""
    durations = Durations(step, machine)
    return sum(_delays(step, durations, machine, _kernels_s(step, durations, machine)))


def _kernels_s(step: Sequence[Entry], durations: Durations, machine: Machine) -> float:
    return period_s(step, durations, machine, communicates=False, host_takes_time=False)


def _delays(
    step: Sequence[Entry], durations: Durations, machine: Machine, kernels_s: float
) -> tuple[float, float, float]:
    """Return three times in seconds.

    They are the time of a step without communication, the time of waiting for communication, and the time by
    which communication slows down kernels.
    """
    without_links_s = period_s(step, durations, machine, communicates=False)
    exposed_s = period_s(step, durations, machine) - without_links_s
    hidden_s = max(0.0, durations.communication_s - exposed_s)
    return without_links_s, exposed_s, SLOWED * min(hidden_s, kernels_s)


def of_layers(few: StepTime, more: StepTime, few_layers: int, more_layers: int, layers: int) -> StepTime:
    """Extrapolate from the steps of a model with fewer layers to one with `layers`.

    Raises `PredictionError` if the host sets the pace of either step, because in a longer step the host can
    be further ahead.
    """
    for step, number in ((few, few_layers), (more, more_layers)):
        if step.host_s > HOST_SETS_THE_PACE * step.total_s:
            share = step.host_s / step.total_s
            raise PredictionError(
                f"with {number} layers, the device waits for the host for {share:.0%} of a step, and this "
                "wait is not proportional to the number of layers. Run the whole model dry"
            )
    times = (layers - few_layers) / (more_layers - few_layers)
    return StepTime(*(first + times * (second - first) for first, second in zip(few, more, strict=True)))
