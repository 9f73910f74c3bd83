"""Llama on one GPU, on one node of eight GPUs with each strategy and library, and on two and eight nodes.

The clocks and the temperature of a GPU need several seconds to settle, whatever the number of steps. So on an
H100, each case warms up for about 10 s and is measured for at least 20 s. The numbers of steps were chosen
for this, using step times estimated from the case's FLOPs.
"""

import pytest

import perfsuite
from perfsuite import DDP, FSDP, FSDP2, Accelerate, Case, Lightning, Topology

ONE_GPU = Case(
    model="llama-3.2-1b",
    framework=FSDP2(),
    sequence_length=4096,
    micro_batch=2,
    precision="bf16-mixed",
    topology=Topology(processes_per_node=1),
    hardware=("a100-80gb", "h100", "h200"),
    learning_rate=3e-4,
    max_warmup_steps=60,  # 0.2 s each
    steps=120,
)
ONE_NODE = ONE_GPU.replace(
    model="llama-3.1-8b",
    micro_batch=1,
    activation_checkpointing="full",
    topology=Topology(processes_per_node=8),
    max_warmup_steps=20,  # 0.7 s each
    steps=50,
)
# The published number is in published.json: `python -m bench_cases.published accelerate-float8`.
PUBLISHED = ONE_NODE.replace(
    framework=Accelerate(strategy="fsdp2"),
    sequence_length=8192,
    activation_checkpointing="none",
    compile=True,
    hardware="h100",
)
TWO_NODES = ONE_NODE.replace(topology=Topology(nodes=2, processes_per_node=8))
EIGHT_NODES = ONE_NODE.replace(topology=Topology(nodes=8, processes_per_node=8), hardware="h100")

ON_ONE_NODE = [
    ONE_GPU,
    ONE_GPU.replace(framework=DDP()),
    ONE_GPU.replace(compile=True),
    ONE_GPU.replace(activation_checkpointing="full", micro_batch=6, max_warmup_steps=20, steps=50),
    ONE_GPU.replace(activation_checkpointing="selective-op", micro_batch=4, max_warmup_steps=30, steps=60),
    ONE_NODE,
    ONE_NODE.replace(framework=FSDP2(reshard_after_forward=False)),
    ONE_NODE.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    ONE_NODE.replace(framework=FSDP(sharding_strategy="SHARD_GRAD_OP")),
    ONE_NODE.replace(framework=Accelerate(strategy="fsdp2")),
    PUBLISHED,
    ONE_NODE.replace(framework=Lightning(strategy="fsdp2")),
]
if hasattr(perfsuite, "TorchTitan"):  # it is missing if its folder was deleted
    ON_ONE_NODE.append(ONE_NODE.replace(framework=perfsuite.TorchTitan()))
ON_SEVERAL_NODES = [
    TWO_NODES,
    TWO_NODES.replace(framework=FSDP2(shard_group=8)),
    EIGHT_NODES.replace(framework=Accelerate(strategy="fsdp2", dp_shard_size=8, tp_size=8)),
    EIGHT_NODES.replace(framework=Accelerate(strategy="fsdp2", dp_replicate_size=8, dp_shard_size=8)),
]


@pytest.mark.parametrize("case", ON_ONE_NODE + ON_SEVERAL_NODES)
def test_llama(bench, case):
    bench(case)
