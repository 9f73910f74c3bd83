"""Read the job's GPUs with NVML at one moment. A value that a device does not provide is None, never 0.

If the GPU driver no longer answers, any call can block. So `node.health_sampler` makes the calls in a thread.
"""

import contextlib
import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from perfsuite.node.machine import pci_bus_id, visible_handles
from perfsuite.node.processes import JobProcesses
from perfsuite.results.run import DeviceHealth

LINK_ERRORS = ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
"""Counters of NVLink errors. NVML calls them NVML_FI_DEV_NVLINK_..._ERROR_COUNT_TOTAL."""
UNSIGNED_INT = 1  # NVML_VALUE_TYPE_UNSIGNED_INT, the type of 32-bit counters. All other counters have 64 bits


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The readings of one GPU at one moment."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None  # energy used since the driver was loaded
    reasons: frozenset[str] | None = None
    utilisation: float | None = None
    temperature_c: float | None = None
    foreign_bytes: int | None = None
    used_bytes: int | None = None  # memory in use by all processes, without memory that the driver reserves


class Gpus:
    """Reads the job's GPUs with NVML. Missing values are None, and errors become notes."""

    def __init__(self, nvml: Any, count: int, job: JobProcesses) -> None:
        self._nvml = nvml
        self._count = count
        self._job = job
        self._notes: dict[str, None] = {}
        self._strangers: set[int] = set()
        self._own_seen: set[int] = set()
        self._listed: set[int] = set()
        self._link_errors_before: list[dict[str, int]] = []

    @cached_property
    def _handles(self) -> list[Any]:
        try:
            self._nvml.nvmlInit()
            return visible_handles(self._nvml)[: self._count]
        except Exception as error:  # such as a `MachineError`, if CUDA_VISIBLE_DEVICES names no GPU
            self._notes[f"the GPUs' health is unknown: {error}"] = None
            return []

    def only_visible(self) -> str | None:
        """Return the value of CUDA_VISIBLE_DEVICES that hides all GPUs except those of the job.

        Returns None if no other GPU is visible.
        """
        if not self._handles or len(visible_handles(self._nvml)) == self._count:
            return None
        entries = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = map(str, range(self._count))
        return ",".join(numbers if entries is None else entries.split(",")[: self._count])

    @property
    def _indices(self) -> range:
        return range(len(self._handles))

    @cached_property
    def _names(self) -> list[str]:
        bus_ids = [pci_bus_id(self._nvml, handle) for handle in self._handles]
        return [DeviceHealth(index=index, pci_bus_id=bus_id).name for index, bus_id in enumerate(bus_ids)]

    @cached_property
    def _reasons(self) -> dict[int, str]:
        """The names of the bits in nvmlClocksEventReasons.

        They come from the older nvmlClocksThrottleReasons, which has names for more of the bits.
        """
        prefix = "nvmlClocksThrottleReason"
        others = ("All", "None", "UserDefinedClocks")
        names = [name for name in dir(self._nvml) if name.startswith(prefix) and not name.endswith(others)]
        return {getattr(self._nvml, name): name.removeprefix(prefix) for name in names}

    def _note(self, index: int, text: str) -> None:
        self._notes[f"{self._names[index]}: {text}"] = None

    def _ask(self, index: int, what: str, *arguments: Any) -> Any | None:
        """Call `nvmlDeviceGet...` for a GPU of the job. `what` is the end of the function's name."""
        nvml = self._nvml
        function = f"nvmlDeviceGet{what}"
        try:
            return getattr(nvml, function)(self._handles[index], *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, AttributeError):
            return None
        except Exception as error:  # not all errors of pynvml are NVMLErrors
            self._note(index, f"{function}: {error}")
            return None

    def _ask_thousandths(self, index: int, what: str) -> float | None:
        value = self._ask(index, what)
        return None if value is None else value / 1e3

    def finish(self) -> tuple[str, ...]:
        """Shut NVML down. Returns notes on values that could not be read, and on problems of the cards."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()
        hidden = sorted(self._listed - self._own_seen)
        if hidden:
            unseen = (
                f"GPU {', '.join(map(str, hidden))}: NVML does not list this job's own processes (is this a "
                "container with its own process ids?), so it is unknown whether other jobs run there"
            )
            self._notes[unseen] = None
        return tuple(self._notes)

    def used_bytes(self) -> list[int | None]:
        """Return the used memory of each GPU in bytes. None if it is unknown.

        This does not include memory that the driver reserves. The first version of NVML's call would include
        it.
        """
        infos = [self._ask(index, "MemoryInfo", self._nvml.nvmlMemory_v2) for index in self._indices]
        return [None if memory is None else int(memory.used) for memory in infos]

    def near_cores(self) -> tuple[frozenset[int], ...]:
        """Return the cores near each GPU: on its socket or NUMA node. The set is empty if they are unknown.

        nvmlDeviceGetCpuAffinity returns 64-bit words with one bit per core, beginning with core 0.
        """
        words = -(-(os.cpu_count() or 1) // 64)
        masks = [self._ask(index, "CpuAffinity", words) or () for index in self._indices]
        return tuple(
            frozenset(core for core in range(64 * len(mask)) if mask[core // 64] >> core % 64 & 1)
            for mask in masks
        )

    def cards(self, held: Sequence[int | None]) -> tuple[DeviceHealth, ...]:
        """Return identity and settings of each card. `held` are the bytes in use before the job."""
        return tuple(self._card(index, size) for index, size in zip(self._indices, held, strict=True))

    def fabric_states(self) -> list[tuple[int, int] | None]:
        """Return state and status of each GPU's NVLink fabric (nvmlGpuFabricInfo_t).

        The entry of a GPU without a fabric is None.
        """
        infos = [self._nvml.c_nvmlGpuFabricInfo_t() for _ in self._indices]
        answers = [self._ask(index, "GpuFabricInfo", ctypes.byref(info)) for index, info in enumerate(infos)]
        return [
            None if answer is None or not info.state else (info.state, info.status)
            for answer, info in zip(answers, infos, strict=True)
        ]

    def read(self, *, whole: bool, energy: bool = True) -> tuple[Gpu, ...]:
        """Read every GPU of the job.

        Each call of NVML takes a lock, so values that are not needed are left out. Without `whole`, only
        clocks, power and energy are read. The counter of energy is read only if `energy` is true, because
        only its first and its last reading are needed.
        """
        gpus = [self._read(index, energy=energy) for index in self._indices]
        return tuple(map(self._read_rest, self._indices, gpus, self.used_bytes()) if whole else gpus)

    def _card(self, index: int, held: int | None) -> DeviceHealth:
        sm = self._nvml.NVML_CLOCK_SM
        ecc = self._ask(index, "EccMode")
        persistence = self._ask(index, "PersistenceMode")
        faults, pending = self._memory_faults(index)
        up, down = self._nvlinks(index)
        for problem in pending:
            self._note(index, problem)
        processes = self._ask(index, "ComputeRunningProcesses") if held else None
        return DeviceHealth(
            index=index,
            pci_bus_id=pci_bus_id(self._nvml, self._handles[index]),
            power_limit_w=self._ask_thousandths(index, "EnforcedPowerLimit"),
            power_limit_default_w=self._ask_thousandths(index, "PowerManagementDefaultLimit"),
            sm_clock_limit_mhz=self._ask(index, "MaxClockInfo", sm),
            sm_clock_set_mhz=self._ask(index, "ApplicationsClock", sm),
            ecc=None if ecc is None else bool(ecc[0]),
            persistence=None if persistence is None else bool(persistence),
            memory_faults=faults,
            memory_pending=pending,
            nvlinks=up,
            nvlinks_down=down,
            # The PCIe generation is not read, because it drops while a card is idle.
            pcie_lanes=self._ask(index, "CurrPcieLinkWidth"),
            pcie_lanes_most=self._ask(index, "MaxPcieLinkWidth"),
            held_before_bytes=held,
            held_before_by=tuple(sorted(process.pid for process in processes or ())),
        )

    def _memory_faults(self, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return texts about the memory faults of a card, and about memory repairs that wait for a reset."""
        faults = []
        pending = []
        nvml = self._nvml
        # Volatile counters count since the last reset.
        which = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        uncorrected = self._ask(index, "TotalEccErrors", *which)
        if uncorrected:
            faults.append(f"{uncorrected} memory errors that ECC could not correct: reset the GPU")
        _, _, is_pending, has_failed = self._ask(index, "RemappedRows") or (0, 0, 0, 0)
        if has_failed:
            faults.append("a row of memory could not be remapped: have the card replaced")
        if is_pending:
            pending.append("rows of memory are waiting to be remapped: reset the GPU")
        if self._ask(index, "RetiredPagesPendingStatus"):
            pending.append("pages of memory are waiting to be retired: reset the GPU")
        return tuple(faults), tuple(pending)

    def _nvlinks(self, index: int) -> tuple[int | None, int | None]:
        """Return the number of NVLinks that are up, and the number that are down. None without NVLink."""
        nvml = self._nvml
        states: list[int] = []
        with contextlib.suppress(Exception):  # a product can have fewer links than the maximum, or none
            for link in range(nvml.NVML_NVLINK_MAX_LINKS):
                states.append(int(nvml.nvmlDeviceGetNvLinkState(self._handles[index], link)))
        return (sum(states), len(states) - sum(states)) if any(states) else (None, None)

    def _link_errors(self, index: int) -> dict[str, int]:
        """Return, for each counter, the number of errors of all NVLinks since the driver was loaded.

        Counters that NVML does not have are left out.
        """
        fields = [getattr(self._nvml, f"NVML_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL") for name in LINK_ERRORS]
        answers = self._ask(index, "FieldValues", fields) or ()
        return {
            name: int(answer.value.uiVal if answer.valueType == UNSIGNED_INT else answer.value.ullVal)
            for name, answer in zip(LINK_ERRORS, answers, strict=False)
            if answer.nvmlReturn == 0  # NVML_SUCCESS
        }

    def count_link_errors(self) -> None:
        """Read the counters of NVLink errors, for `note_link_errors`."""
        self._link_errors_before = [self._link_errors(index) for index in self._indices]

    def note_link_errors(self) -> None:
        """Note the NVLink errors since `count_link_errors`, from the counters that were readable both times.

        NVLink repairs such errors by sending the data again, which takes time.
        """
        for index, before in enumerate(self._link_errors_before):
            after = self._link_errors(index) if before else {}
            errors = sum(max(after[name] - before[name], 0) for name in before.keys() & after.keys())
            if errors:
                self._note(
                    index,
                    f"{errors} NVLink errors (CRC, replay, recovery) during this launch, which slow "
                    "collectives down. Look at nvidia-smi nvlink -e",
                )

    def _read(self, index: int, *, energy: bool) -> Gpu:
        bits = self._ask(index, "CurrentClocksEventReasons")
        mask: int = bits or 0
        active = [1 << power for power in range(mask.bit_length()) if mask >> power & 1]
        return Gpu(
            sm_clock_mhz=self._ask(index, "ClockInfo", self._nvml.NVML_CLOCK_SM),
            power_w=self._ask_thousandths(index, "PowerUsage"),
            energy_j=self._ask_thousandths(index, "TotalEnergyConsumption") if energy else None,
            reasons=None if bits is None else frozenset(self._reasons.get(bit, hex(bit)) for bit in active),
        )

    def _read_rest(self, index: int, gpu: Gpu, used_bytes: int | None) -> Gpu:
        rates = self._ask(index, "UtilizationRates")
        return replace(
            gpu,
            utilisation=None if rates is None else rates.gpu,
            temperature_c=self._ask(index, "Temperature", self._nvml.NVML_TEMPERATURE_GPU),
            foreign_bytes=self._foreign_bytes(index),
            used_bytes=used_bytes,
        )

    def _foreign_bytes(self, index: int) -> int | None:
        """Return the bytes that other jobs use. None if NVML does not even list this job's own processes."""
        processes = self._ask(index, "ComputeRunningProcesses")
        if processes is None:
            return None
        self._listed.add(index)
        pids = {process.pid for process in processes}
        # An unknown process might belong to the job, because it might have started since the last scan.
        if pids - self._job.pids - self._strangers:
            self._job.scan()
            self._strangers |= pids - self._job.pids
        if not pids & self._job.pids:
            return None
        self._own_seen.add(index)
        # The memory of a process can be None, for example with MIG. It then counts as 0.
        return sum(process.usedGpuMemory or 0 for process in processes if process.pid not in self._job.pids)
