"""Test each fault in one process.

Under DDP the process is the only rank of its group. FSDP2 needs at least two ranks, so there the process is
one of two ranks in a group that sends nothing.
"""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfsuite import DDP, FSDP2, Case, Model
from perfsuite.case.catalog import MODELS
from perfsuite.case.fault import STRUCTURAL, Structural
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import Framework, framework_of
from perfsuite.results.counts import Counts
from perfsuite.worker.counting.steps import Counting
from perfsuite.worker.faults.injector import STRUCTURAL_AFTER
from perfsuite.worker.faults.structural_faults import begin
from tests.fake_group import alone, fake_group
from tests.frameworks.common.test_model import TINY
from tests.samples import known
from tests.worker.loops import memory

TWO_LAYERS = Model(name="two-layers", config={**MODELS["llama-tiny"].config, "num_hidden_layers": 2})
REPLICATED = TINY.replace(
    model=TWO_LAYERS, sequence_length=32, micro_batch=2, activation_checkpointing="full"
)
SHARDED = REPLICATED.replace(framework=FSDP2(), precision="bf16", activation_checkpointing="none")
PARAMETERS = 524_928  # of the model
TENSORS = 21  # of the model


def counted(case: Case, kind: Structural | None = None, *, fused: bool = False) -> Counts:
    """Count the steps of a case like a rank, and begin the fault at the same step as a rank."""
    model: Any = None
    counting = Counting(lambda: model)
    ended = 0
    framework = framework_of(case)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if fused and (kind is None or ended <= STRUCTURAL_AFTER):
            for group in optimizer.param_groups:
                group["fused"] = True
        counting.before_optimizer_step(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal ended
        counting.end_step()
        if ended == STRUCTURAL_AFTER and kind is not None:
            begin(kind, model, optimizer)
        ended += 1
        counting.begin_step()

    group = fake_group(0, 2) if case.framework.name == "fsdp2" else alone()
    with group as ranks, ExitStack() as hooks:
        hooks.callback(register_optimizer_step_pre_hook(before).remove)
        hooks.callback(register_optimizer_step_post_hook(after).remove)
        workload = framework.build(case, ranks, None)  # type: ignore[arg-type]
        model = workload.model
        workload.run(4)
    assert counting.counts is not None, counting.notes
    return counting.counts


@pytest.fixture(scope="module")
def replicated() -> Counts:
    return counted(REPLICATED)


@pytest.fixture(scope="module")
def sharded() -> Counts:
    return counted(SHARDED)


def collectives(counts: Counts) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(c.kind, c.dtype, c.phase): (c.count, c.bytes) for c in counts.collectives}


def test_toggles_which_freed_blocks_are_kept(sharded: Counts) -> None:
    kept = counted(SHARDED, "reshard-toggled")
    freed = counted(SHARDED.replace(framework=FSDP2(reshard_after_forward=False)), "reshard-toggled")
    sent = [collectives(step_counts) for step_counts in (sharded, kept, freed)]
    assert [calls["all_gather", "bfloat16", "forward"][0] for calls in sent] == [3, 3, 3]
    assert [calls.get(("all_gather", "bfloat16", "backward"), (0, 0))[0] for calls in sent] == [2, 0, 2]
    assert memory(kept).at_peak["unsharded"] > memory(sharded).at_peak["unsharded"]


@pytest.mark.parametrize(
    ("framework", "kind"), [(FSDP2(), "reduce_scatter"), (DDP(), "all_reduce")], ids=["fsdp2", "ddp"]
)
def test_gradients_are_reduced_in_float32(framework: Framework, kind: str) -> None:
    case = SHARDED.replace(framework=framework)
    before = collectives(counted(case))
    now = collectives(counted(case, "fp32-communication"))
    calls, size = before[kind, "bfloat16", "backward"]
    assert size == 2 * PARAMETERS
    assert now[kind, "float32", "backward"] == (calls, 2 * size)
    assert (kind, "bfloat16", "backward") not in now


def test_blocks_are_not_recomputed(replicated: Counts) -> None:
    lost = counted(REPLICATED, "checkpointing-lost")
    assert replicated.flops["recompute"] > 0
    assert "recompute" not in lost.flops
    assert memory(lost).saved_for_backward > memory(replicated).saved_for_backward


def test_a_host_read_costs_nothing_else(replicated: Counts) -> None:
    reading = counted(REPLICATED, "host-read")
    assert reading.host_reads["forward"] == replicated.host_reads.get("forward", 0) + 1
    assert (reading.kernels, reading.flops) == (replicated.kernels, replicated.flops)


def test_more_buckets_hold_the_same(replicated: Counts) -> None:
    key = "all_reduce", "float32", "backward"
    assert collectives(replicated)[key] == (1, 4 * PARAMETERS)
    assert collectives(counted(REPLICATED, "small-buckets"))[key] == (3, 4 * PARAMETERS)


def test_fused_optimizer_becomes_a_foreach_list(replicated: Counts) -> None:
    fused = counted(REPLICATED, fused=True)
    lists = counted(REPLICATED, "optimizer-foreach", fused=True)
    kernels = [known(each.kernels)["optimizer"] for each in (fused, lists, replicated)]
    assert kernels[0] < kernels[1] < kernels[2]


def test_no_optimizer_waits_for_its_step_counters(replicated: Counts) -> None:
    fused = counted(REPLICATED, fused=True)
    lists = counted(REPLICATED, "optimizer-foreach", fused=True)
    assert [step_counts.host_reads.get("optimizer", 0) for step_counts in (fused, replicated, lists)] == [
        0,
        0,
        0,
    ]


def test_attention_becomes_matrix_products(replicated: Counts) -> None:
    eager = counted(REPLICATED, "eager-attention")
    assert known(eager.kernels)["forward"] > known(replicated.kernels)["forward"]
    assert any("attention" in operator for operator in replicated.ops)
    assert not any("attention" in operator for operator in eager.ops)


def test_a_copy_of_the_weights_is_kept(replicated: Counts) -> None:
    kept = counted(REPLICATED, "weight-copy")
    assert memory(kept).peak - memory(replicated).peak == 4 * PARAMETERS
    assert memory(kept).at_peak["kept"] - memory(replicated).at_peak["kept"] == 4 * PARAMETERS
    assert memory(kept).growth == memory(replicated).growth
    assert known(kept.kernels)["optimizer"] == known(replicated.kernels)["optimizer"] + 2 * TENSORS


@pytest.mark.parametrize(
    ("kind", "case", "why"),
    [
        ("reshard-toggled", REPLICATED, "FSDP2 does not shard any blocks"),
        ("fp32-communication", REPLICATED, "DDP already reduces in float32"),
        ("fp32-communication", SHARDED.replace(precision="fp32"), "neither DDP nor FSDP2 reduces"),
        ("checkpointing-lost", SHARDED, "no block is checkpointed"),
        ("small-buckets", SHARDED, "the model is not in a DDP with buckets of more than 1 MiB"),
        ("small-buckets", REPLICATED.replace(framework=DDP(bucket_cap_mb=1)), "the model is not in a DDP"),
        ("eager-attention", REPLICATED.replace(attention="eager"), "no model of transformers uses an"),
    ],
)
def test_a_fault_that_changes_nothing_says_why(kind: Structural, case: Case, why: str) -> None:
    with pytest.raises(MismatchError, match=f"^--perf-inject {kind}: {why}"):
        counted(case, kind)


@pytest.mark.parametrize("kind", STRUCTURAL)
def test_every_fault_needs_something_that_trains(kind: Structural) -> None:
    with pytest.raises(MismatchError, match=f"--perf-inject {kind}: nothing trains here"):
        begin(kind, None, None)


def test_a_model_and_an_optimizer_of_another_make() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(MismatchError, match="no model of transformers uses an attention"):
        begin("eager-attention", model, optimizer)
    with pytest.raises(MismatchError, match="LBFGS already uses foreach operators, or does not support them"):
        begin("optimizer-foreach", model, optimizer)
