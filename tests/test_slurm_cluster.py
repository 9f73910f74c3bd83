"""The Slurm that other tests use: its nodes are apart, it can be broken and repaired, and nothing stays."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import arguments, wait_until
from tests.slurm_cluster import START_S, Cluster, interfaces_of, missing, processes_of, slurm_cluster

SLEEP = ["sleep", "3600"]
OWN_SLOT = 100 + os.getpid() % 100
"""A slot that no other process of xdist takes, nor clears."""
OWNER = f"""
import signal
from tests.slurm_cluster import slurm_cluster
with slurm_cluster([{OWN_SLOT}]) as cluster:
    cluster.run("sbatch", "--output=/dev/null", "--wrap=sleep 3600")
    print("started", flush=True)
    signal.pause()
"""

pytestmark = pytest.mark.launch


def is_asleep(process: psutil.Process) -> bool:
    return [Path(word).name for word in arguments(process)] == SLEEP  # Slurm gives the program's whole path


def sleeping(cluster: Cluster, node: str) -> list[psutil.Process]:
    return [process for process in cluster.processes(node) if is_asleep(process)]


def sleep_on(cluster: Cluster, node: str) -> subprocess.Popen[bytes]:
    """A step that sleeps on a node; returns when it does."""
    command = ["srun", f"--nodelist={node}", "--ntasks=1", *SLEEP]
    srun = subprocess.Popen(command, env={**os.environ, **cluster.environment}, stderr=subprocess.DEVNULL)
    wait_until(lambda: bool(sleeping(cluster, node)), f"a process on {node}")
    return srun


def test_nodes_are_machines_of_their_own(cluster: Cluster) -> None:
    assert cluster.on("n2", "hostname") == "n2\n"
    assert cluster.on("n2", "getent", "hosts", "n1").split()[0].endswith(".11")
    assert cluster.on("n2", "getent", "ahostsv4", "localhost").split()[0] == "127.0.0.1"
    srun = sleep_on(cluster, "n1")
    assert " ".join(SLEEP) in cluster.on("n1", "ps", "ax")
    assert " ".join(SLEEP) not in cluster.on("n2", "ps", "ax")
    assert not sleeping(cluster, "n2")
    cluster.run("scancel", "--full", "--user=root")
    srun.wait(START_S)
    wait_until(lambda: not any(cluster.processes(node) for node in cluster.nodes), "the job to end")


def test_nothing_stays_of_a_cluster_and_its_jobs_though_its_owner_was_killed(cluster: Cluster) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == "started\n"
    stale = Cluster(OWN_SLOT).directory / "stale"
    stale.touch()
    wait_until(lambda: any(is_asleep(each) for each in processes_of(OWN_SLOT)), "the job to run")
    owner.kill()
    owner.wait(START_S)
    wait_until(lambda: not processes_of(OWN_SLOT), "the cluster's processes to die")
    assert interfaces_of(OWN_SLOT), "nobody is left to remove the bridge"
    with slurm_cluster([OWN_SLOT]) as other:
        assert not stale.exists()
        srun = sleep_on(other, "n1")
        assert len(processes_of(OWN_SLOT)) > 5
        assert len(interfaces_of(OWN_SLOT)) == 3
        assert not sleeping(cluster, "n1"), "clusters know nothing of each other"
        with pytest.raises(RuntimeError, match="clusters run already in all of"), slurm_cluster([OWN_SLOT]):
            pass
    srun.wait(START_S)
    assert (processes_of(OWN_SLOT), interfaces_of(OWN_SLOT)) == ([], [])
    assert not other.directory.exists()
    assert cluster.state("n1") == "idle"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "nodes are namespaces of Linux, which only root may make"
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "slurmd" else name)
    assert missing() == "slurmd not installed: run `make slurm` as root"


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_without_slurm_a_test_is_skipped_or_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), pytester.path)
    pytester.makepyfile("def test_it(cluster): ...")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("tests.slurm_cluster.missing", lambda: "no Slurm: run `make slurm`")
    result = pytester.runpytest_inprocess("-rs", "-p", "no:xdist")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*no Slurm: run `make slurm`*"])
