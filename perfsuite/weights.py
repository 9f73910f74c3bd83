"""Weights that are the same in every framework, made shard by shard. Worker side; imports torch.

A model is first built with its parameters on the meta device, where they take no memory; a framework that
shards may shard them there. `initialise` then makes the values, one block at a time: the whole block, by
transformers' own rules, each module from a seed of its own; of it only this rank's shard is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from perfsuite.errors import MismatchError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules made inside take no memory. Buffers are there in full, with their values."""

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # as it is, so that tied parameters stay tied
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def initialise(model: Any, units: Sequence[nn.Module], *, seed: int, device: torch.device) -> None:
    """Make the values of all parameters of `model`, which are on the meta device, on `device`.

    `units` are parts of the model, such as its blocks: no two of them are held in full at once.
    Raises `MismatchError` for a parameter that no rule initialises.
    """
    names = {module: name.replace(".base_layer", "") for name, module in model.named_modules()}
    done: set[nn.Module] = set()
    for unit in (*units, model):
        modules = [module for module in unit.modules() if module not in done]
        done.update(modules)
        empty: dict[Tensor, nn.Parameter] = {p: _whole(p, device) for p in _parameters(modules)}
        _replace(modules, lambda p, full=empty: full[p])  # type: ignore[misc]
        for module in reversed(modules):  # children first: a parent may have rules for their weights
            _seed_device(device, f"{seed} {names[module]}")
            _by_own_rules(model, module)
        kept = {full: _kept(on_meta, full) for on_meta, full in empty.items()}
        _replace(modules, lambda p, keep=kept: keep[p])  # type: ignore[misc]
    torch.manual_seed(seed)


def _seed_device(device: torch.device, text: str) -> None:
    """As `torch.manual_seed`, which costs 100 times as much where there is no GPU."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _parameters(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters(recurse=False)


def _replace(modules: Sequence[nn.Module], by: Callable[[Any], nn.Parameter]) -> None:
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = by(parameter)


def _whole(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """All of it, whatever of it this rank keeps; not a number until it is initialised."""
    full = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device=device)
    return nn.Parameter(full, requires_grad=parameter.requires_grad)


def _by_own_rules(model: Any, module: Any) -> None:
    if hasattr(module, "reset_lora_parameters"):
        for adapter in module.active_adapters:
            module.reset_lora_parameters(adapter, init_lora_weights=True)
    else:
        model._init_weights(module)


def _kept(on_meta: Any, full: nn.Parameter) -> nn.Parameter:
    """What this rank keeps of a parameter: all, its shard, or all of it quantised."""
    from torch.distributed.tensor import DTensor

    if bool(full.isnan().any()):
        raise MismatchError(f"a parameter of shape {tuple(full.shape)} has no rule that initialises it")
    if not isinstance(on_meta, DTensor):
        return full
    shard = torch.empty_like(on_meta, device=full.device)
    shard.to_local().copy_(_local(full, on_meta))
    return nn.Parameter(shard, requires_grad=full.requires_grad)


def _local(full: Tensor, like: Any) -> Tensor:
    """This rank's part. The last dimension of the mesh cuts first, as FSDP2 shards what is sharded already."""
    for axis in reversed(range(like.device_mesh.ndim)):
        dim = getattr(like.placements[axis], "dim", None)  # none where it is replicated
        if dim is not None:
            parts = full.chunk(like.device_mesh.size(axis), dim)
            rank = like.device_mesh.get_local_rank(axis)
            full = parts[rank] if rank < len(parts) else full.narrow(dim, 0, 0)
    return full
