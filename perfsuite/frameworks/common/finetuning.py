"""Low-rank adapters (peft) on a frozen, perhaps quantised (bitsandbytes) model. Worker side; imports torch.

LoRA: Hu et al. 2021. `4bit`: QLoRA's NF4 (Dettmers et al. 2023). `8bit`: LLM.int8() (Dettmers et al. 2022).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from perfsuite.case.case import Case, LoRA, Quantization
from perfsuite.errors import MismatchError

NOT_PEFTS = "not peft's, rank "  # begins what is observed of adapters that another library has made


def linear_layers(blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the linear layers of these modules, without adapters, with their names there."""
    return [
        (name.removesuffix(".base_layer"), module)
        for block in blocks
        for name, module in block.named_modules()
        if is_linear(module) and ".lora_" not in name
    ]


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is a matmul with a weight; transformers' GPT-2 has its own class, Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def quantise_layers(
    kind: Quantization, blocks: Sequence[nn.Module], dtype: torch.dtype, compute: torch.dtype
) -> None:
    """Replace linear layers by quantised ones, without values; 4-bit weights are packed in `dtype`."""
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
    """Return a parameter like `empty`, which `quantise_layers` made, with the values of `full`."""
    from bitsandbytes.nn import Int8Params, Params4bit

    if isinstance(empty, Params4bit):
        parameter = Params4bit(
            full.data, quant_type=empty.quant_type, quant_storage=empty.quant_storage, module=empty.module
        )
        return parameter.to(full.device)
    values = Int8Params(full.data.cpu(), requires_grad=False, has_fp16_weights=False)
    return values.to(full.device)  # it quantises on the way from host memory only


def add_adapters(
    lora: LoRA,
    model: Any,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    quantization: Quantization = "none",
) -> None:
    """Freeze `model` and add adapters, without values yet, to the linear layers of its blocks."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = linear_layers(blocks)
    known = {_last(name) for name, _ in layers}
    if unknown := sorted(set(lora.targets) - known):
        raise MismatchError(
            f"lora: no linear layer is called {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    chosen = {layer for name, layer in layers if _is_target(lora, name)}
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[name for name, module in model.named_modules() if module in chosen],
        fan_in_fan_out=not all(isinstance(layer, nn.Linear) for layer in chosen),
    )
    flag = f"is_loaded_in_{quantization}"  # peft asks the model for it to choose the adapters' class
    setattr(model, flag, True)
    inject_adapter_in_model(config, model)
    delattr(model, flag)
    for name, module in model.named_modules():
        if ".lora_" in name and is_linear(module):
            module.to(dtype)


def observed(model: nn.Module) -> dict[str, str]:
    """Return which parameters are trained; unless all are, also the adapters and the quantised layers."""
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if all(trains.values()):
        return {"trained": "all"}
    adapters_only = all(_is_adapter(name) for name, trained in trains.items() if trained)
    kinds = [kind for module in model.modules() if (kind := quantization_of(module)) is not None]
    told = {
        "trained": "adapters only" if adapters_only else "others",
        "quantised_layers": " ".join([str(len(kinds)), *sorted(set(kinds))]),
    }
    if adapted := _adapted(model):
        ranks = {rank for layer in adapted.values() for rank in layer.r.values()}
        alphas = {alpha for layer in adapted.values() for alpha in layer.lora_alpha.values()}
        told |= {"adapters": str(len(adapted)), "lora": _described(ranks, alphas, map(_last, adapted))}
    elif adapters_only:
        told["lora"] = NOT_PEFTS + (" and ".join(map(str, sorted(_ranks_not_pefts(model)))) or "not seen")
    return told


def expected(
    case: Case, blocks: Sequence[nn.Module], lora_observed: str | None = None
) -> dict[str, str | None]:
    """Return what `observed`, which says `lora_observed`, must say of a model with these blocks.

    None: any value. Of adapters that are not peft's the rank alone is known, if it can be seen.
    """
    if case.lora is None:
        return {}
    names = [name for name, _ in linear_layers(blocks)]
    chosen = [name for name in names if _is_target(case.lora, name)]
    quantised = case.quantization != "none"
    lora = _described({case.lora.rank}, {case.lora.alpha}, map(_last, chosen))
    if not_pefts := lora_observed is not None and lora_observed.startswith(NOT_PEFTS):
        lora = f"{NOT_PEFTS}{case.lora.rank}"
    return {
        "trained": "adapters only",
        "lora": None if lora_observed == f"{NOT_PEFTS}not seen" else lora,
        "adapters": None if not_pefts else str(len(chosen)),
        "quantised_layers": f"{len(names)} {case.quantization}" if quantised else "0",
    }


def check_asked(case: Case, observed: Mapping[str, str]) -> None:
    """Raise `MismatchError` if only adapters are trained, and the case says none."""
    if case.lora is None and observed["trained"] == "adapters only":
        raise MismatchError(
            f"lora: the case says none, but only adapters are trained, {observed['lora']}. "
            "Say lora=LoRA(...) in the case: FLOPs go by it"
        )


def frozen_share(model: nn.Module) -> float:
    """Return the share, 0 to 1, of frozen weights in linear layers. Adapters are not counted."""
    layers: list[Any] = [layer for _, layer in linear_layers([model])]
    frozen = (_size(layer) for layer in layers if not getattr(layer.weight, "requires_grad", True))
    return sum(frozen) / max(sum(map(_size, layers)), 1)


def _size(layer: Any) -> int:
    """Return the number of weights in a layer's matmul, however they are packed or sharded."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * layer.out_features
    return int(layer.nx * layer.nf)


def _is_adapter(name: str) -> bool:
    """Return whether the name is a LoRA's, or of peft's copy of a layer that is trained with the adapters."""
    return ".lora_" in f".{name}" or ".modules_to_save." in name


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers that peft has given a low-rank adapter, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "r", None), Mapping) and len(getattr(module, "lora_A", ()))
    }


def _ranks_not_pefts(model: nn.Module) -> set[int]:
    """Return ranks as layers say them (loralib's A may hold q, k and v), else by the shape of their A."""
    ranks = set()
    for module in model.modules():
        names = (name for name in ("lora_A", "lora_a", "lora_down") if hasattr(module, name))
        a = getattr(module, next(names, ""), None)
        if isinstance(weight := getattr(a, "weight", a), torch.Tensor):
            said = getattr(module, "r", getattr(module, "rank", None))
            by_shape = min(weight.shape) if weight.dim() == 2 else 0  # not of a part of a flat parameter
            ranks.add(said if isinstance(said, int) else by_shape)
    return ranks - {0}


def _described(ranks: Iterable[int], alphas: Iterable[int], targets: Iterable[str]) -> str:
    rank, alpha = (" and ".join(map(str, sorted(each))) for each in (ranks, alphas))
    return f"rank {rank}, alpha {alpha}, on {' '.join(sorted(set(targets)))}"


def quantization_of(module: nn.Module) -> str | None:
    """Return `4bit` or `8bit` for a linear layer of bitsandbytes, else None."""
    if not isinstance(module, nn.Linear):  # peft's classes around such a layer have the same names
        return None
    return {"Linear4bit": "4bit", "Linear8bitLt": "8bit"}.get(type(module).__name__)


def _is_target(lora: LoRA, name: str) -> bool:
    return not lora.targets or _last(name) in lora.targets


def _last(name: str) -> str:
    return name.rpartition(".")[2]
