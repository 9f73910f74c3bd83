"""Tensor parallelism for transformers' Llama: which shapes can be split, and how. Imports torch when used.

The matmuls of each block are split by columns and then by rows (Shoeybi et al. 2019, Megatron-LM), so that
attention heads and MLP columns stay with their rank, and each half of a block needs one all-reduce. The
embedding and the head are split by vocabulary; the logits are gathered. Norms are replicated.
"""

from __future__ import annotations

from typing import Any

from perfsuite.case.case import Case


def tensor_parallel_unsupported(case: Case, ranks: int) -> str | None:
    """Return why the case's model cannot be split over `ranks` ranks, or None."""
    config, name = case.model.config, case.model.name
    if case.compile:  # torch 2.13: the second loss is 0.2 % off, where uncompiled blocks train as DDP does
        return "tensor_parallel trains otherwise when its blocks are compiled: leave compile off"
    if case.lora is not None:
        return "tensor_parallel does not know how to split lora adapters"
    if (model_type := config.get("model_type")) != "llama":
        return f"tensor_parallel knows how to split llama models only, {name} is {model_type}"
    heads = config.get("num_attention_heads")
    split = {
        "processes": case.topology.world_size,
        "attention heads": heads,
        "key-value heads": config.get("num_key_value_heads") or heads,
        "MLP columns": config.get("intermediate_size"),
        "tokens in the vocabulary": config.get("vocab_size"),
    }
    for what, count in split.items():
        if not isinstance(count, int):
            return (
                f"tensor_parallel needs the number of {what}, which the configuration of {name} does not say"
            )
        if count % ranks:
            return f"tensor_parallel={ranks} must divide the {count} {what} of {name}"
    return None


def parallelize_llama(model: Any, mesh: Any) -> None:
    """Split a transformers Llama, on the meta device or not, over a 1-D mesh."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    columns = [f"{attention}.{name}_proj" for name in "qkv"] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{path: ColwiseParallel() for path in columns},
        f"{attention}.o_proj": RowwiseParallel(),
        f"{mlp}.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.tie_weights()  # `parallelize_module` gives each tied weight a parameter of its own
