"""Detect this machine: its GPUs with NVML, or its processor. Imports neither torch nor pytest."""

import contextlib
import functools
import itertools
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from perfsuite.case.hardware import AND, PRODUCTS, Machine
from perfsuite.errors import MachineError
from perfsuite.node import nvml_process

# Values of CUDA_VISIBLE_DEVICES that hide every GPU. Slurm sets the last one in jobs without GPUs.
HIDDEN = ("", "-1", "NoDevFiles")
CPU_FILE = Path("/proc/cpuinfo")


def detect(*, library: str = nvml_process.LIBRARY) -> Machine:
    """Return this machine. NVML finds the GPUs, so that torch need not be imported.

    A machine without the file `library` has no NVML, and so no GPU. Raises `MachineError` if NVML does not
    answer, if it cannot read a visible GPU, or if MIG splits a visible GPU.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN
    if is_hidden or not nvml_process.has_library(library):
        return detect_here()
    return Machine.model_validate(nvml_process.ask("perfsuite.node.machine"))


def detect_here() -> Machine:
    """Do the same as `detect`, but call NVML in this process and without a deadline."""
    try:
        return _detect_gpu()
    except _NoGpu as reason:
        return detect_cpu(str(reason))


class _NoGpu(Exception):
    """No GPU was found. The text is the reason."""


def _detect_gpu() -> Machine:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
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
        names = set()
        memory = []
        for index, handle in enumerate(handles):
            with readable(pynvml, str(index), handle):
                names.add(pynvml.nvmlDeviceGetName(handle))
                # The GPU might have no memory of its own (GB10, Jetson).
                with contextlib.suppress(pynvml.NVMLError_NotSupported):
                    memory.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            _refuse_mig(pynvml, index, handle)
        driver = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    least = min(memory, default=psutil.virtual_memory().total)
    return gpu_machine(sorted(names), count=len(handles), memory_bytes=least, driver=driver)


def visible_handles(pynvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs that CUDA_VISIBLE_DEVICES leaves visible.

    Raises `MachineError` if CUDA_VISIBLE_DEVICES names no GPU of this machine.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = pynvml.nvmlDeviceGetCount()
    entries = map(str, range(count)) if visible is None else visible.split(",")
    named = (_named(pynvml, entry.strip(), count) for entry in entries)
    # Like CUDA, ignore the first bad entry and everything after it.
    handles = list(itertools.takewhile(lambda handle: handle is not None, named))
    if not handles and visible is not None:
        if count == 0 or visible.split(",")[0].strip() in HIDDEN:
            raise _NoGpu(f"CUDA_VISIBLE_DEVICES={visible} hides every GPU")
        raise MachineError(
            f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine, which has {count}. Give GPU "
            "numbers (from 0) or whole UUIDs (`nvidia-smi -L`), or an empty value to measure on the CPU"
        )
    return handles


def _named(pynvml: Any, entry: str, count: int) -> Any | None:
    """Return the handle for an entry of CUDA_VISIBLE_DEVICES: an index or a whole UUID. None if unknown."""
    with readable(pynvml, entry):
        if entry.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(entry)) if int(entry) < count else None
        with contextlib.suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            return pynvml.nvmlDeviceGetHandleByUUID(entry)
    return None


def pci_bus_id(pynvml: Any, handle: Any) -> str | None:
    """Return the PCI bus id of a card, as `nvidia-smi` prints it. None if NVML does not provide it."""
    try:
        return str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    except Exception:
        return None


@contextlib.contextmanager
def readable(pynvml: Any, gpu: str, handle: Any = None) -> Iterator[None]:
    """Turn an NVML error in the `with` block into a `MachineError` that names the GPU."""
    try:
        yield
    except pynvml.NVMLError as error:
        raise MachineError(
            f"{_gpu_name(pynvml, gpu, handle)} cannot be read: {error}. Look at `nvidia-smi` and dmesg, and "
            "repair the GPU. To measure without it, name only the other GPUs in CUDA_VISIBLE_DEVICES"
        ) from error


def _gpu_name(pynvml: Any, gpu: str, handle: Any) -> str:
    bus_id = pci_bus_id(pynvml, handle) if handle is not None else None
    return f"GPU {gpu}" + (f" ({bus_id})" if bus_id else "")


def _refuse_mig(pynvml: Any, index: int, handle: Any) -> None:
    """Raise `MachineError` if MIG splits a GPU: CUDA sees an instance, which is only a part of the card."""
    try:
        is_split = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # the card has no MIG, or this is already an instance
        return
    if is_split:
        raise MachineError(
            f"{_gpu_name(pynvml, str(index), handle)} is split by MIG, so a process can use only a part of "
            "it. Name an instance (CUDA_VISIBLE_DEVICES=MIG-..., as `nvidia-smi -L` lists them), or turn MIG "
            f"off (`nvidia-smi -i {pci_bus_id(pynvml, handle) or index} -mig 0`)"
        )


def gpu_machine(names: list[str], *, count: int, memory_bytes: int, driver: str | None) -> Machine:
    """Return a machine with `count` GPUs. `names` are the different names that NVML gives these GPUs.

    A GPU with an unknown name has a hardware class, but no peak FLOP/s.
    """
    name = AND.join(names)
    product = PRODUCTS.get(name)
    note = None
    if product is None:
        note = (
            f"GPU {name!r} is not in perfsuite's table, so its peak FLOP/s is unknown and MFU is left out. "
            "Add the GPU and its datasheet to perfsuite/case/accelerators.json"
        )
    elif product.peak_16bit is None:
        note = f"the peak FLOP/s of {name} is unknown ({product.source}), so MFU is left out"
    unknown = f"{_slug(name)}-{round(memory_bytes / 2**30)}gb"
    return Machine(
        device="cuda",
        device_name=name,
        hardware_class=product.hardware_class if product else unknown,
        devices=count,
        memory_bytes=memory_bytes,
        driver=driver,
        note=note,
    )


def detect_cpu(reason: str, *, cpu_file: Path = CPU_FILE) -> Machine:
    """Return this machine as a CPU machine. Its note is `reason`, which says why no GPUs are used.

    `cpu_file` contains the name of the processor. Raises `MachineError` if this file cannot be read.
    """
    cores = len(os.sched_getaffinity(0))
    name = _cpu_name(cpu_file)
    return Machine(
        device="cpu",
        device_name=name,
        hardware_class=f"cpu-{_slug(name)}-{cores}c",
        devices=cores,
        memory_bytes=psutil.virtual_memory().total,
        note=reason,
    )


@functools.cache
def _cpu_name(file: Path) -> str:
    try:
        content = file.read_text()
    except OSError as error:
        raise MachineError(f"{file} cannot be read: {error.strerror}. Mount /proc") from None
    match = re.search(r"^model name\s*:\s*(.+)$", content, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _slug(name: str) -> str:
    name = re.sub(r"\((r|tm)\)|\bcpu\b|@.*|processor|nvidia", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"


if __name__ == "__main__":
    nvml_process.answer(lambda: detect_here().model_dump(mode="json"))
