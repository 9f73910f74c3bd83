"""Tests that the emulated Slurm leaves nothing behind, even if the process that started it is killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.features.slurm import emulated
from tests.features.slurm.emulated import START_S, Cluster, interfaces_of, processes_of
from tests.processes import arguments, read_until, wait_until

ROOT = Path(__file__).parents[3]
SLOT = 100 + os.getpid() % 100
"""A slot that no other process of xdist uses."""
OWNER = f"""
import signal
from tests.features.slurm import emulated
with emulated.slurm_cluster([{SLOT}]) as cluster:
    cluster.run("sbatch", "--output=/dev/null", "--wrap=sleep 3600")
    print("started", flush=True)
    signal.pause()
"""


@pytest.mark.launch
def test_a_node_that_slurm_drained_is_resumed(cluster: Cluster) -> None:
    """Slurm drains a node if a step does not end. If it is not resumed, later tests do not get this node."""
    cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=Kill task failed")
    wait_until(lambda: cluster.state("n1") == "drained", "n1 to be drained")
    cluster.wait_until_idle()
    assert cluster.state("n1") == "idle"


@pytest.mark.launch
def test_killed_owner_leaves_nothing_of_a_cluster(cluster: Cluster) -> None:
    """The kernel ends the cluster's processes. The next cluster in the same slot removes everything else."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    with owner.stdout:
        read_until("started", owner.stdout, owner)
    stale = Cluster(SLOT).directory / "stale"
    stale.touch()
    wait_until(lambda: ["sleep", "3600"] in map(arguments, processes_of(SLOT)), "the job to run")
    owner.kill()
    owner.wait(START_S)
    wait_until(lambda: not processes_of(SLOT), "the cluster's processes to die")
    assert interfaces_of(SLOT), "nobody is left to remove the bridge"
    with emulated.slurm_cluster([SLOT]) as other:
        assert not stale.exists()
        assert len(processes_of(SLOT)) > 5
        assert len(interfaces_of(SLOT)) == 3
    assert (processes_of(SLOT), interfaces_of(SLOT)) == ([], [])
    assert not other.directory.exists()
    assert cluster.state("n1") == "idle", "clusters are independent"
