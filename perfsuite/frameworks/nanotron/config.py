"""nanotron's configuration file, made from a case; and which cases it cannot express."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsuite.case.case import Case
from perfsuite.frameworks.common.llama import USUAL_SHAPE
from perfsuite.results.run_dir import RunDir

VERSION = "0.4"

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Precision of a case -> nanotron's dtype of parameters and of computing."""

PARALLELISM = ("dp", "tp", "pp", "tp_mode", "tp_linear_async_communication", "pp_engine")
SHAPE = (
    *("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"),
)
"""Fields that nanotron's `LlamaConfig` has in common with transformers': same names, same defaults."""
UNREACHED_STEPS = 10**9
"""An interval in steps that no training reaches: nothing is saved or logged. (nanotron still logs step 1.)"""

Config = dict[str, Any]


def from_case(case: Case, options: Mapping[str, Any], *, files: Path, fused_adam: bool) -> Config:
    """Return the configuration of a case with `Nanotron`'s options: the usual AdamW, and nothing is saved.

    `files`: the directory of the launch.
    """
    return {
        "general": {"project": "perfsuite", "run": case.id, "seed": case.seed, "ignore_sanity_checks": True},
        "parallelism": {name: options[name] for name in PARALLELISM},
        "model": {
            "dtype": DTYPES[case.precision],
            "init_method": {"std": 0.02},
            "model_config": {
                "is_llama_config": True,
                "max_position_embeddings": case.sample_length,
                **{name: case.model.config[name] for name in SHAPE if name in case.model.config},
            },
        },
        "tokenizer": {"tokenizer_name_or_path": None},
        "checkpoints": {
            "checkpoints_path": str(RunDir(files).checkpoints),
            "checkpoint_interval": UNREACHED_STEPS,
        },
        "logging": {
            "log_level": "warning",
            "log_level_replica": "warning",
            "iteration_step_info_interval": UNREACHED_STEPS,
        },
        "tokens": {
            "sequence_length": case.sequence_length,
            "train_steps": case.total_steps,
            "micro_batch_size": case.micro_batch,
            "batch_accumulation_per_replica": case.gradient_accumulation,
        },
        "optimizer": {
            "zero_stage": options["zero_stage"],
            "accumulate_grad_in_fp32": options["accumulate_grad_in_fp32"],
            "weight_decay": 0.1,
            "clip_grad": None,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "torch_adam_is_fused": fused_adam,
            "learning_rate_scheduler": {
                "learning_rate": case.learning_rate,
                "min_decay_lr": case.learning_rate,
                "lr_warmup_style": "constant",
            },
        },
        "data": {"dataset": None, "seed": case.seed},
    }


def size_problems(case: Case, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield which of `Nanotron`'s options do not fit the topology or the model of a case."""
    dp, tp, pp = (options[name] for name in ("dp", "tp", "pp"))
    world = case.topology.world_size
    if dp * tp * pp != world:
        yield f"{layout_text(dp, tp, pp)} is {dp * tp * pp}, but the case's topology has {world} processes"
        return
    sizes: dict[str, Any] = {**USUAL_SHAPE, **case.model.config}
    split = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if options["tp_mode"] == "REDUCE_SCATTER":
        split.append("sequence_length")
        sizes["sequence_length"] = case.sequence_length
    elif options["tp_linear_async_communication"]:
        yield f"tp_linear_async_communication needs tp_mode REDUCE_SCATTER, it is {options['tp_mode']}"
    for name in split:
        if (sizes.get(name) or 0) % tp:
            yield f"tp {tp} does not divide {name} {sizes[name]}"
    if sizes["vocab_size"] % tp:
        yield f"vocab_size {sizes['vocab_size']} is no multiple of tp {tp}: nanotron would enlarge it"
    if pp > sizes["num_hidden_layers"]:
        yield f"pp {pp} is more than num_hidden_layers {sizes['num_hidden_layers']}"
    if options["pp_engine"] == "1f1b" and case.gradient_accumulation < pp - 1:
        yield (
            f"pp_engine 1f1b with pp {pp} needs a gradient_accumulation of {pp - 1} or more, "
            f"it is {case.gradient_accumulation}"
        )
    if options["accumulate_grad_in_fp32"] and case.precision == "fp32":
        yield "accumulate_grad_in_fp32 is for precision 'bf16': of 'fp32' nanotron makes no copy"


def layout_text(dp: int, tp: int, pp: int) -> str:
    """Return a layout as it stands in `Observed.settings`."""
    return f"dp {dp} x tp {tp} x pp {pp}"
