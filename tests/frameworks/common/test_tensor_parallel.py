from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from perfsuite.case.case import LoRA, Topology
from perfsuite.case.catalog import llama
from perfsuite.case.model import Model
from perfsuite.frameworks.base import framework_of
from perfsuite.frameworks.common.loop import data_parallel_workload
from perfsuite.frameworks.common.model import build_model, model_without_weights
from perfsuite.frameworks.common.tensor_parallel import parallelize_llama
from perfsuite.frameworks.fsdp2 import FSDP2
from perfsuite.worker.observe import wrapping
from tests.fake_group import CPU, fake_group
from tests.frameworks.common.test_model import TINY
from tests.samples import make_machine

SHAPE: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "mlp": 48, "vocab": 64}
SPLIT = TINY.replace(framework=FSDP2(tensor_parallel=2), topology=Topology(processes_per_node=4))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "gpt2-tiny"}, "tensor_parallel knows how to split llama models only, gpt2-tiny is gpt2"),
        (
            {"topology": Topology(processes_per_node=3)},
            "tensor_parallel=2 must divide the 3 processes of llama-tiny",
        ),
        (
            {"model": llama("x", **{**SHAPE, "heads": 5, "kv_heads": 5})},
            "tensor_parallel=2 must divide the 5 attention heads of x",
        ),
        (
            {"model": llama("x", **{**SHAPE, "kv_heads": 1})},
            "tensor_parallel=2 must divide the 1 key-value heads of x",
        ),
        (
            {"model": llama("x", **{**SHAPE, "mlp": 49})},
            "tensor_parallel=2 must divide the 49 MLP columns of x",
        ),
        (
            {"model": llama("x", **{**SHAPE, "vocab": 65})},
            "tensor_parallel=2 must divide the 65 tokens in the vocabulary of x",
        ),
        (
            {"model": Model(name="x", config={"model_type": "llama"})},
            "tensor_parallel needs the number of attention heads, which the configuration of x does not say",
        ),
        (
            {"compile": True},
            "tensor_parallel trains otherwise when its blocks are compiled: leave compile off",
        ),
        ({"lora": LoRA(rank=4, alpha=8)}, "tensor_parallel does not know how to split lora adapters"),
        (
            {"framework": FSDP2(tensor_parallel=2, shard_group=2)},
            "tensor_parallel=2 does not go with shard_group (3-D mesh)",
        ),
    ],
)
def test_what_cannot_be_split_is_known_beforehand(changes: dict[str, Any], reason: str) -> None:
    case = SPLIT.replace(**changes)
    assert framework_of(case).unsupported(case, make_machine()) == reason


def test_what_can_be_split() -> None:
    assert framework_of(SPLIT).unsupported(SPLIT, make_machine()) is None
    assert framework_of(SPLIT).unsupported(SPLIT.replace(model="llama-3-70b"), make_machine()) is None


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_built_is_what_is_expected(world_size: int) -> None:
    with fake_group(0, world_size) as ranks:
        workload: Any = FSDP2(tensor_parallel=2).build(SPLIT, ranks, None)  # type: ignore[arg-type]
        assert wrapping(workload.model).items() >= framework_of(SPLIT).expected(SPLIT).items()
        assert workload.data_parallel == world_size // 2
        attention = workload.model.model.layers[0].self_attn
        part = 128 // world_size
        assert attention.q_proj.weight.to_local().shape == (part, 128)
        assert attention.o_proj.weight.to_local().shape == (2 * part, 64)


def test_the_parts_of_all_ranks_make_up_the_whole() -> None:
    """Four ranks: 0 and 1 split the layers of the first shard, 2 and 3 of the second."""
    parts = []
    for rank in range(4):
        with fake_group(rank, 4) as ranks:
            workload: Any = FSDP2(tensor_parallel=2).build(SPLIT, ranks, None)  # type: ignore[arg-type]
            parts.append({name: p.detach().to_local() for name, p in workload.model.named_parameters()})
    for name, full in build_model(SPLIT, CPU).named_parameters():
        a, b, c, d = (part[name] for part in parts)
        if "norm" in name:
            joined = torch.cat([a, c])
            assert torch.equal(a, b)
        elif "o_proj" in name or "down_proj" in name:
            joined = torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)])
        else:  # by columns first, so a and c are one rank's half
            joined = torch.cat([a, c, b, d])
        assert torch.equal(joined, full), name


def test_ranks_that_split_a_layer_see_the_same_data() -> None:
    class Sees(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.config = None
            self.seen: list[torch.Tensor] = []

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            self.seen.append(input_ids)
            return type("Output", (), {"loss": self.weight.square()})

    def seen(rank: int) -> torch.Tensor:
        with fake_group(rank, 4) as ranks:
            model = Sees()
            data_parallel_workload(SPLIT, ranks, model, tensor_parallel=2).run(1)
            return model.seen[0]

    first, second, third, fourth = map(seen, range(4))
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)


def test_a_tied_embedding_stays_tied() -> None:
    case = SPLIT.replace(model=llama("x", **SHAPE, tie_word_embeddings=True))
    with fake_group(0, 2):
        model: Any = model_without_weights(case, CPU)
        parallelize_llama(model, init_device_mesh("cpu", (2,)))
        assert model.lm_head.weight is model.model.embed_tokens.weight
