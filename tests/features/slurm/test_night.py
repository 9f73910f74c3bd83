"""Tests of a project's first baseline and first night, with the commands that `init --slurm` prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite import Topology
from tests.features.slurm.emulated import Cluster
from tests.samples import make_case
from tests.suite import measuring
from tests.synthetic import commit, git

INIT = ("perfsuite", "init", "--script", "train.py", "--slurm", "--hardware", "cpu")


@pytest.mark.nightly
def test_project_follows_what_init_prints(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_cases = tmp_path / "bench_cases"
    bench_cases.mkdir()
    case = make_case(topology=Topology(processes_per_node=1))
    (bench_cases / "test_train.py").write_text(measuring(case))
    (tmp_path / "train.py").touch()
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -p no:xdist --perf-wait-quiet=0")
    said = subprocess.run(INIT, capture_output=True, text=True, check=True).stdout
    record, accept, night = said.partition("Next:\n")[2].splitlines()
    # A real baseline needs twice as many launches.
    subprocess.run(record.replace("launches=10", "launches=5"), shell=True, check=True)
    subprocess.run(accept, shell=True, check=True)
    ended = subprocess.run(night, shell=True, check=False).returncode
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert Path(result["baseline_file"]).is_relative_to(tmp_path / "baselines")
    outcome = result["verdict"]["outcome"]
    assert ended == (outcome not in ("passed", "improved")), "other tests can disturb the machine"
    assert len([*tmp_path.glob("slurm-*.out")]) == 2
    slurm.wait_until_idle()
