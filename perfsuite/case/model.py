"""Model shapes as transformers configurations: no hub, no download. Imports neither torch nor pytest.

The numbers are the published architectures; `tests/case/test_model.py` builds each on the meta device and
compares its parameter count with the published one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, JsonValue, PlainSerializer, field_validator

from perfsuite.documents import Data
from perfsuite.errors import CaseError, FileError

FrozenMapping = Annotated[
    Mapping[str, JsonValue],
    AfterValidator(lambda value: MappingProxyType(dict(value))),
    PlainSerializer(dict),
]


class Model(Data):
    """A causal language model, as the `config.json` that transformers builds it from.

    `config` must hold `model_type` (a name that `transformers.AutoConfig` knows); the other keys are that
    configuration's own. Any model that `AutoModelForCausalLM.from_config` builds can be measured.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)
    config: FrozenMapping
    """Empty for what only a training script knows how to build: no FLOPs are known of it, and so no MFU."""

    def __hash__(self) -> int:
        return hash(self.name)

    @field_validator("config")
    @classmethod
    def _has_model_type(cls, config: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        if config and not isinstance(config.get("model_type"), str):
            raise ValueError("a transformers configuration needs model_type, for example 'llama'")
        return config

    @classmethod
    def named(cls, name: str) -> Self:
        """A model of which only a training script knows what it is."""
        return cls(name=name, config={})

    @classmethod
    def from_config(cls, config: Any, *, name: str = "") -> Self:
        """From a `config.json` (its path or its content) or a transformers configuration object.

        `name` stands in the ids of its cases. Raises `CaseError` without one.
        """
        if not name:
            given = repr(str(config)) if isinstance(config, str | Path) else "..."
            raise CaseError(
                "Model.from_config needs a name, which stands in the ids of its cases: "
                f"Model.from_config({given}, name='my-model')"
            )
        if hasattr(config, "to_diff_dict"):
            config = {"model_type": config.model_type, **config.to_diff_dict()}
        if not isinstance(config, Mapping):
            config = _read_json(Path(config))
        if config == {}:
            raise CaseError("Model: config: a transformers configuration needs model_type, got {}")
        return cls(name=name, config=config)

    @property
    def max_sequence_length(self) -> int | None:
        """Tokens that the position encoding is made for; None if the configuration does not say."""
        for key in ("max_position_embeddings", "n_positions"):
            value = self.config.get(key)
            if isinstance(value, int):
                return value
        return None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}. Give a transformers config.json.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: not JSON ({error}). Give a transformers config.json.") from error


def gpt2(name: str, *, layers: int, heads: int, hidden: int, **changes: JsonValue) -> Model:
    """A GPT-2 shape (OpenAI 2019): learned positions, tied embeddings, dropout 0.1 as published."""
    config: dict[str, JsonValue] = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": hidden,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    return Model(name=name, config={**config, **changes})


def llama(
    name: str,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    mlp: int,
    vocab: int,
    **changes: JsonValue,
) -> Model:
    """A Llama shape (Touvron 2023, Dubey 2024): rotary positions, grouped-query attention, SwiGLU."""
    config: dict[str, JsonValue] = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return Model(name=name, config={**config, **changes})


def mamba(name: str, *, layers: int, hidden: int, vocab: int, **changes: JsonValue) -> Model:
    """A Mamba shape (Gu and Dao 2023): state 16, expansion 2, convolution over 4, tied embeddings."""
    config: dict[str, JsonValue] = {
        "model_type": "mamba",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    return Model(name=name, config={**config, **changes})


_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_LLAMA_31_ROPE: dict[str, JsonValue] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_ROPE: dict[str, JsonValue] = {"rope_type": "default", "rope_theta": 500000.0}

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        # For machines without a GPU: milliseconds a step.
        gpt2("gpt2-tiny", layers=2, heads=4, hidden=128, n_positions=128, vocab_size=512, **_NO_DROPOUT),
        llama(
            "llama-tiny",
            layers=4,
            heads=4,
            kv_heads=2,
            hidden=128,
            mlp=384,
            vocab=512,
            max_position_embeddings=256,
        ),
        mamba("mamba-tiny", layers=2, hidden=64, vocab=512),
        gpt2("gpt2", layers=12, heads=12, hidden=768),
        gpt2("gpt2-large", layers=36, heads=20, hidden=1280),
        gpt2("gpt2-xl", layers=48, heads=25, hidden=1600),
        # Lightning's shapes for minGPT, called 3 B (96 layers of gpt2-xl's width), 4.4 B and 8.4 B.
        gpt2("gpt2-xxl", layers=96, heads=25, hidden=1600),
        gpt2("gpt2-xxxl", layers=100, heads=30, hidden=1920),
        gpt2("gpt2-4xl", layers=190, heads=30, hidden=1920),
        llama("llama-2-13b", layers=40, heads=40, kv_heads=40, hidden=5120, mlp=13824, vocab=32000),
        llama("llama-2-70b", layers=80, heads=64, kv_heads=8, hidden=8192, mlp=28672, vocab=32000),
        llama(
            "llama-3-8b",
            layers=32,
            heads=32,
            kv_heads=8,
            hidden=4096,
            mlp=14336,
            vocab=128256,
            max_position_embeddings=8192,
            rope_parameters=_LLAMA_3_ROPE,
        ),
        llama(
            "llama-3-70b",
            layers=80,
            heads=64,
            kv_heads=8,
            hidden=8192,
            mlp=28672,
            vocab=128256,
            max_position_embeddings=8192,
            rope_parameters=_LLAMA_3_ROPE,
        ),
        llama(
            "llama-3.1-8b",
            layers=32,
            heads=32,
            kv_heads=8,
            hidden=4096,
            mlp=14336,
            vocab=128256,
            max_position_embeddings=131072,
            rope_parameters=_LLAMA_31_ROPE,
        ),
        llama(
            "llama-3.2-1b",
            layers=16,
            heads=32,
            kv_heads=8,
            hidden=2048,
            mlp=8192,
            vocab=128256,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            rope_parameters={**_LLAMA_31_ROPE, "factor": 32.0},
        ),
        # LightOn's 1.6 B, of which the shape was not published with its throughput: 56 layers of the width
        # of Mamba-1.4B come nearest, with a vocabulary of 64,000.
        mamba("mamba-1.6b", layers=56, hidden=2048, vocab=64000),
    )
}


def find(name: str) -> Model:
    """The model of that name. Raises `CaseError` naming the known ones."""
    try:
        return MODELS[name]
    except KeyError:
        near = get_close_matches(name, MODELS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CaseError(
            f"unknown model {name!r}.{hint} Known: {', '.join(MODELS)}; "
            "or give Model.from_config('config.json', name=...)."
        ) from None
