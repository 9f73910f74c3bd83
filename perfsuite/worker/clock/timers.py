"""Clocks that time steps: the host's clock, events on a GPU, and a simulated clock. Does not import torch."""

import threading
from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from typing import Any

from perfsuite.frameworks.common import private
from perfsuite.results.rank_report import SIMULATED_CLOCK

CALIBRATION_CYCLES = 10**7  # number of GPU cycles (a few milliseconds) that `CudaTimer.sleep` times once

_time: Any = module_from_spec(BuiltinImporter.find_spec("time"))  # type: ignore[arg-type]
# Use a separate copy of `time`, because the usual module is patched by some libraries, for example by
# freezegun and by libraries that scale time.
BuiltinImporter.exec_module(_time)


class HostTimer:
    """The host's monotonic clock. `stamp` returns a mark, and `seconds` the time between two marks."""

    name = "perf_counter"

    def stamp(self) -> Any:
        """Return a mark for the current time."""
        return float(_time.perf_counter())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks.

        The device must have reached both marks (see `settle` and `is_past`).
        """
        return float(end - start)

    def settle(self) -> None:
        """Wait until the device has reached every mark made so far. On the host, return at once."""

    def is_past(self, mark: Any) -> bool:
        """Return whether the device has reached a mark, without waiting."""
        return True

    def host(self) -> float:
        """Return the host's time in seconds. Unlike the clock of `stamp`, this clock is never adjusted."""
        return float(_time.clock_gettime(_time.CLOCK_MONOTONIC_RAW))

    def uptime(self) -> float | None:
        """Return the seconds since the machine booted, from proc_uptime(5), or None if unknown."""
        try:
            with open("/proc/uptime") as file:
                return float(file.read().split()[0])
        except (OSError, ValueError, IndexError):
            return None

    def cpu(self) -> float | None:
        """Return the CPU seconds of all threads of this process. A simulated clock returns None."""
        return float(_time.process_time())

    def sleep(self, seconds: float) -> None:
        """Let time pass in a busy loop, because `time.sleep(0.001)` takes longer than a millisecond."""
        until = self.host() + seconds
        while self.host() < until:
            pass


class CudaTimer(HostTimer):
    """Uses events on a device's current stream. The device times the events with its own clock.

    The device need not be the current device of the process.
    """

    name = "cuda events"

    def __init__(self, device: Any) -> None:
        self.device = device
        self._cycles_per_s: float | None = None
        self._keep_busy: Any = None  # function that keeps the device busy for a number of cycles

    def stamp(self) -> Any:
        """Record an event on the device's current stream, and return it."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events, measured with the device's own clock."""
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Synchronise with the device."""
        import torch

        torch.cuda.synchronize(self.device)

    def is_past(self, mark: Any) -> bool:
        """Return whether the device has reached the event."""
        return bool(mark.query())

    def sleep(self, seconds: float) -> None:
        """Keep the device busy after its queued work, and keep the host busy for the same time.

        Both are kept busy because either of them can limit the speed of a step. The first call also waits for
        the device, to measure the length of a cycle.
        """
        import torch

        with torch.cuda.device(self.device):
            if self._cycles_per_s is None:
                self._keep_busy = private.cuda_sleep
                self._keep_busy(1)  # loads the kernel
                start = self.stamp()
                self._keep_busy(CALIBRATION_CYCLES)
                end = self.stamp()
                self.settle()
                self._cycles_per_s = CALIBRATION_CYCLES / self.seconds(start, end)
            self._keep_busy(round(seconds * self._cycles_per_s))
        super().sleep(seconds)


class SimulatedTimer(HostTimer):
    """A clock that advances only when `sleep` is called, for a framework that trains nothing."""

    name = SIMULATED_CLOCK

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        """Return the simulated time, in seconds."""
        return self.now

    host = stamp

    def uptime(self) -> float | None:
        """Return None, because the machine's uptime is not simulated."""

    def cpu(self) -> float | None:
        """Return None, because nothing is computed."""

    def sleep(self, seconds: float) -> None:
        """Advance the clock by `seconds`."""
        self.now += seconds


def clock_for(device: Any) -> tuple[HostTimer, Callable[[], object] | None]:
    """Return the timer for a `torch.device`, and the probe to run after each step (None on a GPU)."""
    return (CudaTimer(device), None) if device.type == "cuda" else (HostTimer(), cpu_probe())


def cpu_probe() -> Callable[[], object]:
    """Return a probe: two fp32 matmuls of 384 x 384, which take a few milliseconds.

    How long they take depends only on the machine.
    """
    import torch

    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # a script might have set other defaults
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(384, 384, generator=generator, **plain)
    b = torch.rand(384, 384, generator=generator, **plain)
    out = torch.empty(384, 384, **plain)

    def probe() -> None:
        torch.mm(a, b, out=out)
        torch.mm(b, a, out=out)

    return probe


def training_thread() -> int:
    """Return the id of the thread that runs the script.

    This is not always the calling thread. If optimizers step during backward, the caller can be a thread of
    autograd, which Python did not start.
    """
    here = threading.current_thread()
    return (threading.main_thread() if isinstance(here, threading._DummyThread) else here).ident or 0
