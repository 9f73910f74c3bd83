"""Make or check a configuration file of nanotron. Fields are checked against nanotron's source code."""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from perfsuite.case.case import Case
from perfsuite.errors import CaseError
from perfsuite.frameworks.common.config_file import ConfigFile
from perfsuite.results.run_dir import RunDir

VERSION = "0.4"

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # a case's precision -> dtype of parameters and computation

PARALLELISM = ("dp", "tp", "pp", "tp_mode", "tp_linear_async_communication", "pp_engine")
SHAPE = (  # fields with the same name and default in nanotron's and in transformers' `LlamaConfig`
    *("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size"),
)
DECIDED_BY_THE_CASE = {  # path of a field in the file -> the field of the case that determines it
    "general.seed": "seed",
    "model.dtype": "precision",
    "optimizer.learning_rate_scheduler.learning_rate": "learning_rate",
    "tokens.batch_accumulation_per_replica": "gradient_accumulation",
    "tokens.micro_batch_size": "micro_batch",
    "tokens.sequence_length": "sequence_length",
    **{f"model.model_config.{name}": "model" for name in SHAPE},
}
NOT_IN_A_MEASUREMENT = (  # fields that must not be set, because they add work to the measured steps
    *("checkpoints.resume_checkpoint_path", "checkpoints.save_initial_state"),
    *("general.benchmark_csv_path", "profiler"),
)
SECTIONS = ("checkpoints", "general", "logging", "model", "optimizer", "parallelism", "tokens")
"""Sections that training needs. Most of them are optional in nanotron's classes."""

# An interval that is longer than any training, so that nothing is saved and nanotron logs only step 1.
UNREACHED_STEPS = 10**9

Config = dict[str, Any]


def from_case(case: Case, options: Mapping[str, Any], *, files: Path, fused_adam: bool) -> Config:
    """Return the configuration of a case with `Nanotron`'s options.

    With this configuration, nanotron trains with AdamW and saves no checkpoint.
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


class TrainingConfig(ConfigFile):
    """A user's configuration file for nanotron."""

    kind: ClassVar[str] = "a configuration file of nanotron, in YAML"

    name: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file, and check its fields if nanotron is installed. Raises `FileError` or `CaseError`."""
        config = super().read(path)
        fields = config.content
        if not isinstance(fields, dict):
            raise CaseError(f"{path} contains a {type(fields).__name__} instead of sections with fields")
        problems = [f"{name}: missing, but training needs it" for name in SECTIONS if not fields.get(name)]
        if importlib.util.find_spec("nanotron") is not None:
            problems += _unknown(fields, "Config")
        if problems:
            raise CaseError(f"{path}: {'; '.join(problems)}")
        return config


def conflicts(config: Config, expected: Config, case: Case) -> Iterator[str]:
    """Yield a message for each field of the user's file that contradicts the case or disturbs a measurement.

    `expected` is the configuration that perfsuite would create from the case.
    """
    for path, field in DECIDED_BY_THE_CASE.items():
        has = get(config, path)
        needs = get(expected, path)
        if has != needs:
            yield f"{path}: {has!r}, but the case's {field} needs {needs!r}"
    for path in NOT_IN_A_MEASUREMENT:
        value = get(config, path)
        if value:
            yield f"{path}: {value!r} would disturb the measurement: remove it"
    steps = case.total_steps
    trained = get(config, "tokens.train_steps")
    if trained < steps:
        yield f"tokens.train_steps: {trained}, but the case's max_warmup_steps + steps needs {steps}"
    interval = get(config, "checkpoints.checkpoint_interval")
    if interval <= steps:
        yield f"checkpoints.checkpoint_interval: {interval} would save within the {steps} steps: increase it"


def size_problems(config: Config, case: Case) -> Iterator[str]:
    """Yield a message for each size in a configuration that does not fit the topology or the model."""
    parallelism = {name: get(config, f"parallelism.{name}") for name in _schema()["ParallelismArgs"]}
    sizes = {name: get(config, f"model.model_config.{name}") for name in SHAPE}
    dp, tp, pp = (parallelism[name] for name in ("dp", "tp", "pp"))
    world = case.topology.world_size
    if dp * tp * pp != world or min(dp, tp, pp) < 1:
        yield f"{layout_text(dp, tp, pp)} is {dp * tp * pp}, but the case's topology has {world} processes"
        return
    experts = parallelism["expert_parallel_size"]
    if experts != 1:
        yield f"expert_parallel_size {experts}: give 1, because Llama has no experts"
    split = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    mode = parallelism["tp_mode"]
    if str(mode).upper() == "REDUCE_SCATTER":
        split.append("sequence_length")
        sizes["sequence_length"] = case.sequence_length
    elif parallelism["tp_linear_async_communication"]:
        yield f"tp_linear_async_communication needs tp_mode REDUCE_SCATTER, not {mode}"
    for name in split:
        if (sizes[name] or 0) % tp:
            yield f"tp {tp} does not divide {name} {sizes[name]}"
    unit = tp * get(config, "model.make_vocab_size_divisible_by")
    if sizes["vocab_size"] % unit:
        yield (
            f"vocab_size {sizes['vocab_size']} is not a multiple of {unit} (tp x "
            "make_vocab_size_divisible_by): nanotron would enlarge it"
        )
    if pp > sizes["num_hidden_layers"]:
        yield f"pp {pp} is greater than num_hidden_layers {sizes['num_hidden_layers']}"
    if parallelism["pp_engine"] == "1f1b" and case.gradient_accumulation < pp - 1:
        yield (
            f"pp_engine 1f1b with pp {pp} needs a gradient_accumulation of {pp - 1} or more, "
            f"not {case.gradient_accumulation}"
        )
    if get(config, "optimizer.accumulate_grad_in_fp32") and case.precision == "fp32":
        yield (
            "accumulate_grad_in_fp32 needs precision 'bf16': nanotron keeps no fp32 copy of parameters that "
            "are already in fp32"
        )


def layout_text(dp: int, tp: int, pp: int) -> str:
    """Return the degrees of parallelism as they appear in `Observed.settings`."""
    return f"dp {dp} x tp {tp} x pp {pp}"


def get(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path such as `tokens.train_steps`, or nanotron's default."""
    kind = "Config"
    values = config
    *sections, name = path.split(".")
    for section in sections:
        kind = _kind_of(_schema()[kind][section][0])
        values = values.get(section) or {}
    return values[name] if name in values else _schema()[kind][name][1]


def _unknown(section: Config, kind: str, path: str = "") -> Iterator[str]:
    """Yield a message for each unknown, wrong or missing field of a section.

    `kind` is the name of nanotron's dataclass for the section. `path` is the prefix of field names.
    """
    fields = _schema()[kind]
    for name, value in section.items():
        annotation = fields[name][0] if name in fields else ""
        inner = _kind_of(annotation)
        if not annotation:
            yield f"{path}{name}: nanotron has no such field here; the fields are {', '.join(fields)}"
        elif inner and isinstance(value, dict):
            yield from _unknown(value, inner, f"{path}{name}.")
        elif (inner and value is not None) or not _fits(value, annotation):
            yield f"{path}{name}: give {annotation}, not {value!r}"
    for name, (_, default) in fields.items():
        if default is REQUIRED and name not in section:
            yield f"{path}{name}: missing, and nanotron has no default for it"


REQUIRED = object()  # in `_schema`, the "default" of a field for which nanotron has no default
PLAIN = {"bool": (bool,), "float": (int, float), "int": (int,), "str": (str,)}
"""Annotation -> types of valid values. nanotron itself checks fields with other annotations."""


@functools.cache
def _schema() -> Mapping[str, Mapping[str, tuple[str, Any]]]:
    """Return class -> field -> (annotation, default) for the dataclasses in nanotron's `config` directory."""
    nanotron: Any = importlib.util.find_spec("nanotron")
    folder = Path(nanotron.origin).parent / "config"
    return {
        node.name: {
            ast.unparse(item.target): (ast.unparse(item.annotation), _default(item.value))
            for item in node.body
            if isinstance(item, ast.AnnAssign)
        }
        for name in ("config", "models_config", "parallelism_config")
        for node in ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return REQUIRED
    return value.value if isinstance(value, ast.Constant) else ast.unparse(value)


def _fits(value: object, annotation: str) -> bool:
    name = annotation.removeprefix("Optional[").removesuffix("]")
    return type(value) in PLAIN.get(name, (type(value),)) or (value is None and name != annotation)


def _kind_of(annotation: str) -> str:
    """Return the name of the dataclass in an annotation, or "".

    If the annotation is the union of all model configurations, return the name of Llama's dataclass.
    """
    if annotation == "NanotronConfigs":
        return "LlamaConfig"
    name = annotation.removeprefix("Optional[").removesuffix("]")
    return name if name in _schema() else ""
