"""torchtitan: its own Trainer, FSDP2 over all ranks, or FSDP2 with tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from perfsuite.case import torch_build
from perfsuite.frameworks.base import Framework, LaunchPlan, Ranks, StepClock, Workload

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.case.hardware import Machine
    from perfsuite.case.model import Model

MIN_TORCH = (2, 13)
"""The first on which torchtitan 0.3 trains: 2.11 lacks what it imports, on 2.12 a backward pass fails."""
PRECISIONS = {
    "fp32": ("float32", "float32"),
    "bf16-mixed": ("float32", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16"),
}
"""dtype of parameters, and of what is computed; gradients are always reduced in fp32."""
LOSS_CHUNKS = 8
"""Parts of a sequence whose logits are computed one after the other: torchtitan's default."""
HAS_ONLY = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
"""Options of transformers' Llama for which torchtitan's has one value."""
ROPES = ("default", "llama3")


class TorchTitan(Framework):
    """Degrees of parallelism of torchtitan's Trainer. Over the ranks that these leave it shards (FSDP2)."""

    name: ClassVar[str] = "torchtitan"
    packages: ClassVar[tuple[str, ...]] = ("torchtitan",)

    tensor_parallel: int = Field(default=1, ge=1, strict=True)
    """Ranks that compute one sequence together, with sequence parallelism between the matrix products."""
    data_parallel_replicate: int = Field(default=1, ge=1, strict=True)
    """Groups of ranks that replicate, while the ranks of a group shard (HSDP)."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Degrees that do not divide what they split, fp16, attention but sdpa, models but Llama."""
        ranks = case.topology.world_size
        if ranks % (self.tensor_parallel * self.data_parallel_replicate):
            return (
                f"tensor_parallel={self.tensor_parallel} times data_parallel_replicate="
                f"{self.data_parallel_replicate} must divide the number of processes, {ranks}"
            )
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
        """torchtitan creates the process group itself."""
        return LaunchPlan(process_group="library")

    def expected(self, case: Case) -> dict[str, str]:
        """FSDP2 modules whatever the degrees, and DTensors on the mesh of these."""
        replicate, tensor = self.data_parallel_replicate, self.tensor_parallel
        mesh = [f"fsdp {case.topology.world_size // (replicate * tensor)}"]
        placements = ["Shard(0)"]
        if tensor > 1:  # norms; matrices split by their inputs; by their outputs
            mesh.append(f"tp {tensor}")
            placements = ["Shard(0), Replicate", "Shard(0), Shard(1)", "StridedShard(0), Shard(0)"]
        if replicate > 1:
            mesh.insert(0, f"dp_replicate {replicate}")
            placements = [f"Replicate, {placement}" for placement in placements]
        return {"wrapper": "FSDPModule", "mesh": " x ".join(mesh), "sharding": " and ".join(placements)}

    def load(self, case: Case, device: Any) -> None:
        """Some 140 MiB, and the patches that come before."""
        from perfsuite.frameworks.torchtitan import compat

        compat.before_import(device.type)
        import perfsuite.frameworks.torchtitan.trainer  # noqa: F401

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """A Trainer with the case's configuration. It makes the process group."""
        from perfsuite.frameworks.torchtitan.trainer import CaseTrainer, trainer_config

        trainer = CaseTrainer(trainer_config(case, self), clock)

        def run(steps: int) -> list[Any]:
            assert steps == trainer.config.training.steps
            trainer.train()
            return trainer.losses()

        return Workload(
            run=run,
            data_parallel=trainer.data_parallel,
            model=trainer.model,
            settings=trainer.settings(),
            own_tokens_per_s=lambda: trainer.own_log.metrics["throughput(tps)"] * ranks.world_size,
        )


def unsupported_shape(model: Model, tensor_parallel: int) -> str | None:
    """Why torchtitan's Llama 3 cannot be `model`, split among so many ranks, or None."""
    config: Mapping[str, Any] = model.config
    if config["model_type"] != "llama":
        return f"torchtitan's llama3 builds Llama models, {model.name} is a {config['model_type']}"
    for key, only in HAS_ONLY.items():
        if config.get(key, only) != only:
            return f"torchtitan's llama3 has {key}={only!r} only, {model.name} has {config[key]!r}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPES:
        return f"torchtitan's llama3 knows rope_type {' and '.join(ROPES)}, {model.name} has {rope_type!r}"
    heads, hidden = config.get("num_attention_heads", 32), config.get("hidden_size", 4096)
    if config.get("head_dim") not in (None, hidden // heads):
        return (
            f"torchtitan's llama3 has heads of size {hidden // heads}, {model.name} of {config['head_dim']}"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (count := config.get(key) or heads) % tensor_parallel:
            return f"tensor_parallel={tensor_parallel} must divide {key}, {count}"
    return None
