from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import MODELS, Case, Nanotron, Topology
from perfsuite.frameworks.nanotron.config import SHAPE, from_case, size_problems
from tests.samples import make_case

TINY = MODELS["llama-tiny"]
SPLIT = Nanotron(tp=2, tp_mode="REDUCE_SCATTER")
IN_FP32 = Nanotron(dp=2, accumulate_grad_in_fp32=True)


def nanotron_case(framework: Nanotron, processes: int = 2, **changes: Any) -> Case:
    topology = Topology(processes_per_node=processes)
    return make_case(**{"model": TINY, "framework": framework, "topology": topology, **changes})


def made(framework: Nanotron, processes: int = 2, **changes: Any) -> dict[str, Any]:
    case = nanotron_case(framework, processes, **changes)
    return from_case(case, framework.model_dump(), files=Path("/launch"), fused_adam=False)


def test_the_configuration_of_a_case() -> None:
    parallelism: dict[str, Any] = {
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "tp_mode": "REDUCE_SCATTER",
        "tp_linear_async_communication": True,
        "pp_engine": "afab",
    }
    in_optimizer: dict[str, Any] = {"zero_stage": 1, "accumulate_grad_in_fp32": True}
    options = Nanotron(**parallelism, **in_optimizer)
    config = made(options, 8, precision="bf16", gradient_accumulation=4, learning_rate=3e-4, seed=7)
    assert config["parallelism"] == parallelism
    assert config["tokens"] == {
        "sequence_length": 64,
        "train_steps": 25,
        "micro_batch_size": 2,
        "batch_accumulation_per_replica": 4,
    }
    assert config["model"]["dtype"] == "bfloat16"
    shape = {name: value for name, value in TINY.config.items() if name in SHAPE}
    assert len(shape) == 8
    assert config["model"]["model_config"] == {
        "is_llama_config": True,
        "max_position_embeddings": 64,
        **shape,
    }
    assert config["optimizer"] == {
        **in_optimizer,
        "weight_decay": 0.1,
        "clip_grad": None,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "torch_adam_is_fused": False,
        "learning_rate_scheduler": {
            "learning_rate": 3e-4,
            "min_decay_lr": 3e-4,
            "lr_warmup_style": "constant",
        },
    }
    assert config["general"]["seed"] == 7
    assert config["checkpoints"]["checkpoints_path"] == "/launch/checkpoints"


def test_nothing_is_logged_or_saved_in_the_measured_steps_unless_asked_for() -> None:
    config = made(Nanotron(dp=2))
    assert config["logging"]["iteration_step_info_interval"] > 25
    assert config["checkpoints"]["checkpoint_interval"] > 25


@pytest.mark.parametrize(
    ("options", "processes", "changes", "problem"),
    [
        (Nanotron(dp=2, tp=2), 4, {}, None),
        (Nanotron(tp=2, pp=2, tp_mode="REDUCE_SCATTER"), 4, {"gradient_accumulation": 4}, None),
        (Nanotron(pp=4), 4, {"gradient_accumulation": 3}, None),
        (Nanotron(dp=2, tp=2), 2, {}, "dp 2 x tp 2 x pp 1 is 4, but the case's topology has 2 processes"),
        (Nanotron(tp=4), 4, {}, "tp 4 does not divide num_key_value_heads 2"),
        (Nanotron(tp=3), 3, {}, "tp 3 does not divide num_attention_heads 4"),
        (Nanotron(tp=3), 3, {}, "vocab_size 512 is no multiple of tp 3: nanotron would enlarge it"),
        (SPLIT, 2, {"sequence_length": 63}, "tp 2 does not divide sequence_length 63"),
        (
            Nanotron(tp=2, tp_linear_async_communication=True),
            2,
            {},
            "tp_linear_async_communication needs tp_mode REDUCE_SCATTER, it is ALL_REDUCE",
        ),
        (Nanotron(pp=5, pp_engine="afab"), 5, {}, "pp 5 is more than num_hidden_layers 4"),
        (Nanotron(pp=4), 4, {"gradient_accumulation": 2}, "gradient_accumulation of 3 or more, it is 2"),
        (IN_FP32, 2, {}, "accumulate_grad_in_fp32 is for precision 'bf16'"),
    ],
)
def test_sizes_that_do_not_fit(
    options: Nanotron, processes: int, changes: dict[str, Any], problem: str | None
) -> None:
    case = nanotron_case(options, processes, **changes)
    problems = "; ".join(size_problems(case, options.model_dump()))
    assert problems == "" if problem is None else problem in problems
