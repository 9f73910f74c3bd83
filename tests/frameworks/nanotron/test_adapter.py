from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import Nanotron
from perfsuite.errors import CaseError
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results.run import Run
from tests.frameworks import test_base as base
from tests.frameworks.test_base import measured, observed
from tests.samples import make_case

SMALL = base.SMALL.replace(framework=Nanotron(dp=2), micro_batch=4)
MACHINE = detect_cpu("a test")


@pytest.fixture(scope="module")
def by_options(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(SMALL, tmp_path_factory.mktemp("options"))


@pytest.mark.smoke("nanotron")
def test_data_parallel_by_the_options(by_options: Run) -> None:
    told = {
        "parallelism": "dp 2 x tp 1 x pp 1",
        "wrapper": "DistributedDataParallel",
        "optimizer_parameters": "the model's",
        "recomputing_blocks": "0 of 4",
        "attention": "sdpa",
        "patched": "circular import, torch for flash_attn, cpu and gloo for cuda and nccl",
    }
    assert observed(by_options).settings.items() >= told.items()
    assert observed(by_options).environment["nanotron"] == "0.4"
    assert float(by_options.figures.loss_last or 9) < float(by_options.figures.loss_first or 0) - 1


@pytest.mark.launch
def test_an_optimizer_that_is_sharded_trains_the_same(by_options: Run, tmp_path: Path) -> None:
    sharded = measured(SMALL.replace(framework=Nanotron(dp=2, zero_stage=1)), tmp_path)
    assert observed(sharded).settings["sharding"] == "optimizer (ZeRO 1)"
    assert sharded.loss == pytest.approx(by_options.loss, rel=1e-4)


@pytest.mark.launch
def test_tensor_parallel(tmp_path: Path) -> None:
    options = Nanotron(tp=2, tp_mode="REDUCE_SCATTER", tp_linear_async_communication=True)
    result = measured(SMALL.replace(framework=options), tmp_path)
    told = {"parallelism": "dp 1 x tp 2 x pp 1", "tp_mode": "REDUCE_SCATTER"}
    told["tp_linear_async_communication"] = "True"
    assert observed(result).settings.items() >= told.items()
    assert observed(result).environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert result.figures.tokens_per_s is not None
    assert result.figures.step_s_p50 == pytest.approx(4 * 32 / result.figures.tokens_per_s)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "bf16-mixed"}, "takes precision 'fp32' or 'bf16', and the case asks for 'bf16-mixed'"),
        ({"activation_checkpointing": "full"}, "takes activation_checkpointing 'none', and"),
        (
            {"attention": "eager"},
            "takes attention 'sdpa' or 'flash_attention_2'",
        ),
        ({"compile": True}, "nanotron takes compile False, and"),
        ({"model": "gpt2-tiny"}, "nanotron builds Llama models, gpt2-tiny is a gpt2"),
        ({}, "None"),
    ],
)
def test_what_it_does_not_have_is_said_beforehand(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(unsupported(SMALL.replace(**changes), MACHINE))


def test_a_contradiction_is_an_error_before_anything_is_launched(tmp_path: Path) -> None:
    with pytest.raises(
        CaseError, match="nanotron-dp2-tp2: dp 2 x tp 2 x pp 1 is 4, but the case's topology has 2"
    ):
        launch_once(SMALL.replace(framework=Nanotron(dp=2, tp=2)), MACHINE, tmp_path / "launch")
    assert not (tmp_path / "launch").exists()


def test_ids() -> None:
    assert Nanotron(dp=4, tp=4, tp_mode="REDUCE_SCATTER").slug() == "nanotron-dp4-tp4-reduce_scatter"
    assert Nanotron(pp=2, pp_engine="afab", resume=True).slug() == "nanotron-pp2-afab-resume"


@pytest.mark.parametrize("asked", [True, False])
def test_overlapped_tensor_parallelism_sets_its_environment(asked: bool) -> None:
    plan = Nanotron(tp=2, tp_linear_async_communication=asked).plan(make_case())
    assert plan.environment == ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if asked else {})
    assert plan.process_group == "lazy"


def test_what_must_be_observed() -> None:
    sharded = Nanotron(dp=2, tp=2, zero_stage=1, accumulate_grad_in_fp32=True)
    assert sharded.expected(SMALL.replace(precision="bf16")) == {
        "parallelism": "dp 2 x tp 2 x pp 1",
        "wrapper": "none",
        "sharding": "optimizer (ZeRO 1)",
        "gradient_dtype": "float32",
        "tp_mode": "ALL_REDUCE",
        "pp_engine": "1f1b",
        "optimizer_parameters": None,
    }
    plain = Nanotron(dp=2).expected(SMALL)
    assert (plain["wrapper"], plain["sharding"]) == ("DistributedDataParallel", "none")
    assert "optimizer_parameters" not in plain
