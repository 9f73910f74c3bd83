"""Tests of a pytest session whose allocation is cancelled. A second allocation continues the session."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite import Model, Script, Topology
from tests.features.slurm.allocation import Allocation
from tests.processes import ended, wait_until
from tests.samples import make_case
from tests.suite import measuring
from tests.synthetic import commit

FIRST, ON_TWO, ON_THREE = (
    make_case(topology=Topology(nodes=nodes, processes_per_node=1), timeout_s=600) for nodes in (1, 2, 3)
)
SCRIPT = ON_TWO.replace(framework=Script(path="train.py"), model=Model.named("net"))
SESSION_S = 300  # longer than a session of this test, even on a loaded machine
TRAIN = """
import os, time

while not os.path.exists("go"):
    time.sleep(0.1)
import torch

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "test_cases.py", "--perf-launcher=slurm", *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True, env=kept)


@pytest.mark.nightly
def test_next_allocation_measures_what_is_left(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next allocation continues the session. The ranks of a script communicate across nodes."""
    (tmp_path / "test_cases.py").write_text(measuring(FIRST, SCRIPT, ON_TWO, ON_THREE))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider --perf-record-launches=1\n")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / ".gitignore").write_text(".perfsuite\n__pycache__\ngo\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    commit(tmp_path)
    store = tmp_path / ".perfsuite"
    with ended(start(tmp_path)) as session:
        wait_until(
            lambda: len(list(store.glob("runs/*/*/launch-1/rank-*.log"))) == 3,
            "both ranks of the second case to run",
            seconds=SESSION_S,
        )
        allocation.cluster.run("scancel", allocation.job_id)
        out, _ = session.communicate(timeout=SESSION_S)
    assert session.returncode not in (0, 1)
    assert re.search(r"is over: .*--perf-resume measures the remaining cases in another allocation", out)
    (tmp_path / "go").touch()
    allocation.renew()
    monkeypatch.setenv("SLURM_JOB_ID", allocation.job_id)
    with ended(start(tmp_path, "--perf-resume", "--perf-no-preflight")) as session:
        out, _ = session.communicate(timeout=SESSION_S)
    assert session.returncode == 0, out
    (results,) = store.glob("runs/*/results.json")
    written = json.loads(results.read_text())
    first, second, third = (result["verdict"]["outcome"] for result in written["results"])
    assert (first, third) == ("recorded", "recorded")
    assert second in ("recorded", "unhealthy"), "other tests can disturb the machine"
    assert [len(result["runs"][0]["nodes"]) for result in written["results"]] == [0, 2, 2]
    assert [skip["reason"] for skip in written["skipped"]] == [
        "it needs 3 nodes (processes per node: 1), but there are only 2"
    ]
    assert len(list(store.glob("runs/*/*/launch-1/case.json"))) == 4, "the first case is not launched again"
    assert [node["name"] for node in written["preflights"][0]["nodes"]] == ["n1", "n2"]
    assert (results.parent / "preflight-1").is_dir()
