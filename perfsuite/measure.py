"""The flow: launch a case, measure it, judge it, and launch again while in doubt. Read this first.

    case --case.json--> launcher --> one worker per rank --rank-N.json--> collect --> run.json --> judge

Driver side; imports neither torch nor pytest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import Case, CaseFile
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError
from perfsuite.frameworks.base import missing_package
from perfsuite.launch import torch_build
from perfsuite.launch.health import sampler
from perfsuite.launch.local import OnProgress, launch, no_progress
from perfsuite.results.collect import collect
from perfsuite.results.rank_report import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.verdict.judge import Verdict


def unsupported(case: Case, machine: Machine) -> str | None:
    """Why `case` cannot run on `machine`, or None. Knows before anything is launched, without torch."""
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
    return missing_package(*case.framework.packages) or case.framework.unsupported(case, machine)


def wrong_torch(case: Case, machine: Machine) -> str | None:
    """Why `case`, which `machine` can run, cannot be trained there with the installed torch, or None.

    An error, not a reason to skip: the machine has the GPUs.
    """
    return torch_build.wrong_build(machine) if case.framework.needs_torch else None


def _slow_mamba(case: Case, machine: Machine) -> str | None:
    """Why a Mamba would take minutes a step on a GPU, or None: a million kernels, launched one by one."""
    if case.model.config.get("model_type") != "mamba" or machine.device == "cpu":
        return None
    if not (case.framework.builds_model and case.framework.needs_torch):
        return None
    missing = missing_package("mamba_ssm")
    return missing and f"for a Mamba on a GPU {missing}; transformers' own scan goes position by position"


def measure(
    case: Case,
    machine: Machine,
    directory: Path,
    verdict_on: Callable[[list[Run]], Verdict],
    *,
    runs: list[Run] | None = None,
    inject: str | None = None,
    on_launch: Callable[[int], None] = lambda launch: None,
    on_progress: OnProgress = no_progress,
) -> tuple[list[Run], Verdict]:
    """Launch `case` until `verdict_on` the runs so far is no longer undecided.

    Each run is appended to `runs`, an empty list: what an error or an interrupt leaves is there.
    """
    runs = [] if runs is None else runs
    while True:
        number = len(runs) + 1
        on_launch(number)
        runs.append(
            run(case, machine, directory / f"launch-{number}", inject=inject, on_progress=on_progress)
        )
        verdict = verdict_on(runs)
        if verdict.outcome != "undecided":
            return runs, verdict


def run(
    case: Case,
    machine: Machine,
    directory: Path,
    *,
    inject: str | None = None,
    on_progress: OnProgress = no_progress,
) -> Run:
    """Launch `case` once in fresh processes and measure it. All its files are in `directory`."""
    case.framework.check(case)
    run_dir = RunDir(directory)
    if run_dir.case.exists():
        raise FileError(f"{directory} holds another launch: its reports would be taken for this one's")
    asked = CaseFile(
        case=case,
        device=machine.device,
        peak_flops=machine.peak_flops(case.precision),
        inject=inject,
    )
    documents.write(run_dir.case, asked)
    started_at, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    health = sampler(machine, case.topology.processes_per_node)
    try:
        failure = launch(run_dir, case, device=machine.device, on_progress=on_progress, sampler=health)
        duration_s = time.monotonic() - began
    finally:
        seen = health.finish()
    measured = collect(
        run_dir,
        machine,
        started_at=started_at,
        duration_s=duration_s,
        failure=failure,
        health=seen,
    )
    documents.write(run_dir.run, measured)
    return measured
