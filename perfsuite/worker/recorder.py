"""The clock of every framework: optimizer steps. Worker side; imports no pytest, and torch only when used.

`Recorder.boundary` runs after each optimizer step (through torch's public post-step hook). It stamps the end
of the step, does what must be done between steps (probe, garbage collection, progress), and stamps the start
of the next one, so that nothing of ours is timed. On a GPU the stamps are events: nothing waits for the
device until `Recorder.finish`.
"""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable
from statistics import median
from typing import Any, ClassVar, Protocol

from perfsuite.results.rank_report import Memory

GC_EVERY = 50
"""Steps between collections: at the same step on every rank, so that no rank waits for another's."""
PROGRESS_EVERY_S = 0.5
UNSETTLED_STEPS = 2
"""At the start of a launch: what they take says nothing of the steps after them, and is never measured."""
USUAL_OF_STEPS = 20
CALIBRATION_CYCLES = 10**7
"""Some milliseconds of a GPU."""


class Timer(Protocol):
    """A clock: `stamp` marks a moment, `seconds` says how long it was from one to another."""

    name: str

    def stamp(self) -> Any:
        """A mark for now."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks. May only be asked after `settle`."""

    def settle(self) -> None:
        """Wait until every mark so far is in the past."""

    def is_past(self, mark: Any) -> bool:
        """Whether a mark is in the past already, so that `seconds` may be asked. Waits for nothing."""

    def since(self, start: Any) -> float | None:
        """Seconds from a mark to now; None where the device would have to be waited for."""

    def host(self) -> float:
        """The host's clock in seconds: the cross-check."""

    def sleep(self, seconds: float) -> None:
        """Let time pass, for an injected delay."""


class HostTimer:
    """The host's monotonic clock."""

    name = "perf_counter"

    def stamp(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def settle(self) -> None:
        """Host marks are in the past at once."""

    def is_past(self, mark: Any) -> bool:
        """Always."""
        return True

    def since(self, start: Any) -> float | None:
        """The difference to now."""
        return self.seconds(start, self.stamp())

    def host(self) -> float:
        """Now."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Busy, so that a delay of a millisecond is one of a millisecond."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass


class CudaTimer(HostTimer):
    """Events on the current stream of one device: its own clock, without waiting for it.

    The device is the one that trains, which need not be the process's current one.
    """

    name = "cuda events"

    def __init__(self, device: Any) -> None:
        self.device = device
        self._cycles_per_s: float | None = None

    def stamp(self) -> Any:
        """An event, recorded."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Elapsed time of the device between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Synchronise with the device."""
        import torch

        torch.cuda.synchronize(self.device)

    def is_past(self, mark: Any) -> bool:
        """Whether the device has come to the event."""
        return bool(mark.query())

    def since(self, start: Any) -> float | None:
        """Not known: the device is behind the host."""
        return None

    def sleep(self, seconds: float) -> None:
        """Keep the device busy, behind what it was given so far, and the host for as long: whichever of them
        sets the pace of a step, it takes that much longer. Only the first call waits for the device, to see
        how long a cycle takes."""
        import torch

        if self._cycles_per_s is None:
            self._cycles_per_s = self._calibrated()
        with torch.cuda.device(self.device):
            torch.cuda._sleep(round(seconds * self._cycles_per_s))
        super().sleep(seconds)

    def _calibrated(self) -> float:
        import torch

        with torch.cuda.device(self.device):
            torch.cuda._sleep(1)  # loads the kernel
            start = self.stamp()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            end = self.stamp()
        self.settle()
        return CALIBRATION_CYCLES / self.seconds(start, end)


def clock_for(device: Any) -> tuple[Timer, Callable[[], object] | None]:
    """The timer for a `torch.device`, and the probe that is timed beside it: on a CPU alone."""
    if device.type == "cuda":
        return CudaTimer(device), None
    return HostTimer(), cpu_probe()


class Recorder:
    """Takes the time of each optimizer step of one process.

    `probe`, if given, is a fixed piece of work done after each step and timed apart from it. `before_end`, if
    given, is called with the step's index before its end is stamped: injected faults. The peak of `memory`
    is reset after the first step, not timed: what a library builds in that step is behind it then.
    """

    def __init__(
        self,
        timer: Timer,
        *,
        probe: Callable[[], object] | None = None,
        before_end: Callable[[int, Recorder], None] | None = None,
        memory: HostMemory | CudaMemory | None = None,
    ) -> None:
        self.timer = timer
        self.memory = memory
        self.on_progress: Callable[[int], object] = lambda step: None
        """Called with the number of steps that the device has finished, at most twice a second."""
        self.probe_s: list[float] = []
        self.wall_s = 0.0
        """Host seconds from `start` to `finish`, less what was done between steps."""
        self._probe = probe
        self._before_end = before_end
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._lengthened_s: dict[int, float] = {}
        """By injected faults, of steps that `lengthen` was called in."""
        self._past = 0
        """Steps that the device was seen to have finished."""
        self._clock_optimizer: Any = None
        self._is_finished = False
        self._begun_at = self._between_s = self._progress_at = 0.0

    def start(self) -> None:
        """The first step begins now. Python's garbage collector rests until `finish`."""
        gc.collect()
        gc.disable()
        if self.memory is not None:
            self.memory.release()
        self.timer.settle()
        self._begun_at = self.timer.host()
        self._starts.append(self.timer.stamp())

    def after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """For `register_optimizer_step_post_hook`. The first optimizer seen is the clock."""
        if self._clock_optimizer is None:
            self._clock_optimizer = optimizer
        if optimizer is self._clock_optimizer:
            self.boundary()

    def boundary(self) -> None:
        """A step has ended."""
        if self._before_end is not None:
            self._before_end(len(self._ends), self)
        self._ends.append(self.timer.stamp())
        ended_at = self.timer.host()
        if len(self._ends) == 1 and self.memory is not None:
            self.memory.reset_peak()
        if len(self._ends) % GC_EVERY == 0:
            gc.collect(1)
        if ended_at - self._progress_at > PROGRESS_EVERY_S:
            self._progress_at = ended_at
            self.on_progress(self._steps_past())
        if self._probe is not None:
            probe_at = self.timer.host()
            self._probe()
            self.probe_s.append(self.timer.host() - probe_at)
        self._between_s += self.timer.host() - ended_at
        self._starts.append(self.timer.stamp())

    def finish(self) -> None:
        """The last step has ended: wait for the device, once. Only the first call counts.

        The worker calls it; a framework whose library goes on after its last step calls it before.
        """
        if self._is_finished:
            return
        self._is_finished = True
        self.timer.settle()
        self.wall_s = self.timer.host() - self._begun_at - self._between_s
        gc.enable()

    @property
    def steps(self) -> int:
        """Finished so far."""
        return len(self._ends)

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step, after `finish`."""
        return [self.timer.seconds(start, end) for start, end in zip(self._starts, self._ends, strict=False)]

    def lengthen(self, share: float) -> None:
        """Make the running step longer by a share of itself: an injected fault.

        On a GPU, which nothing may wait for, by that share of the median of its last finished steps; until
        one after the first two is finished, by nothing.
        """
        seconds = self.timer.since(self._starts[-1])
        if seconds is None:
            seconds = self._usual_s()
        if seconds:
            self._lengthened_s[len(self._ends)] = share * seconds
            self.timer.sleep(share * seconds)

    def _steps_past(self) -> int:
        while self._past < len(self._ends) and self.timer.is_past(self._ends[self._past]):
            self._past += 1
        return self._past

    def _usual_s(self) -> float:
        """Of the last finished steps, less what lengthened them; 0 if there is none."""
        past = self._steps_past()
        lengths = [
            self.timer.seconds(self._starts[step], self._ends[step]) - self._lengthened_s.get(step, 0)
            for step in range(max(UNSETTLED_STEPS, past - USUAL_OF_STEPS), past)
        ]
        return median(lengths) if lengths else 0


def cpu_probe() -> Callable[[], object]:
    """Two 384 x 384 fp32 matrix products: some milliseconds that only the machine's own speed changes."""
    import torch

    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever a script has made the default
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(384, 384, generator=generator, **plain)
    b = torch.rand(384, 384, generator=generator, **plain)
    out = torch.empty(384, 384, **plain)

    def probe() -> None:
        torch.mm(a, b, out=out)
        torch.mm(b, a, out=out)

    return probe


class HostMemory:
    """Peak resident set above its level now. Linux resets the peak by writing to `clear_refs`."""

    def __init__(self, level_at: str = "before the model") -> None:
        self.method = f"VmHWM above VmRSS {level_at}"
        self.reset_peak()
        self._level = _status_bytes("VmRSS")

    def release(self) -> None:
        """Nothing: what is freed here has left the process, or is reused."""

    def reset_peak(self) -> None:
        """Forget the peak so far; the level stays that of construction."""
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # proc_pid_clear_refs(5)
        except OSError:
            self.method += "; peak not reset (clear_refs is read-only)"

    def read(self) -> Memory:
        """The peak since construction or `reset_peak`."""
        return Memory(peak=max(_status_bytes("VmHWM") - self._level, 0), method=self.method)


def _status_bytes(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


class CudaMemory:
    """The caching allocator's counters of one device since construction or `reset_peak`.

    They outlast a `reset_peak_memory_stats` by whoever trains: see `keep_peaks`.
    """

    method = "torch.cuda.memory_stats"
    counting: ClassVar[weakref.WeakSet[CudaMemory]] = weakref.WeakSet()

    def __init__(self, device: Any) -> None:
        self.device = device
        self._peak = self._reserved = 0
        keep_peaks()
        self.counting.add(self)
        self.reset_peak()

    def release(self) -> None:
        """Give back what the allocator keeps but nobody uses, so that `reserved` is of the steps alone."""
        import torch

        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Forget the peaks and retries so far."""
        import torch

        torch.cuda.reset_peak_memory_stats(self.device)
        self._peak = self._reserved = 0
        self._retries = self._stat("num_alloc_retries")

    def fold(self) -> None:
        """Keep the peaks so far: the allocator is about to forget them."""
        self._peak = max(self._peak, self._stat("allocated_bytes.all.peak"))
        self._reserved = max(self._reserved, self._stat("reserved_bytes.all.peak"))

    def read(self) -> Memory:
        """Peaks since construction or `reset_peak`."""
        self.fold()
        return Memory(
            peak=self._peak,
            reserved=self._reserved,
            alloc_retries=self._stat("num_alloc_retries") - self._retries,
            method=self.method,
        )

    def _stat(self, key: str) -> int:
        import torch

        return int(torch.cuda.memory_stats(self.device).get(key, 0))


def keep_peaks() -> None:
    """Let every `CudaMemory` fold its peaks before torch's public functions reset them.

    A script may hold such a function under a name of its own, from when it was imported: then this must have
    been called before.
    """
    import torch

    name = "reset_peak_memory_stats"
    for owner in (torch.cuda.memory, torch.cuda, torch.accelerator.memory, torch.accelerator):
        original = getattr(owner, name)
        if not hasattr(original, "folds"):
            setattr(owner, name, _folding(original))


def _folding(original: Any) -> Any:
    @functools.wraps(original)
    def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> None:
        for memory in tuple(CudaMemory.counting):
            memory.fold()
        original(*args, **kwargs)

    reset_peak_memory_stats.folds = True  # type: ignore[attr-defined]
    return reset_peak_memory_stats
