"""The GPUs that the steps of an allocation ask for and get. Imports neither torch nor pytest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfsuite.errors import MachineError
from perfsuite.node.describe import GRANTED_GPUS, Described

GPU_REQUESTS = frozenset(
    [
        *("SLURM_CPUS_PER_GPU", "SLURM_GPUS", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK"),
        *("SLURM_GPU_BIND", "SLURM_MEM_PER_GPU", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"),
        GRANTED_GPUS,  # that of the step counts, not that of the script of the job
    ]
)
"""Variables that an allocation has by its own options and `srun` reads as options of a step, which has one
task a node for all GPUs: https://slurm.schedmd.com/srun.html, "Input environment variables"."""


def of_each_node(found: Mapping[str, int]) -> int | None:
    """Return the GPUs of every node; None if `found` is empty. Raises `MachineError` if they differ."""
    if len(set(found.values())) > 1:
        each = ", ".join(f"{count} on {node}" for node, count in found.items())
        raise MachineError(
            f"Slurm gave this allocation unlike numbers of GPUs: {each}. Ask for them per node: --gres=gpu:8 "
            "of salloc or sbatch"
        )
    return next(iter(found.values()), None)


def for_srun(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that `srun` takes for its own options about GPUs."""
    return {name: value for name, value in variables.items() if name not in GPU_REQUESTS}


def refuse_other_gpus(told: Sequence[Described]) -> None:
    """Raise `MachineError` if a node sees other GPUs than Slurm gave it."""
    for each in told:
        seen = each.machine.devices if each.machine.device == "cuda" else 0
        if each.granted_gpus not in (None, seen):
            note = "" if each.machine.note is None else f" ({each.machine.note})"
            raise MachineError(
                f"{each.name}: Slurm gave a step {each.granted_gpus} GPUs, and it sees {seen}{note}. Look at "
                "nvidia-smi on that node, and leave it out (--exclude of salloc or sbatch); if no GPU is to "
                "be used, ask for none"
            )
