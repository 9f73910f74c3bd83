import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from perfsuite import MODELS, Case, Nanotron, Topology
from perfsuite.errors import CaseError
from perfsuite.frameworks.nanotron.config import SHAPE, TrainingConfig, conflicts, get, size_problems
from tests.samples import make_case

TINY = MODELS["llama-tiny"]
SPLIT = Nanotron(tp=2, tp_mode="REDUCE_SCATTER")
IN_FP32 = Nanotron(dp=2, accumulate_grad_in_fp32=True)
OVERLAPPED = Nanotron(tp=2, tp_linear_async_communication=True)


def nanotron_case(framework: Nanotron, processes: int = 2, **changes: Any) -> Case:
    topology = Topology(processes_per_node=processes)
    return make_case(**{"model": TINY, "framework": framework, "topology": topology, **changes})


def made(framework: Nanotron, processes: int = 2, **changes: Any) -> dict[str, Any]:
    case = nanotron_case(framework, processes, **changes)
    return framework.from_options(case, files=Path("/launch"))


DEGREES = {"dp": 2, "tp": 2, "pp": 2}
MODES = {"tp_mode": "REDUCE_SCATTER", "pp_engine": "afab", "tp_linear_async_communication": True}
PARALLELISM: dict[str, Any] = {**DEGREES, **MODES}
IN_OPTIMIZER: dict[str, Any] = {"zero_stage": 1, "accumulate_grad_in_fp32": True}


@pytest.fixture
def config() -> dict[str, Any]:
    """Return the configuration that is made from a case on eight ranks."""
    options = Nanotron(**PARALLELISM, **IN_OPTIMIZER)
    return made(options, 8, precision="bf16", gradient_accumulation=4, learning_rate=3e-4, seed=7)


def test_a_case_determines_the_parallelism(config: dict[str, Any]) -> None:
    assert config["parallelism"] == PARALLELISM


def test_a_case_determines_the_tokens(config: dict[str, Any]) -> None:
    tokens = {"sequence_length": 64, "train_steps": 25, "micro_batch_size": 2}
    assert config["tokens"] == {**tokens, "batch_accumulation_per_replica": 4}


def test_a_case_determines_the_model(config: dict[str, Any]) -> None:
    shape = {name: value for name, value in TINY.config.items() if name in SHAPE}
    assert len(shape) == 8
    rest = {"is_llama_config": True, "max_position_embeddings": 64}
    assert config["model"]["model_config"] == {**rest, **shape}
    assert config["model"]["dtype"] == "bfloat16"


def test_a_case_determines_the_optimizer(config: dict[str, Any]) -> None:
    adam = {"weight_decay": 0.1, "clip_grad": None, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    rates = {"learning_rate": 3e-4, "min_decay_lr": 3e-4, "lr_warmup_style": "constant"}
    whole = {**IN_OPTIMIZER, **adam, "torch_adam_is_fused": False, "learning_rate_scheduler": rates}
    assert config["optimizer"] == whole


def test_a_case_determines_the_seed(config: dict[str, Any]) -> None:
    assert config["general"]["seed"] == 7


def test_nothing_is_logged_or_saved_in_measured_steps(config: dict[str, Any]) -> None:
    assert config["checkpoints"]["checkpoints_path"] == "/launch/checkpoints"
    assert config["logging"]["iteration_step_info_interval"] > 25
    assert config["checkpoints"]["checkpoint_interval"] > 25


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the configuration of two processes with this value at `path`. KeyError removes the value."""
    config = made(Nanotron(dp=2))
    *sections, name = path.split(".")
    place = functools.reduce(dict.__getitem__, sections, config)
    place[name] = value
    if value is KeyError:
        del place[name]
    return config


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("parallelism.ddp", 2, "nanotron has no such field here; the fields are dp, pp, tp,"),
        ("data_stages", [], "nanotron has no such field here; the fields are general, parallelism,"),
        ("model.model_config.hiden_size", 64, "nanotron has no such field here"),
        ("parallelism.tp", KeyError, "missing, and nanotron has no default for it"),
        ("optimizer", KeyError, "missing, but training needs it"),
        ("tokens.train_steps", "100", "give int, not '100'"),
        ("tokens.train_steps", True, "give int, not True"),
        ("parallelism.dp", None, "give int, not None"),
        ("optimizer.learning_rate_scheduler.learning_rate", "1e-3", "give float, not '1e-3'"),
        ("tokens", 5, "give Optional[TokensArgs], not 5"),
    ],
)
def test_refuses_a_file_that_nanotron_would_refuse(
    tmp_path: Path, path: str, value: Any, problem: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(changed(path, value)))
    with pytest.raises(CaseError) as raised:
        TrainingConfig.read(file)
    assert str(raised.value).startswith(f"{file}: {path}: {problem}")


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("tokens.sequence_length", 128, "128, but the case's sequence_length needs 64"),
        ("tokens.micro_batch_size", 1, "1, but the case's micro_batch needs 2"),
        ("tokens.batch_accumulation_per_replica", 4, "4, but the case's gradient_accumulation needs 1"),
        ("tokens.train_steps", 24, "24, but the case's max_warmup_steps + steps needs 25"),
        ("model.dtype", "bfloat16", "'bfloat16', but the case's precision needs 'float32'"),
        ("model.model_config.num_hidden_layers", KeyError, "32, but the case's model needs 4"),
        ("general.seed", 42, "42, but the case's seed needs 0"),
        ("checkpoints.checkpoint_interval", 25, "25 would save within the 25"),
        ("checkpoints.save_initial_state", True, "True would disturb the"),
        ("profiler", {"profiler_export_path": "x"}, "{'profiler_export_path': 'x'} would disturb"),
    ],
)
def test_names_what_in_a_file_contradicts_the_case(path: str, value: Any, problem: str) -> None:
    (said,) = conflicts(changed(path, value), made(Nanotron(dp=2)), nanotron_case(Nanotron(dp=2)))
    assert said.startswith(f"{path}: {problem}")


def test_file_may_train_longer_on_other_data() -> None:
    config = changed("tokens.train_steps", 100_000)
    config["data"] = {"dataset": {"hf_dataset_or_datasets": "wikitext"}, "seed": 1}
    config["checkpoints"]["checkpoint_interval"] = 1000
    assert [*conflicts(config, made(Nanotron(dp=2)), nanotron_case(Nanotron(dp=2)))] == []


@pytest.mark.parametrize(
    ("options", "processes", "changes", "problem"),
    [
        (Nanotron(dp=2, tp=2), 4, {}, None),
        (Nanotron(tp=2, pp=2, tp_mode="REDUCE_SCATTER"), 4, {"gradient_accumulation": 4}, None),
        (Nanotron(pp=4), 4, {"gradient_accumulation": 3}, None),
        (Nanotron(dp=2, tp=2), 2, {}, "dp 2 x tp 2 x pp 1 is 4, but the case's topology has 2 processes"),
        (Nanotron(tp=4), 4, {}, "tp 4 does not divide num_key_value_heads 2"),
        (Nanotron(tp=3), 3, {}, "tp 3 does not divide num_attention_heads 4"),
        (Nanotron(tp=3), 3, {}, "vocab_size 512 is not a multiple of 3 (tp x make_vocab_size_divisible_by)"),
        (SPLIT, 2, {"sequence_length": 63}, "tp 2 does not divide sequence_length 63"),
        (OVERLAPPED, 2, {}, "tp_linear_async_communication needs tp_mode REDUCE_SCATTER, not ALL_REDUCE"),
        (Nanotron(pp=5, pp_engine="afab"), 5, {}, "pp 5 is greater than num_hidden_layers 4"),
        (Nanotron(pp=4), 4, {"gradient_accumulation": 2}, "gradient_accumulation of 3 or more, not 2"),
        (IN_FP32, 2, {}, "accumulate_grad_in_fp32 needs precision 'bf16'"),
    ],
)
def test_names_sizes_that_do_not_fit(
    options: Nanotron, processes: int, changes: dict[str, Any], problem: str | None
) -> None:
    case = nanotron_case(options, processes, **changes)
    problems = "; ".join(size_problems(options.from_options(case), case))
    assert problems == "" if problem is None else problem in problems


def test_refuses_experts_and_an_uneven_vocabulary() -> None:
    config = changed("parallelism.expert_parallel_size", 2)
    config["model"]["make_vocab_size_divisible_by"] = 100
    problems = "; ".join(size_problems(config, nanotron_case(Nanotron(dp=2))))
    assert "expert_parallel_size 2: give 1, because Llama has no experts" in problems
    assert "vocab_size 512 is not a multiple of 100" in problems


def test_a_default_is_nanotrons_own() -> None:
    assert get({}, "logging.iteration_step_info_interval") == 1
    assert get({}, "model.model_config.rms_norm_eps") == 1e-6
    assert get({"tokens": {"train_steps": 3}}, "tokens.train_steps") == 3
