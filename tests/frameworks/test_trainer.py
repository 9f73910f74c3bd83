from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import Topology, Trainer
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError
from tests.frameworks.test_base import SMALL, measured, observed
from tests.samples import make_case, make_gpu_machine, make_machine

CPU, GPUS = make_machine(), make_gpu_machine()
HYBRID = Trainer(fsdp="hybrid_shard", fsdp_version=1)
EIGHT = Topology(processes_per_node=8)


def test_the_id_tells_the_options() -> None:
    assert Trainer().slug() == "trainer"
    assert Trainer(fsdp=" full_shard  auto_wrap").slug() == "trainer-full_shard auto_wrap"
    assert Trainer(fsdp="no_shard", fsdp_version=1).slug() == "trainer-no_shard-fsdp_version1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp": "full"}, "fsdp: unknown 'full'; words are full_shard, shard_grad_op, no_shard,"),
        ({"fsdp": "auto_wrap"}, "fsdp: name one sharding of full_shard, shard_grad_op, no_shard,"),
        ({"fsdp": "full_shard no_shard"}, "leave it empty for DDP, got 'full_shard no_shard'"),
        ({"fsdp": "no_shard"}, "no_shard is of FSDP1: fsdp_version=1, or full_shard, shard_grad_op"),
        ({"fsdp_version": 1}, "fsdp_version=1 without fsdp; name what to shard"),
        ({"float8": "rowwise"}, "float8: Input should be 'tensorwise', got 'rowwise'"),
        (
            {"fsdp": "full_shard", "fsdp_version": 1, "float8": "tensorwise"},
            "float8='tensorwise' goes with DDP and FSDP2, not with fsdp_version=1",
        ),
        ({"fsdp_version": 3}, "fsdp_version: Input should be 1 or 2, got 3"),
        (
            {"dp_shard_size": 2},
            "dp_replicate_size=1, dp_shard_size=2, cp_size=1, tp_size=1: degrees are of FSDP2; name",
        ),
        ({"fsdp": "full_shard", "fsdp_version": 1, "tp_size": 2}, "tp_size=2: degrees are of FSDP2"),
    ],
)
def test_bad_options_are_named_with_what_is_allowed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CaseError) as caught:
        Trainer(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("trainer", "machine", "changes", "said"),
    [
        (Trainer(), CPU, {}, None),
        (Trainer(), CPU, {"activation_checkpointing": "every-2"}, None),
        (Trainer(), CPU, {"activation_checkpointing": "selective-op"}, "whole blocks (none, full, every-N)"),
        (Trainer(), CPU, {"topology": Topology(processes_per_node=1)}, "wraps nothing on 1 process"),
        (Trainer(fsdp="full_shard offload"), CPU, {}, "to a GPU, this machine has none"),
        (HYBRID, CPU, {}, "hybrid_shard shards among the GPUs of a node, this machine has none"),
        (Trainer(fsdp="full_shard offload"), GPUS, {"topology": EIGHT}, "take fsdp_version=1"),
        (Trainer(fsdp="full_shard offload", fsdp_version=1), GPUS, {"topology": EIGHT}, None),
        (HYBRID, GPUS, {"topology": EIGHT}, "8 processes cannot be split so"),
        (
            Trainer(),
            GPUS,
            {"precision": "fp16-mixed"},
            "precision 'fp16-mixed' is not one of fp32, bf16-mixed, bf16",
        ),
    ],
)
def test_what_cannot_run(
    trainer: Trainer, machine: Machine, changes: dict[str, Any], said: str | None
) -> None:
    reason = trainer.unsupported(make_case(**changes), machine)
    assert reason is None if said is None else said in str(reason)


def test_what_must_be_observed() -> None:
    case = make_case()
    assert Trainer().expected(case) == {"wrapper": "DistributedDataParallel"}
    assert Trainer(fsdp="shard_grad_op").expected(case) == {"wrapper": "FSDPModule", "sharding": "Shard(0)"}
    split = Trainer(fsdp="full_shard", dp_shard_size=2, tp_size=2).expected(case)
    assert split["mesh"] == "dp_shard_cp 2 x tp 2"
    assert split["sharding"] == "Shard(0), Replicate and Shard(0), Shard(1) and StridedShard(0), Shard(0)"
    hybrid = {"wrapper": "FullyShardedDataParallel", "sharding": "_HYBRID_SHARD_ZERO2"}
    assert Trainer(fsdp="hybrid_shard_zero2", fsdp_version=1).expected(case) == hybrid


@pytest.mark.launch
def test_its_own_checkpointing_accumulation_and_log(tmp_path: Path) -> None:
    case = SMALL.replace(
        framework=Trainer(fsdp="full_shard auto_wrap", fsdp_version=1),
        precision="bf16-mixed",
        activation_checkpointing="every-2",
        gradient_accumulation=2,
    )
    run = measured(case, tmp_path)
    settings = observed(run).settings
    assert settings["recomputing_blocks"] == "2 of 4"
    assert settings["compute_dtype"] == "bfloat16"
    assert settings["forced"].endswith("without sync_module_states, which broadcasts from a GPU")
    assert len(run.loss) == len(run.step_s) == 12
    assert run.figures.own_tokens_per_s is not None
    assert 0 < run.figures.own_tokens_per_s < 12 * 2 * 2 * 2 * 32 / min(run.step_s), (
        "it counts all of `train`"
    )
