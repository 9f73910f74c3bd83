"""Collect facts with which `analysis.agreement` checks that data-parallel ranks train one model."""

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.private import disable_current_modes, shard_of
from perfsuite.worker.hooks import libraries

_world = private.or_none("process_groups")
_sequence_number = private.or_none("sequence_number")


def fingerprint(model: nn.Module) -> dict[str, float]:
    """Return, for each trained parameter, the L1 norm of this rank's shard. Every step changes the norm."""
    trained = (
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_lazy(parameter)  # a lazy parameter has no values yet
    )
    with torch.no_grad():
        shards = ((name, _real(local(parameter))) for name, parameter in trained)
        return {
            name: float(torch.linalg.vector_norm(shard, ord=1, dtype=torch.float32))
            for name, shard in shards
            if shard.numel()
        }


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor.

    For a DTensor, or a tensor that a library has sharded itself, this is a shard. Any other tensor is
    returned whole.
    """
    name = next((name for name in _shards() if hasattr(tensor, name)), None)
    held: torch.Tensor = shard_of(tensor) if name is None else getattr(tensor, name)
    return held


def _shards() -> list[str]:
    return [library.shard for library in libraries.imported() if library.shard is not None]


def squares(gradients: Iterable[Any]) -> float | None:
    """Return the sum of squares of this rank's gradients, or None if it is unknown.

    If n ranks of a mesh hold the same part of a gradient, this part has the weight 1/n. The sums of all ranks
    then add up to the sum of the job. If each rank holds all gradients, as with DDP, the sum of one rank is
    already that of the job.
    """
    with disable_current_modes(), torch.no_grad(), contextlib.suppress(RuntimeError):
        existing = [gradient for gradient in gradients if gradient is not None]
        copies = [_copies(gradient) for gradient in existing]
        if copies == [
            gradient.device_mesh.size() if hasattr(gradient, "device_mesh") else 1 for gradient in existing
        ]:
            copies = [1] * len(existing)
        held = [part.coalesce().values() if part.is_sparse else part for part in map(local, existing)]
        terms = [
            float(torch.linalg.vector_norm(_real(part), dtype=torch.float32)) ** 2 * (1 / count)
            for part, count in zip(held, copies, strict=True)
            if part.numel()
        ]
        return sum(terms) if terms else None
    return None


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of a complex tensor. A real tensor is returned unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _copies(tensor: Any) -> int:
    """Return how many ranks of a tensor's mesh hold the same part of the tensor."""
    placements = enumerate(getattr(tensor, "placements", ()))
    return math.prod(
        tensor.device_mesh.size(dim) for dim, placement in placements if placement.is_replicate()
    )


def replicated(model: nn.Module) -> set[str]:
    """Return the names of the parameters that every data-parallel rank holds whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    sharding = [unit for unit in units if unit.sharding_strategy is not ShardingStrategy.NO_SHARD]
    sharded = {id(parameter) for unit in sharding for parameter in unit.parameters()}
    return {name for name, p in model.named_parameters() if id(p) not in sharded and _is_whole(p)}


def _is_whole(parameter: Any) -> bool:
    # Megatron, and libraries derived from Megatron, set `allreduce` to False on the parameters of experts.
    is_expert = not getattr(parameter, "allreduce", True)
    if is_expert or any(hasattr(parameter, name) for name in _shards()):
        return False
    return all(placement.is_replicate() for placement in getattr(parameter, "placements", ()))


def collectives_begun(*, world: Any = _world, sequence_number: Any = _sequence_number) -> int | None:
    """Return the number of collectives that have begun in groups of several ranks, or None if unknown.

    `world` and `sequence_number` are None if this version of torch lacks these private names.
    """
    if world is None or sequence_number is None or not dist.is_initialized():
        return None
    try:
        return sum(int(sequence_number(group)) for group in world.pg_map if group.size() > 1)
    except RuntimeError:  # the backend does not count collectives
        return None
