"""Test degrees of accelerate's mesh: which are refused, and what a step sends by theory and in a dry run."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import Accelerate, Model, Topology, Trainer
from perfsuite.case.catalog import MODELS
from perfsuite.errors import CaseError, MismatchError
from perfsuite.frameworks.base import Framework, framework_of
from perfsuite.frameworks.common.parallelism import Degrees
from perfsuite.worker.counting.flops import count
from tests.counted import FULL_SIZE
from tests.dry.runs import passed
from tests.fake_group import CPU, fake_group
from tests.frameworks.test_base import observed
from tests.samples import known, make_case, make_machine
from tests.worker.loops import memory


def accelerate(**degrees: int) -> Framework:
    return Accelerate(strategy="fsdp2", **degrees)


def trainer(**degrees: int) -> Framework:
    return Trainer(fsdp="full_shard auto_wrap", **degrees)


FOUR = Topology(processes_per_node=4)
BOTH = pytest.mark.parametrize("make", [accelerate, trainer])


@BOTH
def test_degrees_multiply_to_the_ranks(make: Any) -> None:
    case = make_case(framework=make(dp_replicate_size=2, dp_shard_size=2, tp_size=2))
    framework_of(case).check(case.replace(topology=Topology(nodes=2, processes_per_node=4)))
    with pytest.raises(CaseError) as caught:
        framework_of(case).check(case.replace(topology=FOUR))
    assert str(caught.value) == (
        "dp_replicate_size=2, dp_shard_size=2, cp_size=1, tp_size=2: the product is 8, but the topology of "
        "the case has 4 processes; change one of them"
    )


@BOTH
def test_each_rank_has_two_sequence_parts(make: Any) -> None:
    case = make_case(framework=make(cp_size=4), topology=FOUR, sequence_length=64)
    framework_of(case).check(case)
    with pytest.raises(CaseError, match="sequence_length=60 is not a multiple of 8, twice the cp_size"):
        framework_of(case).check(case.replace(sequence_length=60))


def test_names_a_model_whose_mask_stays() -> None:
    degrees = Degrees(dp_replicate_size=1, dp_shard_size=1, cp_size=2, tp_size=1)
    with pytest.raises(MismatchError, match="needs modules named self_attn, but GPT2LM"):
        degrees.model(make_case(model="gpt2-tiny"), None, CPU)


@pytest.mark.parametrize("rank", range(8))
def test_position_gaps_match_torchs_parts(rank: int) -> None:
    """transformers finds a gap on all ranks except the last ones.

    A dry run has no values, but gives the same answer.
    """
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
    from transformers.masking_utils import find_packed_sequence_indices

    degrees = Degrees(dp_replicate_size=1, dp_shard_size=1, cp_size=4, tp_size=2)
    in_order: Any = _HeadTailLoadBalancer(64, 4, "cpu")._generate_indices()
    positions = in_order.chunk(4, dim=-1)[rank // 2]
    real = find_packed_sequence_indices(positions)
    with fake_group(rank, 8):
        ours = degrees._told_by_positions(lambda positions: None)(positions)
    assert (real is None) == (ours is None) == (rank >= 6)
    assert real is None or torch.equal(real, ours)


def test_gives_whole_sequences_by_default() -> None:
    degrees = Degrees(dp_replicate_size=1, dp_shard_size=2, cp_size=1, tp_size=1)
    tokens = torch.arange(4)
    with degrees.inputs(None, tokens) as given:
        assert {name: tensor.data_ptr() for name, tensor in given.items()} == dict.fromkeys(
            ("input_ids", "labels"), tokens.data_ptr()
        )


@pytest.mark.parametrize(
    ("package", "degrees", "reason"),
    [
        ("accelerate", {}, None),
        ("accelerate", {"dp_shard_size": 2}, "it needs accelerate>=1.12, and 1.10.1 is installed"),
        ("transformers", {"dp_shard_size": 2}, None),
        ("transformers", {"dp_shard_size": 2, "tp_size": 2}, "it needs transformers>=5.23, and 1.10.1 is"),
    ],
)
def test_refuses_libraries_that_are_too_old(
    monkeypatch: pytest.MonkeyPatch, package: str, degrees: dict[str, int], reason: str | None
) -> None:
    versions = {"accelerate": "1.15.0", "transformers": "5.23.0", package: "1.10.1"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    case = make_case(model="llama-tiny", framework=accelerate(**degrees), topology=FOUR)
    refusal = framework_of(case).unsupported(case, make_machine())
    assert refusal is None if reason is None else str(refusal).startswith(reason)


def test_never_replaces_a_class_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import tensor_parallel

    monkeypatch.setattr(tensor_parallel, "ReplicateParallel", object, raising=False)
    assert Degrees(dp_replicate_size=1, dp_shard_size=2, cp_size=1, tp_size=2).patch() == {}
    assert tensor_parallel.ReplicateParallel is object  # type: ignore[attr-defined]


# --- what a step sends ------------------------------------------------------------------------------------

# Sizes of Llama-3.1-8B, which repeats 32 layers.
LAYERS = 2
HIDDEN = 4096
KEYS = 1024
MLP = 14336
VOCABULARY = 128256
TOKENS = 8192
LONG = 131072
BF16 = 2  # bytes of a number; accelerate also reduces gradients in bfloat16


def theory(degrees: Degrees) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return calls and bytes by axis of the mesh, kind and phase, from the sizes of the model.

    ZeRO-3 (Rajbhandari et al. 2020): sharded parameters are gathered before forward and again before
    backward, and their gradients are scattered. accelerate's units are each block, the embedding, and the
    last norm with the head, which stays gathered.

    Tensor parallelism (Shoeybi et al. 2019) reduces the output of each half of a block in forward. In
    backward, it reduces the gradient of the half's input. transformers does that separately for each of the
    five matrices that get this input. The embedding's output and the gradient of the head's input are reduced
    as well, and the logits are gathered. A block that is recomputed reduces the output of its attention
    again.
    """
    tp = degrees.tp_size
    block = (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * MLP) // tp + 2 * HIDDEN
    embedding = VOCABULARY * HIDDEN // tp
    tail = embedding + HIDDEN
    all_units = BF16 * (LAYERS * block + embedding + tail)
    hidden = BF16 * TOKENS * HIDDEN
    forward = 2 * LAYERS + 1
    backward = 5 * LAYERS + 1 + LAYERS
    return {
        ("dp_shard", "all_gather", "forward"): (LAYERS + 2, all_units),
        ("dp_shard", "all_gather", "backward"): (LAYERS + 1, all_units - BF16 * tail),
        ("dp_shard", "reduce_scatter", "backward"): (LAYERS + 2, all_units),
        ("dp_replicate", "all_reduce", "backward"): (LAYERS + 2, all_units // degrees.dp_shard_size),
        ("tp", "all_reduce", "forward"): (forward, forward * hidden),
        ("tp", "all_reduce", "backward"): (backward, backward * hidden),
        ("tp", "all_gather", "forward"): (1, BF16 * TOKENS * VOCABULARY),
    }


TWO_LAYERS = {**MODELS["llama-3.1-8b"].config, "num_hidden_layers": LAYERS}
CASE = FULL_SIZE.replace(
    model=Model.from_config(TWO_LAYERS, name="two-layers"),
    framework=accelerate(dp_replicate_size=2, dp_shard_size=4, tp_size=8),
    sequence_length=TOKENS,
    activation_checkpointing="full",
)
"""The case runs on 64 GPUs in bf16-mixed."""


@pytest.mark.launch
def test_a_step_sends_what_theory_says(tmp_path: Path) -> None:
    run = passed(CASE, tmp_path)
    assert observed(run).settings["mesh"] == "dp_replicate 2 x dp_shard_cp 4 x tp 8"
    axes = {(8, 1): "tp", (4, 8): "dp_shard", (2, 32): "dp_replicate"}
    sent = {
        (axes[call.ranks, call.apart], call.kind, call.phase): (call.count, call.bytes)
        for call in run.counts[0].counts.collectives
    }
    assert sent == theory(CASE.framework._degrees)  # type: ignore[attr-defined]
    whole = count(CASE.model, TOKENS).parameters
    assert known(known(run.dry_facts).fit).built == 4 * whole // 8, (
        "the model is built in fp32, and split before it is sharded"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "make", [accelerate, pytest.param(trainer, marks=pytest.mark.nightly)], ids=["accelerate", "trainer"]
)
def test_sequence_parts_match_theory(make: Any, tmp_path: Path) -> None:
    """Keys and values are gathered again for recomputed blocks, and for backward.

    Their gradients, in fp32, pass from rank to rank until each gradient is back at its own rank (Liu et al.
    2023).
    """
    parts = 4
    own = LONG // 4
    topology = Topology(processes_per_node=8)
    framework = make(dp_shard_size=2, cp_size=parts)
    case = CASE.replace(framework=framework, sequence_length=LONG, topology=topology)
    # torch 2.13 keeps each function that it has replaced for attention (`_replaced_functions`).
    run = passed(case, tmp_path, leaks="_ContextParallel")
    settings = observed(run).settings
    assert (settings["mesh"], settings["context_parallel"]) == ("dp_shard_cp 8", "4")
    both = 2 * own * KEYS
    gathers = dict.fromkeys(("forward", "recompute", "backward"), (LAYERS, LAYERS * BF16 * both * parts))
    gathered = {("all_gather", "bfloat16", phase): calls for phase, calls in gathers.items()}
    passes = LAYERS * parts, LAYERS * parts * 4 * both
    # The block of scores with the rank's own part is computed in full. Half of the other blocks are computed.
    attention = LAYERS * 4 * HIDDEN * own * own * (1 + (parts - 1) / 2)
    matmuls = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * MLP) + VOCABULARY * HIDDEN
    assert len(run.counts) == 2, "counts of the first and the last rank"
    for of_rank in run.counts:
        sent = {
            (call.kind, call.dtype, call.phase): (call.count, call.bytes)
            for call in of_rank.counts.collectives
            if call.ranks == parts
        }
        assert sent == {**gathered, ("all_to_all", "float32", "backward"): passes}
        assert of_rank.counts.flops["forward"] == attention + 2 * own * matmuls
        assert of_rank.counts.host_reads == {"forward": 1}
    first, last = (memory(rank.counts) for rank in run.counts)
    assert abs(first.saved_for_backward - last.saved_for_backward - own * own) < own * own // 500, (
        "they differ by the masked half"
    )
    assert known(known(run.dry_facts).roofline).tokens == 2 * LONG, "two sequences, each on four ranks"
