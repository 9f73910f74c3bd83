from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from perfsuite.case.catalog import MODELS, llama
from perfsuite.errors import MismatchError
from perfsuite.frameworks.common.model import (
    blocks,
    build_model,
    model_without_weights,
    transformers_config,
    transformers_model,
)
from perfsuite.frameworks.common.weights import initialise, parameters_on_meta
from tests.fake_group import CPU, fake_group, sharded_without_weights
from tests.frameworks.common.test_model import TINY
from tests.worker.loops import counted, memory

SHAPE: dict[str, Any] = {"layers": 8, "heads": 2, "kv_heads": 2, "hidden": 128, "mlp": 256, "vocab": 64}
TIED = TINY.replace(model=llama("tied", **SHAPE, tie_word_embeddings=True))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_weights_follow_transformers_own_rules(name: str) -> None:
    """Each weight has the same spread and mean. Constants and buffers are identical."""
    ours = build_model(TINY.replace(model=name), CPU)
    theirs = transformers_model(transformers_config(MODELS[name]), attention="sdpa")
    usual = values(theirs)
    assert values(ours).keys() == usual.keys()
    for key, value in values(ours).items():
        assert float(value.std()) == pytest.approx(float(usual[key].std()), rel=0.1), key
        assert float(value.mean()) == pytest.approx(float(usual[key].mean()), abs=1e-3), key
    buffers = dict(theirs.named_buffers())
    assert dict(ours.named_buffers()).keys() == buffers.keys()
    assert all(torch.equal(value, buffers[key]) for key, value in ours.named_buffers())


def test_weights_depend_on_seed_and_layer_alone() -> None:
    one, same, other = (values(build_model(TINY.replace(seed=seed), CPU)) for seed in (1, 1, 2))
    drawn = torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(drawn, torch.rand(3))
    key = "model.layers.{}.self_attn.q_proj.weight"
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one[key.format(0)], other[key.format(0)])
    assert not torch.equal(one[key.format(0)], one[key.format(1)])


@pytest.mark.parametrize("case", [TINY, TINY.replace(model="gpt2-tiny"), TIED], ids=lambda case: case.id)
@pytest.mark.parametrize("world_size", [1, 3])
def test_shards_of_all_ranks_form_the_whole(case: Any, world_size: int) -> None:
    shards = [shards_of(case, rank, world_size) for rank in range(world_size)]
    whole = values(build_model(case, CPU))
    assert shards[0].keys() == whole.keys()
    assert ("lm_head.weight" in whole) is (case is TINY), "tied weights are one parameter, sharded or not"
    for name, full in whole.items():
        assert torch.equal(torch.cat([shard[name] for shard in shards]), full), name


def shards_of(case: Any, rank: int, world_size: int) -> Mapping[str, torch.Tensor]:
    with fake_group(rank, world_size):
        model, units = sharded_without_weights(case)
        initialise(model, units, seed=case.seed, device=CPU)
        return {name: value.to_local() for name, value in values(model).items()}  # type: ignore[attr-defined]


def test_a_sharded_model_is_never_there_in_full() -> None:
    """With 8 blocks on 8 ranks, a rank holds an eighth of the model, and one complete block at a time."""
    with fake_group(0, 8):
        model, units = sharded_without_weights(TIED)
        made = counted(lambda: initialise(model, units, seed=0, device=CPU))
        block = sum(4 * p.numel() for p in units[0].parameters())
        full = sum(4 * p.numel() for p in model.parameters())
    assert full / 8 + block < memory(made).peak < full / 8 + 1.5 * block < full / 3


def test_initializes_one_unit_at_a_time() -> None:
    """A caller can partition each unit before the next unit is initialised, as DeepSpeed does."""
    model = model_without_weights(TINY, CPU)

    def units() -> Iterator[nn.Module]:
        for index, block in enumerate(blocks(model)):
            yield block
            made = [not next(unit.parameters()).is_meta for unit in blocks(model)]
            assert made == [other <= index for other in range(len(made))]
            asked.append(index)

    asked: list[int] = []
    initialise(model, units(), seed=0, device=CPU)
    assert asked == [0, 1, 2, 3]


def test_refuses_a_parameter_without_a_rule() -> None:
    model: Any = model_without_weights(TINY, CPU)
    with parameters_on_meta():
        model.model.layers[2].scale = nn.Parameter(torch.ones(7))
    with pytest.raises(MismatchError, match=r"^no rule initialises a parameter of shape \(7,\)$"):
        initialise(model, blocks(model), seed=0, device=CPU)
