"""Test Lightning Fabric: refused cases, the arguments of its strategies, and that it trains like torch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from perfsuite import DDP, FSDP2, Case, Framework, Lightning
from perfsuite.case.case import Precision
from perfsuite.frameworks.common.model import blocks, build_model
from perfsuite.frameworks.lightning import FABRIC_PRECISION
from perfsuite.results.run import Run
from tests.fake_group import fake_group
from tests.frameworks.learnt import learnt
from tests.frameworks.test_base import SMALL, measured, observed

BY_DDP = Lightning(strategy="ddp")
BY_FSDP = Lightning(strategy="fsdp")
BY_FSDP2 = Lightning(strategy="fsdp2")
FSDP_CASE = SMALL.replace(framework=BY_FSDP, hardware="v100")


def test_every_precision_has_its_name_in_fabric() -> None:
    assert set(get_args(Precision)) <= set(FABRIC_PRECISION)


def test_a_case_expects_its_wrapper_and_sharding() -> None:
    sharded = {"wrapper": "FullyShardedDataParallel", "sharding": "SHARD_GRAD_OP"}
    assert BY_DDP.expected(SMALL) == {"wrapper": "DistributedDataParallel"}
    assert BY_FSDP.replace(sharding_strategy="SHARD_GRAD_OP").expected(SMALL) == sharded
    assert BY_FSDP2.expected(SMALL) == {"wrapper": "FSDPModule", "sharding": "Shard(0)"}


def units(case: Case) -> list[FullyShardedDataParallel]:
    """Return what `FSDPStrategy` wraps for `case` on the first of two ranks: the model and its blocks."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    framework = case.framework
    assert isinstance(framework, Lightning)
    model = build_model(case.replace(activation_checkpointing="none"), torch.device("cpu"))
    strategy = framework.strategy_object(case, blocks(model))
    # The strategy passes the index of its GPU to torch, but torch also accepts a device.
    strategy.parallel_devices = [SimpleNamespace(index=torch.device("cpu"))]
    strategy.cluster_environment = LightningEnvironment()
    with fake_group(0, 2):
        wrapped = strategy.setup_module(model)
        return [module for module in wrapped.modules() if isinstance(module, FullyShardedDataParallel)]


@pytest.mark.parametrize(
    ("mode", "blocks_recomputed"), [("none", ()), ("every-2", (0, 2)), ("full", (0, 1, 2, 3))]
)
def test_fsdp_recomputes_the_requested_blocks(mode: str, blocks_recomputed: tuple[int, ...]) -> None:
    _, *wrapped = units(FSDP_CASE.replace(activation_checkpointing=mode))
    recomputed = [isinstance(next(unit.children()), CheckpointWrapper) for unit in wrapped]
    assert recomputed == [index in blocks_recomputed for index in range(4)]


@pytest.mark.parametrize(
    ("options", "prefetch", "sharding", "offload"),
    [
        ({}, "BACKWARD_PRE", "FULL_SHARD", False),
        ({"backward_prefetch": "none"}, None, "FULL_SHARD", False),
        ({"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True}, "BACKWARD_PRE", "SHARD_GRAD_OP", True),
    ],
)
def test_fsdp_options_reach_every_unit(
    options: dict[str, Any], prefetch: str | None, sharding: str, offload: bool
) -> None:
    wrapped = units(FSDP_CASE.replace(framework=BY_FSDP.replace(**options)))
    prefetches = [unit.backward_prefetch and unit.backward_prefetch.name for unit in wrapped]
    assert prefetches == [prefetch] * 5
    assert [unit.sharding_strategy.name for unit in wrapped] == [sharding] * 5
    assert [unit.cpu_offload.offload_params for unit in wrapped] == [offload] * 5


ACCUMULATED = SMALL.replace(precision="bf16-mixed", gradient_accumulation=2)
# FSDP2 sums in another order.
OTHERWISE = ACCUMULATED.replace(framework=BY_FSDP2, activation_checkpointing="every-2")


def peak(run: Run) -> int:
    """Return the peak memory of the rank that needs less, because a busy machine can add to one rank."""
    return min(memory.peak for memory in run.memory)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("case", "plain", "rel", "strategy"),
    [
        pytest.param(
            ACCUMULATED.replace(framework=BY_DDP), DDP(), 1e-4, "DDPStrategy", marks=pytest.mark.nightly
        ),
        (OTHERWISE, FSDP2(), 1e-3, "ModelParallelStrategy"),
    ],
    ids=["ddp", "fsdp2"],
)
def test_lightning_trains_as_a_plain_loop(
    tmp_path: Path, case: Case, plain: Framework, rel: float, strategy: str
) -> None:
    run = measured(case, tmp_path / "lightning")
    assert run.loss == pytest.approx(learnt(ACCUMULATED).loss, rel=rel)
    settings = observed(run).settings
    assert settings["fabric_precision"].endswith(" bf16-mixed")
    assert settings["fabric_strategy"] == strategy
    assert "lightning" in observed(run).environment
    library = 60 * 2**20  # memory that importing Lightning takes
    without = measured(case.replace(framework=plain), tmp_path / "plain")
    assert peak(run) < peak(without) + library / 2, "the peak excludes the imported library"
