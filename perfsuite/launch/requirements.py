"""Check whether a case can run with this machine and these packages. Imports neither torch nor pytest."""

from collections.abc import Callable

from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import framework_of, missing_package


def unsupported(case: Case, machine: Machine) -> str | None:
    """Return why `case` cannot run on `machine`, or None if it can. The first failing check gives the reason.

    Raises `CaseError` if the case's framework is unknown or refuses the case.
    """
    framework_of(case)
    reasons = (check(case, machine) for check in CHECKS)
    return next((reason for reason in reasons if reason is not None), None)


def wrong_torch(case: Case, machine: Machine) -> str | None:
    """Return why the installed torch cannot train `case` on the GPUs of `machine`, or None if it can."""
    plan = framework_of(case).plan(case)
    if not plan.needs_torch:
        return None
    if plan.command is not None and plan.command.starts_ranks and not torch_build.installed():
        return None
    return torch_build.wrong_build(machine)


def _hardware(case: Case, machine: Machine) -> str | None:
    reasons = [machine.why_not(hardware) for hardware in case.hardware]
    return None if None in reasons else "; ".join(reason for reason in reasons if reason)


def _topology(case: Case, machine: Machine) -> str | None:
    nodes = case.topology.nodes
    per_node = case.topology.processes_per_node
    if nodes > machine.nodes:
        have = "this is one machine" if machine.nodes == 1 else f"there are only {machine.nodes}"
        return f"it needs {nodes} nodes (processes per node: {per_node}), but {have}"
    if per_node <= machine.devices:
        return None
    what = "GPUs" if machine.device == "cuda" else "cores"
    return f"it needs {per_node} {what} (one per process), but this machine has {machine.devices}"


def _attention(case: Case, machine: Machine) -> str | None:
    if case.attention != "flash_attention_2":
        return None
    return _on_gpu(machine, "flash_attention_2", "flash_attn")


def _fields(case: Case, machine: Machine) -> str | None:
    name = case.framework.name
    promises = case.framework.promises
    for field in sorted(promises.ignores):
        value = getattr(case, field)
        if value != Case.model_fields[field].default:
            return f"{name} does not support {field}, but the case asks for {value!r}"
    for field, values in promises.takes.items():
        value = getattr(case, field)
        if value not in values:
            return (
                f"{name} supports {field} {' or '.join(map(repr, values))}, but the case asks for {value!r}"
            )
    return None


def _finetuning(case: Case, machine: Machine) -> str | None:
    if case.lora is not None and case.framework.promises.builds_model:
        missing = _needs("lora", "peft")
        if missing:
            return missing
    if case.quantization == "none":
        return None
    return _on_gpu(machine, f"quantization {case.quantization!r}", "bitsandbytes")


def _configuration(case: Case, machine: Machine) -> str | None:
    if case.model.config or not case.framework.promises.builds_model:
        return None
    return (
        f"{case.framework.name} cannot build {case.model.name}: this model has a name, but no configuration"
    )


def _fast_mamba(case: Case, machine: Machine) -> str | None:
    """Return a reason if the case needs the package mamba_ssm, and this package is missing.

    Without this package, a step of a Mamba model takes minutes on a GPU, because it launches a million
    kernels one by one.
    """
    is_on_gpu = case.model.config.get("model_type") == "mamba" and machine.device != "cpu"
    if not (is_on_gpu and _builds_model(case)):
        return None
    missing = missing_package("mamba_ssm")
    return (
        missing
        and f"for a Mamba on a GPU {missing}. transformers' own scan is slow: it takes one position at a time"
    )


def _transformers(case: Case, machine: Machine) -> str | None:
    return _needs(f"the model {case.model.name}", "transformers") if _builds_model(case) else None


CHECKS: tuple[Callable[[Case, Machine], str | None], ...] = (
    _hardware,
    _topology,
    _attention,
    _fields,
    _finetuning,
    _configuration,
    # This must precede the checks that use the framework's plan, because the plan can use the library to read
    # a file.
    lambda case, machine: missing_package(*case.framework.packages),
    _fast_mamba,
    _transformers,
    lambda case, machine: framework_of(case).unsupported(case, machine),
)
# Checks of the amount of hardware. A simulated machine always has enough.
OF_THE_MACHINE = frozenset({_hardware, _topology})


def _needs(what: str, package: str) -> str | None:
    missing = missing_package(package)
    return missing and f"for {what} {missing}"


def _on_gpu(machine: Machine, what: str, package: str) -> str | None:
    return f"{what} runs on GPUs only" if machine.device == "cpu" else _needs(what, package)


def _builds_model(case: Case) -> bool:
    """Return whether each rank builds the case's model. False for scripts and simulations."""
    return case.framework.promises.builds_model and framework_of(case).plan(case).needs_torch
