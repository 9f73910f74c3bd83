"""Configurations of torchtitan's own registry: what is said of them, refused in them, and what runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from perfsuite import Case, Model, Topology, TorchTitan
from perfsuite.errors import MismatchError
from perfsuite.launch.requirements import unsupported
from tests.frameworks.test_base import measured, observed
from tests.frameworks.torchtitan.samples import MARKS
from tests.samples import make_machine
from tests.test_published import CASES

pytestmark = MARKS

SHAPE = ("--training.seq_len=64", "--training.local_batch_size=2", "--training.steps=100")


def registered(module: str, config: str, *overrides: str, ranks: int = 2, **changes: Any) -> Case:
    """A small case of a registered configuration."""
    case = Case(
        model=Model.named(config),
        framework=TorchTitan(module=module, config=config, overrides=(*SHAPE, *overrides)),
        sequence_length=64,
        micro_batch=2,
        precision="bf16-mixed",
        activation_checkpointing="selective-op",
        topology=Topology(processes_per_node=ranks),
        hardware="cpu",
        max_warmup_steps=4,
        steps=10,
        timeout_s=240,
    )
    return case.replace(**changes)


def degree(name: str, ranks: int) -> str:
    return f"--parallelism.{name}_parallel_degree={ranks}"


LLAMA = registered("llama3", "llama3_debugmodel")
DEEPSEEK = registered("deepseek_v3", "deepseek_v3_debugmodel", degree("expert", 2))
QWEN = registered("tests.theory_configs", "qwen3_moe_debug", degree("expert", 2), timeout_s=600)
GPT_OSS = registered(
    "gpt_oss", "gpt_oss_debugmodel", degree("expert", 2), activation_checkpointing="none", timeout_s=600
)
OWN = "bench_cases.torchtitan_configs"
EMULATED = registered(OWN, "llama3_debugmodel_float8_emulated")
PIPED = registered(
    "llama3",
    "llama3_debugmodel",
    degree("pipeline", 2),
    "--parallelism.pipeline_parallel_schedule=1F1B",
)
KIMI = registered(OWN, "moonlight_debugmodel", degree("expert", 2), activation_checkpointing="full")
NONE = dict.fromkeys(("experts_per_rank", "low_precision_modules", "pipeline"), "none") | {
    "context_parallel": "1"
}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("case", "mesh", "experts"),
    [
        (LLAMA, "fsdp 2", "none"),
        (EMULATED, "fsdp 2", "none"),
        (PIPED, "fsdp 1", "none"),
        (DEEPSEEK, "efsdp 1 x ep 2 and fsdp 2", "4"),
        pytest.param(KIMI, "efsdp 1 x ep 2 and fsdp 2", "4", marks=pytest.mark.nightly),
        pytest.param(QWEN, "efsdp 1 x ep 2 and fsdp 2", "32", marks=pytest.mark.nightly),
        pytest.param(GPT_OSS, "efsdp 1 x ep 2 and fsdp 2", "4", marks=pytest.mark.nightly),
    ],
    ids=["llama3", "float8", "pipeline", "deepseek_v3", "kimi", "qwen3_moe", "gpt_oss"],
)
def test_a_registered_model_trains_as_it_says(tmp_path: Path, case: Case, mesh: str, experts: str) -> None:
    """Those marked nightly have some 100 million parameters, which take a CPU a minute."""
    run = measured(case, tmp_path)
    settings = observed(run).settings
    assert (settings["mesh"], settings["experts_per_rank"]) == (mesh, experts)
    assert settings["replaced"].startswith("data and tokenizer by perfsuite's tokens; checkpoints")
    assert settings["gradient_clipping"] == "max_norm=1.0"
    assert run.flops is not None
    assert run.flops.formula == "torchtitan-0.3"
    assert float(run.figures.loss_last or 0) < float(run.figures.loss_first or 0)
    tokens = (1 if case is PIPED else 2) * 2 * 64
    assert run.figures.tokens_per_s == pytest.approx(tokens / float(run.figures.step_s_p50 or 0))
    assert run.counts
    assert not run.hidden


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (LLAMA, {**NONE, "mesh": "fsdp 2"}),
        (
            registered(
                "llama3",
                "llama3_debugmodel",
                "--parallelism.data_parallel_replicate_degree=2",
                degree("tensor", 2),
                ranks=8,
            ),
            {**NONE, "mesh": "dp_replicate 2 x fsdp 2 x tp 2"},
        ),
        (
            registered(
                "deepseek_v3", "deepseek_v3_debugmodel", degree("expert", 4), degree("tensor", 2), ranks=8
            ),
            {**NONE, "experts_per_rank": "2", "mesh": "efsdp 2 x ep 4 and fsdp 4 x tp 2"},
        ),
        (PIPED, {**NONE, "pipeline": "2 ranks, Schedule1F1B", "mesh": "fsdp 1"}),
        (registered("qwen3", "qwen3_moe_debug"), {**NONE, "experts_per_rank": "64", "mesh": "fsdp 2"}),
    ],
    ids=["fsdp", "hsdp x tp", "ep x tp", "pp", "experts without ep"],
)
@pytest.mark.usefixtures("titan")
def test_what_must_be_observed(case: Case, told: dict[str, str]) -> None:
    assert unsupported(case, make_machine(devices=8)) is None
    of_all = {"wrapper": "FSDPModule", "attention": "sdpa", "cuda_graphs": "no"}
    assert case.framework.expected(case) == {**told, **of_all}  # type: ignore[attr-defined]


def overridden(*words: str, case: Case = LLAMA) -> Case:
    framework: Any = case.framework
    return case.replace(framework=framework.replace(overrides=(*framework.overrides, *words)))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            registered("llama3", "llama_debugmodel"),
            "'llama_debugmodel' not found in torchtitan.models.llama3.*Did you mean 'llama3_debugmodel'",
        ),
        (registered("deepseek", "deepseek_v3_16b"), "import module 'deepseek'.*Did you mean 'deepseek_v3'"),
        (overridden("--training.sequence=7"), "Unrecognized options: --training.sequence=7"),
        (overridden("--training.seq_len=long"), "Error parsing --training.seq-len: invalid literal for int"),
        (registered("qwen3_5", "qwen35_0_8b"), r"Cannot import .*'qwen3_5' .*\(No module named 'fla'\)"),
        (registered("flux", "flux_debugmodel"), "flux_debugmodel trains images"),
        (registered("kimi_k2_7", "kimi_k2_5"), "kimi_k2_5 trains images"),
        (
            registered("kimi_k2_7", "moonlight_16b_a3b", degree("expert", 2)),
            "DistMuon shards by spmd_types, which torch 2.13 lacks: give a configuration of your own AdamW",
        ),
        (overridden(degree("tensor", 3)), "tensor_parallel_degree 3, .* do not multiply to the case's 2"),
        (
            overridden("--parallelism.data_parallel_shard_degree=3"),
            "data_parallel_replicate_degree 1, data_parallel_shard_degree 3, tensor_parallel_degree 1, "
            "pipeline_parallel_degree 1, context_parallel_degree 1: these do not multiply to the case's 2",
        ),
        (
            registered("deepseek_v3", "deepseek_v3_debugmodel", degree("expert", 16), ranks=16),
            "expert_parallel_degree 16 must divide the number of experts, 8",
        ),
        (overridden(degree("expert", 2)), "expert_parallel_degree 2 must divide the number of experts, 0"),
        (
            registered("deepseek_v3", "deepseek_v3_debugmodel", degree("expert", 4)),
            "expert_parallel_degree 4 must divide dp_shard x cp x tp, 2",
        ),
        (overridden(degree("context", 2)), "context_parallel_degree 2: a CPU has no kernel: run it dry"),
        (LLAMA.replace(sequence_length=32), "training.seq_len: 64, but the case's sequence_length says 32"),
        (LLAMA.replace(micro_batch=4), "training.local_batch_size: 2, but the case's micro_batch says 4"),
        (
            overridden("--training.global_batch_size=8"),
            "global_batch_size over the sequences of all ranks: 2.0, but .*gradient_accumulation says 1",
        ),
        (LLAMA.replace(precision="fp32"), "precision_param: 'bf16-mixed', but the case's precision says"),
        (LLAMA.replace(activation_checkpointing="full"), "checkpoint: 'selective-op', but the case's"),
        (LLAMA.replace(compile=True), "compile.enable: False, but the case's compile says True"),
        (overridden("--debug.seed=3"), "debug.seed: 3, but the case's seed says 0"),
        (overridden("--training.no-disable-cuda-graphs"), r"give TorchTitan\(disable_cuda_graphs=...\)"),
        (LLAMA.replace(steps=97), "steps: 100, but the case has 101: add --training.steps=101 to overrides"),
        (LLAMA.replace(learning_rate=0.1), "learning_rate: the configuration decides it, leave it out"),
        (
            LLAMA.replace(attention="eager"),
            "attention: the configuration decides it, leave it out",
        ),
        (LLAMA.replace(model="llama-tiny"), r"the configuration has its own, name it Model.named\('debug"),
    ],
)
@pytest.mark.usefixtures("titan")
def test_what_contradicts_or_cannot_be_is_told(case: Case, said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        case.framework.expected(case)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("titan")
def test_float8_without_torchao_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.components.quantization.float8.Float8Linear", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = r"refuses .*torchao is not installed.* pip install 'perfsuite\[torchao\]'"
    with pytest.raises(MismatchError, match=told):
        EMULATED.framework.expected(EMULATED)  # type: ignore[attr-defined]


def test_a_torchao_that_is_too_old_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan would train in 16 bits, and say so in its log alone."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda of: "0.8.0" if of == "torchao" else version(of))
    reason = "it needs torchao>=0.18, and 0.8.0 is installed: pip install 'perfsuite[torchao]'"
    assert unsupported(EMULATED, make_machine(devices=8)) == reason
    assert unsupported(EMULATED.replace(framework="torchtitan", model="llama-tiny"), make_machine()) is None


@pytest.mark.usefixtures("titan")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("llama3_debugmodel_float8", r"only supported on .*SM89 .*set `float8.emulate` to True"),
        ("llama3_8b_mxfp8", "MXFP8 is only supported on SM100 or later"),
    ],
)
def test_float8_on_a_cpu_is_refused_in_torchtitans_words(config: str, said: str) -> None:
    case = registered("llama3", config)
    with pytest.raises(MismatchError, match=said):
        case.framework.expected(case)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("recipe", "flops"), [("rowwise", 6 * 16 * 32), ("rowwise_with_gw_hp", 4 * 16 * 32), (None, None)]
)
def test_flops_in_float8_by_the_recipe(titan: Any, recipe: str | None, flops: float | None) -> None:
    """The last of them is emulated. A layer in 16 bits adds none."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe) if recipe else Float8LinearConfig(emulate=True)
    linear = torch.nn.Linear(16, 32)
    assert titan.flops_in_float8([linear, Float8Linear.from_float(linear, config)]) == flops
    assert titan.flops_in_float8([linear]) == 0

    class Float8GroupedExperts: ...

    assert titan.flops_in_float8([Float8GroupedExperts()]) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"module": "llama3"}, "module and config name a configuration together"),
        ({"overrides": ("--training.steps=3",)}, "module and config name a configuration together"),
        (
            {"module": "llama3", "config": "llama3_8b", "tensor_parallel": 2},
            "config llama3_8b decides everything: leave out tensor_parallel2",
        ),
        ({"module": "llama3", "config": "llama3-8b"}, "should match pattern"),
        ({"module": "llama3", "config": "llama3_8b", "overrides": "--a.b=1"}, "valid tuple"),
    ],
)
def test_options_that_do_not_fit_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TorchTitan.model_validate(options)


def test_the_id_names_configuration_and_overrides() -> None:
    framework = TorchTitan(module="deepseek_v3", config="deepseek_v3_16b")
    assert framework.slug() == "torchtitan-deepseek_v3_16b"
    changed = framework.replace(overrides=(degree("expert", 8),), disable_cuda_graphs=False)
    assert (
        changed.slug()
        == "torchtitan-deepseek_v3_16b-parallelism.expert_parallel_degree=8-no_disable_cuda_graphs"
    )
    assert framework.replace(module="my.models").slug() == "torchtitan-my.models-deepseek_v3_16b"


def test_modules_in_few_bits_are_told_by_class(titan: Any) -> None:
    class Float8Linear: ...

    class Linear: ...

    assert titan.low_precision([Linear(), Float8Linear(), Float8Linear()]) == "2 Float8Linear"
    assert titan.low_precision([Linear()]) == "none"


OF_THE_SUITE = [
    case for case in CASES.values() if isinstance(case.framework, TorchTitan) and case.framework.config
]


@pytest.mark.parametrize("case", OF_THE_SUITE, ids=lambda case: case.id)
def test_each_registered_case_of_the_suite_says_what_torchtitan_reads(
    titan: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those too that are compiled, which no dry run reads."""
    from torchtitan.components.quantization import float8

    from perfsuite.frameworks.torchtitan import configuration

    monkeypatch.setattr(float8, "has_cuda_capability", lambda *capability: True)
    assert configuration.expected(case)["wrapper"] == "FSDPModule"
    whole = configuration.read(case).loss.__class__.__qualname__ == "CrossEntropyLoss.Config"
    assert whole is ("_whole_loss" in case.framework.slug())
