"""Train low-rank adapters (peft) on a frozen model, which can be quantised (bitsandbytes).

For the worker; imports torch.

LoRA: Hu et al. 2021. `4bit`: QLoRA's NF4 (Dettmers et al. 2023). `8bit`: LLM.int8() (Dettmers et al. 2022).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from perfsuite.case.case import Case, LoRA, Quantization
from perfsuite.errors import MismatchError
from perfsuite.frameworks.common import adapters
from perfsuite.frameworks.common.adapters import is_linear

NOT_PEFTS = "not peft's, rank "  # prefix of the observed value if another library added the adapters


def linear_layers(blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the linear layers in these blocks, with their names within a block. Adapters are left out."""
    return [
        (name.removesuffix(".base_layer"), module)
        for block in blocks
        for name, module in block.named_modules()
        if is_linear(module) and ".lora_" not in name
    ]


def quantise_layers(
    kind: Quantization, blocks: Sequence[nn.Module], dtype: torch.dtype, compute: torch.dtype
) -> None:
    """Replace linear layers with quantised layers that have no values yet.

    4-bit weights are packed into elements of `dtype`.
    """
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for block in blocks:
        for name, layer in linear_layers([block]):
            if not isinstance(layer, nn.Linear):
                raise MismatchError(f"quantization: {name} is a {type(layer).__name__}, not a torch Linear")
            make: Any = partial(Linear8bitLt, has_fp16_weights=False, threshold=6.0)
            if kind == "4bit":
                make = partial(Linear4bit, compute_dtype=compute, quant_type="nf4", quant_storage=dtype)
            new = make(layer.in_features, layer.out_features, layer.bias is not None)
            block.set_submodule(name, new.requires_grad_(False))


def quantised(empty: Any, full: nn.Parameter) -> Any:
    """Quantise the values of `full` for the parameter `empty`, which was created by `quantise_layers`."""
    from bitsandbytes.nn import Int8Params, Params4bit

    if isinstance(empty, Params4bit):
        parameter = Params4bit(
            full.data, quant_type=empty.quant_type, quant_storage=empty.quant_storage, module=empty.module
        )
        return parameter.to(full.device)
    values = Int8Params(full.data.cpu(), requires_grad=False, has_fp16_weights=False)
    return values.to(full.device)  # `Int8Params` are quantised when they are copied from host memory


def add_adapters(
    lora: LoRA,
    model: Any,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    quantization: Quantization = "none",
) -> None:
    """Freeze `model` and add adapters, which have no values yet, to its linear layers.

    By default, only the linear layers in the model's blocks get an adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = adapters.adaptable(model)
    unused = adapters.unused(lora, layers)
    if unused:
        missing = ", ".join(unused)
        names = ", ".join(adapters.short_names(layers))
        raise MismatchError(f"lora: no linear layer is called {missing}; the linear layers are {names}")
    chosen = adapters.chosen(lora, layers, blocks)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[layer.name for layer in chosen],
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        fan_in_fan_out=not all(isinstance(layer.module, nn.Linear) for layer in chosen),
    )
    flag = f"is_loaded_in_{quantization}"  # peft reads this attribute to choose the class of the adapters
    setattr(model, flag, True)
    inject_adapter_in_model(config, model)
    delattr(model, flag)
    for name, module in model.named_modules():
        if ".lora_" in name and is_linear(module):
            module.to(dtype)


OTHERS = "others"  # the value of `trained` if parameters other than adapters are trained
MOST_NAMED = 3  # maximum number of such parameters in a message


def observed(model: nn.Module) -> dict[str, str]:
    """Return settings that show which parameters are trained and, if some are frozen, the adapters."""
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if all(trains.values()):
        return {"trained": "all"}
    adapters_only = all(_is_adapter(name) for name, trained in trains.items() if trained)
    kinds = [kind for kind in map(quantization_of, model.modules()) if kind is not None]
    settings = {
        "trained": "adapters only" if adapters_only else OTHERS,
        "quantised_layers": " ".join([str(len(kinds)), *sorted(set(kinds))]),
    }
    layers = adapters.adaptable(model)
    adapted = adapters.adapted(layers)
    if adapted:
        described = adapters.described(layers, {layer: layer.adapters for layer in adapted})
        settings |= {"adapters": str(len(adapted)), "lora": described}
    elif adapters_only:
        settings["lora"] = NOT_PEFTS + (" and ".join(map(str, sorted(_ranks_not_pefts(model)))) or "not seen")
    return settings


def expected(
    case: Case, model: nn.Module, blocks: Sequence[nn.Module], lora_observed: str | None = None
) -> dict[str, str | None]:
    """Return the values that `observed` must return for a model with these blocks. None allows any value.

    `lora_observed` is the observed value of `lora`. If the adapters are not from peft, only their rank can
    be known, and sometimes not even the rank. If the case gives only the name of the model, the number of
    adapters is unknown.
    """
    if case.lora is None:
        return {}
    names = [name for name, _ in linear_layers(blocks)]
    quantised = case.quantization != "none"
    asked: dict[str, str | None] = {
        "trained": "adapters only",
        "quantised_layers": f"{len(names)} {case.quantization}" if quantised else "0",
    }
    if lora_observed is not None and lora_observed.startswith(NOT_PEFTS):
        is_seen = lora_observed != f"{NOT_PEFTS}not seen"
        return {**asked, "adapters": None, "lora": f"{NOT_PEFTS}{case.lora.rank}" if is_seen else None}
    layers = adapters.adaptable(model)
    if not case.model.config and adapters.fits(case.lora, layers, blocks):
        return {**asked, "adapters": None, "lora": lora_observed}
    chosen = adapters.chosen(case.lora, layers, blocks)
    of = {layer: frozenset({case.lora.of(layer.name)}) for layer in chosen}
    lora = adapters.described(layers, of)
    if lora != lora_observed:
        short = adapters.described(layers, of, exactly=False)
        if short != lora_observed:
            lora = short  # short names for the message, because there can be hundreds of full names
    unused = adapters.unused(case.lora, layers)
    if unused:
        lora = "; ".join(filter(None, [lora, f"on {' '.join(unused)} (no layer has such a name)"]))
    return {**asked, "adapters": str(len(chosen)) if case.model.config else None, "lora": lora}


def check_asked(
    case: Case, model: nn.Module, blocks: Sequence[nn.Module], observed: Mapping[str, str]
) -> None:
    """Raise `MismatchError` if only adapters are trained, but the case has no `lora`."""
    if case.lora is None and observed["trained"] == "adapters only":
        raise MismatchError(
            f"lora: the case has none, but only adapters are trained ({observed['lora']}). "
            f"The FLOPs depend on them: {advice(model, blocks)}"
        )


def advice_on_others(model: nn.Module) -> str:
    """Return advice for a case with `lora` whose script also trains parameters that are not adapters."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    others = [name for name in trained if not _is_adapter(name)]
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    return (
        "remove lora from the case, because parameters that are not adapters are trained: "
        f"{', '.join(others[:MOST_NAMED])}{more}"
    )


def advice(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Return advice on how to set `lora` in the case so that it describes the training."""
    layers = adapters.adaptable(model)
    if adapters.adapted(layers):
        return f"set lora={adapters.as_code(layers, blocks)} in the case"
    ranks = sorted(_ranks_not_pefts(model))
    if ranks:
        return (
            f"set lora=LoRA(rank={ranks[0]}, alpha={ranks[0]}) in the case, but replace this alpha with "
            "the one that you use"
        )
    if any(_is_adapter(name) for name, _ in model.named_parameters()):
        return "set lora=LoRA(rank=16, alpha=32) in the case, but replace both numbers with your own"
    return "leave lora out of the case"


def frozen_share(model: nn.Module) -> float:
    """Return the frozen fraction of the weights in linear layers, from 0 to 1. Adapters are not counted."""
    layers: list[Any] = [layer for _, layer in linear_layers([model])]
    frozen = (_size(layer) for layer in layers if not getattr(layer.weight, "requires_grad", True))
    return sum(frozen) / max(sum(map(_size, layers)), 1)


def _size(layer: Any) -> int:
    """Return the number of weights of a linear layer, before packing and sharding."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * layer.out_features
    return int(layer.nx * layer.nf)


def _is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to a LoRA adapter, or to a layer that peft trains in full."""
    return ".lora_" in f".{name}" or ".modules_to_save." in name


def _ranks_not_pefts(model: nn.Module) -> set[int]:
    """Return the ranks of adapters that are not from peft.

    The rank is read from a field of the layer. The shape of the layer's matrix A does not always show the
    rank: in loralib, one matrix A can hold the adapters of q, k and v. If a layer has no such field, the
    shape of A gives the rank.
    """
    ranks = set()
    for module in model.modules():
        names = (name for name in ("lora_A", "lora_a", "lora_down") if hasattr(module, name))
        a = getattr(module, next(names, ""), None)
        weight = getattr(a, "weight", a)
        if isinstance(weight, torch.Tensor):
            said = getattr(module, "r", getattr(module, "rank", None))
            by_shape = min(weight.shape) if weight.dim() == 2 else 0  # 0: the parameter is flat
            ranks.add(said if isinstance(said, int) else by_shape)
    return ranks - {0}


def quantization_of(module: nn.Module) -> str | None:
    """Return `4bit` or `8bit` for a linear layer of bitsandbytes, and None for any other module."""
    # peft's wrappers around these layers have classes of the same names, but they are not `nn.Linear` layers.
    if not isinstance(module, nn.Linear):
        return None
    return {"Linear4bit": "4bit", "Linear8bitLt": "8bit"}.get(type(module).__name__)
