from typing import Any

import pytest
import torch

from perfsuite.case.catalog import MODELS, mamba
from perfsuite.frameworks.common.model import blocks, transformers_config, transformers_model
from perfsuite.worker.counting.flops import count

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mamba-1.4b": 1_372_178_432,  # no case uses this model; it is built in the same way
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_parameters_are_as_published(name: str, parameters: int) -> None:
    model = MODELS.get(name) or mamba(name, layers=48, hidden=2048, vocab=50280)
    assert count(model, 128).parameters == parameters


@pytest.mark.parametrize(
    ("name", "hidden", "millions"),
    [("gpt2-xxl", 1600, 2951), ("gpt2-xxxl", 1920, 4426), ("gpt2-4xl", 1920, 8409)],
)
def test_large_gpt2_has_the_blocks_of_mingpt(name: str, hidden: int, millions: int) -> None:
    """minGPT's number of parameters includes the blocks and the final norm, but not the embeddings."""
    embeddings = (50257 + 1024) * hidden
    assert count(MODELS[name], 128).parameters - embeddings == pytest.approx(millions * 1e6, rel=2e-4)


def test_mamba_is_of_the_size_that_lighton_gives() -> None:
    assert count(MODELS["mamba-1.6b"], 128).parameters == pytest.approx(1.6e9, rel=0.01)


def test_every_model_matches_a_published_source() -> None:
    tiny = {"gpt2-tiny", "llama-tiny", "mamba-tiny"}
    assert set(MODELS) - set(PUBLISHED) - tiny == {"gpt2-xxl", "gpt2-xxxl", "gpt2-4xl", "mamba-1.6b"}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_names_positions_and_blocks(name: str) -> None:
    model = MODELS[name]
    assert model.name == name
    (key,) = model.config.keys() & {"n_layer", "num_hidden_layers"}
    shallow = model.replace(config={**model.config, key: 2})
    with torch.device("meta"):
        built: Any = transformers_model(transformers_config(shallow), attention="sdpa")
    assert len(blocks(built)) == 2
    assert model.max_sequence_length == getattr(built.config, "max_position_embeddings", None)
