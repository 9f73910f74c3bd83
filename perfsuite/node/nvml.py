"""Reads the job's GPUs through NVML, one moment at a time. Driver side; imports neither torch nor pytest.

A reading that a device does not give is None, never 0. The NVML module itself is handed in: `pynvml`, or in
tests a stand-in with its function names and recorded readings. Any call may wait for a driver that no longer
answers: `perfsuite.node.health_sampler` makes them in a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from perfsuite.analysis.health import HELD_BYTES
from perfsuite.node.job_processes import JobProcesses
from perfsuite.node.machine import pci_bus_id, text, visible_handles
from perfsuite.results.amounts import amount
from perfsuite.results.run import DeviceHealth

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
    0x200: "BoardLimit",
    0x400: "Reliability",
}
"""The bits of nvmlClocksEventReasons (nvml.h), earlier nvmlClocksThrottleReasons. The last two have a name
with the earlier prefix only."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment."""

    sm_clock_mhz: float | None
    power_w: float | None
    energy_j: float | None
    """Since the driver was loaded."""
    reasons: frozenset[str] | None
    utilisation: float | None = None
    temperature_c: float | None = None
    foreign_bytes: int | None = None
    used_bytes: int | None = None
    """Memory in use, by whomever; without what the driver reserves."""


class Gpus:
    """Reads the job's GPUs through NVML. What NVML cannot tell is None and, unless that is normal, noted.

    NVML is asked for the first time when something is read.
    """

    def __init__(self, nvml: Any, count: int, job: JobProcesses) -> None:
        self._nvml, self._count, self._job = nvml, count, job
        self._notes: dict[str, None] = {}
        self._unsupported: set[tuple[str, int]] = set()
        self._strangers: set[int] = set()
        self._own_seen: set[int] = set()
        self._listed: set[int] = set()
        self._link_seen: set[int] = set()

    @cached_property
    def _handles(self) -> list[Any]:
        try:
            self._nvml.nvmlInit()
            return visible_handles(self._nvml)[: self._count]
        except Exception as error:  # also hardware's own, if CUDA_VISIBLE_DEVICES names no GPU
            self._notes[f"the GPUs' health is unknown: {error}"] = None
            return []

    @cached_property
    def _names(self) -> list[str]:
        return [
            DeviceHealth(index=index, pci_bus_id=pci_bus_id(self._nvml, handle)).name
            for index, handle in enumerate(self._handles)
        ]

    def finish(self) -> None:
        """Shut NVML down."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def notes(self) -> tuple[str, ...]:
        """Return what could not be read so far, and why, and what is wrong with a card."""
        hidden = sorted(self._listed - self._own_seen)
        if not hidden:
            return tuple(self._notes)
        which = ", ".join(map(str, hidden))
        unseen = (
            f"GPU {which}: NVML does not list this job's own processes (a container with process ids of "
            "its own?), so whether others use it is unknown"
        )
        return (*self._notes, unseen)

    def used_bytes(self) -> list[int | None]:
        """Return the used memory of each GPU in bytes, without the driver's; None if NVML does not tell."""
        return [self._used_bytes(index, handle) for index, handle in enumerate(self._handles)]

    def near_cores(self) -> tuple[frozenset[int], ...]:
        """Return the numbers of the cores near each GPU, those of its socket or NUMA node; none if unknown.

        See nvmlDeviceGetCpuAffinity: words of 64 bits, one a core, from core 0 on.
        """
        words = -(-(os.cpu_count() or 1) // 64)
        masks = [
            self._ask(index, "nvmlDeviceGetCpuAffinity", handle, words) or ()
            for index, handle in enumerate(self._handles)
        ]
        return tuple(
            frozenset(core for core in range(64 * len(mask)) if mask[core // 64] >> core % 64 & 1)
            for mask in masks
        )

    def cards(self, held: Sequence[int | None]) -> tuple[DeviceHealth, ...]:
        """Return which cards these are and how they are set up. `held` bytes are in use before the job.

        Memory that is held on other GPUs of the machine is noted.
        """
        self._note_other_gpus()
        return tuple(
            self._card(index, handle, size)
            for index, (handle, size) in enumerate(zip(self._handles, held, strict=True))
        )

    def fabric_states(self) -> list[tuple[int, int] | None]:
        """Return state and status of each GPU in its NVLink fabric (nvmlGpuFabricInfo_t in nvml.h).

        None where a GPU is in none, or NVML does not tell.
        """
        found: list[tuple[int, int] | None] = []
        for index, handle in enumerate(self._handles):
            info = self._nvml.c_nvmlGpuFabricInfo_t()
            if self._ask(index, "nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
                found.append(None)
            else:
                found.append((info.state, info.status) if info.state else None)
        return found

    def read(self, *, under_load: bool = True, whole: bool = True) -> tuple[Gpu, ...]:
        """Read every GPU of the job; under load also its PCIe link, which an idle card slows down.

        Unless `whole`, only clocks and power are read, which change from step to step: each call takes a lock
        of the driver that the training takes, too.
        """
        if under_load:
            for index, handle in enumerate(self._handles):
                self._note_link(index, handle)
        return tuple(self._read(index, handle, whole=whole) for index, handle in enumerate(self._handles))

    def _note_other_gpus(self) -> None:
        own = {pci_bus_id(self._nvml, handle) for handle in self._handles}
        with contextlib.suppress(Exception):  # one that cannot be read is none of the job's
            for index in range(self._nvml.nvmlDeviceGetCount() if own else 0):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if (bus_id := pci_bus_id(self._nvml, handle)) in own:
                    continue
                used = self._nvml.nvmlDeviceGetMemoryInfo(handle, self._nvml.nvmlMemory_v2).used
                if used > HELD_BYTES:
                    self._notes[
                        f"{amount(used, 'bytes')} held on {bus_id}, a GPU of this machine that is none of "
                        "the job's: what runs there shares cores, power and PCIe with it"
                    ] = None

    def _card(self, index: int, handle: Any, held: int | None) -> DeviceHealth:
        nvml = self._nvml

        def watts(function: str) -> float | None:
            milliwatts = self._ask(index, function, handle)
            return None if milliwatts is None else milliwatts / 1e3

        def words(function: str) -> str | None:
            value = self._ask(index, function, handle)
            return None if value is None else text(value)

        def is_on(mode: Any) -> bool | None:
            return None if mode is None else bool(mode)

        limits = self._ask(index, "nvmlDeviceGetPowerManagementLimitConstraints", handle)
        ecc = self._ask(index, "nvmlDeviceGetEccMode", handle)
        faults, pending = self._memory_faults(index, handle)
        up, down, errors = self._nvlinks(index, handle)
        self._notes |= {f"{self._names[index]}: {each}": None for each in pending}
        processes = self._ask(index, "nvmlDeviceGetComputeRunningProcesses", handle) if held else None
        return DeviceHealth(
            index=index,
            pci_bus_id=pci_bus_id(nvml, handle),
            uuid=words("nvmlDeviceGetUUID"),
            serial=words("nvmlDeviceGetSerial"),
            power_limit_w=watts("nvmlDeviceGetEnforcedPowerLimit"),
            power_limit_default_w=watts("nvmlDeviceGetPowerManagementDefaultLimit"),
            power_limit_max_w=None if limits is None else limits[1] / 1e3,
            sm_clock_limit_mhz=self._ask(index, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            sm_clock_set_mhz=self._ask(index, "nvmlDeviceGetApplicationsClock", handle, nvml.NVML_CLOCK_SM),
            ecc=None if ecc is None else is_on(ecc[0]),
            persistence=is_on(self._ask(index, "nvmlDeviceGetPersistenceMode", handle)),
            memory_faults=faults,
            memory_pending=pending,
            nvlinks=up,
            nvlinks_down=down,
            nvlink_errors=errors,
            held_before_bytes=held,
            held_before_by=tuple(sorted(process.pid for process in processes or ())),
        )

    def _memory_faults(self, index: int, handle: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what is wrong with the memory of a card, what only waits for a reset, and what to do."""
        faults, pending = [], []
        nvml = self._nvml
        which = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)  # since the last reset
        uncorrected = self._ask(index, "nvmlDeviceGetTotalEccErrors", handle, *which)
        if uncorrected:
            faults.append(f"{uncorrected} errors of its memory that ECC could not correct: reset the GPU")
        _, _, is_pending, has_failed = self._ask(index, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
        if has_failed:
            faults.append("a row of its memory could not be remapped: have the card replaced")
        if is_pending:
            pending.append("rows of its memory wait to be remapped: reset the GPU")
        if self._ask(index, "nvmlDeviceGetRetiredPagesPendingStatus", handle):
            pending.append("pages of its memory wait to be retired: reset the GPU")
        return tuple(faults), tuple(pending)

    def _nvlinks(self, index: int, handle: Any) -> tuple[int | None, int | None, int | None]:
        """Return how many NVLinks are up, how many down, and their errors; None without NVLink."""
        nvml = self._nvml
        states = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                states.append(int(nvml.nvmlDeviceGetNvLinkState(handle, link)))
            except Exception:  # this product has no more of them, or none
                break
        if not any(states):
            return None, None, None
        errors = [
            self._ask(index, "nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
            for link, state in enumerate(states)
            if state
            for counter in (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
        ]
        known = [count for count in errors if count is not None]
        return sum(states), len(states) - sum(states), sum(known) if known else None

    def _note_link(self, index: int, handle: Any) -> None:
        """Note a slow PCIe link, once."""
        if index in self._link_seen:
            return
        self._link_seen.add(index)
        for what, known in (("width", "x{}".format), ("generation", "{}".format)):
            now = self._ask(index, f"nvmlDeviceGetCurrPcieLink{what.title()}", handle)
            most = self._ask(index, f"nvmlDeviceGetMaxPcieLink{what.title()}", handle)
            if now is not None and most is not None and now < most:
                self._notes[
                    f"{self._names[index]}: PCIe {what} {known(now)}, it can have {known(most)}: copies "
                    "from and to the host are slower"
                ] = None

    def _read(self, index: int, handle: Any, *, whole: bool) -> Gpu:
        nvml = self._nvml
        milliwatts = self._ask(index, "nvmlDeviceGetPowerUsage", handle)
        millijoules = self._ask(index, "nvmlDeviceGetTotalEnergyConsumption", handle)
        reasons = self._ask(index, "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # a driver from before 2023
            reasons = self._ask(index, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        read = Gpu(
            sm_clock_mhz=self._ask(index, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            energy_j=None if millijoules is None else millijoules / 1e3,
            reasons=None if reasons is None else frozenset(_reasons(reasons)),
        )
        if not whole:
            return read
        rates = self._ask(index, "nvmlDeviceGetUtilizationRates", handle)
        return replace(
            read,
            utilisation=None if rates is None else rates.gpu,
            temperature_c=self._ask(index, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            foreign_bytes=self._foreign_bytes(index, handle),
            used_bytes=self._used_bytes(index, handle),
        )

    def _used_bytes(self, index: int, handle: Any) -> int | None:
        """Ask by the second version of the call: the first one counts what the driver reserves as used."""
        memory = self._ask(index, "nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
        return None if memory is None else int(memory.used)

    def _foreign_bytes(self, index: int, handle: Any) -> int | None:
        """Return the bytes of others; None if NVML does not list the job's own processes either."""
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
        except Exception as error:  # pynvml's own are not all NVMLErrors
            self._notes[f"{self._names[index]}: {function}: {error}"] = None
        return None


def _reasons(bits: int) -> Iterable[str]:
    """Name each bit that is set; a bit without a name is given in hexadecimal."""
    for bit in (1 << position for position in range(bits.bit_length())):
        if bits & bit:
            yield REASONS.get(bit, hex(bit))
