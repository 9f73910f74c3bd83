"""An allocation of both nodes of a cluster, which the tests of a file use one after another."""

import os
import subprocess

import psutil

from tests.features.slurm.emulated import START_S, Cluster
from tests.processes import agent_among


class Allocation:
    """An allocation of both nodes of a cluster, for this process. `options` are more options of salloc."""

    def __init__(self, cluster: Cluster, *options: str) -> None:
        self.cluster = cluster
        self.job_id = ""
        self._options = options
        self.take(*options)

    def renew(self, *options: str) -> None:
        """Allocate the nodes again after the allocation has ended."""
        self.cluster.wait_until_idle()
        words = [
            "salloc",
            "--no-shell",
            "--nodes=2",
            "--exclusive",
            "--time=30",
            f"--immediate={START_S}",
            *options,
        ]
        environment = {**os.environ, **self.cluster.environment}
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=environment, timeout=2 * START_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
        self.job_id = done.stderr.split("job allocation ")[1].split()[0]
        self._options = options

    def take(self, *options: str) -> None:
        """Allocate the nodes with these options of salloc.

        If the present allocation is clean and has these options, keep it.
        """
        state = self.cluster.run("squeue", "--noheader", "--format=%i %T").split()
        if state != [self.job_id, "RUNNING"] or self._options != options or not self.is_clean():
            self.release()
            self.renew(*options)

    def release(self) -> None:
        """End the allocation, and repair broken nodes."""
        self.cluster.run("scancel", "--full", "--user=root")
        for node in self.cluster.nodes:
            if self.cluster.state(node).rstrip("*") not in ("idle", "completing", "allocated", "mixed"):
                self.cluster.repair(node)
        self.cluster.wait_until_idle()

    def agent(self, node: str) -> psutil.Process:
        """Return the agent of the launch on a node."""
        process = agent_among(self.cluster.processes(node))
        assert process is not None
        return process

    def step(self) -> str:
        """Return the id of Slurm's step for the launch."""
        steps = self.cluster.run("squeue", "--noheader", "--steps", f"--jobs={self.job_id}", "--format=%i")
        return next(step_id for step_id in steps.split() if step_id.rpartition(".")[2].isdigit())

    def is_clean(self) -> bool:
        """Whether no process of a job is left on any node."""
        return not any(self.cluster.processes(node) for node in self.cluster.nodes)
