"""What options for efficient training cost and save on one node: memory and tokens/s, one option at a time.

After M. Xia and A. Wettig, "Distributed Training with Model Parallel" (2023): gradient checkpointing "slows
down by 20 %"; mixed precision, flash attention, LoRA and QLoRA save memory; weights, gradients and Adam need
2 N + 2 N + 12 N bytes (`perfsuite/memory_rule.py`). No figures for the others are published there.

    perfsuite report --comparison efficient-finetuning
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
)
LARGE = SMALL.replace(model="llama-3.1-8b", framework=FSDP2(), micro_batch=1)
# Quantised weights are packed in the dtype of the others, which a wrapper that shards must not cast.
QLORA = LARGE.replace(precision="bf16", **ADAPTERS, quantization="4bit")

CASES = [
    # Fits on one GPU: each option against the first.
    SMALL,
    SMALL.replace(activation_checkpointing="full"),
    SMALL.replace(activation_checkpointing="selective-op"),
    SMALL.replace(precision="fp32"),
    SMALL.replace(precision="bf16"),
    SMALL.replace(attention="eager"),
    SMALL.replace(attention="flash_attention_2"),
    SMALL.replace(**ADAPTERS),
    SMALL.replace(**ADAPTERS, quantization="8bit"),
    SMALL.replace(**ADAPTERS, quantization="4bit"),
    # Must be sharded to be trained in full.
    LARGE,
    LARGE.replace(activation_checkpointing="full"),
    LARGE.replace(attention="flash_attention_2"),
    LARGE.replace(framework=BY_TRAINER),
    LARGE.replace(framework=BY_TRAINER, activation_checkpointing="full"),
    LARGE.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    LARGE.replace(framework=FSDP(sharding_strategy="FULL_SHARD"), activation_checkpointing="full"),
    LARGE.replace(**ADAPTERS),
    LARGE.replace(framework=FSDP(sharding_strategy="FULL_SHARD"), **ADAPTERS),
    LARGE.replace(precision="bf16", **ADAPTERS),
    QLORA,
    QLORA.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    # Whole on one GPU where it is quantised.
    QLORA.replace(framework=DDP(), precision="bf16-mixed"),
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


@pytest.mark.parametrize("case", [*CASES, *TWINS])
def test_option(bench, case):
    bench(case)
