"""Configurations of torchtitan's registry at full size, and small versions that run on any machine.

The small versions use the registry's debug models.
"""

import pytest

from perfsuite import Case, Model, Topology, TorchTitan


def registered(module, config, *overrides, **fields):
    """Return a case for a configuration. The fields must have the same values as the configuration."""
    framework = TorchTitan(module=module, config=config, overrides=overrides)
    return Case(
        model=Model.named(config.split("_")[0]), framework=framework, precision="bf16-mixed", **fields
    )


def at_full_size(module, config, nodes, *overrides, **fields):
    topology = Topology(nodes=nodes, processes_per_node=8)
    usual = {"activation_checkpointing": "full", "topology": topology, "hardware": "h100", "timeout_s": 3600}
    return registered(module, config, *overrides, **{**usual, **fields})


DEEPSEEK = ("--compile.no-enable", "activation-checkpoint:full")
OWN = "bench_cases.torchtitan_configs"
FULL_SIZE = [
    at_full_size("deepseek_v3", "deepseek_v3_16b", 8, *DEEPSEEK, sequence_length=4096, micro_batch=4),
    at_full_size(
        "deepseek_v3",
        "deepseek_v3_671b",
        64,
        "--parallelism.expert_parallel_degree=64",
        *DEEPSEEK,
        sequence_length=4096,
        micro_batch=4,
    ),
    at_full_size(
        "deepseek_v3",
        "deepseek_v3_671b",
        128,
        "--parallelism.expert_parallel_degree=64",
        *DEEPSEEK,
        sequence_length=4096,
        micro_batch=4,
    ),
    at_full_size(OWN, "moonlight_16b_a3b_adamw", 8, sequence_length=4096, micro_batch=4),
    at_full_size(
        "gpt_oss",
        "gpt_oss_120b",
        8,
        "--parallelism.expert_parallel_degree=8",
        sequence_length=8192,
        micro_batch=1,
    ),
    at_full_size(OWN, "qwen3_235b_a22b", 32, sequence_length=4096, micro_batch=2),
    at_full_size(OWN, "llama3_405b_bf16", 64, sequence_length=8192, micro_batch=2),
    at_full_size(
        OWN,
        "llama3_405b_bf16",
        64,
        "--parallelism.pipeline_parallel_degree=8",
        "--parallelism.pipeline_parallel_schedule=1F1B",
        "--training.local_batch_size=8",
        sequence_length=8192,
        micro_batch=8,
    ),
    at_full_size(
        OWN,
        "llama3_8b_float8",
        1,
        sequence_length=8192,
        micro_batch=1,
        activation_checkpointing="selective-op",
        max_warmup_steps=40,
        steps=80,
    ),
]

SMALL = ("--training.seq_len=64", "--training.local_batch_size=2", "--training.steps=25")
# Without forced balance, every commit that changes a rounding would make the router distribute the tokens
# differently over the ranks.
EXPERTS = ("--parallelism.expert_parallel_degree=2", "--debug.moe_force_load_balance")


def twin(module, config, *overrides, recomputed="selective-op", steps=20):
    return registered(
        module,
        config,
        *SMALL,
        *overrides,
        sequence_length=64,
        micro_batch=2,
        activation_checkpointing=recomputed,
        topology=Topology(processes_per_node=2),
        hardware="cpu",
        max_warmup_steps=5,
        steps=steps,
        timeout_s=900,
    )


TWINS = [
    twin("llama3", "llama3_debugmodel"),
    twin("llama3", "llama3_debugmodel", "--parallelism.pipeline_parallel_degree=2"),
    twin(OWN, "llama3_debugmodel_float8_emulated"),
    twin(OWN, "moonlight_debugmodel", *EXPERTS, recomputed="full"),
    twin("deepseek_v3", "deepseek_v3_debugmodel", *EXPERTS),
    twin("qwen3", "qwen3_moe_debug", *EXPERTS, steps=10),  # 316 million parameters
    twin("gpt_oss", "gpt_oss_debugmodel", *EXPERTS, recomputed="none"),
]


@pytest.mark.parametrize("case", FULL_SIZE + TWINS)
def test_torchtitan_registry(bench, case):
    bench(case)
