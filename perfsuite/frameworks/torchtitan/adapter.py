"""torchtitan: its own Trainer, FSDP2 over all ranks, or FSDP2 with tensor parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import DryPlan, Framework, LaunchPlan, Ranks, StepClock, Workload
from perfsuite.frameworks.torchtitan.limits import LOSS_CHUNKS, MIN_TORCH, PRECISIONS, unsupported_shape


class TorchTitan(Framework):
    """Degrees of parallelism of torchtitan's Trainer. Over the ranks that these leave it shards (FSDP2)."""

    name: ClassVar[str] = "torchtitan"
    packages: ClassVar[tuple[str, ...]] = ("torchtitan",)

    tensor_parallel: int = Field(default=1, ge=1, strict=True)
    """Ranks that compute one sequence together, with sequence parallelism between the matmuls."""
    data_parallel_replicate: int = Field(default=1, ge=1, strict=True)
    """Groups of ranks that replicate, while the ranks of a group shard (HSDP)."""
    disable_cuda_graphs: bool = True
    """False: forward and backward are captured in a CUDA graph in the second step and replayed from then on,
    torchtitan's own default. What a replay does cannot be counted."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        ranks = case.topology.world_size
        if ranks % (self.tensor_parallel * self.data_parallel_replicate):
            return (
                f"tensor_parallel={self.tensor_parallel} times data_parallel_replicate="
                f"{self.data_parallel_replicate} must divide the number of processes, {ranks}"
            )
        if not self.disable_cuda_graphs and machine.device == "cpu":
            return "disable_cuda_graphs=False asks for CUDA graphs, which a CPU does not have"
        if case.precision not in PRECISIONS:
            return f"precision {case.precision!r} is not one of {', '.join(PRECISIONS)}"
        if case.attention != "sdpa":
            return f"torchtitan is measured with attention='sdpa' only, not {case.attention!r}"
        for name, parts in (("loss in chunks", LOSS_CHUNKS), ("tensor_parallel", self.tensor_parallel)):
            if case.sample_length % parts:
                return (
                    f"torchtitan's {name} splits a sequence into {parts} equal parts, "
                    f"which sequence_length={case.sequence_length} does not allow"
                )
        if torch_build.release() < MIN_TORCH:
            needed = ".".join(map(str, MIN_TORCH))
            return f"torchtitan 0.3 needs torch {needed} or newer, this is {torch_build.summary()}"
        return unsupported_shape(case.model, self.tensor_parallel)

    def plan(self, case: Case) -> LaunchPlan:
        return LaunchPlan(process_group="library")

    def dry(self, case: Case) -> DryPlan:
        if self.disable_cuda_graphs:
            return DryPlan()
        return DryPlan(impossible="a dry run captures no CUDA graph: leave disable_cuda_graphs as it is")

    def expected(self, case: Case) -> dict[str, str]:
        replicate, tensor = self.data_parallel_replicate, self.tensor_parallel
        mesh = [f"fsdp {case.topology.world_size // (replicate * tensor)}"]
        placements = ["Shard(0)"]
        if tensor > 1:  # norms; matrices split by their inputs; by their outputs
            mesh.append(f"tp {tensor}")
            placements = ["Shard(0), Replicate", "Shard(0), Shard(1)", "StridedShard(0), Shard(0)"]
        if replicate > 1:
            mesh.insert(0, f"dp_replicate {replicate}")
            placements = [f"Replicate, {placement}" for placement in placements]
        return {
            "wrapper": "FSDPModule",
            "mesh": " x ".join(mesh),
            "sharding": " and ".join(placements),
            "cuda_graphs": "no" if self.disable_cuda_graphs else "yes",
        }

    def load(self, case: Case, device: Any) -> None:
        from perfsuite.frameworks.torchtitan import compat

        compat.before_import(device.type)
        import perfsuite.frameworks.torchtitan.trainer  # noqa: F401

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build a Trainer with the case's configuration. It makes the process group."""
        from perfsuite.frameworks.torchtitan.trainer import CaseTrainer, trainer_config

        trainer = CaseTrainer(trainer_config(case), clock)

        def run(steps: int) -> list[Any]:
            assert steps == trainer.config.training.steps
            trainer.train()
            return trainer.losses()

        return Workload(
            run=run,
            data_parallel=trainer.data_parallel,
            model=trainer.model,
            settings=trainer.settings(),
            own_tokens_per_s=lambda: trainer.last_metrics.metrics["throughput(tps)"] * ranks.world_size,
        )
