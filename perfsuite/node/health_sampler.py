"""Sample the machine's health during a run, for `analysis.health`: clocks, power, memory, other users.

This runs in the agent of each node. A value that a device does not provide is None, never 0.

Only samples that are taken during the steps are used. If there are too few of them, the sample at the
beginning of training is used as well. On a CPU, if training has not begun, the sample at the beginning of the
launch is used instead.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, TypeVar

from perfsuite.analysis.health import FREE_S, HELD_BYTES
from perfsuite.node.cpu import Cpu, read_cpu
from perfsuite.node.nvml import Gpu, Gpus
from perfsuite.node.processes import JobProcesses
from perfsuite.results.counts import spans
from perfsuite.results.run import DeviceHealth, Health

T = TypeVar("T")
EVERY_S = 0.25
"""Seconds between samples. A sample is also taken when the step count changes. So the first and the last
sample are taken at the end of a step. The count changes at most twice a second, because rank 0 reports its
steps no more often."""
WHOLE_EVERY_S = 1.0  # seconds between samples of values that change slowly: utilisation, temperature, memory
LOOK_S = 0.06  # seconds between checks of the number of finished steps
RESCAN_S = 2.0  # seconds between checks for new processes of the job
FREE_POLL_S = 0.5  # seconds between checks whether the GPUs' memory is free. A launch waits until it is free
SILENT_S = 5.0  # seconds after which NVML is assumed not to answer. An answer usually takes milliseconds


@dataclass(frozen=True, kw_only=True)
class _Sample:
    at: float
    step: int
    gpus: tuple[Gpu, ...]
    cpu: Cpu | None
    job_s: float  # CPU seconds of the job since its start


class Sampler:
    """Samples the machine while `job` runs, on the first `devices` GPUs of `nvml`."""

    def __init__(
        self,
        *,
        devices: int = 0,  # pragma: no mutate 0: nothing reads this number if there is no NVML
        nvml: Any | None = None,
        job: JobProcesses | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        proc: Path = Path("/proc"),
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._proc = proc
        self._cores = os.sched_getaffinity(0)
        self._job = job or JobProcesses(os.getpid())
        self._gpus = Gpus(nvml, devices, self._job) if nvml is not None else None
        self._cards: tuple[DeviceHealth, ...] = ()
        # After `prepare`: the cores near each GPU. Empty if they are unknown.
        self.near_cores: tuple[frozenset[int], ...] = ()
        # After `prepare`: the value of CUDA_VISIBLE_DEVICES with which the job sees only its own GPUs. None
        # if the job sees no other GPUs anyway.
        self.only_visible: str | None = None
        self._counted: list[_Sample] = []
        self._pending: list[_Sample] = []
        self._step = 0  # pragma: no mutate 0: the first sample is due with any number
        self._sampled_at = -EVERY_S
        self._whole_at = -WHOLE_EVERY_S  # pragma: no mutate -: the first sample is due with any sign
        self._scanned_at = -RESCAN_S
        # The sample at the beginning of training. On a CPU, as long as training has not begun, this is the
        # sample at the beginning of the launch.
        self._first: _Sample | None = None
        self._has_begun = False

    def prepare(self) -> None:
        """Wait before the launch until earlier jobs have freed the GPUs, for at most `FREE_S`."""
        if self._gpus is None:
            return
        until = self._clock() + FREE_S
        held = self._gpus.used_bytes()
        # pragma: no mutate 0): the mutated value, 1 byte, is also not more than `HELD_BYTES`
        while any((size or 0) > HELD_BYTES for size in held) and self._clock() < until:
            self._sleep(FREE_POLL_S)
            held = self._gpus.used_bytes()
        self.near_cores = self._gpus.near_cores()
        self._cards = tuple(
            card.replace(near_cores=spans(sorted(cores)))
            # pragma: no mutate True: both have one entry for each GPU
            for card, cores in zip(self._gpus.cards(held), self.near_cores, strict=True)
        )
        self._gpus.count_link_errors()
        self.only_visible = self._gpus.only_visible()

    def sample(self, step: int | None, *, is_last: bool = False) -> None:
        """Take a sample if one is due.

        This is called often. `step` is the number of steps finished so far, or None before the training
        begins. `is_last` means that the job is over. A sample is then due if the number of steps has changed.

        A sample counts only if it is taken between the end of the first step and the end of the last step.
        It is pending until `step` grows. So samples after the last step or in a hang never count.
        """
        now = self._clock()
        has_begun = step is not None
        if not step:  # do not read the GPUs before the job's processes use them
            if not self._has_begun and (has_begun or not (self._first or self._gpus)):
                self._has_begun = has_begun
                self._first = self._read(now, 0, rescan=True)
            return
        wait = EVERY_S if step == self._step else 0 if is_last else EVERY_S / 4
        if now - self._sampled_at < wait:
            return
        self._sampled_at = now
        self._pending.append(self._read(now, step, rescan=is_last))
        if step > self._step:
            self._step = step
            self._counted += self._pending
            self._pending.clear()

    def end(self) -> None:
        """Note the errors of the GPUs' links during the launch. Like `sample`, this calls NVML."""
        if self._gpus is not None:
            self._gpus.note_link_errors()

    def finish(self) -> Health | None:
        """Shut NVML down, and return the sampled health. None if there is nothing to report."""
        return self.seen(*(() if self._gpus is None else self._gpus.finish()))

    def seen(self, *notes: str) -> Health | None:
        """Return the health sampled so far, with these notes. None if there is nothing to report."""
        counted = self._counted
        if len(counted) < 2 and self._first is not None:
            counted = [self._first, *counted]
        if len(counted) > 1:
            return _health(counted, self._cards, notes, len(self._cores))
        if self._cards or notes:
            return Health(samples=0, seconds=0, steps=0, devices=self._cards, notes=notes)
        return None

    def _read(self, now: float, step: int, *, rescan: bool) -> _Sample:
        if rescan or now - self._scanned_at >= RESCAN_S:
            self._scanned_at = now
            self._job.scan()
        gpus: tuple[Gpu, ...] = ()
        if self._gpus is not None:
            whole = rescan or not self._counted or now - self._whole_at >= WHOLE_EVERY_S
            if whole:
                self._whole_at = now
            # The energy is needed only in the first and the last counted sample. Both are taken at the end of
            # a step.
            gpus = self._gpus.read(whole=whole, energy=rescan or step > self._step)
        cpu = read_cpu(self._proc / "stat", self._cores)
        return _Sample(at=now, step=step, gpus=gpus, cpu=cpu, job_s=self._job.cpu_s())


class HealthWatch:
    """Samples health in a thread of the agent, and waits at most `SILENT_S` for NVML to answer."""

    def __init__(self, sampler: Sampler, steps: Callable[[], int | None]) -> None:
        """`steps` returns the number of steps that rank 0 has finished, or None before rank 0 trains."""
        self.sampler = sampler
        self._steps = steps
        self._error: str | None = None
        self._is_prepared = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="perfsuite-health", daemon=True)

    def begin(self) -> None:
        """Prepare the sampler, then start sampling.

        Returns when the job can start, even if NVML does not answer.
        """
        self._thread.start()
        self._is_prepared.wait(FREE_S + SILENT_S)

    def finish(self) -> Health | None:
        """Stop sampling and return the health. If NVML does not answer, the thread is left behind."""
        self._is_over.set()
        if self._thread.ident is not None:  # the thread was started
            self._thread.join(SILENT_S)
        if self._thread.is_alive():
            self._error = "NVML does not answer (is a GPU lost?). Look at `nvidia-smi` and dmesg"
        return self.sampler.finish() if self._error is None else self.sampler.seen(self._error)

    def _work(self) -> None:
        try:
            self.sampler.prepare()
            self._is_prepared.set()
            self.sampler.sample(None)
            while not self._is_over.wait(LOOK_S):
                self.sampler.sample(self._steps())
            self.sampler.sample(self._steps(), is_last=True)
            self.sampler.end()
        except Exception as error:  # a failure to sample the health must not make the launch fail
            self._error = f"the machine's health is unknown: {type(error).__name__}: {error}"
            self._is_prepared.set()


def sampler(device: Literal["cpu", "cuda"], devices: int) -> Sampler:
    """Return a sampler for a job on the first `devices` devices of this machine."""
    return Sampler() if device == "cpu" else Sampler(devices=devices, nvml=import_module("pynvml"))


def _health(
    samples: Sequence[_Sample], cards: Sequence[DeviceHealth], notes: tuple[str, ...], cores: int
) -> Health:
    first = samples[0]
    last = samples[-1]
    seconds = last.at - first.at
    # pragma: no mutate True: all samples have the same GPUs, so the lengths are equal
    gpus = list(zip(*(sample.gpus for sample in samples), strict=True))
    cards = cards or [DeviceHealth(index=index) for index in range(len(gpus))]
    slowest = [
        (
            step,
            _known(min(_known(gpu.sm_clock_mhz for gpu in reading.gpus), default=None) for reading in group),
        )
        for step, group in groupby(samples, key=lambda sample: sample.step)
    ]
    return Health(
        cores=cores,
        cores_of_machine=os.cpu_count(),
        samples=len(samples),
        seconds=round(seconds, 3),
        steps=last.step - first.step,
        # pragma: no mutate True: the cards and the samples have the same GPUs, so the lengths are equal
        devices=tuple(_device(card, readings) for card, readings in zip(cards, gpus, strict=True)),
        sm_clocks_mhz=tuple((step, median(clocks)) for step, clocks in slowest if clocks),
        notes=notes,
        **_cpu_shares(first, last),
    )


def _cpu_shares(first: _Sample, last: _Sample) -> dict[str, float | None]:
    """Return the shares of the cores' time that were used by the job, other processes and the hypervisor.

    Only the time between the two samples counts. Shares of shorter periods would be inaccurate, because the
    kernel counts in ticks of 10 ms.
    """
    if first.cpu is None or last.cpu is None or last.cpu.total_s <= first.cpu.total_s:
        return {}
    total = last.cpu.total_s - first.cpu.total_s
    job = max(0.0, last.job_s - first.job_s)
    busy = last.cpu.processes_s - first.cpu.processes_s
    steal = last.cpu.steal_s - first.cpu.steal_s
    shares = {"job_cpu": job / total, "foreign_cpu": (busy - job) / total, "steal": steal / total}
    return {name: round(min(max(share, 0.0), 1.0), 4) for name, share in shares.items()}


def _device(card: DeviceHealth, readings: Sequence[Gpu]) -> DeviceHealth:
    clocks = _known(reading.sm_clock_mhz for reading in readings)
    reasons = _known(reading.reasons for reading in readings)
    before = readings[0].energy_j
    after = readings[-1].energy_j
    energy_j = None
    if before is not None and after is not None and after > before:  # the counter was not reset
        energy_j = round(after - before, 3)
    used = max(_known(reading.used_bytes for reading in readings), default=None)
    held = card.held_before_bytes
    throttled = Counter(name for active in reasons for name in active)
    shares = {name: round(throttled[name] / len(reasons), 4) for name in sorted(throttled)}
    return card.replace(
        sm_clock_mhz=median(clocks) if clocks else None,
        sm_clock_mhz_min=min(clocks, default=None),
        utilisation=_mean(reading.utilisation for reading in readings),
        power_w=_mean(reading.power_w for reading in readings),
        energy_j=energy_j,
        temperature_c=max(_known(reading.temperature_c for reading in readings), default=None),
        throttled=shares if reasons else None,
        foreign_memory_bytes=max(_known(reading.foreign_bytes for reading in readings), default=None),
        job_memory_bytes=None if used is None or held is None else max(0, used - held),
    )


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    measured = _known(values)
    return round(fmean(measured), 3) if measured else None
