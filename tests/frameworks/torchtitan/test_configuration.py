"""Test configurations of torchtitan's own registry: what is expected, refused and run."""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, Model, Topology, TorchTitan
from perfsuite.errors import MismatchError
from perfsuite.launch.requirements import unsupported
from perfsuite.results.rank_report import Flops
from perfsuite.results.run import Run
from perfsuite.worker.counting.growth import DISABLED
from tests.case_files import BENCH_CASES, cases_of
from tests.dry.runs import passed
from tests.dry.twins import check_ranks
from tests.frameworks.test_base import COUNTED, measured, observed
from tests.frameworks.torchtitan.samples import MARKS
from tests.samples import known, make_machine

pytestmark = MARKS

SHORT = 16
"""Sequence length of launched cases. In 16 bits, a CPU takes seconds for longer sequences."""


def registered(
    module: str, config: str, *overrides: str, ranks: int = 2, length: int = 64, **changes: Any
) -> Case:
    """Return a small case of a registered configuration."""
    shape = (f"--training.seq_len={length}", "--training.local_batch_size=2", "--training.steps=100")
    case = COUNTED.replace(
        model=Model.named(config),
        framework=TorchTitan(module=module, config=config, overrides=(*shape, *overrides)),
        sequence_length=length,
        precision="bf16-mixed",
        activation_checkpointing="selective-op",
        topology=Topology(processes_per_node=ranks),
        timeout_s=600,  # on a CPU, experts are a loop in Python
    )
    return case.replace(**changes)


def degree(name: str, ranks: int) -> str:
    return f"--parallelism.{name}_parallel_degree={ranks}"


LLAMA = registered("llama3", "llama3_debugmodel")
CUT = "tests.frameworks.torchtitan.configs"
# torchtitan's switch for balanced routing replaces the router's choice, in launches and in dry runs.
DEEPSEEK = registered(
    CUT, "deepseek_v3_debugmodel", degree("expert", 2), "--debug.moe_force_load_balance", length=SHORT
)
QWEN = registered(CUT, "qwen3_moe_debug", degree("expert", 2), length=SHORT)
GPT_OSS = registered(
    CUT, "gpt_oss_debugmodel", degree("expert", 2), length=SHORT, activation_checkpointing="none"
)
KIMI = registered(
    CUT, "moonlight_debugmodel", degree("expert", 2), length=SHORT, activation_checkpointing="full"
)
EMULATED = registered(CUT, "llama3_debugmodel_float8_emulated", length=SHORT)
ONE_BY_ONE = "--parallelism.pipeline_parallel_schedule=1F1B"
PIPED = registered(CUT, "llama3_debugmodel", degree("pipeline", 2), ONE_BY_ONE, length=SHORT)
NONE = dict.fromkeys(("experts_per_rank", "low_precision_modules", "pipeline"), "none") | {
    "context_parallel": "1"
}
BALANCED = "expert routing is assumed to be balanced: every expert gets its share of the tokens"


def deepseek_flops() -> Flops:
    """Return the FLOPs of two layers of width 256 with 16 heads. The first layer is dense.

    The second one has 8 experts, and each token goes to three of them.
    """
    width = 256
    layers = 2
    vocabulary = 2048
    expert = 3 * 256 * 256
    latent = 512
    rope = 64
    head = 128
    value = 128
    attention = width * (16 * (head + rope) + latent + rope + 16 * value) + latent * 16 * (head + value)
    feed_forward = 3 * width * 1024
    shared = 3 * width * 512
    gate = width * 8
    linear = layers * attention + feed_forward + shared + gate + vocabulary * width
    dense = linear + layers * (2 * width + latent) + width
    active = dense + 3 * expert
    scores = layers * 16 * (head + rope + value)
    return Flops(
        formula="torchtitan-0.3",
        per_token=6 * active + 6 * scores * SHORT,
        parameters=dense + vocabulary * width + 8 * expert,
        matmul_parameters=active,
    )


@pytest.mark.launch
@pytest.mark.parametrize(
    ("case", "mesh", "experts", "notes"),
    [
        pytest.param(EMULATED, "fsdp 2", "none", (DISABLED,), marks=pytest.mark.nightly),
        (PIPED, "fsdp 1", "none", (DISABLED,)),
        pytest.param(
            DEEPSEEK, "efsdp 1 x ep 2 and fsdp 2", "4", (BALANCED, DISABLED), marks=pytest.mark.nightly
        ),
        pytest.param(KIMI, "efsdp 1 x ep 2 and fsdp 2", "4", None, marks=pytest.mark.nightly),
        pytest.param(QWEN, "efsdp 1 x ep 2 and fsdp 2", "32", None, marks=pytest.mark.nightly),
        pytest.param(GPT_OSS, "efsdp 1 x ep 2 and fsdp 2", "4", None, marks=pytest.mark.nightly),
    ],
    ids=["float8", "pipeline", "deepseek_v3", "kimi", "qwen3_moe", "gpt_oss"],
)
def test_registered_model_trains_and_runs_dry(
    tmp_path: Path, case: Case, mesh: str, experts: str, notes: tuple[str, ...] | None
) -> None:
    """`notes` are those of the dry run, if there is one."""
    run = measured(case, tmp_path / "launched")
    check_settings(run, mesh, experts)
    check_figures(run, tokens=(1 if case is PIPED else 2) * 2 * SHORT)
    if case is DEEPSEEK:
        assert run.flops == deepseek_flops()
    if notes is not None:
        dry = passed(case, tmp_path / "dry")
        assert (dry.notes, dry.flops) == (notes, run.flops)
        check_ranks(dry, run.counts)


def check_settings(run: Run, mesh: str, experts: str) -> None:
    """Check what the worker observes of a registered model."""
    settings = observed(run).settings
    assert (settings["mesh"], settings["experts_per_rank"]) == (mesh, experts)
    assert settings["replaced"].startswith("data and tokenizer by perfsuite's tokens; checkpoints")
    assert settings["gradient_clipping"] == "max_norm=1.0"


def check_figures(run: Run, *, tokens: int) -> None:
    """Check that the model learnt, that its speed is that of its median step, and that all was counted."""
    assert known(run.flops).formula == "torchtitan-0.3"
    assert float(run.figures.loss_last or 0) < float(run.figures.loss_first or 0)
    assert run.figures.tokens_per_s == pytest.approx(tokens / float(run.figures.step_s_p50 or 0))
    assert run.counts
    assert not run.counts[0].counts.without_flops
    assert not run.hidden


EP_X_TP = registered(
    "deepseek_v3", "deepseek_v3_debugmodel", degree("expert", 4), degree("tensor", 2), ranks=8
)
REPLICATED = "--parallelism.data_parallel_replicate_degree=2"
HSDP_X_TP = registered("llama3", "llama3_debugmodel", REPLICATED, degree("tensor", 2), ranks=8)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (LLAMA, {"mesh": "fsdp 2"}),
        (HSDP_X_TP, {"mesh": "dp_replicate 2 x fsdp 2 x tp 2"}),
        (EP_X_TP, {"experts_per_rank": "2", "mesh": "efsdp 2 x ep 4 and fsdp 4 x tp 2"}),
        (PIPED, {"pipeline": "2 ranks, Schedule1F1B", "mesh": "fsdp 1"}),
        (registered("qwen3", "qwen3_moe_debug"), {"experts_per_rank": "64", "mesh": "fsdp 2"}),
    ],
    ids=["fsdp", "hsdp x tp", "ep x tp", "pp", "experts without ep"],
)
def test_a_case_expects_what_its_configuration_says(case: Case, settings: dict[str, str]) -> None:
    assert unsupported(case, make_machine(devices=8)) is None
    of_all = {"wrapper": "FSDPModule", "attention": "sdpa", "cuda_graphs": "no"}
    assert case.framework.expected(case) == {**NONE, **settings, **of_all}  # type: ignore[attr-defined]


OF_ALL_DEGREES = (
    "data_parallel_replicate_degree 1, data_parallel_shard_degree 3, tensor_parallel_degree 1, "
    "pipeline_parallel_degree 1, context_parallel_degree 1: their product must be the number of processes "
    "of the case, 2"
)


def overridden(*words: str, case: Case = LLAMA) -> Case:
    framework: Any = case.framework
    return case.replace(framework=framework.replace(overrides=(*framework.overrides, *words)))


def experts(ranks: int, degrees: int) -> Case:
    return registered("deepseek_v3", "deepseek_v3_debugmodel", degree("expert", degrees), ranks=ranks)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            registered("llama3", "llama_debugmodel"),
            "'llama_debugmodel' not.*Did you mean 'llama3_debugmodel'",
        ),
        (registered("deepseek", "deepseek_v3_16b"), "import module 'deepseek'.*Did you mean 'deepseek_v3'"),
        (overridden("--training.sequence=7"), "Unrecognized options: --training.sequence=7"),
        (overridden("--training.seq_len=long"), "Error parsing --training.seq-len: invalid literal for int"),
        (registered("qwen3_5", "qwen35_0_8b"), r"Cannot import .*'qwen3_5' .*\(No module named 'fla'\)"),
        (registered("flux", "flux_debugmodel"), "flux_debugmodel trains on images"),
        (registered("kimi_k2_7", "kimi_k2_5"), "kimi_k2_5 trains on images"),
        (registered("kimi_k2_7", "moonlight_16b_a3b"), "DistMuon needs spmd_types, .* with AdamW"),
        (overridden(degree("tensor", 3)), "tensor_parallel_degree 3, .* product must be .* of the case, 2"),
        (overridden("--parallelism.data_parallel_shard_degree=3"), OF_ALL_DEGREES),
        (experts(16, 16), "expert_parallel_degree 16 must divide the number of experts, 8"),
        (overridden(degree("expert", 2)), "expert_parallel_degree 2 must divide the number of experts, 0"),
        (experts(2, 4), "expert_parallel_degree 4 must divide dp_shard x cp x tp, 2"),
        (overridden(degree("context", 2)), "context_parallel_degree 2 needs a GPU. Run the case dry"),
        (LLAMA.replace(sequence_length=32), "training.seq_len: 64, but the case's sequence_length needs 32"),
        (LLAMA.replace(micro_batch=4), "training.local_batch_size: 2, but the case's micro_batch needs 4"),
        (overridden("--training.global_batch_size=8"), "all ranks: 2.0, but .*gradient_accumulation needs 1"),
        (LLAMA.replace(precision="fp32"), "precision_param: 'bf16-mixed', but the case's precision needs"),
        (LLAMA.replace(activation_checkpointing="full"), "checkpoint: 'selective-op', but the case's"),
        (LLAMA.replace(compile=True), "compile.enable: False, but the case's compile needs True"),
        (overridden("--debug.seed=3"), "debug.seed: 3, but the case's seed needs 0"),
        (overridden("--training.no-disable-cuda-graphs"), r"give TorchTitan\(disable_cuda_graphs=...\)"),
        (LLAMA.replace(steps=97), "steps: 100, but the case has 101: add --training.steps=101 to overrides"),
        (LLAMA.replace(learning_rate=0.1), "learning_rate: the configuration sets it, so remove it"),
        (LLAMA.replace(attention="eager"), "attention: the configuration sets it, so remove it"),
        (
            LLAMA.replace(model="llama-tiny"),
            r"has its own model, so give model=Model.named\('debug",
        ),
        (registered("llama3", "llama3_debugmodel_float8"), "on .*SM89 .*set `float8.emulate` to True"),
        (registered("llama3", "llama3_8b_mxfp8"), "MXFP8 is only supported on SM100 or later"),
    ],
)
def test_names_contradictory_and_impossible_settings(case: Case, said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        case.framework.expected(case)  # type: ignore[attr-defined]


def test_names_torchao_where_float8_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.components.quantization.float8.Float8Linear", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"rejects .*torchao is not installed.* pip install 'perfsuite\[torchao\]'"
    with pytest.raises(MismatchError, match=message):
        EMULATED.framework.expected(EMULATED)  # type: ignore[attr-defined]


def test_a_torchao_that_is_too_old_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan would train in 16 bits, and only its log would mention that."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda of: "0.8.0" if of == "torchao" else version(of))
    reason = "it needs torchao>=0.18, and 0.8.0 is installed: pip install 'perfsuite[torchao]'"
    assert unsupported(EMULATED, make_machine(devices=8)) == reason
    assert unsupported(EMULATED.replace(framework="torchtitan", model="llama-tiny"), make_machine()) is None


CASES = [
    case for file in sorted(BENCH_CASES.glob("test_torchtitan_*.py")) for case in cases_of(file).values()
]
OF_THE_SUITE = [case for case in CASES if isinstance(case.framework, TorchTitan) and case.framework.config]


@pytest.mark.parametrize("case", OF_THE_SUITE, ids=lambda case: case.id)
def test_suite_cases_expect_what_torchtitan_reads(
    titan: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes compiled cases, which cannot be run dry."""
    from torchtitan.components.quantization import float8

    from perfsuite.frameworks.torchtitan import configuration

    monkeypatch.setattr(float8, "has_cuda_capability", lambda *capability: True)
    assert configuration.expected(case)["wrapper"] == "FSDPModule"
    whole = configuration.read(case).loss.__class__.__qualname__ == "CrossEntropyLoss.Config"
    assert whole is ("_whole_loss" in case.framework.slug())
