from pathlib import Path

import pytest

from perfsuite import Trainer
from tests.frameworks.test_base import MIXED, measured, observed
from tests.samples import make_case


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        (Trainer(), {"wrapper": "DistributedDataParallel"}),
        (Trainer(fsdp="shard_grad_op"), {"wrapper": "FSDPModule", "sharding": "Shard(0)"}),
        (
            Trainer(fsdp="hybrid_shard_zero2", fsdp_version=1),
            {"wrapper": "FullyShardedDataParallel", "sharding": "_HYBRID_SHARD_ZERO2"},
        ),
    ],
    ids=["ddp", "fsdp2", "fsdp1"],
)
def test_a_case_expects_its_wrapper_and_sharding(framework: Trainer, expected: dict[str, str]) -> None:
    assert framework.expected(make_case()) == expected


def test_tensor_parallel_expects_its_mesh() -> None:
    split = Trainer(fsdp="full_shard", dp_shard_size=2, tp_size=2).expected(make_case())
    assert split["mesh"] == "dp_shard_cp 2 x tp 2"
    assert split["sharding"] == "Shard(0), Replicate and Shard(0), Shard(1) and StridedShard(0), Shard(0)"


@pytest.mark.nightly
def test_uses_its_own_checkpointing_and_log(tmp_path: Path) -> None:
    by_fsdp1 = MIXED.replace(framework=Trainer(fsdp="full_shard auto_wrap", fsdp_version=1))
    case = by_fsdp1.replace(activation_checkpointing="every-2", gradient_accumulation=2)
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
