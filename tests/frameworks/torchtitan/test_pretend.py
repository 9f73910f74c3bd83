"""Test dry runs of torchtitan's registered configurations on GPUs, using formulas from the models' shapes.

The formulas are torchtitan's own: a parameter is gathered in bf16 over its FSDP mesh in forward and in
backward, and its gradient is reduced in fp32 (docs/fsdp.md). Experts have a mesh of their own
(`ParallelDims.build_mesh`). The head is gathered once more, because the loss in chunks calls it after the
model.

`tests/bench_cases/test_theory.py` tests more configurations at full width.
"""

from pathlib import Path

import pytest

from perfsuite import Case
from perfsuite.results.counts import Counts
from perfsuite.worker.counting.growth import DISABLED
from tests.dry.runs import passed
from tests.frameworks.torchtitan.samples import MARKS
from tests.frameworks.torchtitan.test_configuration import BALANCED, CUT, ONE_BY_ONE, degree, registered
from tests.samples import known

pytestmark = [*MARKS, pytest.mark.launch]

TOKENS = 2 * 64  # tokens of a rank in a step


def on_gpus(module: str, config: str, *overrides: str) -> Case:
    """Return a case on eight pretended H100s, without recomputation."""
    words = (*overrides, "activation-checkpoint:none")
    return registered(module, config, *words, ranks=8, activation_checkpointing="none", hardware=("h100",))


def sent(counts: Counts) -> dict[tuple[str, int, int, str, str], int]:
    """Return bytes by kind, number of ranks, stride of the ranks (`Collective.apart`), dtype and phase.

    Tiny messages are omitted.
    """
    return {
        (call.kind, call.ranks, call.apart, call.dtype, call.phase): int(call.bytes)
        for call in counts.collectives
        if call.bytes > 4096
    }


@pytest.mark.nightly
def test_llama_in_float8_matches_theory(tmp_path: Path) -> None:
    """Each linear layer has three products: one in forward and two in backward.

    Attention is not converted.

    Each of the 6 blocks has 5 layers, and the head has 8 parts.
    """
    run = passed(on_gpus("llama3", "llama3_debugmodel_float8"), tmp_path)
    counts = run.counts[0].counts
    assert counts.ops["aten._scaled_mm"] == 3 * (6 * 5 + 8)
    assert "aten.mm" not in counts.ops
    width = 256
    layers = 6
    vocabulary = 2048
    linear = layers * (4 * width**2 + 3 * width * 768) + vocabulary * width
    assert known(run.flops).per_token_float8 == 6 * linear
    assert counts.flops["forward"] == 2 * TOKENS * (linear + layers * 2 * width * 64)
    assert known(known(run.dry_facts).roofline).peak_flops == 2 * 989.5e12


def test_replicated_qwen_experts_match_theory(tmp_path: Path) -> None:
    """The layer has width 256, 16 heads of size 128 and 8 key heads. Each token uses 8 of 64 experts."""
    words = (degree("expert", 2), "--parallelism.data_parallel_replicate_degree=2")
    run = passed(on_gpus(CUT, "qwen3_moe_debug", *words), tmp_path)
    assert BALANCED in run.notes
    width = 256
    vocabulary = 2048
    head = 128
    experts = 64 * 3 * width * 768
    routed = TOKENS * 8 * width * 2
    layer = 2 * width * 16 * head + 2 * width * 8 * head + 2 * head + 2 * width + width * 64
    dense = layer + 2 * vocabulary * width + width
    assert sent(run.counts[0].counts) == {
        ("all_gather", 4, 1, "bfloat16", "forward"): 2 * (dense + vocabulary * width + width),
        ("all_gather", 4, 1, "bfloat16", "backward"): 2 * dense,
        ("reduce_scatter", 4, 1, "float32", "backward"): 4 * dense,
        ("all_gather", 2, 2, "bfloat16", "forward"): 2 * experts // 2,
        ("all_gather", 2, 2, "bfloat16", "backward"): 2 * experts // 2,
        ("reduce_scatter", 2, 2, "float32", "backward"): 4 * experts // 2,
        # Each shard is reduced together with its twin in the other group.
        ("all_reduce", 2, 4, "float32", "backward"): 4 * dense // 4 + 4 * experts // 4,
        ("all_to_all", 2, 1, "bfloat16", "forward"): 2 * routed,
        ("all_to_all", 2, 1, "bfloat16", "backward"): 2 * routed,
    }


@pytest.mark.nightly
def test_pipeline_end_stages_match_theory(tmp_path: Path) -> None:
    """Each of the two stages has three of six layers of width 256. The first stage also has the embedding.

    Each rank holds half of a stage.
    """
    words = (degree("pipeline", 2), degree("tensor", 2), ONE_BY_ONE)
    first, last = passed(on_gpus("llama3", "llama3_debugmodel", *words), tmp_path).counts
    assert (first.ranks, last.ranks) == ((0,), (7,))
    width = 256
    layers = 3
    vocabulary = 2048
    matrices = layers * (4 * width**2 + 3 * width * 768)
    norms = layers * 2 * width
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
def test_sinks_and_windows_run_dry(tmp_path: Path) -> None:
    """Only gpt-oss scales attention's output with the sums of its softmax, so the test runs only at night."""
    run = passed(on_gpus(CUT, "gpt_oss_debugmodel", degree("expert", 2), degree("tensor", 2)), tmp_path)
    fused = "attention is counted as one fused kernel without a mask, instead of torchtitan's own kernel"
    assert run.notes == (BALANCED, fused, DISABLED)
    assert "attention_sink" not in run.counts[0].counts.without_flops
    assert run.counts[0].counts.ops["aten.sigmoid"] >= 2
