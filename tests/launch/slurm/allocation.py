"""Both nodes of a cluster, for the tests of one file after the other."""

from __future__ import annotations

import subprocess

import psutil

from tests.processes import agent_among, wait_until
from tests.slurm_cluster import Cluster


class Allocation:
    """Both nodes of a cluster, for this process."""

    def __init__(self, cluster: Cluster, *options: str) -> None:
        """`options` are further ones of salloc."""
        self.cluster = cluster
        self._options = options
        self.job_id = self._allocate()

    def renew(self) -> None:
        """Take the nodes again, when the allocation is over."""
        self._wait_until_idle()
        self.job_id = self._allocate()

    def release(self) -> None:
        """Give the nodes back, repaired if they broke."""
        self.cluster.run("scancel", "--full", self.job_id)
        for node in self.cluster.nodes:
            if self.cluster.state(node).rstrip("*") not in ("idle", "completing", "allocated", "mixed"):
                self.cluster.repair(node)
        self._wait_until_idle()

    def agent(self, node: str) -> psutil.Process:
        """The agent of the launch on a node."""
        found = agent_among(self.cluster.processes(node))
        assert found is not None
        return found

    def step(self) -> str:
        """The id of the launch's step."""
        steps = self.cluster.run("squeue", "--noheader", "--steps", f"--jobs={self.job_id}", "--format=%i")
        return next(each for each in steps.split() if each.rpartition(".")[2].isdigit())

    def is_clean(self) -> bool:
        """Whether no process of a job is left on any node."""
        return not any(self.cluster.processes(node) for node in self.cluster.nodes)

    def _wait_until_idle(self) -> None:
        nodes = self.cluster.nodes
        wait_until(lambda: all(self.cluster.state(node) == "idle" for node in nodes), "idle nodes")

    def _allocate(self) -> str:
        words = ["salloc", "--no-shell", "--nodes=2", "--exclusive", "--time=30", "--immediate=60"]
        done = subprocess.run([*words, *self._options], capture_output=True, text=True, check=True)
        return done.stderr.split("job allocation ")[1].split()[0]
