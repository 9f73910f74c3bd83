"""Create the same weights in every framework, shard by shard. For the worker; imports torch.

A model is built on the meta device, and can be sharded there. `initialise` then creates the values, one block
at a time.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from perfsuite.errors import MismatchError
from perfsuite.frameworks.common.finetuning import quantised
from perfsuite.frameworks.common.private import init_weights, own_parameters


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside the `with`, create the parameters of new modules on the meta device.

    Buffers are created on their usual device.
    """

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # leave the parameter unchanged: tied parameters would otherwise no longer be tied
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def initialise(model: Any, units: Iterable[nn.Module], *, seed: int, device: torch.device) -> None:
    """Move all parameters of `model` from the meta device to `device`, and create their values.

    `units` are parts of the model, such as its blocks. Only one unit at a time is in memory unsharded,
    because each unit gets its values before the next one is taken from the iterator. Raises `MismatchError`
    for a parameter that no rule initialises.
    """
    names = {
        # The name of a module is the seed of its values. A layer inside an adapter gets the name that it
        # would have without the adapter, so that it also gets the same weights as without the adapter.
        module: f"{name} (adapter)" if _is_adapter(module) else name.removesuffix(".base_layer")
        for name, module in model.named_modules()
    }
    done: set[nn.Module] = set()
    for unit in chain(units, (model,)):
        modules = {module: names[module] for module in unit.modules() if module not in done}
        _initialise_modules(model, modules, seed, device)
        done.update(modules)
    torch.manual_seed(seed)


def _initialise_modules(model: Any, names: dict[nn.Module, str], seed: int, device: torch.device) -> None:
    on_meta = {parameter for module in names for parameter in module.parameters(recurse=False)}
    whole = {}
    for parameter in on_meta:  # NaN shows which parameters no rule has initialised
        full = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device=device)
        whole[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    _replace(names, whole)
    # Seed only the generator of this device. On a CPU, `torch.manual_seed` would take 100 times as long.
    generator: Any = torch.cuda if device.type == "cuda" else torch.default_generator
    module: Any
    # Initialise children first, because a parent can have its own rules for the weights of its children.
    for module, name in reversed(names.items()):
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4]))
        if _is_adapter(module):
            for adapter in module.active_adapters:
                module.reset_lora_parameters(adapter, init_lora_weights=True)
        else:
            init_weights(model)(module)
    _replace(names, {whole[parameter]: _kept(parameter, whole[parameter]) for parameter in on_meta})


def _is_adapter(module: nn.Module) -> bool:
    return hasattr(module, "reset_lora_parameters")


def _replace(modules: Iterable[nn.Module], by: Mapping[Any, nn.Parameter]) -> None:
    for module in modules:
        parameters = own_parameters(module)
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = by[parameter]


def _kept(on_meta: Any, full: nn.Parameter) -> nn.Parameter:
    """Return the parameter that this rank keeps: its shard, or the full parameter, quantised if necessary."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    _check_initialised(full)
    if not isinstance(on_meta, DTensor):
        return full if type(on_meta) is type(full) else quantised(on_meta, full)
    # With `src_data_rank=None`, each rank cuts out its own shard, and nothing is sent.
    shard = distribute_tensor(full, on_meta.device_mesh, on_meta.placements, src_data_rank=None)
    return nn.Parameter(shard, requires_grad=full.requires_grad)


def _check_initialised(full: torch.Tensor) -> None:
    if bool(full.isnan().any()):
        raise MismatchError(f"no rule initialises a parameter of shape {tuple(full.shape)}")
