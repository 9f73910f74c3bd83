"""Test the recipes of docs/your-own-script.md as written, except LLaMA-Factory, which needs old packages."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, Script, Topology
from tests.frameworks.test_base import observed
from tests.frameworks.test_script import case_of, failure_of, measured

RECIPES = Path(__file__).parent / "recipes"
PAGE = (Path(__file__).parents[2] / "docs" / "your-own-script.md").read_text()
ALONE = Topology(processes_per_node=1)

pytestmark = pytest.mark.launch


def as_in_the_page(*words: str) -> tuple[str, ...]:
    """Return the words of a command, after checking that the page contains each of them."""
    assert [word for word in words if word not in PAGE] == []
    return words


@pytest.mark.nightly
def test_runs_the_command_of_torchrun(tmp_path: Path) -> None:
    command = as_in_the_page(
        "torchrun", "--standalone", "--nproc-per-node=2", "bench_cases/scripts/train_copy.py"
    )
    run = measured(case_of(Script(command=command), sequence_length=64), tmp_path)
    assert run.case.id.startswith("script-train_copy-")
    assert observed(run).settings["wrapper"] == "DistributedDataParallel"


def by_accelerate(**env: str) -> Case:
    command = as_in_the_page(
        *("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "tests/frameworks/recipes/train_accelerate.py"),
    )
    return case_of(Script(command=command, env=env), sequence_length=32)


@pytest.mark.nightly
def test_runs_the_command_of_accelerate_launch(tmp_path: Path) -> None:
    run = measured(by_accelerate(ACCELERATE_USE_CPU="true"), tmp_path)
    assert run.case.id.startswith("script-train_accelerate-")
    assert observed(run).settings["wrapper"] == "DistributedDataParallel"


@pytest.mark.nightly
def test_unaware_accelerate_exchanges_nothing(tmp_path: Path) -> None:
    """The command starts two processes, but neither of them wraps the model.

    So the two processes train two separate models.
    """
    kind, said = failure_of(by_accelerate(), tmp_path)
    assert kind == "mismatch"
    assert "the 2 ranks trained apart: no collective ran after the first step" in said


# --- fine-tuning by the command line ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its tokenizer, and conversations of different lengths."""
    directory = tmp_path_factory.mktemp("sft")
    subprocess.run([sys.executable, RECIPES / "make_sft.py", directory], check=True)
    return directory


def by_trl(sft: Path, length: int, *options: str, **script: Any) -> Case:
    command = (
        *("trl", "sft", "--model_name_or_path", str(sft / "model"), "--dataset_name", str(sft / "data")),
        *as_in_the_page("--per_device_train_batch_size", "4", "--max_steps", "100", "--save_strategy", "no"),
        *as_in_the_page("--output_dir", "{launch_dir}", "--max_length"),
        str(length),
        *("--report_to", "none", "--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
        *as_in_the_page(*options),
    )
    return case_of(Script(command=command, **script), sequence_length=length, topology=ALONE)


@pytest.mark.nightly
def test_trl_with_padding_says_how_much(sft: Path, tmp_path: Path) -> None:
    """If one sequence of a batch is cut to the full length, the others are padded to that length."""
    run = measured(by_trl(sft, 64), tmp_path)
    assert run.case.id.startswith("script-trl-sft-")
    assert "In the second step, the model was given 256, 13% of them padding" in str(run.notes)


@pytest.mark.nightly
def test_trl_must_declare_uneven_batches(sft: Path, tmp_path: Path) -> None:
    kind, said = failure_of(by_trl(sft, 128), tmp_path / "fixed")
    assert kind == "mismatch"
    assert "the case claims 512 a step" in said
    assert "Script(tokens='vary')" in said
    run = measured(by_trl(sft, 128, tokens="vary"), tmp_path / "vary")
    assert "(which vary, according to the case). In the second step" in str(run.notes)
    assert "the model was given 320, 22% of them padding" in str(run.notes)


@pytest.mark.nightly
def test_trl_packed_has_the_tokens_that_it_claims(sft: Path, tmp_path: Path) -> None:
    run = measured(by_trl(sft, 64, "--packing", "true", "--packing_strategy", "wrapped"), tmp_path)
    assert [note for note in run.notes if "tokens" in note] == []
