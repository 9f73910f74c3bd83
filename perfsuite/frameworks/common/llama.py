"""Check whether a library that can only build Llama models can build a case's model."""

from typing import Any

from perfsuite.case.model import Model

USUAL_SHAPE = {  # default sizes of a Llama, for keys that a configuration leaves out
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
PLAIN = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
"""Options of transformers' Llama -> the only value that `cannot_build` accepts."""


def cannot_build(library: str, model: Model) -> str | None:
    """Return why `library` cannot build `model`, or None."""
    model_type = model.config.get("model_type")
    if model_type != "llama":
        return f"{library} builds only Llama models, but {model.name} is a {model_type}"
    config: dict[str, Any] = {**USUAL_SHAPE, **model.config}
    only = {**PLAIN, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
    for key, value in only.items():
        if config.get(key) not in (None, value):
            return f"{library} supports only {key}={value!r}, but {model.name} has {config[key]!r}"
    return None
