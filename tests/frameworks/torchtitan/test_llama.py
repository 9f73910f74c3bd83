from typing import Any

import pytest
import torch

from perfsuite.case.catalog import MODELS
from perfsuite.frameworks.common.model import transformers_config, transformers_model
from perfsuite.worker.counting.flops import count
from tests.frameworks.torchtitan.samples import LLAMAS, MARKS, changed

pytestmark = MARKS


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_has_our_parameters_and_flops(titan: Any, name: str) -> None:
    config = titan.llama.model_spec(MODELS[name]).model
    with torch.device("meta"):
        model = config.build()
    ours = count(MODELS[name], 4096)
    parameters, flops = config.get_nparams_and_flops(model, 4096)
    assert parameters == sum(p.numel() for p in model.parameters()) == ours.parameters
    norms = (2 * len(config.layers) + 1) * config.dim
    assert flops == ours.per_token + 6 * norms, "torchtitan counts the norms' weights, but perfsuite does not"


SCALED: Any = MODELS["llama-3.1-8b"].config["rope_parameters"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-2},
        {"tie_word_embeddings": True},
        {"rope_parameters": {**SCALED, "rope_type": "llama3", "original_max_position_embeddings": 32}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_llama_computes_what_transformers_does(titan: Any, changes: dict[str, Any]) -> None:
    from torchtitan.distributed.utils import set_spmd_backend

    from tests.frameworks.torchtitan.losses import with_weights_of

    set_spmd_backend("partial_dtensor")
    shape = changed(**changes)
    theirs = transformers_model(transformers_config(shape), attention="sdpa").eval()
    its = with_weights_of(theirs, titan.llama.model_spec(shape))
    tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(its(tokens), theirs(tokens).logits)


@pytest.mark.parametrize(
    ("mode", "policy", "wrapped"),
    [("full", "FullAC", 4), ("selective-op", "SelectiveAC", 4), ("every-3", "EveryNthAC", 2)],
)
def test_uses_its_own_checkpointing_policies(titan: Any, mode: str, policy: str, wrapped: int) -> None:
    with torch.device("meta"):
        model = titan.llama.model_spec(MODELS["llama-tiny"]).model.build()
    built = titan.llama.activation_checkpoint(mode).build(dump_folder="")
    assert type(built).__name__ == policy
    built.apply(model)
    kinds = [type(block).__name__ for block in model.layers.children()]
    assert kinds.count("CheckpointWrapper") == wrapped
    assert kinds[0] == "CheckpointWrapper"
    assert titan.llama.activation_checkpoint("none") is None
