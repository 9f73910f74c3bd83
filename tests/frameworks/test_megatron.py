"""Test dry runs of Megatron-Core, Megatron-FSDP and NeMo Automodel from the public index, on 64 ranks.

The expected collectives are the closed forms of docs/evidence/megatron.md.
"""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, Model, Script, Topology
from perfsuite.dry.driver import dry_run
from perfsuite.results.counts import Counts, of_rank
from perfsuite.results.run import Run
from tests.dry.runs import failure_of, passed
from tests.frameworks.test_base import COUNTED
from tests.samples import known

RECIPES = Path(__file__).parent / "recipes"
RANKS = 64
LAYERS, HIDDEN, VOCABULARY = 4, 512, 32_000  # like the scripts' defaults
TOKENS = 2 * 256  # tokens of a micro-batch
BF16 = 2  # bytes

pytestmark = pytest.mark.nightly

Sent = dict[tuple[str, str, int, int, str], tuple[int, float]]
"""Calls and bytes by phase, kind, number of ranks, stride of the ranks (`Collective.apart`), and dtype."""


def case_of(package: str, script: str, *arguments: str, **changes: Any) -> Case:
    """Return a case on 64 H100s.

    Its script imports `package`, which `make` installs apart from other packages.
    """
    apart = Path(sys.prefix) / "megatron" / package
    if not apart.is_dir():
        pytest.skip(f"{package} is not installed (make .venv/installed)")
    how = {name: changes.pop(name) for name in ("loss", "data_parallel") if name in changes}
    framework = Script(path=RECIPES / script, arguments=arguments, env={"PYTHONPATH": str(apart)}, **how)
    net = {"model": Model.named("net"), "framework": framework, "sequence_length": 256, "micro_batch": 2}
    topology = Topology(nodes=8, processes_per_node=8)
    machines = {"topology": topology, "hardware": "h100", "precision": "bf16-mixed", "timeout_s": 1200}
    return COUNTED.replace(**{**net, **machines, **changes})


def counted(run: Run, rank: int = 0) -> Counts:
    assert run.failure is None, f"{run.failure.message}\n{run.failure.traceback}"
    return known(of_rank(run.counts, rank))


def sent(counts: Counts) -> Sent:
    """Return the collectives between several ranks."""
    return {
        (collective.phase, collective.kind, collective.ranks, collective.apart, collective.dtype): (
            collective.count,
            collective.bytes,
        )
        for collective in counts.collectives
        if collective.ranks > 1
    }


CLIPPING: Sent = {("forward", "all_reduce", RANKS, 1, "float32"): (1, 4)}
"""The all-reduce for the norm of the gradients."""


def zero1(elements: int, ranks: int, apart: int) -> Sent:
    """Return what the distributed optimizer sends for parameters that fit into one bucket."""
    return {
        ("forward", "all_gather", ranks, apart, "bfloat16"): (1, elements * BF16),
        ("backward", "reduce_scatter", ranks, apart, "bfloat16"): (1, elements * BF16),
    }


@pytest.mark.parametrize("rank", [0, RANKS - 1], ids=["first stage", "last stage"])
def test_megatron_core_splits_tensors_and_pipelines(rank: int, tmp_path: Path) -> None:
    tp, pp, micro_batches = 4, 2, 3
    words = (f"--tp={tp}", f"--pp={pp}", f"--micro-batches={micro_batches}")
    case = case_of(
        *("megatron-core", "train_megatron_core.py", *words),
        loss=None,
        data_parallel=RANKS // tp // pp,
        gradient_accumulation=micro_batches,
    )
    counts = counted(dry_run(case, tmp_path, ranks=[rank]), rank)
    is_last = rank > 0
    layers = LAYERS // pp
    activation = TOKENS * HIDDEN * BF16
    of_a_layer = (12 * HIDDEN**2 + 7 * HIDDEN) // tp + 6 * HIDDEN
    elements = layers * of_a_layer + VOCABULARY * HIDDEN // tp + 2 * HIDDEN * is_last
    forward = micro_batches * (2 * layers + (not is_last))
    backward = micro_batches * (2 * layers + is_last)
    expected: Sent = {
        **zero1(elements, RANKS // tp // pp, tp),
        ("forward", "all_reduce", tp, 1, "bfloat16"): (forward, forward * activation),
        ("backward", "all_reduce", tp, 1, "bfloat16"): (backward, backward * activation),
        ("forward", "send", pp, RANKS // pp, "bfloat16"): (micro_batches, micro_batches * activation),
        ("forward", "recv", pp, RANKS // pp, "bfloat16"): (micro_batches, micro_batches * activation),
        **CLIPPING,
    }
    if is_last:
        expected["forward", "all_reduce", tp, 1, "float32"] = (3 * micro_batches, 12 * micro_batches * TOKENS)
    assert sent(counts) == expected
    products = layers * (24 * HIDDEN**2 + 4 * 256 * HIDDEN) + 2 * HIDDEN * VOCABULARY * is_last
    flops = micro_batches * TOKENS * products // tp
    assert counts.flops == {"forward": flops, "backward": 2 * flops}


EXPERTS = ("--ep=8", "--experts=16", "--layers=2")


def test_megatron_core_sends_tokens_to_experts(tmp_path: Path) -> None:
    ep, experts, layers, factor = 8, 16, 2, 1.25
    case = case_of("megatron-core", "train_megatron_core.py", *EXPERTS, f"--capacity={factor}")
    counts = counted(dry_run(case, tmp_path))
    rows = experts * math.ceil(TOKENS * 2 * factor / experts)  # each token goes to two experts
    exchanged = (3 * layers, layers * rows * (2 * HIDDEN + 1) * BF16)
    dense = 2 * VOCABULARY * HIDDEN + layers * (4 * HIDDEN**2 + experts * HIDDEN + 4 * HIDDEN) + 2 * HIDDEN
    assert sent(counts) == {
        **zero1(dense, RANKS, 1),
        **zero1(layers * experts // ep * 8 * HIDDEN**2, RANKS // ep, ep),
        ("forward", "all_to_all", ep, 1, "bfloat16"): exchanged,
        ("backward", "all_to_all", ep, 1, "bfloat16"): exchanged,
        **CLIPPING,
    }


def test_tokens_without_padding_depend_on_values(tmp_path: Path) -> None:
    failure = failure_of(case_of("megatron-core", "train_megatron_core.py", *EXPERTS), tmp_path)
    assert failure.kind == "not_dry"
    assert "train_megatron_core.py" in failure.message
    assert "token_indices.masked_select(routing_map)" in known(failure.traceback)


def test_megatron_fsdp_gathers_each_unit_twice(tmp_path: Path) -> None:
    """Megatron-FSDP's `fully_shard` makes one step of the optimizer without a loss."""
    counts = counted(passed(case_of("megatron-fsdp", "train_megatron_fsdp.py", loss=None), tmp_path))
    inner = 1408
    of_a_layer = padded(4 * HIDDEN**2 + 3 * HIDDEN * inner + 2 * HIDDEN, math.lcm(HIDDEN, inner))
    layers = LAYERS * of_a_layer
    everything = layers + padded(2 * VOCABULARY * HIDDEN + HIDDEN, HIDDEN)
    assert sent(counts) == {
        ("forward", "all_gather", RANKS, 1, "bfloat16"): (LAYERS + 1, everything * BF16),
        ("backward", "all_gather", RANKS, 1, "bfloat16"): (LAYERS, layers * BF16),
        ("backward", "reduce_scatter", RANKS, 1, "bfloat16"): (LAYERS + 1, everything * BF16),
    }


def padded(elements: int, row: int) -> int:
    """Return the number of elements of a buffer that is split among all ranks in whole rows."""
    return math.ceil(elements / (row * RANKS)) * row * RANKS


def test_automodel_trains_its_recipe(tmp_path: Path) -> None:
    config = ("--config", str(RECIPES / "automodel.yaml"))
    counts = counted(dry_run(case_of("nemo-automodel", "train_automodel.py", *config), tmp_path))
    of_a_layer = 4 * HIDDEN**2 + 3 * HIDDEN * 1408 + 2 * HIDDEN
    everything = LAYERS * of_a_layer + 2 * VOCABULARY * HIDDEN + HIDDEN
    again = (LAYERS - 1) * of_a_layer + VOCABULARY * HIDDEN
    assert {name: value for name, value in sent(counts).items() if name[1] != "all_reduce"} == {
        ("forward", "all_gather", RANKS, 1, "bfloat16"): (LAYERS + 3, everything * BF16),
        ("backward", "all_gather", RANKS, 1, "bfloat16"): (LAYERS, again * BF16),
        ("backward", "reduce_scatter", RANKS, 1, "float32"): (LAYERS + 3, everything * 4),
    }
