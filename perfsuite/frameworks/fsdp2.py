"""FSDP2, `fully_shard`: every parameter a DTensor, sharded on its first dimension, gathered per block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from perfsuite.framework import Framework, Ranks, Workload
from perfsuite.frameworks.fsdp import hybrid_unsupported

if TYPE_CHECKING:
    from perfsuite.case import Case
    from perfsuite.hardware import Machine
    from perfsuite.measure import Recorder


class FSDP2(Framework):
    """Options of `torch.distributed.fsdp.fully_shard`."""

    name: ClassVar[str] = "fsdp2"

    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward, and gather them again in backward."""
    shard_group: int | None = Field(default=None, ge=2)
    """Ranks in a group that shards, while groups replicate (2-D mesh). None: all ranks shard (1-D mesh)."""
    sync_each_micro_batch: bool = True
    """Reduce gradients after each micro-batch. False keeps whole gradients in memory until the last."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """A hybrid mesh that the ranks do not fill."""
        return None if self.shard_group is None else hybrid_unsupported(self.shard_group, case)

    def expected(self, case: Case) -> dict[str, str]:
        """DTensors, sharded in every block."""
        placement = "Shard(0)" if self.shard_group is None else "Replicate, Shard(0)"
        return {"wrapper": "FSDPModule", "sharding": placement}

    def build(self, case: Case, ranks: Ranks, recorder: Recorder) -> Workload:
        """The model under FSDP2, one unit per block, and the root."""
        from torch.distributed.fsdp import fully_shard

        from perfsuite.torch_model import blocks, data_parallel_workload, model_without_weights
        from perfsuite.weights import initialise

        options: dict[str, Any] = {
            "mesh": self._mesh(ranks),
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": _mixed_precision(case),
        }
        model = model_without_weights(case, ranks.device)
        units = blocks(model)
        for unit in (*units, model):
            fully_shard(unit, **options)
        initialise(model, units, seed=case.seed, device=ranks.device)
        no_sync = None if self.sync_each_micro_batch else partial(_no_sync, model)
        return data_parallel_workload(case, ranks, model, no_sync=no_sync)

    def _mesh(self, ranks: Ranks) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if self.shard_group is None:
            return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
        shape = (ranks.world_size // self.shard_group, self.shard_group)
        return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """What DDP and FSDP1 have as a method: gradients are not reduced inside."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _mixed_precision(case: Case) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from perfsuite.torch_model import COMPUTE_DTYPES

    if "mixed" not in case.precision:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[case.precision], reduce_dtype=torch.float32)
