from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from perfsuite.case.hardware import Machine
from perfsuite.errors import MachineError
from perfsuite.node.machine import detect
from tests.node.fake_nvml import GIB, NotSupported, NVMLError


class NotFound(NVMLError):
    pass


class InvalidArgument(NVMLError):
    pass


def fails(error: Exception, of: object = None, otherwise: Callable[[Any], Any] = id) -> Callable[[Any], Any]:
    """A function of NVML that fails, for one GPU or for all."""

    def answer(handle: object) -> Any:
        if of in (None, handle):
            raise error
        return otherwise(handle)

    return answer


def stand_in(
    monkeypatch: pytest.MonkeyPatch, names: list[str], *, missing: str | None = None, **functions: Any
) -> list[str]:
    """A pynvml that knows these GPUs; index i has the UUID GPU-i. Returns what was called at the ends.

    `functions` replace the module's, by the end of their name.
    """
    calls: list[str] = []

    def init() -> None:
        calls.append("init")
        if missing is not None:
            raise NVMLError(missing)

    def by_uuid(uuid: str) -> int:
        if uuid not in (known := [f"GPU-{index}" for index in range(len(names))]):
            raise NotFound("Not Found")
        return known.index(uuid)

    module = SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NotSupported,
        NVMLError_NotFound=NotFound,
        NVMLError_InvalidArgument=InvalidArgument,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: names[handle],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=(80 + handle) * GIB),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:{0x1B + handle:02X}:00.0"),
        nvmlDeviceGetMigMode=fails(NotSupported("Not Supported")),
        nvmlSystemGetDriverVersion=lambda: "580.65",
    )
    vars(module).update({f"nvmlDeviceGet{name}": function for name, function in functions.items()})
    monkeypatch.setitem(sys.modules, "pynvml", module)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("perfsuite.node.machine.AMD_DRIVER", Path("/no/such/device"))
    return calls


def test_the_stand_in_has_the_names_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = importlib.import_module("pynvml")
    stand_in(monkeypatch, [])
    assert set(vars(sys.modules["pynvml"])) <= set(vars(library))
    assert library.NVML_DEVICE_MIG_ENABLE == 1


@pytest.mark.parametrize(
    ("visible", "devices", "memory_gib"),
    [
        (None, 4, 80),
        ("0,1,2,3", 4, 80),
        ("2", 1, 82),
        (" 3, 1", 2, 81),
        ("GPU-3", 1, 83),
        ("GPU-1,GPU-2", 2, 81),
        ("1,GPU-3", 2, 81),
        ("1,9,2", 1, 81),  # CUDA, too, ignores everything from the first bad entry on
        ("1,-1,2", 1, 81),
        ("GPU-2,GPU-9,GPU-0", 1, 82),
        ("3,nonsense", 1, 83),
    ],
)
def test_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: int, memory_gib: int
) -> None:
    calls = stand_in(monkeypatch, ["NVIDIA H100 80GB HBM3"] * 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    assert (machine.device, machine.hardware_class) == ("cuda", "h100-80gb-sxm")
    assert (machine.devices, machine.memory_bytes, machine.driver) == (devices, memory_gib * GIB, "580.65")
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("visible", "note", "calls"),
    [
        *((each, "hides every GPU", []) for each in ("", "-1")),
        *(
            (each, f"={each} names none of the 1 GPUs", ["init", "shutdown"])
            for each in ("9", "GPU-9", "nonsense", "-1,0")
        ),
    ],
)
def test_cuda_visible_devices_that_names_no_gpu_leaves_the_processor(
    monkeypatch: pytest.MonkeyPatch, visible: str, note: str, calls: list[str]
) -> None:
    called = stand_in(monkeypatch, ["NVIDIA H200"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    space = "" if note.startswith("=") else " "
    assert (machine.device, machine.note) == ("cpu", f"CUDA_VISIBLE_DEVICES{space}{note}")
    assert called == calls


@pytest.mark.parametrize("amd", [None, "/dev/null"])
@pytest.mark.parametrize(
    ("missing", "calls", "note"),
    [
        (None, ["init", "shutdown"], "NVML found a driver but no GPU"),
        ("Library Not Found", ["init"], "NVML found no GPU: Library Not Found"),
    ],
)
def test_without_a_gpu_there_is_the_processor_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, missing: str | None, amd: str | None, calls: list[str], note: str
) -> None:
    called = stand_in(monkeypatch, [], missing=missing)
    if amd is not None:
        monkeypatch.setattr("perfsuite.node.machine.AMD_DRIVER", Path(amd))
        note += f"; there is an AMD GPU ({amd}), perfsuite measures on NVIDIA's only"
    machine = detect()
    assert (machine.device, machine.note) == ("cpu", note)
    assert called == calls


def test_unlike_gpus_make_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
    machine = detect()
    assert machine.device_name == "NVIDIA A100-SXM4-80GB + NVIDIA H200"
    assert machine.peak_flops("bf16") is None


@pytest.mark.parametrize(
    ("function", "otherwise", "name"),
    [
        ("HandleByIndex", lambda index: index, "GPU 2"),
        ("Name", lambda handle: "NVIDIA H200", "GPU 2 (00000000:1D:00.0)"),
        ("MemoryInfo", lambda handle: SimpleNamespace(total=GIB), "GPU 2 (00000000:1D:00.0)"),
    ],
)
def test_a_gpu_that_cannot_be_read_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, function: str, otherwise: Callable[[Any], Any], name: str
) -> None:
    lost: Any = {function: fails(NVMLError("GPU is lost"), 2, otherwise)}
    calls = stand_in(monkeypatch, ["NVIDIA H200"] * 4, **lost)
    with pytest.raises(MachineError) as raised:
        detect()
    assert str(raised.value) == (
        f"{name} cannot be read: GPU is lost. Look at `nvidia-smi` and dmesg, then mend it, or measure "
        "without it: CUDA_VISIBLE_DEVICES=0,1,3"
    )
    assert calls == ["init", "shutdown"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert detect().devices == 3


@pytest.mark.parametrize("visible", ["1,2", "GPU-1,GPU-2"])
def test_a_named_gpu_that_cannot_be_read_is_to_be_taken_out(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    lost = fails(NVMLError("GPU is lost"), 2, lambda index: index)
    lost_uuid = fails(NVMLError("GPU is lost"), "GPU-2", lambda uuid: int(uuid[-1]))
    stand_in(monkeypatch, ["NVIDIA H200"] * 4, HandleByIndex=lost, HandleByUUID=lost_uuid)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match=f"take it out of CUDA_VISIBLE_DEVICES={visible}"):
        detect()


def test_a_gpu_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GB10 and a Jetson answer."""
    stand_in(monkeypatch, ["NVIDIA GB10"], MemoryInfo=fails(NotSupported("Not Supported")))
    machine = detect()
    assert (machine.device, machine.memory_bytes) == ("cuda", psutil.virtual_memory().total)
    assert "NVML tells no memory of the GPU, as where it shares the machine's" in str(machine.note)
    assert "is not in perfsuite's table" in str(machine.note)


@pytest.mark.parametrize("visible", [None, "1", "GPU-1"])
def test_a_gpu_that_is_split_by_mig_is_refused(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    stand_in(monkeypatch, ["NVIDIA A100-SXM4-40GB"] * 2, MigMode=lambda handle: [handle, handle])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError) as raised:
        detect()
    assert "(00000000:1C:00.0) is split by MIG, so it is not what its name says" in str(raised.value)
    assert "CUDA_VISIBLE_DEVICES=MIG-..., as `nvidia-smi -L` lists them" in str(raised.value)
    assert "`nvidia-smi -i 00000000:1C:00.0 -mig 0`" in str(raised.value)


def test_an_instance_of_mig_has_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mig_mode = fails(InvalidArgument("Invalid Argument"))  # of an instance
    names = ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
    stand_in(monkeypatch, names, MigMode=mig_mode, HandleByUUID=lambda uuid: {"MIG-5": 1}[uuid])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    assert detect().hardware_class == "a100-sxm4-40gb-mig-1g-5gb-81gb"


def test_the_beginning_of_one_uuid_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["GPU-a77", "GPU-b11", "GPU-b22"]
    stand_in(monkeypatch, ["NVIDIA H200"] * 3, UUID=uuids.__getitem__)
    for visible, memory_gib in (("GPU-a", 80), ("GPU-b1", 81)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert detect().memory_bytes == memory_gib * GIB
    for visible in ("GPU-b", "GPU-c", "b1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert detect().device == "cpu", visible


def test_unlike_gpus_in_an_order_that_nvml_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ["NVIDIA T400", "NVIDIA H200"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    with pytest.raises(MachineError) as raised:
        detect()
    assert str(raised.value) == (
        "CUDA_DEVICE_ORDER=FASTEST_FIRST on a machine with unlike GPUs (NVIDIA H200, NVIDIA T400): NVML "
        "numbers them by PCI bus, so others would be watched than train; unset it, or set PCI_BUS_ID"
    )
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert detect().device_name == "NVIDIA T400"
    stand_in(monkeypatch, ["NVIDIA H200"] * 2)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert detect().devices == 2


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("AMD EPYC(TM) 7763 64-Core Processor @ 2.45GHz", "amd-epyc-7763-64-core"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("aarch64", "aarch64"),
        ("???", "unknown"),
    ],
)
def test_cpu_classes_are_fit_for_a_directory(monkeypatch: pytest.MonkeyPatch, name: str, middle: str) -> None:
    stand_in(monkeypatch, [], missing="no driver")
    monkeypatch.setattr("perfsuite.node.machine._cpu_name", lambda: name)
    machine = detect()
    assert machine.devices == len(os.sched_getaffinity(0))
    assert machine.hardware_class == f"cpu-{middle}-{machine.devices}c"
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert machine.why_not("cpu") is None


def test_this_machine_is_something() -> None:
    machine = detect()
    assert machine.devices >= 1
    assert machine.memory_bytes > 0
    assert Machine.model_validate_json(machine.model_dump_json()) == machine
