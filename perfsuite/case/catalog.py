"""The built-in models: published shapes by name.

`tests/case/test_catalog.py` compares the parameter count of each model with the published count.
"""

from collections.abc import Mapping
from typing import Any

from perfsuite.case.model import Model
from perfsuite.documents import did_you_mean
from perfsuite.errors import CaseError

GPT2 = {"layers": "n_layer", "heads": "n_head", "hidden": "n_embd", "positions": "n_positions"}
LLAMA = {  # short name in this module -> the field of a transformers configuration
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "mlp": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "rope": "rope_parameters",
    "tied": "tie_word_embeddings",
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def gpt2(name: str, **shape: Any) -> Model:
    """Return a GPT-2 model (OpenAI 2019): tied embeddings, dropout of 0.1 as published.

    `shape` gives fields of the configuration, under their own names or the short names in `GPT2`.
    """
    usual = {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257}
    return Model(name=name, config={**usual, **{GPT2.get(key, key): value for key, value in shape.items()}})


def llama(name: str, **shape: Any) -> Model:
    """Return a Llama model (Touvron 2023, Dubey 2024): grouped queries, SwiGLU.

    `shape` gives fields of the configuration, under their own names or the short names in `LLAMA`.
    """
    shape = {"positions": 4096, "rms_norm_eps": 1e-5, "tied": False, **shape}
    config = {LLAMA.get(key, key): value for key, value in shape.items()}
    return Model(name=name, config={"model_type": "llama", **config})


def mamba(name: str, **shape: Any) -> Model:
    """Return a Mamba model (Gu and Dao 2023).

    It has a state size of 16, an expansion of 2, convolutions over 4 tokens, and tied embeddings.
    """
    config = {LLAMA[key]: value for key, value in shape.items()}
    usual = {"state_size": 16, "expand": 2, "conv_kernel": 4, "tie_word_embeddings": True}
    return Model(name=name, config={"model_type": "mamba", **usual, **config})


def _llama3(name: str, **shape: Any) -> Model:
    """Return a Llama 3 model (Dubey 2024): 8 key-value heads, 128,256 tokens, 8,192 positions."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return llama(name, **{"kv_heads": 8, "vocab": 128256, "positions": 8192, "rope": rope, **shape})


def _llama31(name: str, *, factor: float = 8.0, **shape: Any) -> Model:
    """Return a Llama 3.1 or 3.2 model: Llama 3 with rotary positions scaled up to 131,072."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama3(name, positions=131072, rope=rope, **shape)


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        # Models for machines without a GPU, on which their steps take milliseconds.
        gpt2("gpt2-tiny", layers=2, heads=4, hidden=128, positions=128, vocab_size=512, **NO_DROPOUT),
        llama("llama-tiny", layers=4, heads=4, kv_heads=2, hidden=128, mlp=384, vocab=512, positions=256),
        mamba("mamba-tiny", layers=2, hidden=64, vocab=512),
        gpt2("gpt2", layers=12, heads=12, hidden=768),
        gpt2("gpt2-large", layers=36, heads=20, hidden=1280),
        gpt2("gpt2-xl", layers=48, heads=25, hidden=1600),
        # Lightning's three shapes for minGPT. Lightning calls them 3 B (96 layers, as wide as gpt2-xl),
        # 4.4 B and 8.4 B.
        gpt2("gpt2-xxl", layers=96, heads=25, hidden=1600),
        gpt2("gpt2-xxxl", layers=100, heads=30, hidden=1920),
        gpt2("gpt2-4xl", layers=190, heads=30, hidden=1920),
        llama("llama-2-13b", layers=40, heads=40, kv_heads=40, hidden=5120, mlp=13824, vocab=32000),
        llama("llama-2-70b", layers=80, heads=64, kv_heads=8, hidden=8192, mlp=28672, vocab=32000),
        _llama3("llama-3-8b", layers=32, heads=32, hidden=4096, mlp=14336),
        _llama3("llama-3-70b", layers=80, heads=64, hidden=8192, mlp=28672),
        _llama31("llama-3.1-8b", layers=32, heads=32, hidden=4096, mlp=14336),
        _llama31("llama-3.2-1b", layers=16, heads=32, hidden=2048, mlp=8192, factor=32.0, tied=True),
        # LightOn's model of 1.6 B parameters. Its throughput was published, but not its shape. With a
        # vocabulary of 64,000 and layers as wide as Mamba-1.4B's, 56 layers come closest to 1.6 B parameters.
        mamba("mamba-1.6b", layers=56, hidden=2048, vocab=64000),
    )
}


def find_model(name: str) -> Model:
    """Return the model with this name. Raises `CaseError` with the known names if there is no such model."""
    if name in MODELS:
        return MODELS[name]
    raise CaseError(
        f"unknown model {name!r}.{did_you_mean(name, MODELS)} Known: {', '.join(MODELS)}. "
        "For another model, give Model.from_config('config.json', name=...), or for a script only a name: "
        f"Model.named({name!r})."
    )
