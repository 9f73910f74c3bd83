"""Reads the job's GPUs through NVML, one moment at a time. Driver side; imports neither torch nor pytest.

A reading that a device does not give is None, never 0. The NVML module itself is handed in: `pynvml`, or in
tests a stand-in with its function names and recorded readings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from perfsuite.hardware import visible_handles

REASONS: dict[int, str] = {
    0x001: "GpuIdle",
    0x002: "ApplicationsClocksSetting",
    0x004: "SwPowerCap",
    0x008: "HwSlowdown",
    0x010: "SyncBoost",
    0x020: "SwThermalSlowdown",
    0x040: "HwThermalSlowdown",
    0x080: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
}
"""Bits of nvmlClocksEventReasons (nvml.h), older name nvmlClocksThrottleReasons."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment."""

    sm_clock_mhz: float | None
    utilisation: float | None
    power_w: float | None
    energy_j: float | None
    """Since the driver was loaded."""
    temperature_c: float | None
    reasons: frozenset[str] | None
    foreign_bytes: int | None


class Job(Protocol):
    """Whose processes are not foreign."""

    pids: set[int]

    def scan(self) -> None:
        """Look for processes that were born meanwhile."""


class Gpus:
    """Reads the job's GPUs through NVML. What NVML cannot tell is None and, unless that is normal, noted."""

    def __init__(self, nvml: Any, count: int, job: Job) -> None:
        self._nvml, self._job = nvml, job
        self._notes: dict[str, None] = {}
        self._unsupported: set[tuple[str, int]] = set()
        self._strangers: set[int] = set()
        self._own_seen: set[int] = set()
        self._listed: set[int] = set()
        self._handles: list[Any] = []
        try:
            nvml.nvmlInit()
            self._handles = visible_handles(nvml)[:count]
        except Exception as error:  # also hardware's own, if CUDA_VISIBLE_DEVICES names no GPU
            self._notes[f"the GPUs' health is unknown: {error}"] = None

    def finish(self) -> tuple[str, ...]:
        """Let NVML go. Returns what could not be found out, and why."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
        hidden = sorted(self._listed - self._own_seen)
        if hidden:
            which = ", ".join(map(str, hidden))
            self._notes[
                f"GPU {which}: NVML does not list this job's own processes (a container with process ids of "
                "its own?), so whether others use it is unknown"
            ] = None
        return tuple(self._notes)

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs of the job, now."""
        return tuple(self._read(index, handle) for index, handle in enumerate(self._handles))

    def _read(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        rates = self._ask(index, "nvmlDeviceGetUtilizationRates", handle)
        milliwatts = self._ask(index, "nvmlDeviceGetPowerUsage", handle)
        millijoules = self._ask(index, "nvmlDeviceGetTotalEnergyConsumption", handle)
        reasons = self._ask(index, "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # a driver from before 2023
            reasons = self._ask(index, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return Gpu(
            sm_clock_mhz=self._ask(index, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            utilisation=None if rates is None else rates.gpu,
            power_w=None if milliwatts is None else milliwatts / 1e3,
            energy_j=None if millijoules is None else millijoules / 1e3,
            temperature_c=self._ask(index, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=None if reasons is None else frozenset(_names(reasons)),
            foreign_bytes=self._foreign_bytes(index, handle),
        )

    def _foreign_bytes(self, index: int, handle: Any) -> int | None:
        """None where not even the job's own processes are seen: then nobody can be called foreign."""
        processes = self._ask(index, "nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is None:
            return None
        self._listed.add(index)
        pids = {process.pid for process in processes}
        if pids - self._job.pids - self._strangers:  # born since the last look?
            self._job.scan()
            self._strangers |= pids - self._job.pids
        if not pids & self._job.pids:
            return None
        self._own_seen.add(index)
        # The memory of a process is None on MIG and the like: then only its presence is known.
        return sum(process.usedGpuMemory or 0 for process in processes if process.pid not in self._job.pids)

    def _ask(self, index: int, function: str, *arguments: Any) -> Any | None:
        if (function, index) in self._unsupported:
            return None
        nvml = self._nvml
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, AttributeError):
            self._unsupported.add((function, index))
        except nvml.NVMLError as error:
            self._notes[f"GPU {index}: {function}: {error}"] = None
        return None


def _names(reasons: int) -> Iterable[str]:
    """Of each bit that is set; a bit that this file does not know stands for itself."""
    for bit in (1 << position for position in range(reasons.bit_length())):
        if reasons & bit:
            yield REASONS.get(bit, hex(bit))
