from typing import Any

import pytest
import torch
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy

from perfsuite import FSDP, Topology
from tests.fake_group import fake_group
from tests.frameworks.common.test_model import TINY

TWO = Topology(processes_per_node=2)
FULL = TINY.replace(framework=FSDP(sharding_strategy="FULL_SHARD"), topology=TWO)


def units(framework: FSDP, **changes: Any) -> list[FullyShardedDataParallel]:
    """Return the modules that FSDP wraps on the first of two ranks: the model and its four blocks."""
    case = FULL.replace(framework=framework, **changes)
    with fake_group(0, 2) as ranks:
        workload = framework.build(case, ranks, None)  # type: ignore[arg-type]
        assert workload.data_parallel == 2
        return [module for module in workload.model.modules() if isinstance(module, FullyShardedDataParallel)]


@pytest.mark.parametrize(
    ("strategy", "options", "prefetch"),
    [
        ("FULL_SHARD", {}, BackwardPrefetch.BACKWARD_PRE),
        ("SHARD_GRAD_OP", {"backward_prefetch": "none"}, None),
        ("SHARD_GRAD_OP", {"backward_prefetch": "BACKWARD_POST"}, BackwardPrefetch.BACKWARD_POST),
        ("NO_SHARD", {}, BackwardPrefetch.BACKWARD_PRE),
    ],
)
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
def test_options_reach_every_unit(strategy: Any, options: dict[str, Any], prefetch: Any) -> None:
    framework = FSDP(sharding_strategy=strategy, **options)
    wrapped = units(framework)
    assert len(wrapped) == 5
    assert {unit.sharding_strategy for unit in wrapped} == {ShardingStrategy[strategy]}
    assert {unit.backward_prefetch for unit in wrapped} == {prefetch}
    assert framework.expected(FULL)["sharding"] == strategy


@pytest.mark.parametrize(("precision", "compute"), [("fp32", None), ("bf16-mixed", torch.bfloat16)])
def test_mixed_precision_reduces_in_fp32(precision: str, compute: Any) -> None:
    wrapped = units(FSDP(sharding_strategy="FULL_SHARD"), precision=precision)
    policies = [unit.mixed_precision for unit in wrapped]
    assert {(policy.param_dtype, policy.reduce_dtype) for policy in policies} == {
        (compute, None if compute is None else torch.float32)
    }
