"""Change the work of a training step in the same way as a mistake in the training's code would.

docs/evidence/faults.md lists the faults. A fault begins with the first counted step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from perfsuite.errors import MismatchError
from perfsuite.frameworks.common.private import (
    CheckpointWrapper,
    attn_implementation,
    checkpointing_func,
    fsdp_group,
    fsdp_state,
    reduce_dtype,
    tree_leaves,
)
from perfsuite.worker.observation.optimizers import parameters_of

if TYPE_CHECKING:
    from perfsuite.case.fault import Structural

PART_BYTES = 1 << 20  # bytes per all-reduce with `small-buckets`
AVERAGED = 0.999  # share of the moving average that each step keeps


class _Misfit(Exception):
    """The reason why a fault would change nothing in this training."""


def begin(kind: Structural, model: nn.Module | None, optimizer: Optimizer | None) -> None:
    """Change the training from the next step on. Raises `MismatchError` if there is nothing to change."""
    try:
        if model is None or optimizer is None:
            raise _Misfit("nothing trains here")
        _FAULTS[kind](model, optimizer)
    except _Misfit as why:
        raise MismatchError(f"--perf-inject {kind}: {why}") from None


def _sharding(model: nn.Module) -> list[tuple[FSDPModule, Any]]:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [(unit, fsdp_group(fsdp_state(unit)())) for unit in units]
    return [(unit, group) for unit, group in groups if group is not None]


def _toggle_resharding(model: nn.Module, optimizer: Optimizer) -> None:
    pairs = _sharding(model)
    if len(pairs) < 2:
        raise _Misfit("FSDP2 does not shard any blocks")
    root = next(module for module in model.modules() if isinstance(module, FSDPModule))
    for unit, group in pairs:
        if unit is not root:  # torch keeps the root gathered
            unit.set_reshard_after_forward(group.post_forward_mesh_info is None, recurse=False)


def _reduce_in_fp32(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(model, DistributedDataParallel):
        if not any(p.requires_grad and p.dtype != torch.float32 for p in model.parameters()):
            raise _Misfit("DDP already reduces in float32")
        model.register_comm_hook(model.process_group, _all_reduced_in_fp32)
        return
    dtypes = [
        (group, reduce_dtype(group) or group.fsdp_params[0].orig_dtype) for _, group in _sharding(model)
    ]
    lower = [group for group, dtype in dtypes if dtype != torch.float32]
    if not lower:
        raise _Misfit("neither DDP nor FSDP2 reduces gradients in a lower precision")
    for group in lower:
        setattr(group, reduce_dtype.name, torch.float32)


def _all_reduced_in_fp32(group, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP reads them
    share = bucket.buffer().float() / group.size()
    future = dist.all_reduce(share, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _reduce_in_parts(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(model, DistributedDataParallel) or model.bucket_bytes_cap <= PART_BYTES:
        raise _Misfit("the model is not in a DDP with buckets of more than 1 MiB")
    model.register_comm_hook(model.process_group, _all_reduced_in_parts)


def _all_reduced_in_parts(group, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP reads them
    whole = bucket.buffer().div_(group.size())
    parts = whole.split(PART_BYTES // whole.itemsize)
    futures = [dist.all_reduce(part, group=group, async_op=True).get_future() for part in parts]
    return torch.futures.collect_all(futures).then(lambda done: whole)


def _forget_checkpointing(model: nn.Module, optimizer: Optimizer) -> None:
    checkpointed: list[Any] = [module for module in model.modules() if _is_checkpointed(module)]
    if not checkpointed:
        raise _Misfit("no block is checkpointed")
    for block in checkpointed:
        if isinstance(block, CheckpointWrapper):
            block.checkpoint_fn = partial(lambda module, *args, **kwargs: module(*args, **kwargs))
        elif getattr(block, "gradient_checkpointing", False):
            block.gradient_checkpointing = False
        else:
            block.forward = block.forward.args[0]


def _is_checkpointed(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    is_ours = isinstance(forward, partial) and forward.func is checkpoint
    by_transformers = hasattr(module, checkpointing_func.name) and module.gradient_checkpointing
    return is_ours or by_transformers or isinstance(module, CheckpointWrapper)


def _read_on_host(model: nn.Module, optimizer: Optimizer) -> None:
    def read(module: nn.Module, args: Any, output: Any) -> None:
        next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)).view(-1)[0].item()

    model.register_forward_hook(read)


def _step_by_lists(model: nn.Module, optimizer: Optimizer) -> None:
    first = optimizer.param_groups[0]
    if "foreach" not in first or (first["foreach"] and not first.get("fused")):
        raise _Misfit(f"{type(optimizer).__name__} already uses foreach operators, or does not support them")
    for group in optimizer.param_groups:
        group.update(foreach=True, fused=False)


def _attend_eagerly(model: nn.Module, optimizer: Optimizer) -> None:
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    fused = [
        config for config in configs if getattr(config, attn_implementation.name, None) not in (None, "eager")
    ]
    if not fused:
        raise _Misfit("no model of transformers uses an attention other than eager")
    for config in fused:
        setattr(config, attn_implementation.name, "eager")


def _keep_average(model: nn.Module, optimizer: Optimizer) -> None:
    weights = parameters_of(optimizer)
    averages = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for average, weight in zip(averages, weights, strict=True):
            average.mul_(AVERAGED).add_(weight, alpha=1 - AVERAGED)

    optimizer.register_step_post_hook(update)


_FAULTS: Mapping[Structural, Callable[[nn.Module, Optimizer], None]] = {
    "reshard-toggled": _toggle_resharding,
    "fp32-communication": _reduce_in_fp32,
    "checkpointing-lost": _forget_checkpointing,
    "host-read": _read_on_host,
    "small-buckets": _reduce_in_parts,
    "optimizer-foreach": _step_by_lists,
    "eager-attention": _attend_eagerly,
    "weight-copy": _keep_average,
}
