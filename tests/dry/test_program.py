import shutil
import sys
import traceback
from pathlib import Path

import pytest

from perfsuite.dry import program
from perfsuite.errors import DryRunError
from tests.dry.runs import failure_of, passed
from tests.dry.test_script import GROUP, TORCHRUN, TRAIN, WRAPPED, case_of


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bash", "run.sh"), "can only run Python programs, but the command begins with '.*/bash'"),
        ((sys.executable, "-c", "1"), "needs a Python file or module, but '.* -c 1' names neither"),
    ],
)
def test_names_a_command_that_is_not_python(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(DryRunError, match=said):
        program._run([shutil.which(words[0]) or "", *words[1:]])


def test_script_beside_perfsuite_has_a_line() -> None:
    """The scripts in a clone of this repository are in such a place."""
    with pytest.raises(ZeroDivisionError) as error:
        print(1 / 0)
    where = program.place(traceback.walk_tb(error.tb))
    assert where is not None
    assert where.endswith(": print(1 / 0)")


@pytest.mark.launch
def test_refuses_a_command_with_other_ranks(tmp_path: Path) -> None:
    failure = failure_of(case_of(tmp_path, TRAIN, *TORCHRUN, "--nproc-per-node=4"), tmp_path / "dry")
    said = "world_size: the case asks for 2 ranks, but the command starts 4 (1 x 4)"
    assert (failure.kind, said in failure.message) == ("mismatch", True), failure.message


@pytest.mark.launch
def test_follows_accelerates_only_process(tmp_path: Path) -> None:
    launcher = ("-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1")
    settings = ("--mixed_precision=no", "--dynamo_backend=no")
    alone = TRAIN.replace(GROUP, "").replace(WRAPPED, "").replace("sampler=DistributedSampler(data), ", "")
    case = case_of(tmp_path, alone, sys.executable, *launcher, *settings, ranks=1)
    passed(case, tmp_path / "dry")
