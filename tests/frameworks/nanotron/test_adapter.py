from pathlib import Path
from typing import Any

import pytest
import yaml

from perfsuite import Case, Nanotron
from perfsuite.errors import CaseError, FileError
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results.run import Run
from tests.frameworks import test_base as base
from tests.frameworks.test_base import measured, observed
from tests.samples import make_case

SMALL = base.SMALL.replace(framework=Nanotron(dp=2), micro_batch=4)
MACHINE = detect_cpu("a test")


@pytest.fixture(scope="module")
def by_options(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Return a launch, and the file that nanotron received in it."""
    directory = tmp_path_factory.mktemp("options")
    return measured(SMALL, directory), directory / "nanotron.yaml"


@pytest.mark.smoke("nanotron")
def test_trains_data_parallel_with_options(by_options: tuple[Run, Path]) -> None:
    run, _ = by_options
    settings = {
        "parallelism": "dp 2 x tp 1 x pp 1",
        "wrapper": "DistributedDataParallel",
        "optimizer_parameters": "the model's",
        "recomputing_blocks": "0 of 4",
        "attention": "sdpa",
        "patched": "circular import, torch for flash_attn, cpu and gloo for cuda and nccl",
    }
    assert observed(run).settings.items() >= settings.items()
    assert observed(run).environment["nanotron"] == "0.4"
    assert float(run.figures.loss_last or 9) < float(run.figures.loss_first or 0) - 1


@pytest.mark.nightly
def test_trains_data_parallel_with_a_users_file(by_options: tuple[Run, Path], tmp_path: Path) -> None:
    """With the file, nanotron also shards the optimizer, but the training is the same."""
    run, written = by_options
    config = yaml.safe_load(written.read_text())
    config["optimizer"]["zero_stage"] = 1
    config["tokens"]["train_steps"] = 100
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(config))
    by_file = measured(SMALL.replace(framework=Nanotron(config=file)), tmp_path / "file")
    assert observed(by_file).settings["sharding"] == "optimizer (ZeRO 1)"
    assert len(observed(by_file).settings["config_sha256"]) == 16
    assert by_file.loss == pytest.approx(run.loss, rel=1e-4)


@pytest.mark.nightly
def test_trains_tensor_parallel(tmp_path: Path) -> None:
    options = Nanotron(tp=2, tp_mode="REDUCE_SCATTER", tp_linear_async_communication=True)
    result = measured(SMALL.replace(framework=options), tmp_path)
    settings = {"tp_mode": "REDUCE_SCATTER", "tp_linear_async_communication": "True"}
    assert observed(result).settings.items() >= {"parallelism": "dp 1 x tp 2 x pp 1", **settings}.items()
    assert observed(result).environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert result.figures.tokens_per_s is not None
    assert result.figures.step_s_p50 == pytest.approx(4 * 32 / result.figures.tokens_per_s)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(Nanotron(dp=2, zero_stage=1).from_options(SMALL, files=tmp_path)))
    return file


def test_contradiction_prevents_a_launch(mine: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CaseError, match="nanotron-dp2-tp2: dp 2 x tp 2 x pp 1 is 4, but the case's topology has 2"
    ):
        launch_once(SMALL.replace(framework=Nanotron(dp=2, tp=2)), MACHINE, tmp_path / "launch")
    mine.write_text(mine.read_text().replace("dp: 2", "dp: 1"))
    case = SMALL.replace(framework=Nanotron(config=mine), micro_batch=2)
    with pytest.raises(CaseError, match=r"nanotron-mine: dp 1 x tp 1 x pp 1 is 1, .* but the case's micro_b"):
        launch_once(case, MACHINE, tmp_path / "launch")
    assert not (tmp_path / "launch").exists()


@pytest.mark.parametrize(
    ("options", "text", "said"),
    [
        ({"dp": 2, "resume": True}, None, "config mine sets all options: remove dp2, resume"),
        ({}, "parallelism: {dp: 2}", r"config: \S*mine.yaml: checkpoints: missing, but training needs"),
        ({}, "- 1", "mine.yaml contains a list instead of sections with fields"),
        ({}, "", "mine.yaml contains a NoneType instead of sections with fields"),
    ],
)
def test_wrong_file_fails_when_the_case_is_made(
    mine: Path, options: dict[str, Any], text: str | None, said: str
) -> None:
    if text is not None:
        mine.write_text(text)
    with pytest.raises(CaseError, match=said):
        Nanotron(config=str(mine), **options)


def test_keeps_a_file_whatever_its_comments(mine: Path, tmp_path: Path) -> None:
    case = SMALL.replace(framework=Nanotron(config=mine))
    Nanotron(config=mine).check(case)
    mine.write_text("# mine\n" + mine.read_text())
    assert str(Nanotron(config=mine)) == str(case.framework), "`perfsuite judge` compares this text"
    mine.unlink()
    assert Case.model_validate_json(case.model_dump_json()) == case
    with pytest.raises(FileError, match=r"mine\.yaml: No such file .* file of nanotron, in YAML\.$"):
        Nanotron(config=mine)


@pytest.mark.parametrize("by_file", [False, True], ids=["options", "a file"])
@pytest.mark.parametrize("asked", [True, False])
def test_overlapped_tp_sets_its_environment(mine: Path, asked: bool, by_file: bool) -> None:
    name = "tp_linear_async_communication"
    mine.write_text(mine.read_text().replace(f"{name}: false", f"{name}: {str(asked).lower()}"))
    by_options = Nanotron(tp=2, tp_linear_async_communication=asked)
    plan = (Nanotron(config=mine) if by_file else by_options).plan(make_case())
    assert plan.environment == ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if asked else {})
    assert plan.process_group == "lazy"


def test_a_case_expects_its_parallelism_and_sharding() -> None:
    sharded = Nanotron(dp=2, tp=2, zero_stage=1, accumulate_grad_in_fp32=True)
    settings = {"wrapper": "none", "sharding": "optimizer (ZeRO 1)", "gradient_dtype": "float32"}
    settings |= {"parallelism": "dp 2 x tp 2 x pp 1", "tp_mode": "ALL_REDUCE", "pp_engine": "1f1b"}
    assert sharded.expected(SMALL.replace(precision="bf16")) == {**settings, "optimizer_parameters": None}
    plain = Nanotron(dp=2).expected(SMALL)
    assert (plain["wrapper"], plain["sharding"]) == ("DistributedDataParallel", "none")
    assert "optimizer_parameters" not in plain
