from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perfsuite import Script
from tests.dry.runs import failure_of, passed
from tests.dry.test_script import TORCHRUN, TRAIN, case_of

pytestmark = [pytest.mark.launch, pytest.mark.usefixtures("_forked")]


@pytest.mark.parametrize(
    ("command", "kind", "said"),
    [
        (("bash", "run.sh"), "not_dry", "follows Python programs only, and the command begins with"),
        ((sys.executable, "-c", "1"), "not_dry", "needs a file or a module"),
        (
            (*TORCHRUN, "--nproc-per-node=4", "train.py"),
            "mismatch",
            "world_size: the case asks for 2 ranks, and the command starts 4 (1 x 4)",
        ),
    ],
    ids=["shell", "-c", "ranks"],
)
def test_a_command_that_cannot_be_followed_is_named(
    tmp_path: Path, command: tuple[str, ...], kind: str, said: str
) -> None:
    case = case_of(tmp_path, TRAIN)
    case = case.replace(framework=Script(command=command, cwd=tmp_path, loss="finite"))
    failure = failure_of(case, tmp_path / "dry")
    assert (failure.kind, said in failure.message) == (kind, True), failure.message


def test_the_only_process_of_accelerate_is_followed(tmp_path: Path) -> None:
    launcher = ("-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1")
    settings = ("--mixed_precision=no", "--dynamo_backend=no")
    case = case_of(tmp_path, TRAIN, sys.executable, *launcher, *settings, ranks=1)
    passed(case, tmp_path / "dry")
