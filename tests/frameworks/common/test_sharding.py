from __future__ import annotations

from typing import Any

import pytest

from perfsuite import FSDP, FSDP2, LoRA, Topology
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.common.sharding import hybrid_unsupported
from tests.samples import make_case, make_gpu_machine, make_machine

CPU, GPUS = make_machine(), make_gpu_machine()


@pytest.mark.parametrize(("group", "fits"), [(2, True), (4, True), (8, False), (1, False), (3, False)])
def test_groups_that_shard_are_two_or_more_of_two_or_more(group: int, fits: bool) -> None:
    reason = hybrid_unsupported(group, make_case(topology=Topology(processes_per_node=8)))
    refused = (
        f"hybrid sharding in groups of {group} needs at least 2 groups of at least 2 processes: "
        "8 processes cannot be split so"
    )
    assert reason == (None if fits else refused)


@pytest.mark.parametrize(
    ("strategy", "options", "machine", "ranks", "reason"),
    [
        ("FULL_SHARD", {}, CPU, (1, 2), None),
        ("SHARD_GRAD_OP", {}, CPU, (1, 1), "SHARD_GRAD_OP needs at least 2 processes"),
        ("NO_SHARD", {}, CPU, (1, 1), None),
        ("NO_SHARD", {"shard_group": 2}, CPU, (1, 4), "shard_group=2 is for HYBRID_SHARD, not for NO_SHARD"),
        (
            "NO_SHARD",
            {"cpu_offload": True},
            CPU,
            (1, 1),
            "cpu_offload copies from pinned memory to a GPU, this machine has none",
        ),
        ("HYBRID_SHARD", {"shard_group": 2}, CPU, (1, 4), None),
        ("HYBRID_SHARD", {"cpu_offload": True}, GPUS, (2, 2), None),
        ("HYBRID_SHARD", {}, GPUS, (1, 4), "hybrid sharding in groups of 4 needs"),
    ],
)
def test_what_fsdp1_cannot_shard(
    strategy: Any, options: dict[str, Any], machine: Machine, ranks: tuple[int, int], reason: str | None
) -> None:
    """`ranks`: the nodes, and the processes on each."""
    topology = Topology(nodes=ranks[0], processes_per_node=ranks[1])
    framework = FSDP(sharding_strategy=strategy, **options)
    result = framework.unsupported(make_case(topology=topology), machine)
    assert result is None if reason is None else str(result).startswith(reason)


@pytest.mark.parametrize(
    ("quantization", "precision", "reason"),
    [
        ("none", "bf16-mixed", None),
        ("4bit", "bf16", None),
        ("4bit", "bf16-mixed", "packed 4bit weights cannot be cast, as bf16-mixed does where it shards"),
        ("8bit", "bf16", "8bit weights cannot be sharded"),
    ],
)
def test_quantised_weights_that_cannot_be_sharded(
    quantization: str, precision: str, reason: str | None
) -> None:
    case = make_case(
        quantization=quantization, precision=precision, lora=LoRA(rank=4, alpha=8), hardware="gpu"
    )
    for framework in (FSDP(sharding_strategy="FULL_SHARD"), FSDP2()):
        result = framework.unsupported(case, GPUS)
        assert result is None if reason is None else str(result).startswith(reason)
