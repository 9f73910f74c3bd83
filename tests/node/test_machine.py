import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfsuite.case.hardware import Machine
from perfsuite.errors import MachineError
from perfsuite.node.machine import detect_cpu, detect_here
from tests.node.fake_nvml import GIB, InvalidArgument, NotSupported, Nvml, NVMLError

LOST = NVMLError("GPU is lost")
H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"
A100 = "NVIDIA A100-SXM4-40GB"


def detected(
    monkeypatch: pytest.MonkeyPatch,
    *names: str,
    changes: dict[int, dict[str, Any]] | None = None,
    visible: str | None = None,
    missing: str | None = None,
) -> Machine:
    """Return this machine as a fake pynvml describes it. The fake has these GPUs, or fails with `missing`.

    The GPU with index i has the UUID GPU-i.
    """
    usual = [
        {"nvmlDeviceGetName": (name,), "nvmlDeviceGetUUID": (f"GPU-{i}",)} for i, name in enumerate(names)
    ]
    devices = [{**answers, **(changes or {}).get(i, {})} for i, answers in enumerate(usual)]
    nvml = Nvml(*devices, init=None if missing is None else NVMLError(missing))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    try:
        return detect_here()
    finally:
        assert nvml.initialised == 0


@pytest.mark.parametrize(
    ("visible", "devices", "memory_gib"),
    [
        *((None, 4, 80), ("0,1,2,3", 4, 80), ("2", 1, 82), (" 3, 1", 2, 81)),
        *(("GPU-3", 1, 83), ("GPU-1,GPU-2", 2, 81), ("1,GPU-3", 2, 81)),
        # CUDA also ignores all entries after the first bad one.
        *(("1,9,2", 1, 81), ("1,-1,2", 1, 81), ("GPU-2,GPU-9,GPU-0", 1, 82), ("3,nonsense", 1, 83)),
    ],
)
def test_sees_the_gpus_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: int, memory_gib: int
) -> None:
    machine = detected(monkeypatch, *[H100] * 4, visible=visible)
    assert (machine.device, machine.hardware_class, machine.driver) == ("cuda", "h100-80gb-sxm", "580.65")
    assert (machine.devices, machine.memory_bytes) == (devices, memory_gib * GIB)


@pytest.mark.parametrize(
    ("names", "visible", "missing", "note"),
    [
        ([H200], "-1,0", None, "{}=-1,0 hides every GPU"),
        ([], "0", None, "{}=0 hides every GPU"),  # a value from another machine
        *(
            ([H200], visible, "NVML is not asked then", "{} hides every GPU")
            for visible in ("", "-1", "NoDevFiles")
        ),
        ([], None, None, "NVML found a driver but no GPU"),
        ([], None, "Library Not Found", "NVML found no GPU: Library Not Found"),
    ],
)
def test_no_gpu_means_processor_and_reason(
    monkeypatch: pytest.MonkeyPatch, names: list[str], visible: str | None, missing: str | None, note: str
) -> None:
    machine = detected(monkeypatch, *names, visible=visible, missing=missing)
    assert (machine.device, machine.note) == ("cpu", note.format("CUDA_VISIBLE_DEVICES"))


@pytest.mark.parametrize("visible", ["9", "GPU-9", "nonsense"])
def test_visible_gpus_must_exist(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    """With such a value, CUDA would not see a GPU either, and every case for GPUs would be skipped."""
    with pytest.raises(MachineError, match=rf"={visible} names no GPU of this machine, which has 1\. Give"):
        detected(monkeypatch, H200, visible=visible)


def test_unlike_gpus_make_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = detected(monkeypatch, H200, A100)
    assert machine.device_name == f"{A100} + {H200}"
    assert machine.peak_flops("bf16") is None


@pytest.mark.parametrize(
    ("what", "visible", "name"),
    [
        *(("handle", None, "GPU 2"), ("handle", "1,2", "GPU 2"), ("handle", "GPU-1,GPU-2", "GPU GPU-2")),
        *((f"nvmlDeviceGet{what}", None, "GPU 2 (00000000:1D:00.0)") for what in ("Name", "MemoryInfo")),
    ],
)
def test_unreadable_gpu_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, what: str, visible: str | None, name: str
) -> None:
    lost = {2: {what: LOST}}
    with pytest.raises(MachineError) as raised:
        detected(monkeypatch, *[H200] * 4, changes=lost, visible=visible)
    assert str(raised.value) == (
        f"{name} cannot be read: GPU is lost. Look at `nvidia-smi` and dmesg, and repair the GPU. To measure "
        "without it, name only the other GPUs in CUDA_VISIBLE_DEVICES"
    )
    assert detected(monkeypatch, *[H200] * 4, changes=lost, visible="0,1,3").devices == 3


def test_integrated_gpu_has_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GB10 and a Jetson answer like this."""
    no_memory = {0: {"nvmlDeviceGetMemoryInfo": NotSupported("Not Supported")}}
    machine = detected(monkeypatch, "NVIDIA GB10", changes=no_memory)
    assert (machine.device, machine.memory_bytes) == ("cuda", psutil.virtual_memory().total)
    assert str(machine.note).startswith("the peak FLOP/s of NVIDIA GB10 is unknown")


@pytest.mark.parametrize("visible", [None, "1", "GPU-1"])
def test_a_gpu_that_is_split_by_mig_is_refused(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    modes = {index: {"nvmlDeviceGetMigMode": ([index, index],)} for index in range(2)}
    with pytest.raises(MachineError) as raised:
        detected(monkeypatch, A100, A100, changes=modes, visible=visible)
    assert "(00000000:1C:00.0) is split by MIG, so a process can use only a part of it" in str(raised.value)
    assert "CUDA_VISIBLE_DEVICES=MIG-..., as `nvidia-smi -L` lists them" in str(raised.value)
    assert "`nvidia-smi -i 00000000:1C:00.0 -mig 0`" in str(raised.value)


def test_mig_instance_has_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = {"nvmlDeviceGetMigMode": InvalidArgument("Invalid Argument"), "nvmlDeviceGetUUID": ("MIG-5",)}
    machine = detected(monkeypatch, A100, f"{A100} MIG 1g.5gb", changes={1: mode}, visible="MIG-5")
    assert machine.hardware_class == "a100-sxm4-40gb-mig-1g-5gb-81gb"


def cpu_file(directory: Path, line: str) -> Path:
    """Write a file like /proc/cpuinfo that has this line."""
    file = directory / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\nflags\t\t: fpu\n")
    return file


def test_a_machine_without_proc_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cpuinfo cannot be read: No such file or directory\. Mount"):
        detect_cpu("no driver", cpu_file=tmp_path / "cpuinfo")


def test_a_cpu_without_a_name_has_its_architecture(tmp_path: Path) -> None:
    """On ARM, the file has no name of the model."""
    file = cpu_file(tmp_path, "CPU implementer\t: 0x41")
    assert detect_cpu("no driver", cpu_file=file).device_name == platform.machine()


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("AMD EPYC(TM) 7763 64-Core Processor @ 2.45GHz", "amd-epyc-7763-64-core"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        *(("aarch64", "aarch64"), ("???", "unknown")),
    ],
)
def test_cpu_classes_are_fit_for_a_directory(tmp_path: Path, name: str, middle: str) -> None:
    machine = detect_cpu("no driver", cpu_file=cpu_file(tmp_path, f"model name\t: {name}"))
    assert machine.devices == len(os.sched_getaffinity(0))
    assert machine.hardware_class == f"cpu-{middle}-{machine.devices}c"
    assert machine.memory_bytes == psutil.virtual_memory().total
    assert machine.why_not("cpu") is None
