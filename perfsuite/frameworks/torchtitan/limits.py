"""What torchtitan 0.3 can train: torch versions, precisions, Llama shapes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfsuite.case.model import Model

MIN_TORCH = (2, 13)
"""The first torch on which torchtitan 0.3 trains: it cannot be imported on 2.11; on 2.12 backward fails."""
PRECISIONS = {
    "fp32": ("float32", "float32"),
    "bf16-mixed": ("float32", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16"),
}
"""Precision of a case -> dtype of the parameters, dtype of computing. Gradients are reduced in fp32."""
LOSS_CHUNKS = 8
"""Parts that a sequence is split into for the loss, so that not all logits exist at once: its default."""
HAS_ONLY = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
"""Options of transformers' Llama for which torchtitan's has one value."""
ROPES = ("default", "llama3")
"""Values of `rope_type` that torchtitan's Llama 3 computes."""


def unsupported_shape(model: Model, tensor_parallel: int) -> str | None:
    """Return why torchtitan's Llama 3 cannot be `model`, or cannot be split over `tensor_parallel` ranks."""
    config: Mapping[str, Any] = model.config
    if config["model_type"] != "llama":
        return f"torchtitan's llama3 builds Llama models, {model.name} is a {config['model_type']}"
    for key, only in HAS_ONLY.items():
        if config.get(key, only) != only:
            return f"torchtitan's llama3 has {key}={only!r} only, {model.name} has {config[key]!r}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPES:
        return f"torchtitan's llama3 knows rope_type {' and '.join(ROPES)}, {model.name} has {rope_type!r}"
    heads, hidden = config.get("num_attention_heads", 32), config.get("hidden_size", 4096)
    if config.get("head_dim") not in (None, hidden // heads):
        return (
            f"torchtitan's llama3 has heads of size {hidden // heads}, {model.name} of {config['head_dim']}"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (count := config.get(key) or heads) % tensor_parallel:
            return f"tensor_parallel={tensor_parallel} must divide {key}, {count}"
    return None
