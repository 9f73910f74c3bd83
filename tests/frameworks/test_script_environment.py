"""A script sees the variables that its user's own launcher sets, launched by perfsuite and dry."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite import Case, Script, Topology
from perfsuite.node.ranks import without_rank
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
"""Variables whose values differ from launch to launch, or that are perfsuite's."""
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
TORCHRUN, BY_MODULE = ("torchrun", *TWO), ("python", "-m", "torch.distributed.run", *TWO)
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
    # perfsuite gives both to every script.
    environment = {**without_rank(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environment, check=True, capture_output=True)


def case(directory: Path, by: str, *launcher: str, ranks: int) -> Case:
    file = str(directory / "train.py")
    how = {"command": (*launcher, file)} if launcher else {"path": file}
    framework = Script(**how, env={"TOLD_BY": by})
    changes = {"topology": Topology(processes_per_node=ranks), "sequence_length": None, "micro_batch": 4}
    return case_of(framework, **changes, max_warmup_steps=COUNTED.max_warmup_steps)


@pytest.mark.parametrize(
    ("real", "launcher", "ranks"),
    [
        (("python",), (), 1),
        (("python",), ("python",), 1),
        (TORCHRUN, (), 2),
        (TORCHRUN, TORCHRUN, 2),
        (BY_MODULE, BY_MODULE, 2),
        ((*ON_CPU, "--num_processes=1"), (*ON_CPU, "--num_processes=1"), 1),
        ((*ON_CPU, "--num_processes=2"), (*ON_CPU, "--num_processes=2"), 1),
        (MULTI, MULTI, 2),
    ],
    ids=["path", "python", "path of two", "torchrun", "module", "accelerate", "accelerate of two", "multi"],
)
def test_a_script_sees_what_its_own_launcher_sets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    real: tuple[str, ...],
    launcher: tuple[str, ...],
    ranks: int,
) -> None:
    (tmp_path / "train.py").write_text(TELLS)
    # What perfsuite names itself unless the user does.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    by_its_user(tmp_path, *real)
    for name, value in OF_ANOTHER_JOB.items():
        monkeypatch.setenv(name, value)
    measured(case(tmp_path, "launch", *launcher, ranks=ranks), tmp_path / "run")
    passed(case(tmp_path, "dry", *launcher, ranks=ranks), tmp_path / "dry")
    for rank in ["0", "1"][:ranks] if ranks > 1 else ["none"]:
        expected = told(tmp_path, "real", rank)
        for by in ("launch", "dry"):
            if (by, rank) != ("dry", "1"):
                seen = told(tmp_path, by, rank)
                seen = {name: value for name, value in seen.items() if not name.startswith("PERFSUITE_")}
                assert seen == expected, by
    assert not list(tmp_path.glob("*-7.json"))
