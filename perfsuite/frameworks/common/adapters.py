"""Find the layers that have low-rank adapters, under the names that peft sees. Imports torch."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from perfsuite.case.case import LoRA
from perfsuite.frameworks.common.private import checkpointed_module, compiled_module, fsdp_module

WRAPPERS = frozenset({checkpointed_module.name, compiled_module.name, fsdp_module.name, "base_layer"})
"""Parts of module names that wrappers added. peft matched the names without these parts."""
COPIES = frozenset({"modules_to_save", "original_module"})  # two copies of a layer that peft trains in full


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """A layer that has an adapter from peft, or could have one."""

    name: str  # relative to the model that was passed to peft
    module: nn.Module  # the layer without its adapters
    is_head: bool  # whether this is the output layer of a language model
    adapters: frozenset[tuple[float, float]]  # rank and alpha of each adapter


def is_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer: torch's class, or Conv1D of transformers' GPT-2."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def adaptable(model: nn.Module) -> list[Layer]:
    """Return the linear layers of `model`, and any other layers that have an adapter.

    If only parts of the model were passed to peft, only the layers of these parts are returned.
    """
    layers: dict[tuple[int, str], Layer] = {}
    for number, root in enumerate(_prepared(model) or [model]):
        get_head = getattr(root, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        for path, module in root.named_modules():
            parts = [part for part in path.split(".") if part not in WRAPPERS]
            if any(part.startswith("lora_") or part in COPIES for part in parts):
                continue
            key = number, ".".join(parts)
            adapters = _adapters(module)
            if adapters or (is_linear(module) and key not in layers):
                base = getattr(module, "base_layer", module)
                is_head = head is not None and head in (module, base)
                layers[key] = Layer(name=key[1], module=base, is_head=is_head, adapters=adapters)
    return list(layers.values())


def adapted(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers that have an adapter."""
    return [layer for layer in layers if layer.adapters]


def chosen(lora: LoRA, layers: Sequence[Layer], blocks: Sequence[nn.Module]) -> list[Layer]:
    """Return those of a model's `layers` that should have an adapter according to `lora`.

    `blocks` are the model's transformer blocks.
    """
    if lora.targets == ():
        inside = {part for block in blocks for part in block.modules()}
        return [layer for layer in layers if layer.module in inside]
    if isinstance(lora.targets, str) and lora.targets.lower() == "all-linear":
        return [layer for layer in layers if not layer.is_head]
    return [layer for layer in layers if lora.selects(layer.name)]


def unused(lora: LoRA, layers: Sequence[Layer]) -> list[str]:
    """Return the targets of `lora` that match none of `layers`."""
    if lora.targets == "all-linear":
        return []
    names = [layer.name for layer in layers]
    if isinstance(lora.targets, str):
        return [] if any(map(lora.selects, names)) else [lora.targets]
    alone = {target: lora.replace(targets=(target,)) for target in lora.targets}
    return [target for target, one in alone.items() if not any(map(one.selects, names))]


def short_names(layers: Sequence[Layer]) -> list[str]:
    """Return the last part of each layer's name: `q_proj`, or `to_out.0` if the last part is a number."""
    return sorted({next(_possible_ends(layer.name)) for layer in layers})


def fits(lora: LoRA, layers: Sequence[Layer], blocks: Sequence[nn.Module]) -> bool:
    """Return whether the adapters match `lora`.

    They also match if only some of the layers that share a short name, such as `q_proj`, have an adapter.
    Use this function if a case gives only the name of its model, because it is then unknown which layers the
    model has.
    """
    with_adapter = adapted(layers)
    asked = chosen(lora, layers, blocks)
    if not all(layer in asked and layer.adapters == {lora.of(layer.name)} for layer in with_adapter):
        return False
    if lora.targets and not isinstance(lora.targets, str):
        return not unused(lora, with_adapter)
    return short_names(with_adapter) == short_names(asked)


def described(
    layers: Sequence[Layer], of: Mapping[Layer, frozenset[tuple[float, float]]], *, exactly: bool = True
) -> str:
    """Describe the adapters of some of `layers`, grouped by rank and alpha.

    `of` maps these layers to their adapters. With `exactly`, the names of layers are long enough to match no
    other layer.
    """
    descriptions = []
    for rank, alpha in sorted({pair for pairs in of.values() for pair in pairs}):
        group = [layer for layer in of if (rank, alpha) in of[layer]]
        names = sorted(set(_ends(layers, group))) if exactly else short_names(group)
        descriptions.append(f"rank {rank}, alpha {alpha}, on {' '.join(names)}")
    return "; ".join(descriptions)


def as_code(layers: Sequence[Layer], blocks: Sequence[nn.Module]) -> str:
    """Return Python code for a case, `LoRA(...)`, that describes the adapters of these layers.

    At least one of the layers must have an adapter.
    """
    with_adapter = adapted(layers)
    pairs = {layer: max(layer.adapters) for layer in with_adapter}
    (rank, alpha), _ = Counter(pairs.values()).most_common(1)[0]
    words = [f"rank={rank}", f"alpha={alpha}"]
    if set(chosen(LoRA(rank=1, alpha=1), layers, blocks)) != set(with_adapter):
        words.append(f"targets={_targets(layers, with_adapter)}")
    for index, (name, usual) in enumerate((("rank_pattern", rank), ("alpha_pattern", alpha))):
        pattern = {}
        for value in sorted({pair[index] for pair in pairs.values()} - {usual}):
            group = [layer for layer in with_adapter if pairs[layer][index] == value]
            pattern.update({re.escape(end): value for end in _ends(with_adapter, group)})
        if pattern:
            words.append(f"{name}={json.dumps(pattern, sort_keys=True)}")
    return f"LoRA({', '.join(words)})"


def _prepared(model: nn.Module) -> list[nn.Module]:
    """Return the innermost modules that were passed to peft. They have the attribute `peft_config`."""
    marked = [
        module for module in model.modules() if isinstance(getattr(module, "peft_config", None), Mapping)
    ]
    outer = {
        module for module in marked for part in module.modules() if part is not module and part in marked
    }
    return [module for module in marked if module not in outer]


def _adapters(module: Any) -> frozenset[tuple[float, float]]:
    """Return rank and alpha of each low-rank adapter that this layer has from peft."""
    ranks = getattr(module, "r", None)
    if not isinstance(ranks, Mapping) or not any(len(getattr(module, kind, ())) for kind in _KINDS):
        return frozenset()
    return frozenset((rank, module.lora_alpha[adapter]) for adapter, rank in ranks.items())


_KINDS = ("lora_A", "lora_embedding_A")


def _targets(layers: Sequence[Layer], group: Sequence[Layer]) -> str:
    """Return Python code for `targets` that match the layers of `group`, but no other layers.

    The targets are suffixes of names. If these suffixes would also match other layers, `targets` is a regular
    expression that lists the full names.
    """
    ends = sorted(set(_ends(layers, group)))
    lora = LoRA(rank=1, alpha=1, targets=tuple(ends))
    if {layer for layer in layers if lora.selects(layer.name)} != set(group):
        return json.dumps("|".join(re.escape(layer.name) for layer in group))
    words = [json.dumps(end) for end in ends]
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def _ends(layers: Sequence[Layer], group: Sequence[Layer]) -> list[str]:
    """Return, for each layer in `group`, the shortest suffix of its name that only layers of `group` have."""
    everywhere = Counter(end for layer in layers for end in _possible_ends(layer.name))
    inside = Counter(end for layer in group for end in _possible_ends(layer.name))
    return [
        next((end for end in _possible_ends(layer.name) if inside[end] == everywhere[end]), layer.name)
        for layer in group
    ]


def _possible_ends(name: str) -> Iterator[str]:
    """Yield the suffixes of a name, shortest first. Suffixes that start with a number are skipped.

    The last one is the whole name, even if it starts with a number.
    """
    parts = name.split(".")
    for start in reversed(range(len(parts))):
        if not parts[start].isdecimal() or start == 0:
            yield ".".join(parts[start:])
