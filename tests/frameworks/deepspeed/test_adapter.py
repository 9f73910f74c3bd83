"""Test what a configuration of DeepSpeed can set in addition to the case, and that ZeRO trains like DDP."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, DeepSpeed, Topology
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.base import framework_of
from perfsuite.frameworks.deepspeed import _filled
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect
from tests.frameworks.learnt import learnt
from tests.frameworks.test_base import COUNTED, SMALL, measured, observed
from tests.samples import known, make_gpu_machine, make_machine

PARAMETERS = 918_656 * 4  # bytes of llama-tiny in fp32
OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
KEEPING_NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""With this, every parameter is gathered where it is used. By default, small ones (up to 100,000) stay."""
OF_TRANSFORMERS: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": 5e8},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": False, "profile_step": 1},
}
"""The configuration of transformers' documentation, with torch's AdamW, which needs no compiler."""


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def case_of(config: Any, **changes: Any) -> Case:
    return COUNTED.replace(framework=DeepSpeed(config=config), **changes)


def of(case: Case) -> DeepSpeed:
    assert isinstance(case.framework, DeepSpeed)
    return case.framework


def filled(case: Case) -> dict[str, Any]:
    return _filled(of(case).config, case)


def checked(config: Any, **changes: Any) -> None:
    case = case_of(config, **changes)
    of(case).check(case)


# --- as data --------------------------------------------------------------------------------------------


@pytest.fixture
def file_for_zero2(tmp_path: Path) -> Path:
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(OF_TRANSFORMERS, indent=4))
    return file


def test_a_file_and_a_mapping_say_the_same(file_for_zero2: Path) -> None:
    by_file = DeepSpeed(config=str(file_for_zero2))
    by_mapping = DeepSpeed(config=OF_TRANSFORMERS)
    assert by_file.config.content == by_mapping.config.content == OF_TRANSFORMERS
    assert by_file.slug() == "deepspeed-zero2"
    assert by_mapping.slug() == f"deepspeed-zero2-{by_file.config.digest[:6]}"


def test_a_rank_needs_no_file(file_for_zero2: Path) -> None:
    cases = [SMALL.replace(framework=DeepSpeed(config=str(file_for_zero2)))]
    cases.append(SMALL.replace(framework=DeepSpeed(config=OF_TRANSFORMERS)))
    file_for_zero2.unlink()
    assert [Case.model_validate_json(case.model_dump_json()) for case in cases] == cases


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory"),
        ('{"bf16": {"enabled": yes}}', r"Expecting value: line 1 column 22"),
        ("[1]", "contains a list instead of sections"),
    ],
)
def test_refuses_a_file_that_is_not_a_configuration(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "zero.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FileError, match=rf"{file}.*{said}.*\. Give a JSON file for DeepSpeed\.$"):
        DeepSpeed(config=str(file))


def test_refuses_a_mapping_that_no_file_could_hold() -> None:
    with pytest.raises(
        CaseError, match="is not JSON serializable: give only values that a JSON file can hold"
    ):
        DeepSpeed(config={"zero_optimization": {"stage": 3, "offload_param": {"nvme_path": Path("x")}}})


UNDECIDED = "but no field of the case determines it. Give a value"
FP32 = "but the case's precision 'fp32' needs False"
NOT_BUILT = "perfsuite supports only ZeRO"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("train_micro_batch_size_per_gpu", 4, "4, but the case's micro_batch needs 2"),
        ("gradient_accumulation_steps", 8, "8, but the case's gradient_accumulation needs 1"),
        ("train_batch_size", 32, "32, but the case's batch of all processes needs 4"),
        ("bf16.enabled", True, f"True, {FP32}"),
        ("fp16.enabled", True, f"True, {FP32}"),
        ("torch_autocast.enabled", True, f"True, {FP32}"),
        ("optimizer.params.lr", 0.5, "0.5, but the case's learning_rate needs 0.001"),
        ("zero_optimization", True, "True is not a section: DeepSpeed expects {...} here"),
        (
            "zero_optimization.offload_param.device",
            "nvme",
            "'nvme', but perfsuite supports offload only to 'cpu'",
        ),
        ("scheduler.params.warmup_max_lr", "auto", f"'auto', {UNDECIDED}"),
        (
            "zero_optimisation",
            {"stage": 2},
            f"{NOT_BUILT} (did you mean zero_optimization?). Remove this key",
        ),
        ("pipeline", {"stages": 2}, f"{NOT_BUILT}. Remove this key, or measure your own script (Script)"),
        ("moe", {"enabled": True}, NOT_BUILT),
        ("expert_parallel", {"enabled": True}, NOT_BUILT),
        ("tensor_parallel", {"autotp_size": 2}, NOT_BUILT),
        ("wall_clock_breakdown", True, NOT_BUILT),
        ("managed_gradient_accumulation", False, NOT_BUILT),
    ],
)
def test_names_contradictions_and_unbuilt_parts(path: str, value: Any, said: str) -> None:
    config = value
    for name in reversed(path.split(".")):
        config = {name: config}
    with pytest.raises(CaseError) as caught:
        checked(config)
    assert f": {path}: {said}" in str(caught.value)


@pytest.mark.parametrize("config", [{}, zero(3, **OFFLOADED), OF_TRANSFORMERS])
def test_accepts_settings_that_agree_with_the_case(config: dict[str, Any]) -> None:
    checked(config)
    checked({**config, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2})
    checked(config, precision="fp16-mixed")  # `unsupported` refuses it


@pytest.fixture
def completed() -> dict[str, Any]:
    """Return a configuration of transformers, completed with the settings of a case."""
    changes: dict[str, Any] = {"gradient_accumulation": 3, "precision": "bf16", "learning_rate": 0.01}
    return filled(case_of(OF_TRANSFORMERS, **changes))


def test_a_case_sets_the_batch_sizes(completed: dict[str, Any]) -> None:
    assert completed["train_micro_batch_size_per_gpu"] == 2
    assert completed["gradient_accumulation_steps"] == 3
    assert completed["train_batch_size"] == 12


def test_a_case_sets_the_precision(completed: dict[str, Any]) -> None:
    assert (completed["bf16"]["enabled"], completed["fp16"]["enabled"]) == (True, False)


def test_a_case_sets_the_optimizer(completed: dict[str, Any]) -> None:
    adam = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert completed["optimizer"]["params"] == {**adam, "torch_adam": True}


@pytest.mark.parametrize("name", ["zero_optimization", "gradient_clipping", "steps_per_print"])
def test_a_case_keeps_other_settings(completed: dict[str, Any], name: str) -> None:
    assert completed[name] == OF_TRANSFORMERS[name]


def test_an_empty_configuration_trains_as_other_frameworks() -> None:
    mixed = filled(case_of({}, precision="bf16-mixed"))
    assert mixed["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert mixed["gradient_clipping"] == 0.0, "like the other frameworks"
    assert "optimizer" not in mixed, "it is torch's optimizer"


@pytest.mark.parametrize(("more", "kind"), [({}, "AdamW"), ({"zero_force_ds_cpu_optimizer": False}, None)])
def test_deepspeed_steps_what_is_offloaded(more: dict[str, Any], kind: str | None) -> None:
    config = zero(2, offload_optimizer={"device": "cpu"}) | more
    assert filled(case_of(config)).get("optimizer", {}).get("type") == kind


OWN_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
TORCHS_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}


@pytest.mark.parametrize(
    ("config", "operator"),
    [
        (zero(2), None),
        (zero(2, offload_optimizer={"device": "cpu"}), "cpu_adam"),
        (zero(2, offload_optimizer={"device": "cpu"}) | {"zero_force_ds_cpu_optimizer": False}, None),
        (zero(2) | OWN_ADAM, "fused_adam"),
        (zero(2) | TORCHS_ADAM, None),
    ],
)
def test_an_optimizer_to_compile_needs_nvcc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any], operator: str | None
) -> None:
    case = case_of(config)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reason = framework_of(case).unsupported(case, make_gpu_machine())
    assert (reason is None) == (operator is None)
    assert operator is None or f"({operator}) in the first launch, which needs nvcc" in str(reason)
    assert framework_of(case).unsupported(case, make_machine()) is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert framework_of(case).unsupported(case, make_gpu_machine()) is None


def test_a_built_operator_needs_no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = case_of(zero(2, offload_optimizer={"device": "cpu"}))
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "git_version_info_installed.py").write_text("installed_ops={'cpu_adam': True}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert framework_of(case).unsupported(case, make_gpu_machine()) is None


@pytest.mark.parametrize(
    ("config", "sharding", "parameters", "optimizer", "offload"),
    [
        ({}, "none", 1, 1, "none"),
        (zero(1), "DeepSpeed ZeRO-1", 1, 4, "none"),
        (zero(2, offload_optimizer={"device": "cpu"}), "DeepSpeed ZeRO-2", 1, 4, "optimizer"),
        (zero(3, **OFFLOADED), "DeepSpeed ZeRO-3", 4, 4, "optimizer and parameters"),
    ],
)
def test_a_case_expects_its_stage_and_offloading(
    config: dict[str, Any], sharding: str, parameters: int, optimizer: int, offload: str
) -> None:
    case = case_of(config, topology=Topology(processes_per_node=4))
    assert of(case).expected(case) == {
        "wrapper": "DeepSpeedEngine",
        "sharding": sharding,
        "rank_holds": f"1/{parameters} of parameters, 1/{optimizer} of optimizer",
        "offload": offload,
        "optimizer_parameters": None,
    }


def test_no_dry_run_knows_whether_it_steps() -> None:
    case = case_of(zero(2))
    assert str(of(case).dry(case).impossible).startswith("DeepSpeed's decisions depend on gradients")


# --- launched -------------------------------------------------------------------------------------------


@pytest.mark.launch
@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(
    ("config", "sent"),
    [
        pytest.param(
            zero(1, use_multi_rank_bucket_allreduce=False),
            {"reduce": 1, "all_gather": 1},
            marks=pytest.mark.nightly,
        ),
        pytest.param(zero(2), {"all_reduce": 1, "all_gather": 1}, marks=pytest.mark.smoke("deepspeed")),
        pytest.param(
            zero(3, **KEEPING_NOTHING),
            {"all_gather": 2, "reduce_scatter": 1},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            # torch's optimizer needs no compiler.
            {**zero(3, **OFFLOADED), "zero_force_ds_cpu_optimizer": False},
            {"all_gather": 1, "reduce_scatter": 1},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["1", "2", "3", "3 offloaded"],
)
def test_zero_trains_as_ddp_and_sends_as_claimed(
    tmp_path: Path, config: dict[str, Any], sent: dict[str, int]
) -> None:
    """The expected bytes are those of Rajbhandari et al. 2020 (arXiv:1910.02054), section 7.

    Each gradient is reduced to the rank that owns the parameter, and this rank then sends the parameter. So
    gradients and parameters are each sent once. With ZeRO 3, parameters are sent twice, before forward and
    before backward.

    By default, DeepSpeed's ZeRO 1 and 2 use all-reduce. ZeRO 3 sends small parameters once, after the step.
    """
    run = measured(case_of(config), tmp_path)
    plain = learnt(COUNTED)
    assert run.loss == pytest.approx(plain.loss, rel=1e-6)
    assert run.figures.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-5)
    total = Counter[str]()
    for call in run.counts[0].counts.collectives:
        total[call.kind] += call.bytes
    flags = 8  # for the norm of the gradients and whether they are finite
    assert {kind for kind, size in total.items() if size > flags} == sent.keys()
    for kind, times in sent.items():
        assert total[kind] == pytest.approx(times * PARAMETERS, abs=flags)
    third = known(run.flops).per_token * COUNTED.micro_batch * COUNTED.sample_length / 3
    # In four layers, backward computes the scores of attention again.
    scores = 2 * 4 * COUNTED.micro_batch * 32**2 * 128
    assert run.counts[0].counts.flops == {"forward": third, "backward": 2 * third + scores}


@pytest.mark.nightly
@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(
    ("precision", "stage", "parameter_dtype"), [("bf16", 2, "bfloat16"), ("bf16-mixed", 3, "float32")]
)
def test_file_for_transformers_runs_as_asked(
    tmp_path: Path, precision: Any, stage: int, parameter_dtype: str
) -> None:
    config = {**OF_TRANSFORMERS, **zero(stage, reduce_bucket_size="auto")}
    case = case_of(config, precision=precision, gradient_accumulation=2, activation_checkpointing="full")
    settings = observed(measured(case, tmp_path)).settings
    assert settings["parameter_dtype"] == parameter_dtype
    assert settings["compute_dtype"] == "bfloat16"
    assert settings["recomputing_blocks"] == "4 of 4"
    assert settings["gradient_clipping"] == "1.0"


@pytest.mark.nightly
@pytest.mark.usefixtures("deepspeed")
def test_reports_deepspeeds_refusal_in_its_words(tmp_path: Path) -> None:
    alone = case_of(zero(5, overlap_com=True), topology=Topology(processes_per_node=1))
    failure = known(launch_once(alone, detect(), tmp_path).failure)
    assert failure.kind == "mismatch"
    assert "DeepSpeedZeroConfig: stage: Input should be 0, 1, 2" in failure.message
    assert "overlap_com: unknown field (did you mean overlap_comm?)" in failure.message
