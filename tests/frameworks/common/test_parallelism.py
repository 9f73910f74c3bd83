"""Degrees of accelerate's mesh: what is refused, and what a step sends by theory, and by a dry run."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import Accelerate, Case, LoRA, Model, Topology, Trainer
from perfsuite.case.catalog import llama
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError, MismatchError
from perfsuite.frameworks.base import Framework, framework_of
from perfsuite.frameworks.common.parallelism import Degrees
from perfsuite.launch.requirements import unsupported
from tests.dry.runs import passed
from tests.fake_group import CPU, fake_group
from tests.samples import make_case, make_gpu_machine, make_machine


def accelerate(**degrees: int) -> Framework:
    return Accelerate(strategy="fsdp2", **degrees)


def trainer(**degrees: int) -> Framework:
    return Trainer(fsdp="full_shard auto_wrap", **degrees)


FOUR = Topology(processes_per_node=4)
BOTH = pytest.mark.parametrize("make", [accelerate, trainer])


@BOTH
@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"tp_size": 2}, "dp_shard_size=1 leaves FSDP2 nothing to shard (dp_replicate_size=1, dp_shard_s"),
        ({"dp_replicate_size": 2, "tp_size": 2}, "give at least 2, or no degree to shard among all ranks"),
        ({"dp_replicate_size": 2, "cp_size": 2}, "give at least 2, or no degree to shard among all ranks"),
        ({"tp_size": 0}, "tp_size: Input should be greater than or equal to 1, got 0"),
        (
            {"sp_size": 2},
            "sp_size=2: accelerate splits sequences so with DeepSpeed alone, not with F",
        ),
        ({"dp_shard_size": 2.0}, "dp_shard_size: Input should be a valid integer, got 2.0"),
    ],
)
def test_degrees_that_accelerate_refuses(make: Any, degrees: dict[str, Any], said: str) -> None:
    with pytest.raises(CaseError) as caught:
        make(**degrees)
    assert said in str(caught.value)


@BOTH
def test_degrees_multiply_to_the_ranks(make: Any) -> None:
    case = make_case(framework=make(dp_replicate_size=2, dp_shard_size=2, tp_size=2))
    framework_of(case).check(case.replace(topology=Topology(nodes=2, processes_per_node=4)))
    with pytest.raises(CaseError) as caught:
        framework_of(case).check(case.replace(topology=FOUR))
    assert str(caught.value) == (
        "dp_replicate_size=2, dp_shard_size=2, cp_size=1, tp_size=2 multiply to 8, but the topology of the "
        "case has 4 processes; change one of them"
    )


@BOTH
def test_fp16_is_refused(make: Any) -> None:
    case = make_case(framework=make(), precision="fp16-mixed")
    said = "takes precision 'fp32' or 'bf16-mixed' or 'bf16', and the case asks for 'fp16-mixed'"
    assert unsupported(case, make_machine()) == f"{case.framework.name} {said}"


@BOTH
def test_each_rank_has_two_equal_parts_of_a_sequence(make: Any) -> None:
    case = make_case(framework=make(cp_size=4), topology=FOUR, sequence_length=64)
    framework_of(case).check(case)
    with pytest.raises(CaseError, match="sequence_length=60 is no multiple of 8, twice the cp_size: change"):
        framework_of(case).check(case.replace(sequence_length=60))


NEEDS = "cp_size=4 needs attention 'sdpa' in 16 bits, not compiled, not "


@BOTH
@pytest.mark.parametrize(
    ("machine", "changes", "reason"),
    [
        (make_gpu_machine(), {}, None),
        (
            make_machine(),
            {},
            "cp_size=4: a CPU has no kernel for it: run the case dry, as on a GPU",
        ),
        (
            make_gpu_machine(),
            {"attention": "eager"},
            f"{NEEDS}'eager', precision 'bf16', compile False",
        ),
        (
            make_gpu_machine(),
            {"precision": "fp32"},
            f"{NEEDS}'sdpa', precision 'fp32', compile False",
        ),
        (make_gpu_machine(), {"compile": True}, f"{NEEDS}'sdpa', precision 'bf16', compile True"),
    ],
)
def test_where_sequences_are_not_split(
    make: Any, machine: Machine, changes: dict[str, Any], reason: str | None
) -> None:
    case = make_case(**{"framework": make(cp_size=4), "topology": FOUR, "precision": "bf16", **changes})
    assert framework_of(case).unsupported(case, machine) == reason


def test_a_model_whose_mask_accelerate_leaves_is_named() -> None:
    degrees = Degrees(dp_replicate_size=1, dp_shard_size=1, cp_size=2, tp_size=1)
    with pytest.raises(MismatchError, match="drops the mask of modules named self_attn, which GPT2LM"):
        degrees.model(make_case(model="gpt2-tiny"), None, CPU)


def test_gaps_in_positions_are_those_of_torch_s_parts() -> None:
    """transformers sees a gap on all ranks but the last, and a dry run is told the same without values."""
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
    from transformers.masking_utils import find_packed_sequence_indices

    degrees = Degrees(dp_replicate_size=1, dp_shard_size=1, cp_size=4, tp_size=2)
    in_order: Any = _HeadTailLoadBalancer(64, 4, "cpu")._generate_indices()
    for rank in range(8):
        positions = in_order.chunk(4, dim=-1)[rank // 2]
        real = find_packed_sequence_indices(positions)
        with fake_group(rank, 8):
            told = degrees._told_by_positions(lambda positions: None)(positions)
        assert (real is None) == (told is None) == (rank >= 6)
        assert real is None or torch.equal(real, told)


def test_without_context_parallelism_the_model_is_given_whole_sequences() -> None:
    degrees, tokens = Degrees(dp_replicate_size=1, dp_shard_size=2, cp_size=1, tp_size=1), torch.arange(4)
    with degrees.inputs(None, tokens) as given:
        assert {name: tensor.data_ptr() for name, tensor in given.items()} == dict.fromkeys(
            ("input_ids", "labels"), tokens.data_ptr()
        )


@BOTH
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"model": "gpt2-tiny"}, "tp_size knows how to split llama models only, gpt2-tiny is gpt2"),
        (
            {"model": llama("x", layers=1, heads=4, kv_heads=1, hidden=32, mlp=48, vocab=64)},
            "tp_size=2 must divide the 1 key-value heads of x",
        ),
        ({"lora": LoRA(rank=4, alpha=8)}, "tp_size does not know how to split lora adapters"),
    ],
)
def test_what_tensor_parallelism_cannot_split(make: Any, changes: dict[str, Any], reason: str | None) -> None:
    framework = make(dp_shard_size=2, tp_size=2)
    split = make_case(**{"model": "llama-tiny", "framework": framework, "topology": FOUR, **changes})
    assert framework_of(split).unsupported(split, make_machine()) == reason


@pytest.mark.parametrize(
    ("package", "degrees", "reason"),
    [
        ("accelerate", {}, None),
        ("accelerate", {"dp_shard_size": 2}, "it needs accelerate>=1.12, and 1.10.1 is installed"),
        ("transformers", {"dp_shard_size": 2}, None),
        ("transformers", {"dp_shard_size": 2, "tp_size": 2}, "it needs transformers>=5.23, and 1.10.1 is"),
    ],
)
def test_libraries_that_are_too_old(
    monkeypatch: pytest.MonkeyPatch, package: str, degrees: dict[str, int], reason: str | None
) -> None:
    versions = {"accelerate": "1.15.0", "transformers": "5.23.0", package: "1.10.1"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    case = make_case(model="llama-tiny", framework=accelerate(**degrees), topology=FOUR)
    told = framework_of(case).unsupported(case, make_machine())
    assert told is None if reason is None else str(told).startswith(reason)


def test_a_class_that_transformers_has_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import tensor_parallel

    monkeypatch.setattr(tensor_parallel, "ReplicateParallel", object, raising=False)
    assert Degrees(dp_replicate_size=1, dp_shard_size=2, cp_size=1, tp_size=2).patch() == {}
    assert tensor_parallel.ReplicateParallel is object  # type: ignore[attr-defined]


# --- what a step sends ------------------------------------------------------------------------------------

LAYERS, HIDDEN, KEYS, MLP, VOCABULARY = 32, 4096, 1024, 14336, 128256  # of Llama-3.1-8B
TOKENS = 8192
BF16 = 2  # bytes of a number; accelerate reduces gradients in it, too


def theory(degrees: Degrees, *, recomputed: bool) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Calls and bytes by axis of the mesh, kind and phase, from the sizes of the model.

    ZeRO-3 (Rajbhandari et al. 2020): what is sharded is gathered before forward and again before backward,
    and its gradients are scattered. accelerate's units are each block, the embedding, and the last norm with
    the head, which stays gathered. Shoeybi et al. 2019: tensor parallelism reduces the output of each half of
    a block in forward, and the gradient of the input of its first matrices in backward; transformers does so
    for each of these five matrices. The embedding's output and the gradient of the head's input are reduced,
    and the logits gathered. A block that is computed anew reduces the output of its attention again.
    """
    tp = degrees.tp_size
    block = (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * MLP) // tp + 2 * HIDDEN
    embedding = VOCABULARY * HIDDEN // tp
    tail = embedding + HIDDEN
    all_units = BF16 * (LAYERS * block + embedding + tail)
    hidden = BF16 * TOKENS * HIDDEN
    forward, backward = 2 * LAYERS + 1, 5 * LAYERS + 1 + (LAYERS if recomputed else 0)
    expected = {
        ("dp_shard", "all_gather", "forward"): (LAYERS + 2, all_units),
        ("dp_shard", "all_gather", "backward"): (LAYERS + 1, all_units - BF16 * tail),
        ("dp_shard", "reduce_scatter", "backward"): (LAYERS + 2, all_units),
        ("tp", "all_reduce", "forward"): (forward, forward * hidden),
        ("tp", "all_reduce", "backward"): (backward, backward * hidden),
        ("tp", "all_gather", "forward"): (1, BF16 * TOKENS * VOCABULARY),
    }
    if degrees.dp_replicate_size > 1:
        reduced = LAYERS + 2, all_units // degrees.dp_shard_size
        expected["dp_replicate", "all_reduce", "backward"] = reduced
    return expected


FULL_SIZE = Case(
    model="llama-3.1-8b",
    framework=accelerate(dp_shard_size=8, tp_size=8),
    sequence_length=TOKENS,
    micro_batch=1,
    precision="bf16-mixed",
    activation_checkpointing="full",
    topology=Topology(nodes=8, processes_per_node=8),
    hardware="h100",
)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        (FULL_SIZE, "dp_shard_cp 8 x tp 8"),
        pytest.param(
            FULL_SIZE.replace(
                framework=accelerate(dp_replicate_size=2, dp_shard_size=4, tp_size=8),
                activation_checkpointing="none",
            ),
            "dp_replicate 2 x dp_shard_cp 4 x tp 8",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["2-D", "3-D"],
)
def test_a_step_sends_what_theory_says(case: Case, mesh: str, tmp_path: Path) -> None:
    run = passed(case, tmp_path)
    assert run.observed is not None
    assert run.observed.settings["mesh"] == mesh
    degrees: Degrees = case.framework._degrees  # type: ignore[attr-defined]
    tp, shards = degrees.tp_size, degrees.dp_shard_size
    axes = {(tp, 1): "tp", (shards, tp): "dp_shard", (degrees.dp_replicate_size, shards * tp): "dp_replicate"}
    sent = {
        (axes[each.ranks, each.apart], each.kind, each.phase): (each.count, each.bytes)
        for each in run.counts[0].counts.collectives
    }
    assert run.dry_facts is not None
    assert run.dry_facts.fit is not None
    assert run.dry_facts.fit.built == 4 * 8_030_261_248 // tp, "fp32, split before it is sharded"
    assert sent == theory(degrees, recomputed=case.activation_checkpointing == "full")


def of_attention(parts: int, *, recomputed: bool) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Calls and bytes of context parallelism: accelerate gathers keys and values, and once more in backward.

    Their gradients, in fp32, pass from rank to rank until each is back at its own (Liu et al. 2023).
    """
    both = 2 * TOKENS_OF_LONG // parts * KEYS
    gathered = FEW_LAYERS, FEW_LAYERS * BF16 * both * parts
    return {
        ("all_gather", "bfloat16", "forward"): gathered,
        **({("all_gather", "bfloat16", "recompute"): gathered} if recomputed else {}),
        ("all_gather", "bfloat16", "backward"): gathered,
        ("all_to_all", "float32", "backward"): (FEW_LAYERS * parts, FEW_LAYERS * parts * 4 * both),
    }


TOKENS_OF_LONG = 131072
FEW_LAYERS = 4  # of 32, which take eight times as long and repeat them
LONG = FULL_SIZE.replace(
    model=Model.from_config({**FULL_SIZE.model.config, "num_hidden_layers": FEW_LAYERS}, name="few-layers"),
    framework=accelerate(dp_shard_size=2, cp_size=4),
    sequence_length=TOKENS_OF_LONG,
    topology=Topology(processes_per_node=8),
)


@pytest.mark.launch
@pytest.mark.parametrize(
    "framework",
    [
        accelerate(dp_shard_size=2, cp_size=4),
        pytest.param(trainer(dp_shard_size=2, cp_size=4), marks=pytest.mark.nightly),
    ],
    ids=["accelerate", "trainer"],
)
def test_parts_of_a_sequence_send_and_compute_what_theory_says(framework: Framework, tmp_path: Path) -> None:
    parts, own = 4, TOKENS_OF_LONG // 4
    run = passed(LONG.replace(framework=framework), tmp_path)
    assert run.observed is not None
    settings = run.observed.settings
    assert (settings["mesh"], settings["context_parallel"]) == ("dp_shard_cp 8", "4")
    # Of two blocks of a part each, one is whole: itself. Of each part of others it takes half.
    attention = FEW_LAYERS * 4 * HIDDEN * own * own * (1 + (parts - 1) / 2)
    matmuls = FEW_LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * MLP) + VOCABULARY * HIDDEN
    assert len(run.counts) == 2, "of the first and the last rank"
    for each in run.counts:
        sent = {
            (call.kind, call.dtype, call.phase): (call.count, call.bytes)
            for call in each.counts.collectives
            if call.ranks == parts
        }
        assert sent == of_attention(parts, recomputed=True)
        assert each.counts.flops["forward"] == attention + 2 * own * matmuls
        assert each.counts.host_reads == {"forward": 1}
    first, last = (each.counts.memory for each in run.counts)
    assert first is not None
    assert last is not None
    assert abs(first.saved_for_backward - last.saved_for_backward - own * own) < own * own // 500, "the mask"
    assert run.dry_facts is not None
    assert run.dry_facts.roofline is not None
    assert run.dry_facts.roofline.tokens == 2 * TOKENS_OF_LONG, "of two sequences, each on four ranks"
