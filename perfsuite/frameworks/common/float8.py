"""Linear layers with float8 matmuls from torchao, and the modules of a model with few bits. Worker side."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import missing_package

if TYPE_CHECKING:
    from perfsuite.results.rank_report import Flops

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""How torchao scales: a whole tensor, each row, or each row except for gradients of weights (16 bits)."""
LOW_PRECISION = ("Float8", "MXFP8", "NVFP4")  # name prefixes of modules with matmuls in fewer than 16 bits
GATHERED = ", gathered in float8"  # added if FSDP2 gathers weights in 8 bits
MULTIPLE = 16  # float8 matmuls on a GPU need sizes that are a multiple of it


def unsupported(
    recipe: Recipe | None, case: Case, machine: Machine, *, by_accelerate: bool = False
) -> str | None:
    """Return why a case cannot train in float8 on a machine, or None."""
    if recipe is None:
        return None
    if by_accelerate and case.precision != "bf16-mixed":
        return f"float8={recipe!r} is mixed with bf16: give precision 'bf16-mixed', not {case.precision!r}"
    if by_accelerate and getattr(case.framework, "tp_size", 1) > 1:
        return f"float8={recipe!r}: torchao's linear layers are none that transformers splits by tp_size"
    if case.lora is not None or case.quantization != "none":
        return f"float8={recipe!r} goes with neither lora nor quantization"
    if machine.compute_capability is not None and machine.compute_capability < (8, 9):
        return f"float8={recipe!r} needs a GPU of compute capability 8.9 or more, as an L4, L40S or H100"
    return missing_package("torchao")


@functools.cache
def expected(
    recipe: Recipe | None, case: Case, *, kept: int = 0, gathered: bool = False
) -> Mapping[str, str]:
    """Return what must be observed: the blocks' linear layers in float8, without the first `kept` ones.

    `gathered` means that the wrapper gathers weights in float8, if the recipe allows it.
    """
    if recipe is None:
        return {}
    import torch

    from perfsuite.frameworks.common.finetuning import linear_layers
    from perfsuite.frameworks.common.model import blocks, model_without_weights

    gathers = gathered and recipe == "tensorwise"
    layers = linear_layers(blocks(model_without_weights(case, torch.device("meta"))))
    return {"low_precision_modules": f"{len(layers) - kept} Float8Linear{GATHERED * gathers}"}


def convert(recipe: Recipe | None, model: Any, device: Any) -> None:
    """Let the linear layers of a model's blocks multiply in float8, emulated on a CPU.

    The head stays unchanged, as torchao advises. Raises `MismatchError` for sizes that float8 does not
    support.
    """
    if recipe is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from perfsuite.frameworks.common.finetuning import linear_layers
    from perfsuite.frameworks.common.model import blocks

    layers: list[tuple[str, Any]] = [*linear_layers(blocks(model))]
    for name, layer in layers:
        if any(size % MULTIPLE for size in layer.weight.shape):
            shape = " x ".join(map(str, layer.weight.shape))
            raise MismatchError(f"float8: the weight of {name} is {shape}, expected multiples of {MULTIPLE}")
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=device.type == "cpu")
    chosen = {id(layer) for _, layer in layers}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: id(layer) in chosen)


def accelerate_recipe(recipe: Recipe, device: Any, *, gathered: bool) -> Any:
    """Return accelerate's `AORecipeKwargs`. `tensorwise` is what accelerate itself would create."""
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    own = {"pad_inner_dim": True, "enable_fsdp_float8_all_gather": gathered} if recipe == "tensorwise" else {}
    config = Float8LinearConfig.from_recipe_name(recipe)
    return AORecipeKwargs(config=dataclasses.replace(config, emulate=device.type == "cpu", **own))


def observed(model: Any) -> dict[str, str]:
    """Return which modules multiply in fewer than 16 bits, if any, and whether FSDP2 gathers them so."""
    from perfsuite.frameworks.common.private import shard_of

    seen = low_precision(model.modules())
    kinds = {type(shard_of(each)).__name__ for each in model.parameters()}
    seen += GATHERED * ("WeightWithDynamicFloat8CastTensor" in kinds)
    return {} if seen == "none" else {"low_precision_modules": seen}


def with_float8(flops: Flops | None, model: Any) -> Flops | None:
    """Return FLOPs with those in float8 listed separately, if that is known."""
    return flops and flops.replace(per_token_float8=flops_in_float8(model.modules()) or None)


def low_precision(things: Iterable[Any]) -> str:
    """Return how many modules, or configurations of modules, multiply in fewer than 16 bits, by class."""
    counts = Counter(map(_kind, things))
    kinds = sorted(name for name in counts if name.startswith(LOW_PRECISION))
    return ", ".join(f"{counts[name]} {name}" for name in kinds) or "none"


def _kind(thing: Any) -> str:
    """Return the class of a module, or of what a configuration builds, before FSDP renamed it."""
    name = type(thing).__qualname__.removesuffix(".Config").rpartition(".")[2]
    return name.removeprefix("FSDP")


def flops_in_float8(modules: Iterable[Any]) -> float | None:
    """Return the FLOPs per token in torchao's linear layers; None if any is emulated, or of another kind.

    The output and the gradients of input and weight are matmuls with 2 FLOPs per weight. A recipe may keep
    the gradient of the weight in more bits.
    """
    flops = 0.0
    for module in modules:
        kind = _kind(module)
        if not kind.startswith(LOW_PRECISION):
            continue
        recipe = getattr(module, "config", None)
        if kind not in ("Float8Linear", "MXFP8Linear") or getattr(recipe, "emulate", False):
            return None
        of_weight = getattr(recipe, "cast_config_input_for_grad_weight", None)
        is_whole = of_weight is not None and of_weight.scaling_type.name == "DISABLED"
        flops += (4.0 if is_whole else 6.0) * module.weight.numel()
    return flops
