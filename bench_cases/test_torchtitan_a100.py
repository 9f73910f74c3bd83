"""torchtitan's Llama 2 and 3 on 64 A100s, trained with torchtitan itself and with perfsuite's FSDP2.

The published numbers are in published.json: `python -m bench_cases.published torchtitan-llama`.
"""

import pytest

from perfsuite import FSDP2, Case, Topology, TorchTitan

LLAMA_3_8B = Case(
    model="llama-3-8b",
    framework=TorchTitan(),
    sequence_length=8192,
    micro_batch=1,
    precision="bf16-mixed",
    activation_checkpointing="every-2",
    topology=Topology(nodes=8, processes_per_node=8),
    hardware="a100-80gb",
    learning_rate=3e-4,
)
# At the published tokens/s, a step takes 12 to 25 s.
SIZE_70B = {"learning_rate": 1e-4, "max_warmup_steps": 5, "steps": 20, "timeout_s": 3600}
LLAMA_2_13B = LLAMA_3_8B.replace(model="llama-2-13b", sequence_length=4096, micro_batch=2)

PUBLISHED = [
    LLAMA_3_8B,
    LLAMA_3_8B.replace(activation_checkpointing="selective-op"),
    LLAMA_3_8B.replace(model="llama-3-70b", activation_checkpointing="full", **SIZE_70B),
    LLAMA_2_13B.replace(activation_checkpointing="none"),
    LLAMA_2_13B,
    LLAMA_2_13B.replace(activation_checkpointing="selective-op"),
    LLAMA_2_13B.replace(
        model="llama-2-70b", micro_batch=1, activation_checkpointing="selective-op", **SIZE_70B
    ),
    LLAMA_2_13B.replace(model="llama-2-70b", activation_checkpointing="full", **SIZE_70B),
]
OURS = [case.replace(framework=FSDP2()) for case in PUBLISHED]

# FSDP with tensor parallelism (2-D) has the same global batch as FSDP alone (1-D): 8 data-parallel ranks with
# 8 sequences each, instead of 64 ranks with one sequence each. torchtitan's 2-D cases use one micro-batch
# that is 8 times as large. perfsuite's FSDP2 gathers the logits of a whole micro-batch on each rank. A
# micro-batch 8 times as large would need 8 times the memory for these logits. The 2-D cases of FSDP2
# therefore keep the micro-batch of the 1-D case and accumulate 8 micro-batches.
TWO_D = [
    how
    for case in (PUBLISHED[1], PUBLISHED[2])
    for how in (
        case.replace(framework=TorchTitan(tensor_parallel=8), micro_batch=8 * case.micro_batch),
        case.replace(framework=FSDP2(tensor_parallel=8), gradient_accumulation=8),
    )
]

# The same code paths with a tiny model, on any machine.
TWIN = Case(
    model="llama-tiny",
    framework=TorchTitan(),
    sequence_length=64,
    micro_batch=2,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    max_warmup_steps=5,
    steps=20,
    timeout_s=300,
)
MODES = ("none", "every-2", "selective-op", "full")
TWINS = [
    *(TWIN.replace(activation_checkpointing=mode) for mode in MODES),
    TWIN.replace(framework=TorchTitan(tensor_parallel=2), micro_batch=4, activation_checkpointing="full"),
    *(TWIN.replace(framework=FSDP2(), activation_checkpointing=mode) for mode in MODES),
    TWIN.replace(framework=FSDP2(tensor_parallel=2), micro_batch=4, activation_checkpointing="full"),
]
TWO_NODES = [
    TWIN.replace(activation_checkpointing="full", topology=Topology(nodes=2, processes_per_node=1)),
    TWIN.replace(
        framework=FSDP2(tensor_parallel=2),
        micro_batch=4,
        activation_checkpointing="full",
        topology=Topology(nodes=2, processes_per_node=2),
    ),
]


@pytest.mark.parametrize("case", PUBLISHED + OURS + TWO_D + TWINS + TWO_NODES)
def test_torchtitan_a100(bench, case):
    bench(case)
