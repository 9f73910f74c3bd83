"""Registered configurations of torchtitan dry: as a launch does it, and by formulas from the models' shapes.

The formulas are torchtitan's own: a parameter is gathered in bf16 over its FSDP mesh in forward and in
backward, and its gradient is reduced in fp32 (docs/fsdp.md); experts have a mesh of their own
(`ParallelDims.build_mesh`). The head is gathered once more: the loss in chunks calls it after the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case
from perfsuite.results.counts import Counts
from perfsuite.results.run import Run
from tests.dry.runs import passed
from tests.dry.test_rank import check_ranks, launched
from tests.frameworks.torchtitan.samples import MARKS
from tests.frameworks.torchtitan.test_configuration import (
    DEEPSEEK,
    EMULATED,
    PIPED,
    degree,
    overridden,
    registered,
)

pytestmark = [*MARKS, pytest.mark.launch]

BALANCED = "routing is pretended to be balanced: every expert gets its share of the tokens"
FUSED = "attention is counted as one fused kernel that masks nothing, in place of torchtitan's own"
TOKENS = 2 * 64  # of a rank in a step


def on_gpus(module: str, config: str, *overrides: str) -> Case:
    """On eight pretended H100, with nothing recomputed."""
    words = (*overrides, "activation-checkpoint:none")
    return registered(module, config, *words, ranks=8, activation_checkpointing="none", hardware=("h100",))


def dry(case: Case, directory: Path) -> Run:
    run = passed(case, directory)
    assert run.observed is not None
    assert run.flops is not None
    return run


def sent(counts: Counts) -> dict[tuple[str, int, int, str, str], int]:
    """Bytes by kind, ranks, distance of the ranks, dtype and phase; without what a few numbers take."""
    return {
        (each.kind, each.ranks, each.apart, each.dtype, each.phase): int(each.bytes)
        for each in counts.collectives
        if each.bytes > 4096
    }


@pytest.mark.parametrize(
    ("case", "notes"),
    [
        # Balanced in the launch, too, by torchtitan's own switch; what it assigns is not the router's.
        pytest.param(overridden("--debug.moe_force_load_balance", case=DEEPSEEK), (BALANCED,), id="experts"),
        pytest.param(PIPED, (), id="pipeline"),
        pytest.param(EMULATED, (), id="float8", marks=pytest.mark.nightly),
    ],
)
def test_it_runs_dry_as_a_launch_does(tmp_path: Path, case: Case, notes: tuple[str, ...]) -> None:
    run = dry(case, tmp_path / "dry")
    assert run.notes == notes
    check_ranks(run, launched(case, tmp_path / "real"))


def test_llama_in_float8(tmp_path: Path) -> None:
    """All products but attention's, three for each: of 5 layers in each of 6 blocks, of the head 8 parts."""
    run = dry(on_gpus("llama3", "llama3_debugmodel_float8"), tmp_path)
    counts = run.counts[0].counts
    assert counts.ops["aten._scaled_mm"] == 3 * (6 * 5 + 8)
    assert "aten.mm" not in counts.ops
    width, layers, vocabulary = 256, 6, 2048
    linear = layers * (4 * width**2 + 3 * width * 768) + vocabulary * width
    assert run.flops is not None
    assert run.flops.per_token_float8 == 6 * linear
    assert counts.flops["forward"] == 2 * TOKENS * (linear + layers * 2 * width * 64)
    assert run.dry_facts is not None
    assert run.dry_facts.roofline is not None
    assert run.dry_facts.roofline.peak_flops == 2 * 989.5e12


def test_deepseek_with_experts_on_four_ranks(tmp_path: Path) -> None:
    """Six layers of width 256 with 16 heads, the first one dense; 8 experts, three for each token."""
    run = dry(on_gpus("deepseek_v3", "deepseek_v3_debugmodel", degree("expert", 4)), tmp_path)
    assert run.notes == (BALANCED, FUSED)
    width, layers, mixed, vocabulary = 256, 6, 5, 2048
    latent, rope, head, value = 512, 64, 128, 128
    projections = width * 16 * (head + rope) + width * (latent + rope) + 16 * value * width
    projections += latent * 16 * (head + value)
    feed_forward, shared, gate = 3 * width * 1024, 3 * width * 512, width * 8
    expert = 3 * width * 256
    experts = mixed * 8 * expert
    linear = layers * projections + feed_forward + mixed * (shared + gate) + vocabulary * width
    norms = layers * (2 * width + latent) + width
    dense, routed = linear + norms + vocabulary * width, TOKENS * 3 * width * 2 * mixed

    counts = run.counts[0].counts
    assert sent(counts) == {
        ("all_gather", 8, 1, "bfloat16", "forward"): 2 * (dense + vocabulary * width + width),
        ("all_gather", 8, 1, "bfloat16", "backward"): 2 * dense,
        ("reduce_scatter", 8, 1, "float32", "backward"): 4 * dense,
        ("all_gather", 2, 4, "bfloat16", "forward"): 2 * experts // 4,
        ("all_gather", 2, 4, "bfloat16", "backward"): 2 * experts // 4,
        ("reduce_scatter", 2, 4, "float32", "backward"): 4 * experts // 4,
        ("all_to_all", 4, 1, "bfloat16", "forward"): 2 * routed,
        ("all_to_all", 4, 1, "bfloat16", "backward"): 2 * routed,
    }
    active = linear + norms + experts * 3 // 8
    scores = layers * 16 * (head + rope + value)
    assert run.flops is not None
    assert run.flops.parameters == dense + experts
    assert run.flops.matmul_parameters == active
    assert run.flops.per_token == 6 * active + 6 * scores * 64
    assert counts.flops["forward"] == 2 * TOKENS * (linear + mixed * 3 * expert + scores * 64)
    assert not counts.without_flops


def test_qwen_with_experts_in_two_groups_that_replicate(tmp_path: Path) -> None:
    """Eight layers of width 256, 16 heads of size 128, 8 of keys; 64 experts, eight for each token."""
    case = on_gpus(
        "qwen3", "qwen3_moe_debug", degree("expert", 2), "--parallelism.data_parallel_replicate_degree=2"
    )
    run = dry(case, tmp_path)
    width, layers, vocabulary, head = 256, 8, 2048, 128
    experts = layers * 64 * 3 * width * 768
    layer = 2 * width * 16 * head + 2 * width * 8 * head + 2 * head + 2 * width + width * 64
    dense = layers * layer + 2 * vocabulary * width + width
    routed = TOKENS * 8 * width * 2 * layers
    assert sent(run.counts[0].counts) == {
        ("all_gather", 4, 1, "bfloat16", "forward"): 2 * (dense + vocabulary * width + width),
        ("all_gather", 4, 1, "bfloat16", "backward"): 2 * dense,
        ("reduce_scatter", 4, 1, "float32", "backward"): 4 * dense,
        ("all_gather", 2, 2, "bfloat16", "forward"): 2 * experts // 2,
        ("all_gather", 2, 2, "bfloat16", "backward"): 2 * experts // 2,
        ("reduce_scatter", 2, 2, "float32", "backward"): 4 * experts // 2,
        # What each shard is reduced to, with its twin in the other group.
        ("all_reduce", 2, 4, "float32", "backward"): 4 * dense // 4 + 4 * experts // 4,
        ("all_to_all", 2, 1, "bfloat16", "forward"): 2 * routed,
        ("all_to_all", 2, 1, "bfloat16", "backward"): 2 * routed,
    }


def test_llama_with_sequences_on_two_ranks(tmp_path: Path) -> None:
    """Six layers of width 256; each rank has half of a sequence, and gathers keys and values of all."""
    run = dry(on_gpus("llama3", "llama3_debugmodel", degree("context", 2)), tmp_path)
    assert run.notes == (FUSED,)
    width, layers, vocabulary = 256, 6, 2048
    dense = layers * (4 * width**2 + 3 * width * 768 + 2 * width) + 2 * vocabulary * width + width
    keys_and_values = 2 * TOKENS * width * layers
    counts = run.counts[0].counts
    assert sent(counts) == {
        ("all_gather", 8, 1, "bfloat16", "forward"): 2 * (dense + vocabulary * width + width),
        ("all_gather", 8, 1, "bfloat16", "backward"): 2 * dense,
        ("reduce_scatter", 8, 1, "float32", "backward"): 4 * dense,
        ("all_gather", 2, 1, "bfloat16", "forward"): 2 * keys_and_values,
        ("reduce_scatter", 2, 1, "bfloat16", "backward"): 2 * keys_and_values,
    }
    linear = dense - vocabulary * width - (2 * layers + 1) * width
    assert counts.flops["forward"] == 2 * TOKENS // 2 * (linear + layers * 2 * width * 64)
    assert run.dry_facts is not None
    assert run.dry_facts.roofline is not None
    assert run.dry_facts.roofline.tokens == TOKENS * 4, "of four ranks with data of their own"


def test_the_first_and_the_last_stage_of_a_pipeline_with_split_layers(tmp_path: Path) -> None:
    """Of two, the first has the embedding and three of six layers of width 256. Each rank has half of all."""
    words = (degree("pipeline", 2), degree("tensor", 2), "--parallelism.pipeline_parallel_schedule=1F1B")
    run = dry(on_gpus("llama3", "llama3_debugmodel", *words), tmp_path)
    first, last = run.counts
    assert (first.ranks, last.ranks) == ((0,), (7,))
    width, layers, vocabulary = 256, 3, 2048
    matrices, norms = layers * (4 * width**2 + 3 * width * 768), layers * 2 * width
    whole = norms + (matrices + vocabulary * width) // 2
    activations = 2 * TOKENS * width // 2
    messages = {key: size for key, size in sent(first.counts).items() if key[1:3] != (2, 1)}
    assert messages == {
        ("all_gather", 2, 2, "bfloat16", "forward"): 2 * whole,
        ("reduce_scatter", 2, 2, "float32", "forward"): 4 * whole,
        ("send", 2, 4, "bfloat16", "forward"): activations,
        ("recv", 2, 4, "bfloat16", "forward"): activations,
    }
    for kind in ("send", "recv"):
        assert sent(last.counts)[kind, 2, 4, "bfloat16", "forward"] == activations


@pytest.mark.nightly
@pytest.mark.parametrize("words", [(), (degree("tensor", 2),)], ids=["ep 2", "ep 2 x tp 2"])
def test_sinks_and_windows_run_dry(words: Any, tmp_path: Path) -> None:
    """gpt-oss transforms what attention gives by the sums of its softmax. Nothing else does: so nightly."""
    run = dry(on_gpus("gpt_oss", "gpt_oss_debugmodel", degree("expert", 2), *words), tmp_path)
    assert run.notes == (BALANCED, FUSED)
    assert "attention_sink" not in run.counts[0].counts.without_flops
    assert run.counts[0].counts.ops["aten.sigmoid"] >= 4
