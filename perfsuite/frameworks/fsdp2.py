"""FSDP2, `fully_shard`: each parameter is a DTensor, sharded on dimension 0 and gathered with its block.

Tensor parallelism follows Megatron-LM (Shoeybi et al. 2019). It supports only transformers' Llama.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import DryPlan, Framework, Ranks, StepClock, Workload
from perfsuite.frameworks.common import float8, sharding
from perfsuite.frameworks.common.float8 import Recipe


class FSDP2(Framework):
    """Options of `torch.distributed.fsdp.fully_shard`."""

    name: ClassVar[str] = "fsdp2"
    promises: ClassVar[Promises] = Promises(ignores=frozenset())

    reshard_after_forward: bool = True
    """Free the gathered parameters of a block after its forward, and gather them again in backward."""
    reshard_root: bool = False
    """Also free the parameters of the root unit after forward, and gather them again in backward. These
    parameters are outside the blocks, for example in the embedding and the head. By default, torch keeps them
    gathered, because backward needs them immediately."""
    shard_group: int | None = Field(default=None, ge=2)
    """Number of ranks in a group. The ranks of a group shard one replica of the model (2-D mesh). None: all
    ranks together shard one replica (1-D mesh)."""
    sync_each_micro_batch: bool = True
    """Reduce gradients after each micro-batch. False keeps unsharded gradients in memory until the last
    micro-batch."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which mixed precision reduces gradients. Without mixed precision, gradients are reduced in
    their own dtype."""
    tensor_parallel: int = Field(default=1, ge=1, strict=True)
    """Number of neighbouring ranks that split each layer and see the same data (2-D mesh). 1: no
    splitting."""
    float8: Recipe | None = None
    """torchao's recipe for float8 matmuls in the linear layers of the blocks. On a CPU, float8 is
    emulated."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        if self.reduce_dtype != "float32" and "mixed" not in case.precision:
            return f"reduce_dtype={self.reduce_dtype!r} needs mixed precision, not {case.precision!r}"
        reason = float8.unsupported(self.float8, case, machine)
        if reason is not None:
            return reason
        if self.tensor_parallel > 1:
            if self.shard_group is not None or self.float8 is not None:
                option = "shard_group (3-D mesh)" if self.shard_group is not None else "float8"
                return f"tensor_parallel={self.tensor_parallel} cannot be combined with {option}"
            return sharding.tensor_parallel_unsupported(case, "tensor_parallel", self.tensor_parallel)
        hybrid = None if self.shard_group is None else sharding.hybrid_unsupported(self.shard_group, case)
        return hybrid or sharding.sharded_quantization_unsupported(case)

    def dry(self, case: Case) -> DryPlan:
        return DryPlan()

    def expected(self, case: Case) -> dict[str, str]:
        placements = "Shard(0)" if self.shard_group is None else "Replicate, Shard(0)"
        if self.tensor_parallel > 1:
            # The placements of norms, row-parallel matrices and column-parallel matrices, in this order.
            placements = "Shard(0) and Shard(0), Shard(1) and StridedShard(0), Shard(0)"
        expected = {"wrapper": "FSDPModule", "sharding": placements, **float8.expected(self.float8, case)}
        if self.reduce_dtype != "float32":
            expected["reduce_dtype"] = self.reduce_dtype
        return expected

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Apply FSDP2 to the model. Each block is a unit, and the rest of the model is the root unit."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from perfsuite.frameworks.common.loop import data_parallel_workload
        from perfsuite.frameworks.common.model import (
            COMPUTE_DTYPES,
            blocks,
            dtype_name,
            model_without_weights,
        )
        from perfsuite.frameworks.common.private import fsdp_policy, fsdp_state
        from perfsuite.frameworks.common.weights import initialise

        world = ranks.world_size
        tensor_parallel = self.tensor_parallel
        shape = {"shard": world}
        if self.shard_group is not None:
            shape = {"replicate": world // self.shard_group, "shard": self.shard_group}
        if tensor_parallel > 1:
            shape = {"shard": world // tensor_parallel, "tensor": tensor_parallel}
        mesh = init_device_mesh(ranks.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        policy = MixedPrecisionPolicy()
        if "mixed" in case.precision:
            reduce = getattr(torch, self.reduce_dtype)
            policy = MixedPrecisionPolicy(COMPUTE_DTYPES[case.precision], reduce_dtype=reduce)
        shard = partial(fully_shard, mesh=mesh["shard"] if tensor_parallel > 1 else mesh, mp_policy=policy)

        model = model_without_weights(case, ranks.device)
        float8.convert(self.float8, model, ranks.device)
        units = blocks(model)
        if tensor_parallel > 1:
            _parallelize_llama(model, mesh["tensor"])
        if case.quantization != "none":  # quantised weights must be created before they are sharded
            initialise(model, units, seed=case.seed, device=ranks.device)
        for unit in units:
            shard(unit, reshard_after_forward=self.reshard_after_forward)
        shard(model, reshard_after_forward=self.reshard_root)
        if case.quantization == "none":
            initialise(model, units, seed=case.seed, device=ranks.device)
        no_sync = None if self.sync_each_micro_batch else partial(_no_sync, model)
        settings = {}
        if self.reduce_dtype != "float32":
            reduces = {dtype_name(fsdp_policy(fsdp_state(unit)()).reduce_dtype) for unit in units}
            settings["reduce_dtype"] = " and ".join(sorted(reduces))
        return data_parallel_workload(
            case, ranks, model, no_sync=no_sync, tensor_parallel=tensor_parallel, settings=settings
        )


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Turn off the reduction of gradients inside the `with` block, as `no_sync` of DDP and FSDP1 does."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _parallelize_llama(model: Any, mesh: Any) -> None:
    """Split a transformers Llama over a 1-D mesh.

    q, k and v share one DTensor as their input, so the gradient of this input is reduced once instead of
    three times.
    """
    from torch.distributed.tensor import Replicate, parallel

    attention = "model.layers.*.self_attn"
    mlp = "model.layers.*.mlp"
    whole = Replicate()
    named: dict[str, Any] = {"hidden_states": whole}
    columns = [f"{attention}.{name}_proj" for name in "qkv"] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    plan = {
        "model.embed_tokens": parallel.RowwiseParallel(input_layouts=whole),
        attention: parallel.PrepareModuleInput(input_kwarg_layouts=named, desired_input_kwarg_layouts=named),
        mlp: parallel.PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        **{path: parallel.ColwiseParallel() for path in columns},
        f"{attention}.o_proj": parallel.RowwiseParallel(),
        f"{mlp}.down_proj": parallel.RowwiseParallel(),
        "lm_head": parallel.ColwiseParallel(output_layouts=whole),
    }
    parallel.parallelize_module(model, mesh, plan)
    # `parallelize_module` has created separate parameters for a tied weight, so tie the weights again.
    model.tie_weights()
