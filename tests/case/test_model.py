import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from perfsuite.case.catalog import gpt2, llama
from perfsuite.case.model import Model
from perfsuite.errors import CaseError, FileError, MismatchError
from perfsuite.frameworks.common.model import transformers_config, transformers_model
from perfsuite.worker.counting.flops import count

QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
LLAMA_31 = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu", "hidden_size": 64,
 "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 131072, "mlp_bias": false,
 "model_type": "llama",
 "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1,
 "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
 "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
 "vocab_size": 101}"""
"""A small version of the `config.json` of Llama-3.1-8B, as transformers wrote it before version 5."""


def test_building_keeps_the_configuration() -> None:
    """transformers adds missing values to a nested rope_parameters."""
    shape: Any = {"layers": 1, "heads": 2, "kv_heads": 2, "hidden": 16, "mlp": 16, "vocab": 32}
    model = llama("rope", **shape, rope_parameters={"rope_theta": 500000.0})
    before = copy.deepcopy(dict(model.config))
    transformers_config(model)
    assert dict(model.config) == before


def test_the_configuration_is_a_frozen_copy() -> None:
    given: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1}
    model = Model(name="mine", config=given)
    given["n_layer"] = 2
    assert model.config["n_layer"] == 1
    with pytest.raises(TypeError, match="does not support item assignment"):
        model.config["n_layer"] = 2  # type: ignore[index]


def build(model: Model) -> torch.nn.Module:
    built = transformers_model(transformers_config(model), attention="eager")
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert torch.isfinite(built(input_ids=tokens, labels=tokens).loss)
    return built


@pytest.mark.parametrize("form", ["a dictionary", "an object", "a path", "a path as text"])
def test_builds_a_model_from_a_configuration(tmp_path: Path, form: str) -> None:
    config = Qwen2Config(**QWEN)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    given = {"a dictionary": {"model_type": "qwen2", **QWEN}, "an object": config, "a path": path}
    model = Model.from_config(given.get(form, str(path)), name="qwen-small")
    assert (model.name, model.config["model_type"], model.max_sequence_length) == ("qwen-small", "qwen2", 64)
    built = build(model)
    assert type(built).__name__ == "Qwen2ForCausalLM"
    assert count(model, 8).parameters == sum(parameter.numel() for parameter in built.parameters())
    assert Model.model_validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "not JSON"),
        (b'{"model_type": ', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=rf"{said} .*Give a transformers config\.json") as caught:
        Model.from_config(path, name="x")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, r"config: a transformers configuration needs model_type, got \{\}"),
        ({"model_type": 3}, "config: a transformers configuration needs model_type"),
        ({"model_type": "gpt2", "callback": print}, "config.*callback"),
        ([1], r"config: .*got \[1\]"),
    ],
)
def test_refuses_an_invalid_configuration(tmp_path: Path, config: Any, said: str) -> None:
    if isinstance(config, list):
        (tmp_path / "config.json").write_text(json.dumps(config))
        config = tmp_path / "config.json"
    with pytest.raises(CaseError, match=f"^Model: {said}"):
        Model.from_config(config, name="x")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", "-x", "x" * 61])
def test_refuses_a_name_unfit_for_a_file(name: str) -> None:
    with pytest.raises(CaseError, match=r"^Model: name: "):
        Model(name=name, config={"model_type": "gpt2"})


def test_positions_are_those_of_the_configuration() -> None:
    assert gpt2("x", layers=1, heads=1, hidden=8, n_positions=77).max_sequence_length == 77
    assert Model(name="x", config={"model_type": "mamba"}).max_sequence_length is None
    parts = {"model_type": "gemma3", "text_config": {"max_position_embeddings": 99}}
    assert Model(name="x", config=parts).max_sequence_length == 99
    assert (Model.named("x").config, Model.named("x").max_sequence_length) == ({}, None)


def test_builds_configs_older_than_transformers_5() -> None:
    rope = transformers_config(Model.from_config(json.loads(LLAMA_31), name="mine")).rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (500000.0, "llama3", 8.0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", "rope_theta": 1.0}, "GPT2Config has no rope_theta. Correct the spelling"),
        ({"model_type": "llama", "hidden_sise": 5}, "LlamaConfig has no hidden_sise"),
        ({"model_type": "lama"}, "transformers has no model_type 'lama'"),
    ],
)
def test_refuses_an_ambiguous_configuration(config: dict[str, object], said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        transformers_config(Model.from_config(config, name="mine"))


def test_nameless_model_says_where_the_name_goes() -> None:
    with pytest.raises(CaseError, match=r"Model.from_config needs a name .*: name='my-model'"):
        Model.from_config("small/config.json")
