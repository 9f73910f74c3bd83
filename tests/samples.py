"""Valid objects to start from: each function takes the fields that a test wants otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import settings

from perfsuite import data
from perfsuite.case import Case, CaseFile, Topology
from perfsuite.frameworks.fake import Fake
from perfsuite.hardware import Machine, gpu_machine
from perfsuite.models import MODELS
from perfsuite.result import Failure, Figures, LaunchFile, Memory, RankReport, Run
from perfsuite.rundir import RunDir

deterministic = settings(deadline=None, derandomize=True, database=None, max_examples=60)
"""For hypothesis: the same examples in every run, however slow the machine."""


def make_case(**changes: Any) -> Case:
    """Two simulated processes on a CPU; 5 steps of warm-up at the most, 20 measured."""
    values: dict[str, Any] = {
        "model": MODELS["gpt2-tiny"],
        "framework": Fake(),
        "sequence_length": 64,
        "micro_batch": 2,
        "topology": Topology(processes_per_node=2),
        "hardware": "cpu",
        "max_warmup_steps": 5,
        "steps": 20,
    }
    return Case(**{**values, **changes})


def make_machine(**changes: Any) -> Machine:
    """A processor with two cores."""
    values: dict[str, Any] = {
        "device": "cpu",
        "device_name": "Test CPU",
        "hardware_class": "cpu-test-2c",
        "devices": 2,
        "memory_bytes": 8 * 2**30,
    }
    return Machine(**{**values, **changes})


def make_gpu_machine(name: str = "NVIDIA H100 80GB HBM3", *, count: int = 8) -> Machine:
    """A machine whose peak is known."""
    return gpu_machine([name], count=count, memory_bytes=85899345920, driver="580.1")


def make_figures(**changes: Any) -> Figures:
    """1,000 tokens/s in 64 MiB, rather even steps."""
    values = {
        "tokens_per_s": 1000.0,
        "tokens_per_s_mean": 990.0,
        "step_jitter": 1.1,
        "peak_memory_bytes": 64.0 * 2**20,
    }
    return Figures(**{**values, **changes})


def make_run(**changes: Any) -> Run:
    """A launch that went well."""
    values: dict[str, Any] = {
        "case": make_case(),
        "machine": make_machine(),
        "started_at": "2026-01-02T03:04:05+00:00",
        "duration_s": 1.5,
        "figures": make_figures(),
        "step_s": (0.25,) * 25,
        "loss": tuple(7 - 0.1 * step for step in range(25)),
        "window": (0, 25),
        "slowest_rank": 1,
    }
    return Run(**{**values, **changes})


def make_launches(*speeds: float, machine: Machine | None = None, **figures: Any) -> list[Run]:
    """A launch for each speed relative to the usual one; `figures` are those of every launch."""
    return [
        make_run(
            machine=machine or make_machine(),
            figures=make_figures(
                **{"tokens_per_s": 1000 * speed, "tokens_per_s_mean": 990 * speed, **figures}
            ),
        )
        for speed in speeds
    ]


def make_report(rank: int = 0, **changes: Any) -> RankReport:
    """What one rank of `make_case` reports: 25 steps of 0.1 s, 256 tokens each, a falling loss."""
    steps = changes.get("step_s", (0.1,) * 25)
    values: dict[str, Any] = {
        "rank": rank,
        "world_size": 2,
        "host": "here",
        "clock": "simulated",
        "tokens_per_step": 256,
        "step_s": steps,
        "wall_s": sum(steps),
        "loss": tuple(7 - 0.1 * step for step in range(25)),
        "memory": Memory(peak=10**6, method="simulated"),
    }
    return RankReport(**{**values, **changes})


def write_launch(
    directory: Path,
    *reports: RankReport,
    case: Case | None = None,
    ended: tuple[Failure, ...] = (),
    peak_flops: float | None = None,
) -> RunDir:
    """The files that driver, launcher and workers leave behind."""
    run_dir = RunDir(directory)
    asked = CaseFile(case=case or make_case(), device="cpu", peak_flops=peak_flops)
    data.write(run_dir.case, asked)
    data.write(run_dir.launch, LaunchFile(failures=ended))
    for report in reports:
        data.write(run_dir.rank(report.rank), report)
    return run_dir
