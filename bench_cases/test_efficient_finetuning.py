"""What options for efficient training cost and save on one node: memory and tokens/s, one option at a time.

After M. Xia and A. Wettig, "Distributed Training with Model Parallel" (2023): gradient checkpointing "slows
down by 20%"; mixed precision, flash attention, LoRA and QLoRA save memory; weights, gradients and Adam need
2 N + 2 N + 12 N bytes (`tests/bench_cases/test_published.py`). No figures for the others are published there.

    python -m bench_cases.published efficient-finetuning

Clocks and temperature of a GPU settle in seconds: on an H100 each case warms up for some 10 s and is measured
for 20 s or more, by the step times that its FLOPs let expect. What fits on one H200 is measured there, too.
"""

import pytest

from perfsuite import DDP, FSDP, FSDP2, Case, LoRA, Topology, Trainer

BY_TRAINER = Trainer(fsdp="full_shard auto_wrap")
ADAPTERS = {"lora": LoRA(rank=16, alpha=32), "learning_rate": 1e-3}

SMALL = Case(
    model="llama-3.2-1b",
    framework=DDP(),
    sequence_length=2048,
    micro_batch=2,
    precision="bf16-mixed",
    topology=Topology(processes_per_node=8),
    hardware=("a100-80gb", "h100"),
    learning_rate=3e-4,
    max_warmup_steps=100,  # of 0.1 s
    steps=200,
)
LARGE = SMALL.replace(
    model="llama-3.1-8b",
    framework=FSDP2(),
    micro_batch=1,
    max_warmup_steps=40,  # of 0.3 s
    steps=80,
)
# With the weights frozen a step is a third shorter.
SMALL_LORA = {**ADAPTERS, "max_warmup_steps": 150, "steps": 300}
LARGE_LORA = {**ADAPTERS, "max_warmup_steps": 60, "steps": 120}
FP32 = {"precision": "fp32", "max_warmup_steps": 20, "steps": 50}  # of 0.7 s, 2.5 s on an A100
# Quantised weights are packed in the dtype of the others, which a wrapper that shards must not cast.
QLORA = LARGE.replace(precision="bf16", **LARGE_LORA, quantization="4bit")

CASES = [
    # Fits on one GPU: each option against the first.
    SMALL,
    SMALL.replace(activation_checkpointing="full"),
    SMALL.replace(activation_checkpointing="selective-op"),
    SMALL.replace(**FP32),
    SMALL.replace(precision="bf16"),
    SMALL.replace(attention="eager"),
    SMALL.replace(attention="flash_attention_2"),
    SMALL.replace(**SMALL_LORA),
    SMALL.replace(**SMALL_LORA, quantization="8bit"),
    SMALL.replace(**SMALL_LORA, quantization="4bit"),
    # Must be sharded to be trained in full.
    LARGE,
    LARGE.replace(activation_checkpointing="full"),
    LARGE.replace(attention="flash_attention_2"),
    LARGE.replace(framework=BY_TRAINER),
    LARGE.replace(framework=BY_TRAINER, activation_checkpointing="full"),
    LARGE.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    LARGE.replace(framework=FSDP(sharding_strategy="FULL_SHARD"), activation_checkpointing="full"),
    LARGE.replace(**LARGE_LORA),
    LARGE.replace(framework=FSDP(sharding_strategy="FULL_SHARD"), **LARGE_LORA),
    LARGE.replace(precision="bf16", **LARGE_LORA),
    QLORA,
    QLORA.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    # Whole on one GPU where it is quantised.
    QLORA.replace(framework=DDP(), precision="bf16-mixed"),
]

ONE_H200 = SMALL.replace(topology=Topology(processes_per_node=1), hardware="h200")
LARGE_ON_ONE_H200 = LARGE.replace(topology=Topology(processes_per_node=1), hardware="h200", precision="bf16")
ON_ONE_H200 = [
    ONE_H200,
    ONE_H200.replace(compile=True),
    ONE_H200.replace(activation_checkpointing="full"),
    ONE_H200.replace(activation_checkpointing="selective-op"),
    ONE_H200.replace(**FP32),
    ONE_H200.replace(precision="bf16"),
    ONE_H200.replace(attention="eager"),
    ONE_H200.replace(**SMALL_LORA),
    ONE_H200.replace(**SMALL_LORA, quantization="8bit"),
    ONE_H200.replace(**SMALL_LORA, quantization="4bit"),
    # All in 16 bits: 8 bytes a parameter, 64 GB. The 16 of bf16-mixed would leave no room for activations.
    LARGE_ON_ONE_H200.replace(activation_checkpointing="full"),
    LARGE_ON_ONE_H200.replace(**SMALL_LORA),
    LARGE_ON_ONE_H200.replace(framework=DDP(), **LARGE_LORA, quantization="4bit"),
]

# The same code paths on any machine.
TWIN = Case(
    model="llama-tiny",
    framework=DDP(),
    sequence_length=128,
    micro_batch=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    max_warmup_steps=5,
    steps=20,
    timeout_s=300,
)
TWINS = [
    TWIN,
    TWIN.replace(activation_checkpointing="full"),
    TWIN.replace(precision="bf16-mixed"),
    TWIN.replace(**ADAPTERS),
    TWIN.replace(attention="eager"),
    TWIN.replace(framework=BY_TRAINER, activation_checkpointing="full"),
    TWIN.replace(activation_checkpointing="selective-op"),
    TWIN.replace(framework=FSDP2(), precision="bf16-mixed"),
    TWIN.replace(framework=FSDP2(), activation_checkpointing="full"),
    TWIN.replace(framework=FSDP2(), **ADAPTERS),
    TWIN.replace(framework=BY_TRAINER),
]


@pytest.mark.parametrize("case", [*CASES, *ON_ONE_H200, *TWINS])
def test_option(bench, case):
    bench(case)
