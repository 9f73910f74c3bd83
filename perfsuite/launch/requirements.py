"""What a case needs of a machine and of the installed packages."""

from __future__ import annotations

from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import framework_of, missing_package


def unsupported(case: Case, machine: Machine) -> str | None:
    """Why `case` cannot run on `machine`, or None. Knows before anything is launched, without torch."""
    framework = framework_of(case)
    reasons = [machine.why_not(hardware) for hardware in case.hardware]
    topology = case.topology
    if None not in reasons:
        return "; ".join(reason for reason in reasons if reason)
    if topology.nodes > 1:
        return f"it needs {topology.nodes} nodes of {topology.processes_per_node}, this is one machine"
    if topology.processes_per_node > machine.devices:
        what = "GPUs" if machine.device == "cuda" else "cores"
        needed = f"{topology.processes_per_node} {what} (one per process)"
        return f"it needs {needed}, this machine has {machine.devices}"
    if case.attention == "flash_attention_2":
        if machine.device == "cpu":
            return "flash_attention_2 runs on GPUs only"
        if (missing := missing_package("flash_attn")) is not None:
            return f"for flash_attention_2 {missing}"
    for field in sorted(case.framework.ignores):
        if (value := getattr(case, field)) != Case.model_fields[field].default:
            return f"{case.framework.name} knows no {field}, and the case asks for {value!r}"
    if case.lora is not None and (missing := missing_package("peft")) is not None:
        return f"for lora {missing}"
    if case.quantization != "none":
        if machine.device == "cpu":
            return f"quantization {case.quantization!r} runs on GPUs only"
        if (missing := missing_package("bitsandbytes")) is not None:
            return f"for quantization {missing}"
    if not case.model.config and case.framework.builds_model:
        return f"{case.framework.name} cannot build {case.model.name}: it has a name only, no configuration"
    if (missing := _slow_mamba(case, machine)) is not None:
        return missing
    return missing_package(*case.framework.packages) or framework.unsupported(case, machine)


def wrong_torch(case: Case, machine: Machine) -> str | None:
    """Why `case`, which `machine` can run, cannot be trained there with the installed torch, or None.

    An error, not a reason to skip: the machine has the GPUs.
    """
    return torch_build.wrong_build(machine) if framework_of(case).plan(case).needs_torch else None


def _slow_mamba(case: Case, machine: Machine) -> str | None:
    """Why a Mamba would take minutes a step on a GPU, or None: a million kernels, launched one by one."""
    if case.model.config.get("model_type") != "mamba" or machine.device == "cpu":
        return None
    if not (case.framework.builds_model and framework_of(case).plan(case).needs_torch):
        return None
    missing = missing_package("mamba_ssm")
    return missing and f"for a Mamba on a GPU {missing}; transformers' own scan goes position by position"
