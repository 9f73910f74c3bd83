"""How long perfsuite takes from a fault to its verdict: the table of docs/evidence/faults.md (7 minutes).

Two ranks of a small Llama train under DDP, on this machine and over the two nodes of the emulated cluster of
the tests. A rank or an agent is killed, or what holds the job is taken away, once both ranks run; a hang
begins with the last step that the driver sees, and the time that is let pass is left out. The time ends when
`launch_once` returns: every process of the job is gone then. That a node is lost Slurm itself notices, after
its SlurmdTimeout, which is short in the emulated cluster.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from perfsuite import DDP, Case, Topology
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError
from perfsuite.launch import hang
from perfsuite.launch.base import Launcher
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.slurm.launcher import JOB_ID, SlurmLauncher
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results.run_dir import RunDir
from tests.benchmarks import show_table
from tests.launch.slurm.allocation import Allocation
from tests.processes import agent_among, pid_of
from tests.samples import make_case
from tests.slurm_cluster import Cluster, slurm_cluster

REPEATS = 3
LET_PASS = re.compile(r"\((\d+) s are let pass here\)")
"""In the message of a hang: seconds without a step before it is one."""
CASE = make_case(model="llama-tiny", framework=DDP())
Breaks = Callable[[RunDir], object]


def seconds(case: Case, machine: Machine, launcher: Launcher, breaks: Breaks | None) -> tuple[float, str]:
    """Break one launch once both ranks run. Returns how long its verdict took from then on, and its kind.

    Without `breaks` the time begins with the last step that is seen, and only seconds are let pass.
    """
    hang.HANG_S = 120 if breaks else 4
    began: list[float] = []
    seen = 0

    def look(step: int, tokens: int) -> None:
        nonlocal seen
        if step == seen or (began and breaks):
            return
        seen = step
        began.append(time.monotonic())
        if breaks is not None:
            breaks(run_dir)

    with tempfile.TemporaryDirectory() as name:
        run_dir = RunDir(Path(name) / "run")
        let_pass = 0
        try:
            how = Launching(inject="hang", launcher=launcher, on_progress=look)
            run = launch_once(case, machine, run_dir.path, how)
        except AllocationOverError:
            kind = "the session ends"
        else:
            kind = "measured" if run.failure is None else run.failure.kind
            if run.failure is not None:
                waited = LET_PASS.search(run.failure.message)
                if waited is not None:
                    let_pass = int(waited[1])
        return time.monotonic() - began[-1] - let_pass, kind


def cells(name: str, break_one: Callable[[], tuple[float, str]]) -> tuple[str, str, str]:
    """A row of the table."""
    taken = [break_one() for _ in range(REPEATS)]
    kinds = ", ".join(sorted({kind for _, kind in taken}))
    return name, kinds, f"{median(s for s, _ in taken):.1f}"


def kill_rank(run_dir: RunDir) -> None:
    """End rank 1 as the kernel's OOM killer would."""
    os.kill(pid_of(1, run_dir), 9)


def kill_agent(run_dir: RunDir) -> None:
    """End the agent on this machine."""
    agent = agent_among(psutil.Process().children())
    assert agent is not None
    agent.kill()


def rows() -> Iterator[tuple[str, str, str]]:
    """Those of this machine, and those of a Slurm cluster."""
    for name, breaks in (("rank is killed", kill_rank), ("agent is killed", kill_agent), ("hang", None)):
        yield cells(name, partial(seconds, CASE, detect_cpu("x"), LocalLauncher(), breaks))
    with slurm_cluster() as cluster:
        yield from on_two_nodes(cluster)


def on_two_nodes(cluster: Cluster) -> Iterator[tuple[str, str, str]]:
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
        return seconds(case, machine, SlurmLauncher(), faults[fault])

    for fault in faults:
        yield cells(fault, partial(once, fault))
    allocation.release()


if __name__ == "__main__":
    show_table(("fault", "reported", "seconds"), rows())
