from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from perfsuite.case.hardware import ACCELERATORS, PRODUCTS, Accelerator, Machine, hardware_error
from perfsuite.errors import MachineError
from perfsuite.launch.machine import detect, detect_cpu, gpu_machine
from tests.samples import make_gpu_machine, make_machine

GIB = 2**30


@pytest.mark.parametrize(("name", "product"), PRODUCTS.items(), ids=list(PRODUCTS))
def test_every_product_has_a_marker_a_source_and_plausible_numbers(name: str, product: Accelerator) -> None:
    assert product.family in ACCELERATORS
    assert len(product.source) > 10
    assert product.memory_gb > 0
    assert product.form_factor in ("sxm", "pcie", "nvl", "superchip")
    assert "-" not in product.family, "what a case's hardware begins with ends there"
    if product.peak_16bit is None or product.peak_fp32 is None:
        assert (product.peak_16bit, product.peak_fp32) == (None, None)
    else:
        assert 0 < product.peak_fp32 < product.peak_16bit < 10_000


def test_markers_are_the_cpu_and_each_family_once() -> None:
    assert ACCELERATORS[0] == "cpu"
    assert len(set(ACCELERATORS)) == len(ACCELERATORS)
    assert set(ACCELERATORS) - {"cpu", "gpu"} == {product.family for product in PRODUCTS.values()}


ANY = f"begin with one of {', '.join(ACCELERATORS)}"
H200 = "h200 is known as h200-141gb-nvl, h200-141gb-sxm"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cpu", None),
        ("cpu-of-any-name", None),
        ("gpu", None),
        ("gpu-80gb", "gpu is known as just gpu"),
        ("h200", None),
        ("h200-141gb", None),
        ("h200-141gb-nvl", None),
        ("h200-141gb-pcie", H200),
        ("h200-141gb-nvl-x", H200),
        ("h200-80gb", H200),
        ("h200-sxm", H200),
        ("h200-141GB-sxm", f"did you mean 'h200-141gb-sxm'? {H200}"),
        ("h200-80GB", H200),
        ("H200-141GB-SXM", f"did you mean 'h200-141gb-sxm'? {ANY}"),
        ("H200-80GB", f"did you mean 'h200'? {ANY}"),
        ("x100", f"did you mean 'v100'? {ANY}"),
        ("quantum", ANY),
    ],
)
def test_hardware_that_no_machine_has_is_told_with_what_there_is(name: str, error: str | None) -> None:
    assert hardware_error(name) == error


@pytest.mark.parametrize(
    ("name", "hardware_class", "peak_16bit", "peak_fp32"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm", 989.5e12, 67e12),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie", 756e12, 51e12),
        ("NVIDIA H200", "h200-141gb-sxm", 989.5e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm", 312e12, 19.5e12),
        ("Tesla V100-SXM2-32GB", "v100-32gb-sxm", 125e12, 15.7e12),
        ("NVIDIA B200", "b200-180gb-sxm", 2250e12, 75e12),
        ("NVIDIA GH200 480GB", "gh200-96gb-superchip", 989.5e12, 67e12),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada-48gb-pcie", 364.2e12, 91.1e12),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb-pcie", 165.2e12, 82.6e12),
        ("NVIDIA A10", "a10-24gb-pcie", 125e12, 31.2e12),
    ],
)
def test_a_known_gpu_has_a_class_and_a_peak(
    name: str, hardware_class: str, peak_16bit: float, peak_fp32: float
) -> None:
    machine = gpu_machine([name], count=8, memory_bytes=80 * GIB, driver="580.1")
    assert (machine.device, machine.devices, machine.driver) == ("cuda", 8, "580.1")
    assert machine.hardware_class == hardware_class
    for precision in ("bf16", "bf16-mixed", "fp16-mixed"):
        assert machine.peak_flops(precision) == pytest.approx(peak_16bit, rel=1e-14)
    assert machine.peak_flops("fp32") == pytest.approx(peak_fp32, rel=1e-14)
    assert machine.note is None


@pytest.mark.parametrize(
    ("names", "hardware_class"),
    [
        (["NVIDIA GeForce RTX 2080 Ti"], "geforce-rtx-2080-ti-24gb"),
        (["NVIDIA H100 80GB HBM2e"], "h100-80gb-hbm2e-24gb"),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA H200"], "a100-sxm4-80gb-h200-24gb"),
    ],
)
def test_an_unknown_gpu_has_a_class_but_no_peak_and_a_note_saying_what_to_do(
    names: list[str], hardware_class: str
) -> None:
    machine = gpu_machine(names, count=2, memory_bytes=24 * GIB - 10**6, driver=None)
    assert machine.hardware_class == hardware_class
    assert machine.product is None
    assert machine.peak_flops("bf16") is None
    assert machine.note is not None
    assert " + ".join(names) in machine.note
    assert "MFU is left out" in machine.note
    assert "add it to PRODUCTS in perfsuite/case/hardware.py" in machine.note


@pytest.mark.parametrize(
    ("meant_for", "name", "here"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80gb-sxm", "NVIDIA A100-SXM4-80GB", True),
        ("a100-40gb", "NVIDIA A100-SXM4-80GB", False),
        ("a100-80gb-pcie", "NVIDIA A100-SXM4-80GB", False),
        ("a100-80gb-sxm-x", "NVIDIA A100-SXM4-80GB", False),
        ("a10", "NVIDIA A100-SXM4-80GB", False),
        ("h100", "NVIDIA H200", False),
        ("h200", "NVIDIA H100 80GB HBM3", False),
        ("l4", "NVIDIA L40S", False),
        ("cpu", "NVIDIA H200", False),
        ("h100", "NVIDIA H100 80GB HBM2e", True),
    ],
)
def test_hardware_matches_by_whole_words(meant_for: str, name: str, here: bool) -> None:
    machine = make_gpu_machine(name)
    reason = machine.why_not(meant_for)
    expected = f"it is meant for {meant_for}, this machine is {machine.hardware_class}"
    assert reason == (None if here else expected)


def test_a_known_chip_whose_peak_no_datasheet_tells_has_a_class_and_no_mfu() -> None:
    machine = make_gpu_machine("NVIDIA A100-SXM-64GB")
    assert machine.hardware_class == "a100-64gb-sxm"
    assert (machine.peak_flops("bf16"), machine.peak_flops("fp32")) == (None, None)
    assert machine.note == (
        "the peak FLOP/s of NVIDIA A100-SXM-64GB is unknown (a chip of its own, with more cores than the "
        "A100's datasheet tells of), so MFU is left out"
    )


def test_a_processor_is_for_cpu_cases_and_has_no_peak() -> None:
    machine = make_machine()
    assert machine.why_not("cpu") is None
    assert machine.why_not("h100") == "it is meant for h100, this machine is cpu-test-2c"
    assert machine.peak_flops("bf16") is None
    assert machine.product is None


def test_a_processor_named_like_a_gpu_has_no_peak() -> None:
    assert make_machine(device_name="NVIDIA H200").peak_flops("bf16") is None


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class NotFound(NVMLError):
    pass


class InvalidArgument(NVMLError):
    pass


def stand_in(
    monkeypatch: pytest.MonkeyPatch, names: list[str | bytes], *, fails: str | None = None, **functions: Any
) -> list[str]:
    """A pynvml that knows these GPUs; index i has the UUID GPU-i. Returns what was called at the ends.

    `functions` replace the module's, by the end of their name.
    """
    calls: list[str] = []
    module = ModuleType("pynvml")

    def init() -> None:
        calls.append("init")
        if fails is not None:
            raise NVMLError(fails)

    def by_index(index: int) -> int:
        if not 0 <= index < len(names):
            raise InvalidArgument("Invalid Argument")
        return index

    def by_uuid(uuid: str) -> int:
        known = [f"GPU-{index}" for index in range(len(names))]
        if uuid not in known:
            raise NotFound("Not Found")
        return known.index(uuid)

    def no_mig(handle: int) -> list[int]:
        raise NotSupported("Not Supported")

    vars(module).update(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NotSupported,
        NVMLError_NotFound=NotFound,
        NVMLError_InvalidArgument=InvalidArgument,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: names[handle],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=(80 + handle) * GIB),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:{0x1B + handle:02X}:00.0"),
        nvmlDeviceGetMigMode=no_mig,
        nvmlSystemGetDriverVersion=lambda: b"580.65",
    )
    vars(module).update({f"nvmlDeviceGet{name}": function for name, function in functions.items()})
    monkeypatch.setitem(sys.modules, "pynvml", module)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("perfsuite.launch.machine.AMD_DRIVER", Path("/no/such/device"))
    return calls


def test_the_stand_in_has_the_names_of_the_library() -> None:
    import pynvml

    mine = (
        "NVMLError_NotSupported",
        "NVMLError_NotFound",
        "NVMLError_InvalidArgument",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMigMode",
    )
    assert set(mine) <= set(vars(pynvml))
    assert pynvml.NVML_DEVICE_MIG_ENABLE == 1


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


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_not_looked_for(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    calls = stand_in(monkeypatch, ["NVIDIA H200"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    assert (machine.device, machine.note) == ("cpu", "CUDA_VISIBLE_DEVICES hides every GPU")
    assert calls == []


@pytest.mark.parametrize("visible", ["9", "GPU-9", "nonsense", "-1,0"])
def test_cuda_visible_devices_that_names_no_gpu_leaves_the_processor(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    calls = stand_in(monkeypatch, ["NVIDIA H200"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    assert machine.device == "cpu"
    assert machine.note is not None
    assert f"CUDA_VISIBLE_DEVICES={visible}" in machine.note
    assert calls == ["init", "shutdown"]


def test_a_driver_without_gpus_leaves_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, [])
    machine = detect()
    assert (machine.device, machine.note) == ("cpu", "NVML found a driver but no GPU")
    assert calls == ["init", "shutdown"]


def test_no_driver_leaves_the_processor_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [], fails="NVML Shared Library Not Found")
    machine = detect()
    assert (machine.device, machine.note) == ("cpu", "NVML found no GPU: NVML Shared Library Not Found")


def test_names_may_be_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [b"NVIDIA H200"])
    assert detect().hardware_class == "h200-141gb-sxm"


def test_unlike_gpus_make_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
    machine = detect()
    assert machine.device_name == "NVIDIA A100-SXM4-80GB + NVIDIA H200"
    assert machine.peak_flops("bf16") is None


def of_one(lost: object, error: Exception, otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of NVML that fails for one GPU."""

    def answer(handle: object) -> Any:
        if handle == lost:
            raise error
        return otherwise(handle)

    return answer


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("HandleByIndex", "GPU 2"),
        ("Name", "GPU 2 (00000000:1D:00.0)"),
        ("MemoryInfo", "GPU 2 (00000000:1D:00.0)"),
    ],
)
def test_a_gpu_that_cannot_be_read_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, function: str, name: str
) -> None:
    otherwise: dict[str, Callable[[int], Any]] = {
        "HandleByIndex": lambda index: index,
        "Name": lambda handle: "NVIDIA H200",
        "MemoryInfo": lambda handle: SimpleNamespace(total=GIB),
    }
    lost: Any = {function: of_one(2, NVMLError("GPU is lost"), otherwise[function])}
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
    lost = of_one(2, NVMLError("GPU is lost"), lambda index: index)
    lost_uuid = of_one("GPU-2", NVMLError("GPU is lost"), lambda uuid: int(uuid[-1]))
    stand_in(monkeypatch, ["NVIDIA H200"] * 4, HandleByIndex=lost, HandleByUUID=lost_uuid)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match=f"take it out of CUDA_VISIBLE_DEVICES={visible}"):
        detect()


def test_a_gpu_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GB10 and a Jetson answer."""
    none = of_one(0, NotSupported("Not Supported"), lambda handle: None)
    stand_in(monkeypatch, ["NVIDIA GB10"], MemoryInfo=none)
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
    def mig_mode(handle: int) -> list[int]:
        raise InvalidArgument("Invalid Argument")  # of an instance

    names: list[str | bytes] = ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
    stand_in(monkeypatch, names, MigMode=mig_mode, HandleByUUID=lambda uuid: {"MIG-5": 1}[uuid])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    assert detect().hardware_class == "a100-sxm4-40gb-mig-1g-5gb-81gb"


@pytest.mark.parametrize(
    ("visible", "memory_gib"), [("GPU-a", 80), ("GPU-b1", 81), ("GPU-b", None), ("GPU-c", None), ("b1", None)]
)
def test_the_beginning_of_one_uuid_is_enough(
    monkeypatch: pytest.MonkeyPatch, visible: str, memory_gib: int | None
) -> None:
    uuids = ["GPU-a77", "GPU-b11", "GPU-b22"]
    stand_in(monkeypatch, ["NVIDIA H200"] * 3, UUID=uuids.__getitem__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = detect()
    assert machine.device == ("cpu" if memory_gib is None else "cuda")
    if memory_gib is not None:
        assert machine.memory_bytes == memory_gib * GIB


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


def test_an_amd_gpu_is_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, [], fails="NVML Shared Library Not Found")
    monkeypatch.setattr("perfsuite.launch.machine.AMD_DRIVER", tmp_path)
    machine = detect()
    assert (machine.device, machine.note) == (
        "cpu",
        "NVML found no GPU: NVML Shared Library Not Found; "
        f"there is an AMD GPU ({tmp_path}), perfsuite measures on NVIDIA's only",
    )


def test_cpu_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [], fails="no driver")
    monkeypatch.setattr(
        "perfsuite.launch.machine._cpu_name", lambda: "AMD EPYC(TM) 7763 64-Core Processor @ 2.45GHz"
    )
    machine = detect()
    cores = len(os.sched_getaffinity(0))
    assert machine.hardware_class == f"cpu-amd-epyc-7763-64-core-{cores}c"
    assert (machine.devices, machine.memory_bytes) == (cores, psutil.virtual_memory().total)
    assert machine.why_not("cpu") is None


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("aarch64", "aarch64"),
        ("???", "unknown"),
    ],
)
def test_cpu_classes_are_fit_for_a_directory(monkeypatch: pytest.MonkeyPatch, name: str, middle: str) -> None:
    stand_in(monkeypatch, [], fails="no driver")
    monkeypatch.setattr("perfsuite.launch.machine._cpu_name", lambda: name)
    machine = detect()
    assert machine.hardware_class == f"cpu-{middle}-{machine.devices}c"


def test_this_machine_is_something() -> None:
    machine = detect()
    assert machine.devices >= 1
    assert machine.memory_bytes > 0
    assert Machine.model_validate_json(machine.model_dump_json()) == machine


def test_gpu_is_any_gpu_and_no_cpu() -> None:
    unknown = gpu_machine(["NVIDIA Imaginary X1"], count=1, memory_bytes=2**35, driver=None)
    assert unknown.why_not("gpu") is None
    assert unknown.why_not("h100") is not None
    assert detect_cpu("none").why_not("gpu") is not None
