"""Test that a script sees the variables of its user's own launcher, in a launch and in a dry run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
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


def told(directory: Path, by: str, rank: str) -> dict[str, str]:
    variables = json.loads((directory / f"{by}-{rank}.json").read_text())
    seen = {name: value for name, value in variables.items() if OF_THE_LAUNCHER.fullmatch(name)}
    return {name: "" if EACH_ITS_OWN.fullmatch(name) else value for name, value in seen.items()}


def by_its_user(directory: Path, *launcher: str) -> None:
    program = Path(sys.executable).parent / launcher[0]
    command = (str(program), *launcher[1:], str(directory / "train.py"), "--only-tell")
    # perfsuite sets both variables for every script.
    environment = {**without_rank(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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


def as_its_user_sees(directory: Path, launcher: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the variables when the user starts the script. Later starts get variables of another job."""
    (directory / "train.py").write_text(TELLS)
    for name in (*COMPILE_CACHES, FLIGHT_RECORDER_FILE):  # perfsuite sets them unless the user has set them
        monkeypatch.setenv(name, str(directory / name))
    by_its_user(directory, *launcher)
    for name, value in OF_ANOTHER_JOB.items():
        monkeypatch.setenv(name, value)


def check(directory: Path, by: str, ranks: Sequence[str]) -> None:
    for rank in ranks:
        seen = told(directory, by, rank)
        seen = {name: value for name, value in seen.items() if not name.startswith("PERFSUITE_")}
        assert seen == told(directory, "real", rank)
    assert not list(directory.glob("*-7.json"))


@pytest.mark.parametrize("how", HOW)
def test_a_launch_sees_what_its_own_launcher_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    real, launcher, ranks = LAUNCHERS[how]
    as_its_user_sees(tmp_path, real, monkeypatch)
    measured(case(tmp_path, "launch", *launcher, ranks=ranks), tmp_path / "run")
    check(tmp_path, "launch", ["0", "1"] if ranks > 1 else ["none"])


@pytest.mark.parametrize("how", HOW)
def test_dry_run_sees_its_launchers_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    real, launcher, ranks = LAUNCHERS[how]
    as_its_user_sees(tmp_path, real, monkeypatch)
    passed(case(tmp_path, "dry", *launcher, ranks=ranks), tmp_path / "dry")
    check(tmp_path, "dry", ["0"] if ranks > 1 else ["none"])
