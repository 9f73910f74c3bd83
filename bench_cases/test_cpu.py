"""Tiny models over gloo on two processes: every strategy, on any machine."""

import pytest

from perfsuite import DDP, FSDP, FSDP2, Case, Topology, TorchTitan

LLAMA = Case(
    model="llama-tiny",
    framework=DDP(),
    sequence_length=64,
    micro_batch=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    timeout_s=300,
)

CASES = [
    LLAMA,
    LLAMA.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    LLAMA.replace(framework=FSDP(sharding_strategy="SHARD_GRAD_OP")),
    LLAMA.replace(framework=FSDP2()),
    LLAMA.replace(framework=TorchTitan()),
]


@pytest.mark.parametrize("case", CASES)
def test_llama(bench, case):
    bench(case)
