"""What cannot be run dry, and which ranks are. Imports neither torch nor pytest."""

from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.dry.machine import pretended_cpu
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.requirements import CHECKS, OF_THE_MACHINE


def why_not(case: Case, machine: Machine) -> str | None:
    """Return why `case` cannot be run dry on `machine`, or None. Raises `CaseError` without its packages."""
    framework = framework_of(case)
    if (problem := torch_build.wrong_build(pretended_cpu(case.topology))) is not None:
        raise CaseError(problem)
    if case.quantization != "none":
        return f"not by a dry run: bitsandbytes' {case.quantization} kernels do not know fake tensors"
    if case.compile:
        return "not by a dry run: torch.compile makes its kernels on the GPU, and there is none: leave it out"
    for check in CHECKS:
        if check not in OF_THE_MACHINE and (reason := check(case, machine)) is not None:
            return reason
    if (plan := framework.dry(case)) is None:
        return (
            f"not by a dry run: {framework.name} does not say how it builds on fake tensors (Framework.dry)"
        )
    return None if plan.impossible is None else f"not by a dry run: {plan.impossible}"


def ranks(case: Case) -> tuple[int, ...]:
    """Return the ranks that tell what all do: the first, and the last if ranks differ by design."""
    last, plan = case.topology.world_size - 1, framework_of(case).dry(case)
    return (0, last) if last and plan is not None and plan.ranks_differ else (0,)
