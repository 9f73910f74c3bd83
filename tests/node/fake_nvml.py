"""Fakes of NVML, with the answers of an H100, and of the clock."""

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pynvml

from perfsuite.node.health_sampler import EVERY_S, Sampler
from perfsuite.results.run import Health

GIB = 2**30
OWN = os.getpid()  # the job is the process of this test
OTHER = 4_000_000  # no Linux has such a process id


class NVMLError(Exception): ...


class NotSupported(NVMLError): ...


class FunctionNotFound(NVMLError): ...


class NotFound(NVMLError): ...


class InvalidArgument(NVMLError): ...


def using(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


# The answers of an H100 SXM while it trains. It is at its power limit, which is normal.
TRAINING: dict[str, Any] = {
    "nvmlDeviceGetClockInfo": (1755, 1980, 1740, 1770, 1755),
    "nvmlDeviceGetUtilizationRates": tuple(SimpleNamespace(gpu=gpu, memory=45) for gpu in (98, 100)),
    "nvmlDeviceGetPowerUsage": (684_512, 699_871, 691_020, 675_313, 688_400),
    "nvmlDeviceGetTotalEnergyConsumption": range(9_000_000_000, 9_100_000_000, 172_500),
    "nvmlDeviceGetTemperature": (61, 63, 64, 63),
    "nvmlDeviceGetCurrentClocksEventReasons": (0x4,),
    "nvmlDeviceGetComputeRunningProcesses": ([using(OWN, 60 * GIB)],),
    "nvmlDeviceGetMemoryInfo": (SimpleNamespace(used=4 * 2**20), SimpleNamespace(used=63 * GIB + 4 * 2**20)),
    "nvmlDeviceGetCpuAffinity": (NotSupported("Not Supported"),),
    "nvmlDeviceGetName": ("NVIDIA H100 80GB HBM3",),
    "nvmlDeviceGetMigMode": NotSupported("Not Supported"),
    "nvmlDeviceGetUUID": ("GPU-8932f937",),
    "nvmlDeviceGetEnforcedPowerLimit": (700_000,),
    "nvmlDeviceGetPowerManagementDefaultLimit": (700_000,),
    "nvmlDeviceGetMaxClockInfo": (1980,),
    "nvmlDeviceGetApplicationsClock": (1980,),
    "nvmlDeviceGetEccMode": ([1, 1],),
    "nvmlDeviceGetPersistenceMode": (1,),
    "nvmlDeviceGetTotalEccErrors": (0,),
    "nvmlDeviceGetRemappedRows": ((0, 0, 0, 0),),
    "nvmlDeviceGetRetiredPagesPendingStatus": (0,),
    "nvmlDeviceGetNvLinkState": (1,),
    "nvmlDeviceGetFieldValues": NotSupported("Not Supported"),
    "nvmlDeviceGetCurrPcieLinkWidth": (16,),
    "nvmlDeviceGetMaxPcieLinkWidth": (16,),
}
CARD: dict[str, Any] = {
    "pci_bus_id": "00000000:1B:00.0",
    "power_limit_w": 700,
    "power_limit_default_w": 700,
    "sm_clock_limit_mhz": 1980,
    "sm_clock_set_mhz": 1980,
    "ecc": True,
    "persistence": True,
    "nvlinks": 18,
    "nvlinks_down": 0,
    "pcie_lanes": 16,
    "pcie_lanes_most": 16,
    "held_before_bytes": 4 * 2**20,
    "held_before_by": (OWN,),
}


class FabricInfo(ctypes.Structure):
    """Those fields of nvmlGpuFabricInfo_t that perfsuite reads."""

    _fields_: ClassVar = [("status", ctypes.c_int), ("state", ctypes.c_ubyte)]


class Nvml:
    """A fake of the module pynvml. Every device gives its recorded answers one after the other."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVMLError_FunctionNotFound = FunctionNotFound
    NVMLError_NotFound = NotFound
    NVMLError_InvalidArgument = InvalidArgument
    NVML_NVLINK_MAX_LINKS = 18
    c_nvmlGpuFabricInfo_t = FabricInfo

    def __init__(self, *devices: dict[str, Any], init: Exception | None = None) -> None:
        self.devices = [{**TRAINING, **changes} for changes in devices]
        self.calls: list[tuple[str, int]] = []
        self.initialised = 0
        self.init_error = init

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        if not self.initialised:
            raise NVMLError("Uninitialized")
        self.initialised -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if "handle" in self.devices[index]:
            raise self.devices[index]["handle"]
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        uuids = [device["nvmlDeviceGetUUID"][0] for device in self.devices]
        if uuid not in uuids:
            raise NotFound("Not Found")
        return self.nvmlDeviceGetHandleByIndex(uuids.index(uuid))

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x1B + handle:02X}:00.0")

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, info: Any) -> int:
        """Answer like every NVSwitch system with a running Fabric Manager: completed, without an error."""
        info._obj.state, info._obj.status = self.devices[handle].get("fabric", (3, 0))
        return 0

    def __getattr__(self, function: str) -> Any:
        if function.startswith("NVML_") or function == "nvmlMemory_v2":
            return getattr(pynvml, function)
        if function not in TRAINING:
            raise AttributeError(function)

        def answer(handle: int, *arguments: int) -> Any:
            asked = self.calls.count((function, handle))
            self.calls.append((function, handle))
            answers = self.devices[handle].get(function, NotSupported("Not Supported"))
            value = answers[asked % len(answers)] if isinstance(answers, Sequence) else answers
            if isinstance(value, Exception):
                raise value
            if function == "nvmlDeviceGetMemoryInfo" and arguments != (self.nvmlMemory_v2,):
                return SimpleNamespace(total=(80 + handle) * GIB)  # the driver's reserve counts as used
            return value

        return answer


for name, bit in vars(pynvml).items():
    if name.startswith("nvmlClocksThrottleReason"):
        setattr(Nvml, name, bit)


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def sampled(
    steps: Iterable[int | None], *, every_s: float = 1.0, is_last: int | None = None, **settings: Any
) -> Health | None:
    """Call a sampler at these steps, and return its report. If `is_last`, the job is over after them.

    `settings` are those of the sampler, by default for a machine without a GPU.
    """
    clock = settings.setdefault("clock", Clock())
    sampler = Sampler(**settings)
    sampler.prepare()
    for step in steps:
        sampler.sample(step, is_last=step is not None and step == is_last)
        clock.now += every_s
    return sampler.finish()


def watched(
    nvml: Nvml, *, samples: int = 20, devices: int | None = None, proc: Path = Path("/nowhere")
) -> Health:
    """Call a sampler every quarter of a second, once per step, and return its report.

    The sampler does not look at the cores, because other programs use them independently of the fake clock.
    """
    gpus: dict[str, Any] = {"devices": devices or len(nvml.devices), "nvml": nvml}
    health = sampled(range(1, samples + 1), every_s=EVERY_S, proc=proc, **gpus)
    assert health is not None
    assert nvml.initialised == 0
    assert Health.model_validate_json(health.model_dump_json()) == health
    return health
