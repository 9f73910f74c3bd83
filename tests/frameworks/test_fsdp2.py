from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FSDPModule

from perfsuite import FSDP2, Case, Topology
from perfsuite.case.catalog import llama
from perfsuite.frameworks.base import Ranks, framework_of
from perfsuite.frameworks.common import loop
from perfsuite.frameworks.common.model import build_model, synthetic_batches
from perfsuite.results.counts import Collective
from perfsuite.worker.counting.counter import StepCounter
from perfsuite.worker.observation.observe import wrapping
from tests.fake_group import CPU, fake_group
from tests.frameworks.common.test_model import TINY

SHAPE: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "mlp": 48, "vocab": 64}
FOUR = Topology(processes_per_node=4)
SHORT = llama("short", **SHAPE)
SPLIT = TINY.replace(framework=FSDP2(tensor_parallel=2), topology=FOUR)


def built(case: Case, ranks: Any) -> Any:
    return framework_of(case).build(case, ranks, None)  # type: ignore[arg-type]


def collectives(case: Case, world_size: int) -> tuple[Collective, ...]:
    """Return what the first of `world_size` ranks sends in its first step."""
    with fake_group(0, world_size) as ranks:
        workload = built(case, ranks)
        counter = StepCounter([])
        with counter:
            workload.run(1)
    return counter.end_step().collectives


@pytest.mark.parametrize(
    ("framework", "world_size", "data_parallel", "mesh"),
    [
        (FSDP2(), 4, 4, "shard 4"),
        (FSDP2(shard_group=2), 4, 4, "replicate 2 x shard 2"),
        (FSDP2(tensor_parallel=2), 2, 1, "shard 1 and shard 1 x tensor 2"),
        (FSDP2(tensor_parallel=2), 4, 2, "shard 2 and shard 2 x tensor 2"),
    ],
)
def test_builds_what_the_case_expects(
    framework: FSDP2, world_size: int, data_parallel: int, mesh: str
) -> None:
    case = TINY.replace(framework=framework, topology=FOUR)
    with fake_group(0, world_size) as ranks:
        workload = built(case, ranks)
        assert wrapping(workload.model).items() >= framework.expected(case).items()
        assert wrapping(workload.model)["mesh"] == mesh
        assert workload.data_parallel == data_parallel
        units = [module for module in workload.model.modules() if isinstance(module, FSDPModule)]
        assert len(units) == 5, "the units are every block and the root"
        if framework.tensor_parallel > 1:
            attention = workload.model.model.layers[0].self_attn
            part = 128 // world_size
            assert attention.q_proj.weight.to_local().shape == (part, 128)
            assert attention.o_proj.weight.to_local().shape == (2 * part, 64)


@pytest.mark.parametrize(
    ("framework", "micro_batches", "forward", "backward", "reduced"),
    [
        (FSDP2(), 1, 3, 2, 3),  # the units are two blocks and the root
        (FSDP2(reshard_root=True), 1, 3, 3, 3),
        (FSDP2(reshard_after_forward=False), 1, 3, 0, 3),
        (FSDP2(), 2, 6, 4, 6),
        (FSDP2(sync_each_micro_batch=False), 2, 6, 4, 3),
    ],
)
def test_gathers_again_what_was_resharded(
    framework: FSDP2, micro_batches: int, forward: int, backward: int, reduced: int
) -> None:
    case = SPLIT.replace(framework=framework, model=SHORT, gradient_accumulation=micro_batches)
    calls = {(call.kind, call.phase): call.count for call in collectives(case, 4)}
    seen = {("all_gather", "forward"): forward, ("all_gather", "backward"): backward}
    seen |= {("reduce_scatter", "backward"): reduced}
    assert calls == {what: count for what, count in seen.items() if count}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduces_gradients_in_the_requested_dtype(dtype: Any) -> None:
    framework = FSDP2(reduce_dtype=dtype)
    case = SPLIT.replace(framework=framework, model=SHORT, precision="bf16-mixed")
    with fake_group(0, 4) as ranks:
        settings = built(case, ranks).settings
    assert settings.get("reduce_dtype") == framework.expected(case).get("reduce_dtype")
    reduced = [call.dtype for call in collectives(case, 4) if call.kind == "reduce_scatter"]
    assert reduced == [dtype]


# --- tensor parallelism -----------------------------------------------------------------------------------


def test_parts_of_all_ranks_make_up_the_whole() -> None:
    """Of four ranks, ranks 0 and 1 split the layers of the first shard.

    Ranks 2 and 3 split the second one.
    """
    parts = []
    for rank in range(4):
        with fake_group(rank, 4) as ranks:
            model = built(SPLIT, ranks).model
            parts.append({name: p.detach().to_local() for name, p in model.named_parameters()})
    for name, full in build_model(SPLIT, CPU).named_parameters():
        a, b, c, d = (part[name] for part in parts)
        if "norm" in name:
            joined = torch.cat([a, c])
            assert torch.equal(a, b)
        elif "o_proj" in name or "down_proj" in name:
            joined = torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)])
        else:  # a and c are the shards of the first tensor-parallel part
            joined = torch.cat([a, c, b, d])
        assert torch.equal(joined, full), name


# The warning is about a view of the logits.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
@pytest.mark.parametrize(("layers", "checkpointing"), [(1, "full"), (3, "none"), (3, "full")])
def test_half_blocks_reduce_once_each_way(layers: int, checkpointing: Any) -> None:
    """The expected calls are those of Shoeybi et al. 2019, figure 4.

    The embedding's output and the gradient of the head's input are reduced as well. A recomputed block also
    repeats everything before its last matmul. This includes the reduced output of its attention.
    """
    model = llama("x", **SHAPE | {"layers": layers})
    case = SPLIT.replace(model=model, activation_checkpointing=checkpointing)
    sent = {call.phase: call for call in collectives(case, 2) if call.kind == "all_reduce"}
    anew = layers if checkpointing == "full" else 0
    calls = {"forward": 2 * layers + 1, "backward": 2 * layers + 1 + anew}
    hidden = case.micro_batch * case.sample_length * SHAPE["hidden"] * 4  # bytes of fp32
    assert {phase: (call.count, call.bytes) for phase, call in sent.items()} == {
        phase: (count, count * hidden) for phase, count in calls.items()
    }


def _as_rank(rank: int, directory: Path) -> None:
    init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    split = built(SPLIT, Ranks(rank=rank, world_size=2, device=CPU, directory=directory)).model
    plain = build_model(SPLIT, CPU)
    tokens = synthetic_batches(SPLIT, 0, CPU)[0]
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (split, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    whole = dict(plain.named_parameters())
    for name, parameter in split.named_parameters():
        gradient = whole[name].grad
        assert gradient is not None
        assert torch.allclose(parameter.grad.full_tensor(), gradient, rtol=1e-4, atol=1e-6), name
    destroy_process_group()


@pytest.mark.launch
@pytest.mark.nightly
def test_loss_and_gradients_match_the_whole_model(tmp_path: Path) -> None:
    """If gradients were twice as large, Adam would take the same step, so the losses would not show it."""
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(_as_rank, args=(tmp_path,), nprocs=2)


class Recording(torch.nn.Module):
    """A model that records the tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.tokens: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.tokens.append(input_ids)
        return SimpleNamespace(loss=self.weight * labels.float().mean())


def test_ranks_sharing_a_layer_see_the_same_data() -> None:
    seen: list[torch.Tensor] = []
    for rank in range(4):
        model = Recording()
        with fake_group(rank, 4) as ranks:
            loop.data_parallel_workload(SPLIT, ranks, model, tensor_parallel=2).run(1)
        seen += model.tokens
    expected = [synthetic_batches(SPLIT, data_rank, CPU)[0] for data_rank in (0, 0, 1, 1)]
    assert [tokens.tolist() for tokens in seen] == [tokens.tolist() for tokens in expected]


def test_a_tied_embedding_stays_tied() -> None:
    case = SPLIT.replace(model=llama("x", **SHAPE, tie_word_embeddings=True))
    with fake_group(0, 2) as ranks:
        model = built(case, ranks).model
        assert model.lm_head.weight is model.model.embed_tokens.weight
