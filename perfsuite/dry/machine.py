"""The machine that a dry run pretends, cases that cannot be run dry, ranks to run. Imports no torch."""

from typing import Literal

from perfsuite.case import torch_build
from perfsuite.case.case import Case, Topology
from perfsuite.case.hardware import PRODUCTS, Machine
from perfsuite.dry import guard
from perfsuite.errors import CaseError, DryRunError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.requirements import CHECKS, OF_THE_MACHINE
from perfsuite.node.machine import gpu_machine

Device = Literal["cuda", "cpu"]
# Variables with which a rank would find the others.
RANKS_MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
OF_ONE_DEVICE = {"LOCAL_RANK": "0"}  # for any rank, since its device is the only one that is pretended
ANY_GPU = "NVIDIA H100 80GB HBM3"  # for a case meant for `gpu`, or for `cpu` if CUDA is requested


def pretended(case: Case, device: Device | None = None) -> tuple[Machine, str | None]:
    """Return the machine to pretend for `case`, and why it is not one that the case is meant for, or None.

    Raises `DryRunError` if `device` requests CUDA and it cannot be pretended.
    """
    wanted = device or ("cpu" if case.hardware[0] == "cpu" else "cuda")
    reason = guard.why_not() if wanted == "cuda" else None
    if reason is not None and device == "cuda":
        raise DryRunError(f"--device cuda: {reason}, or give --device cpu")
    if wanted == "cuda" and reason is None:
        return pretended_gpu(product(case.hardware), case.topology), None
    return pretended_cpu(case.topology), reason and f"a CPU is pretended in place of a GPU: {reason}"


def product(hardware: tuple[str, ...]) -> str:
    """Return the first product in the table that matches an entry of a case's `hardware`."""
    for entry in hardware:
        parts = entry.split("-")
        for name, accelerator in PRODUCTS.items():
            if accelerator.hardware_class.split("-")[: len(parts)] == parts:
                return name
    return ANY_GPU


def pretended_gpu(name: str, topology: Topology) -> Machine:
    """Return a machine with one GPU of this product for each process."""
    memory_bytes = PRODUCTS[name].memory_gb << 30
    return gpu_machine([name], count=topology.processes_per_node, memory_bytes=memory_bytes, driver=None)


def pretended_cpu(topology: Topology) -> Machine:
    """Return a machine with one core for each process, and no memory of its own."""
    devices = topology.processes_per_node
    return Machine(device="cpu", device_name="CPU", hardware_class="cpu", devices=devices, memory_bytes=0)


def why_not_dry(case: Case, machine: Machine) -> str | None:
    """Return why `case` cannot be run dry on `machine`, or None. Raises `CaseError` for missing packages."""
    framework = framework_of(case)
    problem = torch_build.wrong_build(pretended_cpu(case.topology))
    if problem is not None:
        raise CaseError(problem)
    if case.quantization != "none":
        return f"not by a dry run: bitsandbytes' {case.quantization} kernels do not know fake tensors"
    if case.compile:
        return "not by a dry run: torch.compile makes its kernels on the GPU, and there is none: leave it out"
    for check in CHECKS:
        if check not in OF_THE_MACHINE:
            reason = check(case, machine)
            if reason is not None:
                return reason
    plan = framework.dry(case)
    if plan is None:
        return (
            f"not by a dry run: {framework.name} does not say how it builds on fake tensors (Framework.dry)"
        )
    return None if plan.impossible is None else f"not by a dry run: {plan.impossible}"


def telling_ranks(case: Case) -> tuple[int, ...]:
    """Return the ranks that represent all: the first, and the last if ranks differ by design."""
    last = case.topology.world_size - 1
    plan = framework_of(case).dry(case)
    return (0, last) if last and plan is not None and plan.ranks_differ else (0,)
