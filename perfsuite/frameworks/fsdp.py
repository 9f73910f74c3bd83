"""FSDP1, `FullyShardedDataParallel`. It shards one flat parameter per transformer block."""

from typing import ClassVar

from pydantic import Field

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import DryPlan, Framework, Ranks, StepClock, Workload
from perfsuite.frameworks.common import sharding


class FSDP(Framework):
    """Options of `torch.distributed.fsdp.FullyShardedDataParallel`, with torch's names."""

    name: ClassVar[str] = "fsdp"
    promises: ClassVar[Promises] = Promises(ignores=frozenset())

    sharding_strategy: sharding.ShardingStrategy
    """FULL_SHARD shards parameters, gradients and optimizer state. SHARD_GRAD_OP shards only gradients and
    optimizer state. NO_SHARD shards nothing. HYBRID_SHARD shards everything within a group of ranks."""
    shard_group: int | None = Field(default=None, ge=2)
    """For HYBRID_SHARD: number of ranks in a group. The ranks of a group shard one replica of the model.
    None: the ranks of one node are a group."""
    backward_prefetch: sharding.Prefetch = "BACKWARD_PRE"
    """Sets when backward gathers the parameters of the next block."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    sync_each_micro_batch: bool = True
    """Reduce gradients after each micro-batch. False keeps unsharded gradients in memory until the last
    micro-batch."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        strategy = self.sharding_strategy
        group = self.shard_group
        return sharding.fsdp1_unsupported(
            case, machine, strategy, shard_group=group, cpu_offload=self.cpu_offload
        )

    def dry(self, case: Case) -> DryPlan:
        # The ranks' shards of a flat parameter are equally large, but contain different original parameters.
        return sharding.dry_plan(ranks_differ=True, offloads=self.cpu_offload)

    def expected(self, case: Case) -> dict[str, str]:
        return {"wrapper": "FullyShardedDataParallel", "sharding": self.sharding_strategy}

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Wrap the model in FSDP1. Each block is a unit, and the rest of the model is the root unit."""
        import torch
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        from perfsuite.frameworks.common.loop import data_parallel_workload
        from perfsuite.frameworks.common.model import COMPUTE_DTYPES, blocks, build_model

        mesh = mixed_precision = None
        if self.sharding_strategy == "HYBRID_SHARD":
            group = self.shard_group or case.topology.processes_per_node
            mesh = init_device_mesh(ranks.device.type, (ranks.world_size // group, group))
        if "mixed" in case.precision:
            compute = COMPUTE_DTYPES[case.precision]
            fp32 = torch.float32
            mixed_precision = fsdp.MixedPrecision(compute, reduce_dtype=fp32, buffer_dtype=fp32)
        inner = build_model(case, ranks.device)
        model = fsdp.FullyShardedDataParallel(
            inner,
            device_mesh=mesh,
            sharding_strategy=fsdp.ShardingStrategy[self.sharding_strategy],
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks(inner)}),
            backward_prefetch=sharding.prefetch(self.backward_prefetch),
            cpu_offload=fsdp.CPUOffload(offload_params=self.cpu_offload),
            mixed_precision=mixed_precision,
            device_id=ranks.device,
            use_orig_params=True,
        )
        no_sync = None if self.sync_each_micro_batch else model.no_sync
        return data_parallel_workload(case, ranks, model, no_sync=no_sync)
