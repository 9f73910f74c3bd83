"""A whole session of pytest inside an allocation that is cancelled, and gone on with in the next one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.results.session_file import SessionFile
from tests.launch.slurm.allocation import Allocation
from tests.processes import executable, wait_until
from tests.synthetic import commit

CASES = """
import pytest
from perfsuite import Case, Fake, Model, Script, Topology

FIRST = Case(
    model="llama-tiny",
    framework=Fake(),
    sequence_length=64,
    micro_batch=4,
    topology=Topology(processes_per_node=1),
    hardware="cpu",
    timeout_s=600,
)
CASES = [
    FIRST,
    FIRST.replace(
        framework=Script(path="train.py"),
        model=Model.named("net"),
        topology=Topology(nodes=2, processes_per_node=1),
        steps=20,
    ),
    FIRST.replace(topology=Topology(nodes=2, processes_per_node=1)),
    FIRST.replace(topology=Topology(nodes=3, processes_per_node=1)),
]

@pytest.mark.parametrize("case", CASES)
def test_it(bench, case):
    bench(case)
"""
TRAIN = """
import os, time
import torch

while not os.path.exists("go"):
    time.sleep(0.1)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
pytestmark = pytest.mark.launch


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "test_cases.py", "--perf-launcher=slurm", *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True, env=kept)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider --perf-record-launches=1\n")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / ".gitignore").write_text(".perfsuite\n__pycache__\ngo\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    commit(tmp_path)
    return tmp_path


def test_what_an_allocation_left_is_measured_in_the_next_one(
    allocation: Allocation, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(project) as session:
        store = project / ".perfsuite"

        wait_until(
            lambda: len(list(store.glob("runs/*/*/launch-1/rank-*.log"))) == 3,
            "both ranks of the second case to run",
            seconds=300,
        )
        allocation.cluster.run("scancel", allocation.job_id)
        out, _ = session.communicate()
    assert session.returncode not in (0, 1)
    assert re.search(r"is over: .*--perf-resume measures what is left in another allocation", out)
    (project / "go").touch()
    allocation.renew()
    monkeypatch.setenv("SLURM_JOB_ID", allocation.job_id)
    with start(project, "--perf-resume") as session:
        out, _ = session.communicate()
    assert session.returncode == 0, out
    (results,) = store.glob("runs/*/results.json")
    told = json.loads(results.read_text())
    first, second, third = (each["verdict"]["outcome"] for each in told["results"])
    assert (first, third) == ("recorded", "recorded")
    assert second in ("recorded", "unhealthy"), "both nodes share this machine, with other tests"
    assert [len(each["runs"][0]["nodes"]) for each in told["results"]] == [0, 2, 2]
    assert [each["reason"] for each in told["skipped"]] == ["it needs 3 nodes of 1, there are 2"]
    assert len(list(store.glob("runs/*/*/launch-1/case.json"))) == 4, "the first is not launched again"
    seen = [[node["name"] for node in each["nodes"]] for each in told["preflights"]]
    assert seen[0] == seen[-1] == ["n1", "n2"], "each part looks at its nodes"
    assert {each.name for each in store.glob("runs/*/preflight-*")} >= {"preflight-1", "preflight-2"}


def test_both_arms_of_a_comparison_are_launched_on_all_nodes(allocation: Allocation, project: Path) -> None:
    seen = project / "seen"
    writes = f'echo "$SLURM_NODEID $LEVEL" >> {seen}'
    executable(project / "python", writes, f'exec {sys.executable} "$@"')
    options = ("-k", "fake and 2x1", "--perf-against=./python LEVEL=high", "--perf-max-pairs=5")
    with start(project, *options) as session:
        out, _ = session.communicate()
    (results,) = (project / ".perfsuite").glob("compare/*/results.json")
    (told,) = json.loads(results.read_text())["results"]
    assert told["verdict"]["outcome"] == "passed", out
    for runs in (told["before"], told["runs"]):
        assert [[node["name"] for node in run["nodes"]] for run in runs] == [["n1", "n2"]] * 3
    assert {"0 high", "1 high"} < set(seen.read_text().splitlines()), "arm A has its interpreter and variable"


SLOW_NODE = """
import socket

if socket.gethostname() == "n2":
    from perfsuite.worker.timers import HostTimer

    honest = HostTimer.seconds
    HostTimer.seconds = lambda timer, start, end: 10 * honest(timer, start, end)
"""


def test_a_slow_node_is_named_and_nothing_is_launched_on_it(
    allocation: Allocation, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock makes all of its work seem to take ten times as long."""
    (project / "slow").mkdir()
    (project / "slow" / "sitecustomize.py").write_text(SLOW_NODE)
    monkeypatch.setenv("PYTHONPATH", str(project / "slow"))
    with start(project, "-k", "script") as session:
        out, _ = session.communicate()
    assert session.returncode == 1
    (results,) = project.glob(".perfsuite/runs/*/results.json")
    told = documents.read(results, SessionFile)
    (result,) = told.results
    assert (result.outcome, result.runs) == ("unhealthy", ())
    assert not list(results.parent.glob("script*"))
    (reason,) = result.verdict.reasons
    assert re.match(r"n2, by two preflights: matmul \S+ TFLOP/s, n1 has \S+ \(at least 40% is", reason)
    assert reason in " ".join(out.split())  # lines are 100 columns wide
    for seen in told.preflights:
        first, second = seen.nodes
        names = {"matmul_tflops", "copy_gb_s", "all_reduce_gb_s"}
        assert (first.name, set(first.rates)) == ("n1", names | {"next_gb_s"})
        assert (second.name, set(second.rates)) == ("n2", names | {"previous_gb_s"})
        assert all(node.health is not None and node.health.samples > 1 for node in seen.nodes)
    assert [bool(seen.nodes[1].problems) for seen in told.preflights] == [True, True]
    assert out.count("preflight of 2 nodes") == 2
