"""Train with torchao's float8 matmuls, and find modules with matmuls below 16 bits. For the worker."""

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
"""torchao's scales: one per tensor, one per row, or one per row with weight gradients in 16 bits."""
# Prefixes of the class names of modules with matmuls below 16 bits.
LOW_PRECISION = ("Float8", "MXFP8", "NVFP4")
GATHERED = ", gathered in float8"  # suffix of the setting if FSDP2 gathers weights in 8 bits
MULTIPLE = 16  # the sizes of float8 matmuls on a GPU must be multiples of this


def unsupported(
    recipe: Recipe | None, case: Case, machine: Machine, *, by_accelerate: bool = False
) -> str | None:
    """Return why a case cannot train in float8 on a machine, or None. If `recipe` is None, returns None."""
    if recipe is None:
        return None
    if by_accelerate and case.precision != "bf16-mixed":
        return f"float8={recipe!r} needs precision 'bf16-mixed', not {case.precision!r}"
    if by_accelerate and getattr(case.framework, "tp_size", 1) > 1:
        return f"float8={recipe!r}: transformers' tensor parallelism (tp_size) cannot split torchao's layers"
    if case.lora is not None or case.quantization != "none":
        return f"float8={recipe!r} cannot be combined with lora or quantization"
    if machine.compute_capability is not None and machine.compute_capability < (8, 9):
        return f"float8={recipe!r} needs a GPU of compute capability 8.9 or more, such as L4, L40S or H100"
    return missing_package("torchao")


@functools.cache
def expected(
    recipe: Recipe | None, case: Case, *, kept: int = 0, gathered: bool = False
) -> Mapping[str, str]:
    """Return the settings that the worker must observe. They give the number of float8 layers in the blocks.

    The first `kept` linear layers stay in higher precision. `gathered` means that the wrapper gathers weights
    in float8 if the recipe allows it.
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
    """Convert the linear layers of a model's blocks to float8. On a CPU, float8 is emulated.

    The head stays in higher precision, as torchao advises. Raises `MismatchError` for sizes that float8
    does not support.
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
            raise MismatchError(f"float8: the weight of {name} is {shape}; give multiples of {MULTIPLE}")
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=device.type == "cpu")
    chosen = {id(layer) for _, layer in layers}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: id(layer) in chosen)


def accelerate_recipe(recipe: Recipe, device: Any, *, gathered: bool) -> Any:
    """Return accelerate's `AORecipeKwargs`. For `tensorwise`, these are accelerate's own defaults."""
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    own = {"pad_inner_dim": True, "enable_fsdp_float8_all_gather": gathered} if recipe == "tensorwise" else {}
    config = Float8LinearConfig.from_recipe_name(recipe)
    return AORecipeKwargs(config=dataclasses.replace(config, emulate=device.type == "cpu", **own))


def observed(model: Any) -> dict[str, str]:
    """Return the setting `low_precision_modules`, or an empty dict if all matmuls have 16 bits or more."""
    from perfsuite.frameworks.common.private import shard_of

    seen = low_precision(model.modules())
    kinds = {type(shard_of(parameter)).__name__ for parameter in model.parameters()}
    seen += GATHERED * ("WeightWithDynamicFloat8CastTensor" in kinds)
    return {} if seen == "none" else {"low_precision_modules": seen}


def with_float8(flops: Flops | None, model: Any) -> Flops | None:
    """Return `flops` with the float8 FLOPs of `model` listed separately, if their number is known."""
    return flops and flops.replace(per_token_float8=flops_in_float8(model.modules()) or None)


def low_precision(things: Iterable[Any]) -> str:
    """Describe, by class, how many modules or module configurations have matmuls below 16 bits."""
    counts = Counter(map(_kind, things))
    kinds = sorted(name for name in counts if name.startswith(LOW_PRECISION))
    return ", ".join(f"{counts[name]} {name}" for name in kinds) or "none"


def _kind(thing: Any) -> str:
    """Return the class name of a module, or of the module that a configuration describes.

    The prefix that FSDP adds to class names is removed.
    """
    name = type(thing).__qualname__.removesuffix(".Config").rpartition(".")[2]
    return name.removeprefix("FSDP")


def flops_in_float8(modules: Iterable[Any]) -> float | None:
    """Return the FLOPs per token in torchao's linear layers. None if some of them are unknown.

    The FLOPs are unknown if a layer only emulates float8, or if a module with low precision is not one of
    torchao's linear layers. A layer has three matmuls: for its output, for the gradient of its input and for
    the gradient of its weight. Each has 2 FLOPs per weight. If a recipe computes the gradient of the weight
    in more than 8 bits, this matmul is not counted.
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
