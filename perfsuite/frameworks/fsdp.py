"""FSDP1, `FullyShardedDataParallel`: flat parameters sharded per transformer block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from perfsuite.frameworks.base import Framework, Ranks, StepClock, Workload

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.case.hardware import Machine


class FSDP(Framework):
    """Options of `torch.distributed.fsdp.FullyShardedDataParallel`, by their names there."""

    name: ClassVar[str] = "fsdp"
    ignores: ClassVar[frozenset[str]] = frozenset()

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
    """What is sharded: all; gradients and optimizer state; nothing; all, but within groups only."""
    shard_group: int | None = Field(default=None, ge=2)
    """For HYBRID_SHARD: ranks in a group that shards; groups replicate. None: the ranks of one node."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = "BACKWARD_PRE"
    """When the next block's parameters are gathered in backward."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    sync_each_micro_batch: bool = True
    """Reduce gradients after each micro-batch. False keeps whole gradients in memory until the last."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Shardings that need more ranks than the topology has; offloading without a device."""
        if self.cpu_offload and machine.device == "cpu":
            return "cpu_offload copies from pinned memory to a GPU, this machine has none"
        if (reason := sharded_quantization_unsupported(case)) is not None:
            return reason
        ranks = case.topology.world_size
        if self.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and ranks < 2:
            return f"{self.sharding_strategy} needs at least 2 processes (torch turns it into NO_SHARD on 1)"
        if self.sharding_strategy == "HYBRID_SHARD":
            return hybrid_unsupported(self._shard_group(case), case)
        if self.shard_group is not None:
            return f"shard_group={self.shard_group} is for HYBRID_SHARD, not for {self.sharding_strategy}"
        return None

    def expected(self, case: Case) -> dict[str, str]:
        """Every wrapped module with this strategy."""
        return {"wrapper": "FullyShardedDataParallel", "sharding": self.sharding_strategy}

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """The model under FSDP1, one unit per block, and the root."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffload,
            FullyShardedDataParallel,
            ShardingStrategy,
        )
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        from perfsuite.frameworks.common.model import blocks, build_model, data_parallel_workload

        mesh = None
        if self.sharding_strategy == "HYBRID_SHARD":
            group = self._shard_group(case)
            mesh = init_device_mesh(ranks.device.type, (ranks.world_size // group, group))
        inner = build_model(case, ranks.device)
        model = FullyShardedDataParallel(
            inner,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[self.sharding_strategy],
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks(inner)}),
            backward_prefetch=prefetch(self.backward_prefetch),
            cpu_offload=CPUOffload(offload_params=self.cpu_offload),
            mixed_precision=_mixed_precision(case),
            device_id=ranks.device,
            use_orig_params=True,
        )
        no_sync = None if self.sync_each_micro_batch else model.no_sync
        return data_parallel_workload(case, ranks, model, no_sync=no_sync)

    def _shard_group(self, case: Case) -> int:
        return self.shard_group or case.topology.processes_per_node


def prefetch(name: str) -> Any:
    """torch's `BackwardPrefetch` of that name, None for `none`."""
    from torch.distributed.fsdp import BackwardPrefetch

    return None if name == "none" else BackwardPrefetch[name]


def hybrid_unsupported(group: int, case: Case) -> str | None:
    """Why ranks cannot be split into at least two groups of `group` that each shard, or None."""
    ranks = case.topology.world_size
    if group < 2 or ranks % group or ranks // group < 2:
        return (
            f"hybrid sharding in groups of {group} needs at least 2 groups of at least 2 processes: "
            f"{ranks} processes cannot be split so"
        )
    return None


def sharded_quantization_unsupported(case: Case) -> str | None:
    """Why quantised weights cannot be sharded with the others, or None."""
    if case.quantization == "8bit":
        return "8bit weights cannot be sharded (their scales are not in the parameter): give '4bit', or DDP"
    if case.quantization == "4bit" and "mixed" in case.precision:
        return f"packed 4bit weights cannot be cast, as {case.precision} does where it shards: give 'bf16'"
    return None


def _mixed_precision(case: Case) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecision

    from perfsuite.frameworks.common.model import COMPUTE_DTYPES

    if "mixed" not in case.precision:
        return None
    return MixedPrecision(
        param_dtype=COMPUTE_DTYPES[case.precision], reduce_dtype=torch.float32, buffer_dtype=torch.float32
    )
