"""Predict the time of a step from the log of a dry run, and say what the time is spent on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perfsuite.analysis.step_time.kernels import Device
from perfsuite.analysis.step_time.links import Links
from perfsuite.analysis.step_time.streams import Durations, HostTimes, MachineSpeeds, period_s
from perfsuite.results.device_log import Entry

SLOWED = 0.15
"""Share by which kernels are slower while NCCL's kernels run, because both use the same multiprocessors and
memory. This estimate was fixed before any published step was predicted. With 0 or 0.3 instead, the
predictions of published steps change by at most 4%."""
SLOWER_HOSTS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Factors of the host's time for which a step's time is predicted. With 0, the host takes no time."""


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


class Replays:
    """The predicted times of one step. The result of each replay is cached."""

    def __init__(self, step: Sequence[Entry], same_calls: Replays | None = None) -> None:
        """Prepare to replay a step.

        If `same_calls` is given, its step differs from this step only in the bytes of collectives.
        """
        self.step = step
        self._durations: dict[tuple[Device, Links], Durations] = {}
        self._periods: dict[MachineSpeeds, float] = {}
        # Replays without communication do not depend on the bytes of collectives. So this object shares the
        # results of such replays with `same_calls`.
        self._silent: dict[tuple[Device, HostTimes | None], float] = (
            {} if same_calls is None else same_calls._silent
        )

    def durations(self, machine: MachineSpeeds) -> Durations:
        """Return the seconds of each kernel and collective. Raises `PredictionError`."""
        key = machine.device, machine.links
        if key not in self._durations:
            self._durations[key] = Durations(self.step, machine)
        return self._durations[key]

    def period_s(self, machine: MachineSpeeds) -> float:
        """Return the seconds between the ends of two steps, as if collectives did not slow down kernels."""
        if machine not in self._periods:
            self._periods[machine] = period_s(self.step, self.durations(machine), machine)
        return self._periods[machine]

    def without_links_s(self, machine: MachineSpeeds) -> float:
        """Return the seconds of the step if its collectives take no time."""
        return self._without_links_s(machine, machine.host)

    def kernels_s(self, machine: MachineSpeeds) -> float:
        """Return the seconds of the step's kernels, without communication and without the host."""
        return self._without_links_s(machine, None)

    def _without_links_s(self, machine: MachineSpeeds, host: HostTimes | None) -> float:
        key = machine.device, host
        if key not in self._silent:
            durations = self.durations(machine)
            self._silent[key] = period_s(
                self.step, durations, machine, communicates=False, host_takes_time=host is not None
            )
        return self._silent[key]

    def delays(self, machine: MachineSpeeds) -> tuple[float, float, float]:
        """Return three times in seconds.

        They are the time of a step without communication, the time of waiting for communication, and the time
        by which communication slows down kernels.
        """
        without_links_s = self.without_links_s(machine)
        exposed_s = self.period_s(machine) - without_links_s
        hidden_s = max(0.0, self.durations(machine).communication_s - exposed_s)
        return without_links_s, exposed_s, SLOWED * min(hidden_s, self.kernels_s(machine))

    def total_s(self, machine: MachineSpeeds) -> float:
        """Return the seconds of the step, even if it has no kernels. Raises `PredictionError`."""
        return sum(self.delays(machine))


def step_time(step: Sequence[Entry], machine: MachineSpeeds) -> StepTime:
    """Replay the reported step of a log. Raises `PredictionError` if the machine lacks a link.

    The parts come from three replays: with everything, without communication, and with kernels only. The time
    is never below that of the kernels alone, and does not increase if any bandwidth increases.
    """
    replays = Replays(step)
    durations = replays.durations(machine)
    kernels_s = replays.kernels_s(machine)
    without_links_s, exposed_s, slowed_s = replays.delays(machine)
    overlapped = kernels_s / durations.kernels_s  # below 1 if streams compute at the same time
    return StepTime(
        matmul_s=overlapped * durations.of_kind["matmul"],
        attention_s=overlapped * durations.of_kind["attention"],
        memory_s=overlapped * durations.of_kind["memory"],
        slowed_s=slowed_s,
        exposed_s=exposed_s,
        host_s=without_links_s - kernels_s,
    )


def by_host(step: Sequence[Entry], machine: MachineSpeeds) -> tuple[tuple[float, float], ...]:
    """Return the seconds of a step for each factor in `SLOWER_HOSTS`, as pairs. Raises `PredictionError`."""
    replays = Replays(step)
    return tuple((factor, replays.total_s(machine.with_host(factor))) for factor in SLOWER_HOSTS)
