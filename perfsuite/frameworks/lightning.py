"""Lightning Fabric, with its own strategies and precision plugins, in ranks that perfsuite starts.

Fabric's FSDP1 strategy applies activation checkpointing itself. With DDP and FSDP2, perfsuite applies it to
the blocks, as in other frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises, changed_fields
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import DryPlan, Framework, Ranks, StepClock, Workload
from perfsuite.frameworks.common import sharding

if TYPE_CHECKING:
    from torch import Tensor

FABRIC_PRECISION = {
    "fp32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "bf16": "bf16-true",
    "fp16-mixed": "16-mixed",
}


class Lightning(Framework):
    """Options of `lightning.fabric.Fabric` and its `FSDPStrategy`, with Fabric's names."""

    name: ClassVar[str] = "lightning"
    packages: ClassVar[tuple[str, ...]] = ("lightning",)
    promises: ClassVar[Promises] = Promises(ignores=frozenset({"quantization"}))

    strategy: Literal["ddp", "fsdp", "fsdp2"]
    """`ddp`: `DDPStrategy`. `fsdp`: `FSDPStrategy`, only on GPUs. `fsdp2`: `ModelParallelStrategy`, with
    FSDP2 over all ranks."""
    sharding_strategy: sharding.ShardingStrategy = "FULL_SHARD"
    """Only for the strategy `fsdp`, like `backward_prefetch` and `cpu_offload`. HYBRID_SHARD shards within a
    node."""
    backward_prefetch: sharding.Prefetch = "BACKWARD_PRE"
    cpu_offload: bool = False

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        fp16 = case.precision == "fp16-mixed"
        if self.strategy == "fsdp":
            if machine.device == "cpu":
                return "Fabric's FSDPStrategy runs on GPUs only"
            if case.activation_checkpointing == "selective-op":
                return (
                    "Fabric's FSDPStrategy recomputes whole blocks only: "
                    "activation_checkpointing='selective-op' is not supported"
                )
            return sharding.fsdp1_unsupported(
                case, machine, self.sharding_strategy, cpu_offload=self.cpu_offload
            )
        options = changed_fields(self, skip=frozenset({"strategy"}))
        if options:
            return f"{', '.join(options)}: only for strategy 'fsdp', not for {self.strategy!r}"
        if fp16 and self.strategy == "fsdp2":
            return "Fabric's ModelParallelStrategy does not support fp16-mixed"
        if fp16 and machine.device == "cpu":
            return "Fabric changes fp16-mixed to bf16-mixed on a CPU"
        return None

    def dry(self, case: Case) -> DryPlan:
        return sharding.dry_plan(ranks_differ=self.strategy == "fsdp", offloads=self.cpu_offload)

    def expected(self, case: Case) -> dict[str, str]:
        return {
            "ddp": {"wrapper": "DistributedDataParallel"},
            "fsdp": {"wrapper": "FullyShardedDataParallel", "sharding": self.sharding_strategy},
            "fsdp2": {"wrapper": "FSDPModule", "sharding": "Shard(0)"},
        }[self.strategy]

    def load(self, case: Case, device: Any) -> None:
        import lightning.fabric  # noqa: F401

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Set up model and optimizer with Fabric. Gradients are reduced only on the last micro-batch."""
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        from perfsuite.frameworks.common.loop import fixed_scaler, training
        from perfsuite.frameworks.common.model import blocks, build_model, build_optimizer

        built_as = case.replace(activation_checkpointing="none") if self.strategy == "fsdp" else case
        model: Any = build_model(built_as, ranks.device)
        strategy = self.strategy_object(case, blocks(model))
        fabric = Fabric(
            accelerator=ranks.device.type,
            strategy=strategy,
            devices=case.topology.processes_per_node,
            num_nodes=case.topology.nodes,
            precision=FABRIC_PRECISION[case.precision],  # type: ignore[arg-type]
            plugins=[TorchElasticEnvironment()],
        )
        fabric.launch()  # starts nothing: the processes and their process group already exist
        scaler = getattr(strategy.precision, "scaler", None)
        if scaler is not None:
            strategy.precision.scaler = scaler = fixed_scaler(type(scaler), ranks.device.type)
        model = fabric.setup_module(model)
        optimizer: Any = fabric.setup_optimizers(build_optimizer(case, model))
        settings = {
            "fabric_strategy": type(strategy).__name__,
            "fabric_precision": f"{type(strategy.precision).__name__} {FABRIC_PRECISION[case.precision]}",
        }
        mixed = getattr(strategy, "mixed_precision_config", None)
        if mixed is not None:
            settings["reduce_dtype"] = str(mixed.reduce_dtype).removeprefix("torch.")

        def backward(loss: Tensor) -> Tensor:
            loss = loss * (1 / case.gradient_accumulation)
            fabric.backward(loss)
            return loss

        def step() -> None:
            if scaler is not None:
                # Fabric does not unscale the gradients of a fused optimizer. `unscale_` also combines the
                # overflows of all ranks. Without this call, each rank would see only the overflows in its own
                # shard.
                scaler.unscale_(optimizer.optimizer)
            optimizer.step()
            optimizer.zero_grad()

        return training(
            case,
            ranks,
            model,
            backward=backward,
            sync=lambda is_last: fabric.no_backward_sync(model, enabled=not is_last),
            step=step,
            scaler=scaler,
            settings=settings,
        )

    def strategy_object(self, case: Case, blocks: Sequence[Any]) -> Any:
        """Return Fabric's strategy object. With FSDP, each block is a unit."""
        from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

        from perfsuite.frameworks.common.model import is_checkpointed

        mode = case.activation_checkpointing
        topology = case.topology
        if self.strategy == "ddp":
            return DDPStrategy()
        if self.strategy == "fsdp2":
            world = topology.world_size
            return ModelParallelStrategy(_fully_shard, data_parallel_size=world, tensor_parallel_size=1)
        recomputed = {id(block) for index, block in enumerate(blocks) if is_checkpointed(mode, index)}

        def is_recomputed(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
            return recurse or id(module) in recomputed

        hybrid = self.sharding_strategy == "HYBRID_SHARD"
        options: dict[str, Any] = {
            "sharding_strategy": self.sharding_strategy,
            "device_mesh": (topology.nodes, topology.processes_per_node) if hybrid else None,
            "auto_wrap_policy": {type(block) for block in blocks},
            "activation_checkpointing_policy": is_recomputed if recomputed else None,
            "backward_prefetch": sharding.prefetch(self.backward_prefetch),
            "cpu_offload": self.cpu_offload,
        }
        return FSDPStrategy(**options)


def _fully_shard(model: Any, mesh: Any) -> Any:
    """Apply FSDP2 over all ranks. Each block is a unit, and the rest of the model is the root unit.

    Fabric's `ModelParallelStrategy` shards nothing itself. It calls this function.
    """
    from torch.distributed.fsdp import fully_shard

    from perfsuite.frameworks.common.model import blocks

    for block in blocks(model):
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])
