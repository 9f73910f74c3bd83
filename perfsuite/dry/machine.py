"""Choose the machine to simulate and the ranks to run, and refuse cases that cannot run dry.

Does not import torch.
"""

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
# Variables with which a rank finds the other ranks in a launch.
RANKS_MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
# These variables are the same for every rank, because only one device is simulated.
OF_ONE_DEVICE = {"LOCAL_RANK": "0"}
# The GPU to simulate if the case is meant for any `gpu`, or if CUDA is requested for a case meant for `cpu`.
ANY_GPU = "NVIDIA H100 80GB HBM3"


def pretended(case: Case, device: Device | None = None) -> tuple[Machine, str | None]:
    """Return the machine to simulate for `case`, and a reason if a CPU replaces the GPU of the case.

    The reason is None otherwise. Raises `DryRunError` if `device` requests CUDA and CUDA cannot be faked.
    """
    wanted = device or ("cpu" if case.hardware[0] == "cpu" else "cuda")
    reason = guard.why_not() if wanted == "cuda" else None
    if reason is not None and device == "cuda":
        raise DryRunError(f"--device cuda: {reason}. Or give --device cpu")
    if wanted == "cuda" and reason is None:
        return pretended_gpu(product(case.hardware), case.topology), None
    instead = "a CPU is simulated instead of a GPU, because"
    lost = "Kernels are therefore those of a CPU, and neither memory nor speed is predicted"
    return pretended_cpu(case.topology), reason and f"{instead} {reason}. {lost}"


def product(hardware: tuple[str, ...]) -> str:
    """Return the first product in `PRODUCTS` that matches an entry of a case's `hardware`, or `ANY_GPU`."""
    for entry in hardware:
        parts = entry.split("-")
        for name, accelerator in PRODUCTS.items():
            if accelerator.hardware_class.split("-")[: len(parts)] == parts:
                return name
    return ANY_GPU


def pretended_gpu(name: str, topology: Topology) -> Machine:
    """Return a machine with one GPU of the given product for each process.

    Each GPU has as much memory as CUDA reports for the product, or the nominal size if that value is unknown.
    """
    memory_bytes = PRODUCTS[name].memory_bytes
    return gpu_machine([name], count=topology.processes_per_node, memory_bytes=memory_bytes, driver=None)


def pretended_cpu(topology: Topology) -> Machine:
    """Return a machine with one core for each process. Its device memory is 0."""
    devices = topology.processes_per_node
    return Machine(device="cpu", device_name="CPU", hardware_class="cpu", devices=devices, memory_bytes=0)


def why_not_dry(case: Case, machine: Machine) -> str | None:
    """Return why `case` cannot be run dry on `machine`, or None.

    Raises `CaseError` if torch is missing or the installed build is wrong.
    """
    framework = framework_of(case)
    problem = torch_build.wrong_build(pretended_cpu(case.topology))
    if problem is not None:
        raise CaseError(problem)
    if case.quantization != "none":
        return (
            f"a dry run cannot do this: bitsandbytes' {case.quantization} kernels do not support fake tensors"
        )
    for check in CHECKS:
        if check not in OF_THE_MACHINE:
            reason = check(case, machine)
            if reason is not None:
                return reason
    plan = framework.dry(case)
    if plan is None:
        return (
            f"a dry run cannot do this: {framework.name} does not define how it builds on fake tensors "
            "(Framework.dry)"
        )
    return None if plan.impossible is None else f"a dry run cannot do this: {plan.impossible}"


def telling_ranks(case: Case) -> tuple[int, ...]:
    """Return the ranks that represent all ranks: the first and, if ranks differ by design, the last."""
    last = case.topology.world_size - 1
    plan = framework_of(case).dry(case)
    return (0, last) if last and plan is not None and plan.ranks_differ else (0,)
