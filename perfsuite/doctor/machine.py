"""Check the machine, the limits of this process, other users, and the installed extensions."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from perfsuite import extensions
from perfsuite.analysis.cores import advice_on_few
from perfsuite.case.framework import load as load_framework
from perfsuite.case.hardware import ACCELERATORS, Machine
from perfsuite.doctor.rows import Row, checked, failed, passed, unknown
from perfsuite.errors import MachineError
from perfsuite.extensions import COMMANDS, FRAMEWORKS, GROUPS, LAUNCHERS, METRICS, Extension
from perfsuite.launch.launchers import load as load_launcher
from perfsuite.launch.quiet import Neighbours
from perfsuite.report.progress import silent
from perfsuite.results import metric

SHARED_MEMORY_BYTES = 2**30  # minimum size of /dev/shm, which NCCL uses; containers have 64 MiB by default
SHARED_MEMORY_ADVICE = (
    "if it is too small, NCCL fails, and workers of a DataLoader die with a bus error: start the "
    "container with --ipc=host or --shm-size=8g, or mount an emptyDir with medium Memory in the pod"
)


def machine_rows(machine: Machine) -> list[Row]:
    """Describe the machine, say what is unknown about it, and list the markers that select cases here."""
    devices = "GPUs" if machine.device == "cuda" else "cores"
    parts = (f"{machine.devices} {devices}", machine.device_name, f"{machine.memory_bytes / 2**30:.0f} GiB")
    rows = [passed("machine", f"{machine.hardware_class}: {', '.join(parts)}")]
    peak = machine.peak_flops("fp16-mixed")
    check = "peak FLOP/s"
    if machine.product is not None and peak is not None:
        dtype = "in fp16, unknown in bf16" if machine.emulates("bf16") else "at 16 bit"
        rows.append(passed(check, f"{peak / 1e12:g} TFLOP/s dense {dtype} ({machine.product.source})"))
    elif machine.device == "cuda":
        rows.append(unknown(check, "unknown, so there is no MFU", machine.note))
    elif machine.note is not None:
        rows.append(passed("GPUs", machine.note))
    here = [f"-m {name}" for name in ACCELERATORS if why_not(machine, name) is None]
    return [
        *rows,
        passed(
            "cases run here",
            f"{', '.join(here)} (to see why another marker selects no cases: --expect MARKER)",
        ),
    ]


def why_not(machine: Machine, hardware: str) -> str | None:
    """Return why cases for that hardware do not run here, or None. CPU cases also run on GPU machines."""
    return None if hardware == "cpu" else machine.why_not(hardware)


def system_rows(machine: Machine, *, root: Path = Path("/")) -> list[Row]:
    """Check the limits and permissions of this process, from /proc and /sys under `root`."""
    rows = [_cores_row(machine, root), _peak_reset_row(machine, root)]
    if machine.device == "cuda" and machine.devices > 1:
        rows.append(_shared_memory_row(root))
    there = gpus_on_bus(root)
    if machine.device == "cuda" and machine.devices < there:
        observed = f"{machine.devices} of the {there} GPUs are visible: cases of more than {machine.devices} "
        observed += "processes are skipped, and jobs on hidden GPUs can slow down the visible GPUs"
        advice = (
            "show all GPUs (CUDA_VISIBLE_DEVICES, --gpus=all, nvidia.com/gpu of the pod), or keep the hidden "
            "GPUs idle"
        )
        rows.append(unknown("hidden GPUs", observed, advice))
    return rows


def gpus_on_bus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, whether or not this process may use them."""
    return sum(_is_gpu(device) for device in (root / "sys/bus/pci/devices").glob("*"))


def _is_gpu(device: Path) -> bool:
    """Return whether an entry of the PCI bus is an NVIDIA GPU. Containers see the entire bus."""
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith(("0x0300", "0x0302"))  # VGA, or 3D without a display


def _cores_row(machine: Machine, root: Path) -> Row:
    cores = len(os.sched_getaffinity(0))
    limit = "without a visible cgroup limit"
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max" and int(quota) < cores * int(period):
            return (failed if machine.device == "cpu" else unknown)(
                "cores",
                f"{cores} cores are visible, but a cgroup grants only as much CPU time as "
                f"{int(quota) / int(period):.1f} cores have",
                "start the container with whole cores (--cpuset-cpus) instead of a share of their time: "
                "a process that has used its share is paused until the next period",
            )
        limit = "without a limit on their time"
    if machine.device == "cpu":
        return passed("cores", f"{cores}, {limit}")
    observed = f"{cores} of {os.cpu_count()}, {cores / machine.devices:.2g} for each GPU, {limit}"
    advice = advice_on_few(cores, machine.devices, os.cpu_count())
    return passed("cores", observed) if advice is None else unknown("cores", observed, advice)


def _peak_reset_row(machine: Machine, root: Path) -> Row:
    file = root / "proc/self/clear_refs"
    if os.access(file, os.W_OK):
        return passed("peak memory reset", f"{file} can be written")
    return (failed if machine.device == "cpu" else unknown)(
        "peak memory reset",
        f"{file} cannot be written: peaks on a CPU include the memory for building the model",
        "run in a container whose /proc is not read-only, or compare only GPU memory",
    )


def _shared_memory_row(root: Path) -> Row:
    try:
        space = os.statvfs(root / "dev/shm")
    except OSError as error:
        return unknown("shared memory", f"/dev/shm: {error.strerror}", SHARED_MEMORY_ADVICE)
    size = space.f_blocks * space.f_frsize
    if size >= SHARED_MEMORY_BYTES:
        return passed("shared memory", f"/dev/shm holds {size / 2**30:.0f} GiB")
    return unknown(
        "shared memory",
        f"/dev/shm holds {size / 2**20:.0f} MiB",
        SHARED_MEMORY_ADVICE,
    )


def neighbours_row(machine: Machine, neighbours: Neighbours | None = None) -> Row:
    """Check that nobody else uses the cores or GPU memory now. If somebody does, the result is unknown."""
    watched = Neighbours(say=silent, show=silent) if neighbours is None else neighbours
    try:
        others = watched.look(machine, machine.devices)
    except MachineError as error:
        return unknown("other processes", str(error))
    if not others:
        return passed("other processes", "none uses the machine")
    advice = "end these processes, or measure at another time: while they run, launches are set aside"
    return unknown("other processes", "; ".join(others), advice)


def extensions_row(load_command: Callable[[Extension], object]) -> Row:
    """Import the extensions in other packages. Each must have a unique name and the right type."""
    problems = [
        *extensions.problems(COMMANDS, load_command),
        *extensions.problems(FRAMEWORKS, load_framework),
        *extensions.problems(METRICS, lambda extension: metric.find_metric(extension.name)),
        *extensions.problems(LAUNCHERS, load_launcher),
    ]
    names = [
        f"{extension.name} of {extension.package}"
        for group in GROUPS
        for extension in extensions.installed(group)
    ]
    observed = "; ".join(problems) or ", ".join(names) or "none installed"
    advice = "repair or remove these packages: everything that needs them fails"
    return checked("extensions", observed, ok=not problems, advice=advice)
