"""Memory and tokens/s with options for efficient training on one node, one option at a time.

The cases follow M. Xia and A. Wettig, "Distributed Training with Model Parallel" (2023): gradient
checkpointing "slows down by 20%"; mixed precision, flash attention, LoRA and QLoRA save memory; weights,
gradients and Adam need 2 N + 2 N + 12 N bytes (`tests/bench_cases/test_published.py`). The authors publish no
numbers for other options.

    python -m bench_cases.published efficient-finetuning

The clocks and the temperature of a GPU need several seconds to settle. So on an H100, each case warms up for
about 10 s and is measured for at least 20 s. The numbers of steps were chosen for this, using step times
estimated from the case's FLOPs. Cases that fit on one H200 are also measured there.
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
    max_warmup_steps=100,  # 0.1 s each
    steps=200,
)
LARGE = SMALL.replace(
    model="llama-3.1-8b",
    framework=FSDP2(),
    micro_batch=1,
    max_warmup_steps=40,  # 0.3 s each
    steps=80,
)
# With frozen weights, a step takes a third less time.
SMALL_LORA = {**ADAPTERS, "max_warmup_steps": 150, "steps": 300}
LARGE_LORA = {**ADAPTERS, "max_warmup_steps": 60, "steps": 120}
FP32 = {"precision": "fp32", "max_warmup_steps": 20, "steps": 50}  # 0.7 s each; 2.5 s on an A100
# Quantised weights are stored packed, in the dtype of the other weights. A sharding wrapper must not cast
# these packed weights, so the sharded cases use bf16 instead of bf16-mixed.
QLORA = LARGE.replace(precision="bf16", **LARGE_LORA, quantization="4bit")

CASES = [
    # This model fits on one GPU. Each option is compared with the first case.
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
    # This model must be sharded if all of its weights are trained.
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
    # With quantised weights, this model fits on one GPU.
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
    # If everything is in 16 bits, training takes 8 bytes per parameter, 64 GB in total. bf16-mixed would take
    # 16 bytes per parameter and leave no room for activations.
    LARGE_ON_ONE_H200.replace(activation_checkpointing="full"),
    LARGE_ON_ONE_H200.replace(**SMALL_LORA),
    LARGE_ON_ONE_H200.replace(framework=DDP(), **LARGE_LORA, quantization="4bit"),
]

# The same code paths with a tiny model, on any machine.
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
