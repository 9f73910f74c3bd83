"""Measures how long perfsuite takes from a fault on two nodes to its verdict, for docs/evidence/faults.md.

Two ranks of a small Llama train under DDP on both nodes of the emulated cluster. Then a process is killed or
hangs, or the job loses its step, its allocation or a node. `tests.benchmarks.fault_times` does the same on
one machine, and describes how the time is measured. Slurm notices a lost node only after SlurmdTimeout, which
is short in the emulated cluster.
"""

import os
from collections.abc import Iterator
from functools import partial

from perfsuite import Topology
from perfsuite.features.slurm.launcher import JOB_ID, SlurmLauncher
from perfsuite.node.machine import detect_cpu
from tests.benchmarks import show_table
from tests.benchmarks.fault_times import CASE, COLUMNS, Breaks, cells, seconds
from tests.features.slurm.allocation import Allocation
from tests.features.slurm.emulated import slurm_cluster
from tests.processes import pid_of


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield a row of the table for each fault on two nodes."""
    with slurm_cluster() as cluster:
        os.environ.update(cluster.environment)
        allocation = Allocation(cluster)
        faults: dict[str, Breaks | None] = {
            "rank is killed on another node": lambda run_dir: cluster.on(
                "n2", "kill", "-9", str(pid_of(1, run_dir, node=1))
            ),
            "agent is killed on another node": lambda run_dir: allocation.agent("n2").kill(),
            "step is cancelled": lambda run_dir: cluster.run("scancel", allocation.step()),
            "hang on several nodes": None,
            "allocation is cancelled": lambda run_dir: cluster.run("scancel", allocation.job_id),
            "node is lost": lambda run_dir: cluster.kill_slurmd("n2"),
        }
        case = CASE.replace(topology=Topology(nodes=2, processes_per_node=1))
        machine = detect_cpu("of two nodes").replace(nodes=2)

        def once(fault: str) -> tuple[float, str]:
            allocation.take()
            os.environ[JOB_ID] = allocation.job_id
            return seconds(case, machine, SlurmLauncher, faults[fault])

        for fault in faults:
            yield cells(fault, partial(once, fault))
        allocation.release()


if __name__ == "__main__":
    show_table(COLUMNS, rows())
