"""Test that a script sees the variables of its user's own launcher, in a launch and in a dry run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from perfsuite import Case, Script, Topology
from perfsuite.node.ranks import without_rank
from perfsuite.results.run_dir import COMPILE_CACHES, FLIGHT_RECORDER_FILE
from tests.dry.runs import passed
from tests.frameworks.test_base import COUNTED, measured
from tests.frameworks.test_script import case_of

pytestmark = pytest.mark.launch

TELLS = """
import json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
with open(f"{here}/{os.environ.get('TOLD_BY', 'real')}-{os.environ.get('RANK', 'none')}.json", "w") as file:
    json.dump(dict(os.environ), file)
if "--only-tell" in sys.argv:
    raise SystemExit
import torch
import torch.distributed as dist
model = torch.nn.Linear(8, 8)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    optimizer.zero_grad()
    (model(torch.ones(4, 8)) - 1).square().mean().backward()
    optimizer.step()
"""
OF_THE_LAUNCHER = re.compile(".*RANK.*|.*WORLD.*|MASTER_.*|ROLE_.*|TORCH.*|ACCELERATE_.*|KMP_.*")
EACH_ITS_OWN = re.compile(
    "PERFSUITE_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_(RUN_ID|ERROR_FILE|USE_AGENT_STORE)|ACCELERATE_DYNAMO_.*"
)
"""Variables whose values differ between launches, or that belong to perfsuite."""
OF_ANOTHER_JOB = {
    "RANK": "7",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "elsewhere",
    "MASTER_PORT": "3",
    "TORCHELASTIC_RUN_ID": "outer",
    "ROLE_NAME": "outer",
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "9",
    "PMI_RANK": "7",
    "PMI_SIZE": "9",
}
TWO = ("--standalone", "--nproc-per-node=2")
TORCHRUN = ("torchrun", *TWO)
BY_MODULE = ("python", "-m", "torch.distributed.run", *TWO)
ACCELERATE = ("accelerate", "launch", "--num_machines=1", "--mixed_precision=no")
ON_CPU = (*ACCELERATE, "--cpu")
MULTI = (*ACCELERATE, "--multi_gpu", "--num_processes=2", "--main_process_port=0")


def launcher_variables(directory: Path, by: str, rank: str) -> dict[str, str]:
    variables = json.loads((directory / f"{by}-{rank}.json").read_text())
    seen = {name: value for name, value in variables.items() if OF_THE_LAUNCHER.fullmatch(name)}
    return {name: "" if EACH_ITS_OWN.fullmatch(name) else value for name, value in seen.items()}


def set_by_its_user(directory: Path) -> dict[str, str]:
    """Return values of the variables that perfsuite sets unless the user has set them."""
    return {name: str(directory / name) for name in (*COMPILE_CACHES, FLIGHT_RECORDER_FILE)}


def by_its_user(directory: Path, *launcher: str) -> None:
    program = Path(sys.executable).parent / launcher[0]
    command = (str(program), *launcher[1:], str(directory / "train.py"), "--only-tell")
    # perfsuite sets both variables for every script.
    environment = {**without_rank(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= set_by_its_user(directory)
    subprocess.run(command, env=environment, check=True, capture_output=True)


def case(directory: Path, by: str, *launcher: str, ranks: int) -> Case:
    file = str(directory / "train.py")
    how = {"command": (*launcher, file)} if launcher else {"path": file}
    framework = Script(**how, env={"TOLD_BY": by})
    changes = {"topology": Topology(processes_per_node=ranks), "sequence_length": None, "micro_batch": 4}
    return case_of(framework, **changes, max_warmup_steps=COUNTED.max_warmup_steps)


LAUNCHERS = {
    "path": (("python",), (), 1),
    "python": (("python",), ("python",), 1),
    "path of two": (TORCHRUN, (), 2),
    "torchrun": (TORCHRUN, TORCHRUN, 2),
    "module": (BY_MODULE, BY_MODULE, 2),
    "accelerate": ((*ON_CPU, "--num_processes=1"), (*ON_CPU, "--num_processes=1"), 1),
    "accelerate of two": ((*ON_CPU, "--num_processes=2"), (*ON_CPU, "--num_processes=2"), 1),
    "multi": (MULTI, MULTI, 2),
}
"""How the user starts the script, how the case starts it, and the number of ranks."""
HOW = [
    how if how in ("path", "torchrun") else pytest.param(how, marks=pytest.mark.nightly) for how in LAUNCHERS
]


Started = Callable[[Sequence[str]], Path]


@pytest.fixture(scope="module")
def started_by_its_user(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Return a function that starts the script as its user does, once for each launcher.

    The script records its variables. The function returns the directory of the script and its records.
    """

    @cache
    def started(launcher: Sequence[str]) -> Path:
        directory = tmp_path_factory.mktemp("user")
        (directory / "train.py").write_text(TELLS)
        by_its_user(directory, *launcher)
        return directory

    return started


@pytest.fixture
def as_its_user_sees(started_by_its_user: Started, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return a function that does the same, and then sets variables of the user and of another job.

    Launches after a call of this function get these variables.
    """

    def started(launcher: Sequence[str]) -> Path:
        directory = started_by_its_user(launcher)
        for name, value in (set_by_its_user(directory) | OF_ANOTHER_JOB).items():
            monkeypatch.setenv(name, value)
        return directory

    return started


def check(directory: Path, by: str, ranks: Sequence[str]) -> None:
    for rank in ranks:
        seen = launcher_variables(directory, by, rank)
        seen = {name: value for name, value in seen.items() if not name.startswith("PERFSUITE_")}
        assert seen == launcher_variables(directory, "real", rank)
    assert not list(directory.glob("*-7.json"))


@pytest.mark.parametrize("how", HOW)
def test_a_launch_sees_what_its_own_launcher_sets(
    tmp_path: Path, as_its_user_sees: Started, how: str
) -> None:
    real, launcher, ranks = LAUNCHERS[how]
    directory = as_its_user_sees(real)
    measured(case(directory, f"launch-{how}", *launcher, ranks=ranks), tmp_path / "run")
    check(directory, f"launch-{how}", ["0", "1"] if ranks > 1 else ["none"])


@pytest.mark.parametrize("how", HOW)
def test_dry_run_sees_its_launchers_settings(tmp_path: Path, as_its_user_sees: Started, how: str) -> None:
    real, launcher, ranks = LAUNCHERS[how]
    directory = as_its_user_sees(real)
    passed(case(directory, f"dry-{how}", *launcher, ranks=ranks), tmp_path / "dry")
    check(directory, f"dry-{how}", ["0"] if ranks > 1 else ["none"])
