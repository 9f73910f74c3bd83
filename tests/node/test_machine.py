from __future__ import annotations

import os
import sys
from typing import Any

import psutil
import pytest

from perfsuite.case.hardware import Machine
from perfsuite.errors import MachineError
from perfsuite.node.machine import detect
from tests.node.fake_nvml import GIB, InvalidArgument, NotSupported, Nvml, NVMLError

LOST = NVMLError("GPU is lost")


def stand_in(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    changes: dict[int, dict[str, Any]] | None = None,
    *,
    missing: str | None = None,
) -> Nvml:
    """A pynvml that knows these GPUs, or says what is missing; index i has the UUID GPU-i."""
    usual = {
        i: {"nvmlDeviceGetName": (name,), "nvmlDeviceGetUUID": (f"GPU-{i}",)} for i, name in enumerate(names)
    }
    devices = [{**answers, **(changes or {}).get(i, {})} for i, answers in usual.items()]
    nvml = Nvml(*devices, init=None if missing is None else NVMLError(missing))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


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
    nvml = stand_in(monkeypatch, ["NVIDIA H100 80GB HBM3"] * 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    assert (machine.device, machine.hardware_class) == ("cuda", "h100-80gb-sxm")
    assert (machine.devices, machine.memory_bytes, machine.driver) == (devices, memory_gib * GIB, "580.65")
    assert nvml.initialised == 0


@pytest.mark.parametrize(
    ("visible", "missing", "note"),
    [
        *((each, None, f"={each} names none of the 1 GPUs") for each in ("9", "GPU-9", "nonsense", "-1,0")),
        *((each, "NVML is not asked then", " hides every GPU") for each in ("", "-1")),
    ],
)
def test_cuda_visible_devices_that_names_no_gpu_leaves_the_processor(
    monkeypatch: pytest.MonkeyPatch, visible: str, missing: str | None, note: str
) -> None:
    nvml = stand_in(monkeypatch, ["NVIDIA H200"], missing=missing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    assert (machine.device, machine.note) == ("cpu", f"CUDA_VISIBLE_DEVICES{note}")
    assert nvml.initialised == 0


@pytest.mark.parametrize(
    ("missing", "note"),
    [
        (None, "NVML found a driver but no GPU"),
        ("Library Not Found", "NVML found no GPU: Library Not Found"),
    ],
)
def test_without_a_gpu_there_is_the_processor_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, missing: str | None, note: str
) -> None:
    nvml = stand_in(monkeypatch, [], missing=missing)
    machine = detect()
    assert (machine.device, machine.note, nvml.initialised) == ("cpu", note, 0)


def test_unlike_gpus_make_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
    machine = detect()
    assert machine.device_name == "NVIDIA A100-SXM4-80GB + NVIDIA H200"
    assert machine.peak_flops("bf16") is None


@pytest.mark.parametrize(
    ("what", "visible", "name"),
    [
        ("handle", None, "GPU 2"),
        ("handle", "1,2", "GPU 2"),
        ("handle", "GPU-1,GPU-2", "GPU GPU-2"),
        ("nvmlDeviceGetName", None, "GPU 2 (00000000:1D:00.0)"),
        ("nvmlDeviceGetMemoryInfo", None, "GPU 2 (00000000:1D:00.0)"),
    ],
)
def test_a_gpu_that_cannot_be_read_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, what: str, visible: str | None, name: str
) -> None:
    nvml = stand_in(monkeypatch, ["NVIDIA H200"] * 4, {2: {what: LOST}})
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError) as raised:
        detect()
    assert str(raised.value) == (
        f"{name} cannot be read: GPU is lost. Look at `nvidia-smi` and dmesg, then mend it, or measure "
        "without it: name the other GPUs in CUDA_VISIBLE_DEVICES"
    )
    assert nvml.initialised == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert detect().devices == 3


def test_a_gpu_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GB10 and a Jetson answer."""
    stand_in(monkeypatch, ["NVIDIA GB10"], {0: {"nvmlDeviceGetMemoryInfo": NotSupported("Not Supported")}})
    machine = detect()
    assert (machine.device, machine.memory_bytes) == ("cuda", psutil.virtual_memory().total)
    assert "is not in perfsuite's table" in str(machine.note)


@pytest.mark.parametrize("visible", [None, "1", "GPU-1"])
def test_a_gpu_that_is_split_by_mig_is_refused(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    modes = {index: {"nvmlDeviceGetMigMode": ([index, index],)} for index in range(2)}
    stand_in(monkeypatch, ["NVIDIA A100-SXM4-40GB"] * 2, modes)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError) as raised:
        detect()
    assert "(00000000:1C:00.0) is split by MIG, so it is not what its name says" in str(raised.value)
    assert "CUDA_VISIBLE_DEVICES=MIG-..., as `nvidia-smi -L` lists them" in str(raised.value)
    assert "`nvidia-smi -i 00000000:1C:00.0 -mig 0`" in str(raised.value)


def test_an_instance_of_mig_has_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
    instance = {"nvmlDeviceGetMigMode": InvalidArgument("Invalid Argument"), "nvmlDeviceGetUUID": ("MIG-5",)}
    stand_in(monkeypatch, names, {1: instance})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    assert detect().hardware_class == "a100-sxm4-40gb-mig-1g-5gb-81gb"


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
