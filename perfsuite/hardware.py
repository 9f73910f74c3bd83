"""What machine this is, its hardware class, and what its accelerator can do.

Imports neither torch nor pytest.

A baseline belongs to a hardware class: accelerator, memory, form factor (`h100-80gb-sxm`). Driver, NCCL,
torch and clocks are recorded with a run but are not part of the class.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from perfsuite.data import Data


class Accelerator(NamedTuple):
    """One product as NVML names it. Peaks are dense (no sparsity), in TFLOP/s, per device."""

    family: str
    memory_gb: int
    form_factor: str
    peak_16bit: float
    """bf16 with fp32 accumulation; fp16 on Volta and Turing, which have no bf16."""
    peak_fp32: float
    """Of the ordinary cores: torch leaves TF32 off by default."""
    source: str

    @property
    def hardware_class(self) -> str:
        """`family-memory-form factor`."""
        return f"{self.family}-{self.memory_gb}gb-{self.form_factor}"


_V100 = "NVIDIA V100 datasheet, Jan 2020"
_A100 = "NVIDIA A100 datasheet, Jun 2021"
_H100 = "NVIDIA H100 datasheet, 2023 (figures with sparsity halved)"
_H200 = "NVIDIA H200 datasheet, 2024 (figures with sparsity halved)"
_L40S = "NVIDIA L40S datasheet, 2023 (dense figures)"

PRODUCTS: Mapping[str, Accelerator] = {
    "Tesla V100-SXM2-16GB": Accelerator("v100", 16, "sxm", 125, 15.7, _V100),
    "Tesla V100-SXM2-32GB": Accelerator("v100", 32, "sxm", 125, 15.7, _V100),
    "Tesla V100-PCIE-16GB": Accelerator("v100", 16, "pcie", 112, 14, _V100),
    "Tesla V100-PCIE-32GB": Accelerator("v100", 32, "pcie", 112, 14, _V100),
    "Tesla T4": Accelerator("t4", 16, "pcie", 65, 8.1, "NVIDIA T4 datasheet, 2019"),
    "NVIDIA A10G": Accelerator("a10g", 24, "pcie", 70, 35, "AWS G5 instance page; NVIDIA A10G datasheet"),
    "NVIDIA A100-SXM4-40GB": Accelerator("a100", 40, "sxm", 312, 19.5, _A100),
    "NVIDIA A100-SXM4-80GB": Accelerator("a100", 80, "sxm", 312, 19.5, _A100),
    "NVIDIA A100-SXM-64GB": Accelerator("a100", 64, "sxm", 312, 19.5, _A100),
    "NVIDIA A100-PCIE-40GB": Accelerator("a100", 40, "pcie", 312, 19.5, _A100),
    "NVIDIA A100 80GB PCIe": Accelerator("a100", 80, "pcie", 312, 19.5, _A100),
    "NVIDIA L4": Accelerator("l4", 24, "pcie", 121, 30.3, "NVIDIA L4 datasheet, 2023 (sparsity halved)"),
    "NVIDIA L40S": Accelerator("l40s", 48, "pcie", 362, 91.6, _L40S),
    "NVIDIA H100 80GB HBM3": Accelerator("h100", 80, "sxm", 989.5, 67, _H100),
    "NVIDIA H100 PCIe": Accelerator("h100", 80, "pcie", 756, 51, _H100),
    "NVIDIA H100 NVL": Accelerator("h100", 94, "nvl", 835.5, 60, _H100),
    "NVIDIA H200": Accelerator("h200", 141, "sxm", 989.5, 67, _H200),
    "NVIDIA H200 NVL": Accelerator("h200", 141, "nvl", 835.5, 60, _H200),
    "NVIDIA B200": Accelerator("b200", 180, "sxm", 2250, 75, "NVIDIA HGX B200 datasheet, 2024 (per GPU)"),
}

ACCELERATORS: tuple[str, ...] = ("cpu", "gpu", *sorted({product.family for product in PRODUCTS.values()}))
"""Every name that a case's `hardware` may begin with, and so every hardware marker. `gpu` is any of them, and
those that the table does not have."""


def hardware_error(name: str) -> str | None:
    """Why no machine ever matches a case's `hardware` entry, or None."""
    family = name.split("-")[0]
    classes = [product.hardware_class for product in PRODUCTS.values() if product.family == family]
    near = get_close_matches(family.lower(), ACCELERATORS, n=1)
    if name != name.lower() and hardware_error(name.lower()) is None:
        near = [name.lower()]
    hint = f"did you mean {near[0]!r}? " if near and near[0] != family else ""
    if family not in ACCELERATORS:
        return f"{hint}begin with one of {', '.join(ACCELERATORS)}"
    if family == "cpu" or any(
        known.split("-")[: name.count("-") + 1] == name.split("-") for known in classes
    ):
        return None
    if name == "gpu":
        return None
    return f"{hint}{family} is known as {', '.join(sorted(set(classes))) or 'just gpu'}"


class Machine(Data):
    """This machine, as the driver sees it."""

    device: Literal["cpu", "cuda"]
    device_name: str
    hardware_class: str
    """Accelerator, memory and form factor; on a machine without one the processor and its cores."""
    devices: int
    """GPUs, or cores that this process may use."""
    memory_bytes: int
    """Of one GPU, or of the machine."""
    driver: str | None = None
    note: str | None = None
    """What could not be found out, and why."""

    @property
    def product(self) -> Accelerator | None:
        """The accelerator's entry in `PRODUCTS`, None where it has none."""
        return PRODUCTS.get(self.device_name) if self.device == "cuda" else None

    def peak_flops(self, precision: str) -> float | None:
        """Dense peak of one device at a case's precision in FLOP/s; None where unknown: never guessed."""
        if self.product is None:
            return None
        return 1e12 * (self.product.peak_fp32 if precision == "fp32" else self.product.peak_16bit)

    def why_not(self, hardware: str) -> str | None:
        """Why a case meant for `hardware` does not belong here, or None. `a100` matches `a100-80gb-sxm`."""
        if hardware == "gpu" and self.device == "cuda":
            return None
        parts = hardware.split("-")
        if self.hardware_class.split("-")[: len(parts)] == parts:
            return None
        return f"it is meant for {hardware}, this machine is {self.hardware_class}"


def detect() -> Machine:
    """This machine. GPUs are found through NVML, so that torch need not be imported."""
    try:
        return _detect_gpu()
    except _NoGpu as reason:
        return detect_cpu(str(reason))


class _NoGpu(Exception):
    """There is no GPU to be found; the text says why."""


def _detect_gpu() -> Machine:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        raise _NoGpu("CUDA_VISIBLE_DEVICES hides every GPU")
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _NoGpu(f"NVML found no GPU: {error}") from error
    try:
        handles = visible_handles(pynvml)
        if not handles:
            raise _NoGpu("NVML found a driver but no GPU")
        names = sorted({_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles})
        memory = min(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
    return gpu_machine(names, count=len(handles), memory_bytes=memory, driver=driver)


def visible_handles(pynvml: Any) -> list[Any]:
    """NVML sees every GPU; a process sees those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = pynvml.nvmlDeviceGetCount()
    if visible is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles = []
    for entry in map(str.strip, visible.split(",")):
        try:
            if entry.isdigit():
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(entry)))
            else:
                handles.append(pynvml.nvmlDeviceGetHandleByUUID(entry))
        except pynvml.NVMLError:
            break  # CUDA, too, ignores everything from the first bad entry on
    if not handles:
        raise _NoGpu(f"CUDA_VISIBLE_DEVICES={visible} names none of the {count} GPUs")
    return handles


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def gpu_machine(names: list[str], *, count: int, memory_bytes: int, driver: str | None) -> Machine:
    """A machine with `count` GPUs of these NVML names. An unknown name gets a class but no peak."""
    name = " + ".join(names)
    product = PRODUCTS.get(name)
    note = None
    if product is not None:
        hardware_class = product.hardware_class
    else:
        note = (
            f"GPU {name!r} is not in perfsuite's table, so its peak FLOP/s is unknown and MFU is left out; "
            "add it to PRODUCTS in perfsuite/hardware.py with its datasheet"
        )
        hardware_class = f"{_slug(name)}-{round(memory_bytes / 2**30)}gb"
    return Machine(
        device="cuda",
        device_name=name,
        hardware_class=hardware_class,
        devices=count,
        memory_bytes=memory_bytes,
        driver=driver,
        note=note,
    )


def detect_cpu(reason: str) -> Machine:
    """This machine without its GPUs; `reason` says why without."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = _cpu_name()
    return Machine(
        device="cpu",
        device_name=name,
        hardware_class=f"cpu-{_slug(name)}-{cores}c",
        devices=cores,
        memory_bytes=psutil.virtual_memory().total,
        note=reason,
    )


@functools.cache
def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine() or "unknown"


def _slug(name: str) -> str:
    name = re.sub(r"\((r|tm)\)|\bcpu\b|@.*|processor|nvidia", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"
