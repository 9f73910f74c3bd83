"""Lightning Fabric: what it refuses, what its strategies are given, that it trains as plain torch does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from perfsuite import DDP, Case, Lightning, Topology
from perfsuite.case.case import Precision
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError
from perfsuite.frameworks.common.model import blocks, build_model
from perfsuite.frameworks.lightning import FABRIC_PRECISION
from tests.fake_group import fake_group
from tests.frameworks.test_base import SMALL, measured, observed
from tests.samples import make_gpu_machine, make_machine

CPU, GPUS = make_machine(), make_gpu_machine("Tesla V100-SXM2-16GB", count=4)
BY_DDP, BY_FSDP, BY_FSDP2 = Lightning(strategy="ddp"), Lightning(strategy="fsdp"), Lightning(strategy="fsdp2")
HYBRID = BY_FSDP.replace(sharding_strategy="HYBRID_SHARD")
FSDP_CASE = SMALL.replace(framework=BY_FSDP, hardware="v100")
FP16 = {"precision": "fp16-mixed"}
ALONE = Topology(processes_per_node=1)
RECOMPUTED = {"activation_checkpointing": "selective-op"}


@pytest.mark.parametrize(
    ("framework", "machine", "changes", "reason"),
    [
        (BY_DDP, CPU, {}, None),
        (BY_DDP, GPUS, FP16, None),
        (BY_FSDP2, CPU, {"precision": "bf16-mixed", **RECOMPUTED}, None),
        (BY_FSDP.replace(cpu_offload=True, backward_prefetch="none"), GPUS, {}, None),
        (BY_FSDP, GPUS, {**FP16, "activation_checkpointing": "every-2"}, None),
        (HYBRID, GPUS, {"topology": Topology(nodes=2, processes_per_node=4)}, None),
        (BY_FSDP, CPU, {}, "Fabric's FSDPStrategy runs on GPUs only"),
        (BY_FSDP, GPUS, RECOMPUTED, "recomputes whole blocks: no checkpointing 'selective-op'"),
        (BY_FSDP, GPUS, {"topology": ALONE}, "FULL_SHARD needs at least 2 processes"),
        (HYBRID, GPUS, {}, "needs at least 2 groups of at least 2 processes"),
        (
            BY_DDP.replace(sharding_strategy="SHARD_GRAD_OP"),
            GPUS,
            {},
            "shard_grad_op: for strategy 'fsdp' only, not for 'ddp'",
        ),
        (
            BY_FSDP2.replace(cpu_offload=True, backward_prefetch="BACKWARD_POST"),
            GPUS,
            {},
            "backward_post, cpu_offload: for strategy 'fsdp' only, not for 'fsdp2'",
        ),
        (BY_FSDP2, GPUS, FP16, "ModelParallelStrategy has no fp16-mixed"),
        (BY_DDP, CPU, FP16, "turns fp16-mixed into bf16-mixed on a CPU"),
    ],
)
def test_what_fabric_refuses_or_would_change(
    framework: Lightning, machine: Machine, changes: dict[str, Any], reason: str | None
) -> None:
    case = SMALL.model_copy(update={"framework": framework, **changes})
    said = framework.unsupported(case, machine)
    assert said is None if reason is None else reason in str(said)


def test_every_precision_has_its_name_in_fabric() -> None:
    assert set(get_args(Precision)) <= set(FABRIC_PRECISION)


@pytest.mark.parametrize("options", [{}, {"strategy": "deepspeed"}, {"strategy": "ddp", "precision": 16}])
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(CaseError, match=r"Options of lightning: strategy, sharding_strategy"):
        SMALL.replace(framework={"name": "lightning", **options})


def test_what_must_be_observed() -> None:
    sharded = {"wrapper": "FullyShardedDataParallel", "sharding": "SHARD_GRAD_OP"}
    assert BY_DDP.expected(SMALL) == {"wrapper": "DistributedDataParallel"}
    assert BY_FSDP.replace(sharding_strategy="SHARD_GRAD_OP").expected(SMALL) == sharded
    assert BY_FSDP2.expected(SMALL) == {"wrapper": "FSDPModule", "sharding": "Shard(0)"}


def units(case: Case) -> list[FullyShardedDataParallel]:
    """What `FSDPStrategy` wraps with the arguments of `case` on the first of two ranks: all, and blocks."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    framework = case.framework
    assert isinstance(framework, Lightning)
    model = build_model(case.replace(activation_checkpointing="none"), torch.device("cpu"))
    strategy = framework.strategy_object(case, blocks(model))
    # It hands the index of its GPU to torch, which takes a device as well.
    strategy.parallel_devices = [SimpleNamespace(index=torch.device("cpu"))]
    strategy.cluster_environment = LightningEnvironment()
    with fake_group(0, 2):
        wrapped = strategy.setup_module(model)
        return [module for module in wrapped.modules() if isinstance(module, FullyShardedDataParallel)]


@pytest.mark.parametrize(
    ("mode", "blocks_recomputed"), [("none", ()), ("every-2", (0, 2)), ("full", (0, 1, 2, 3))]
)
def test_fsdp_shards_each_block_and_recomputes_those_asked_for(
    mode: str, blocks_recomputed: tuple[int, ...]
) -> None:
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
    assert len(wrapped) == 5
    for unit in wrapped:
        assert (None if unit.backward_prefetch is None else unit.backward_prefetch.name) == prefetch
        assert unit.sharding_strategy.name == sharding
        assert unit.cpu_offload.offload_params == offload


ACCUMULATED = SMALL.replace(precision="bf16-mixed", gradient_accumulation=2)


@pytest.mark.launch
def test_it_trains_the_same_as_plain_ddp(tmp_path: Path) -> None:
    """Same weights, data and seed. Plain DDP casts by autocast, too; FSDP2 sums in another order."""
    plain = measured(ACCUMULATED.replace(framework=DDP()), tmp_path / "plain")
    ddp = measured(ACCUMULATED.replace(framework=BY_DDP), tmp_path / "ddp")
    fsdp2 = ACCUMULATED.replace(framework=BY_FSDP2, activation_checkpointing="every-2")
    sharded = measured(fsdp2, tmp_path / "fsdp2")
    assert ddp.loss == pytest.approx(plain.loss, rel=1e-4)
    assert sharded.loss == pytest.approx(plain.loss, rel=1e-3)
    assert observed(ddp).settings["fabric_precision"] == "MixedPrecision bf16-mixed"
    assert "lightning" in observed(ddp).environment
    assert float(ddp.figures.peak_memory_bytes or 0) < 1.4 * float(plain.figures.peak_memory_bytes or 0)
    assert observed(sharded).settings["fabric_strategy"] == "ModelParallelStrategy"
