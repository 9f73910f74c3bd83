"""Read how the cores of this machine spend their time, from /proc. Imports neither torch nor pytest."""

import contextlib
import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from perfsuite.case.case import Case


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The time of all cores that a job may use, in seconds since boot."""

    processes_s: float  # time in processes of all users. Interrupts are left out: they belong to no process
    steal_s: float  # time taken by the hypervisor
    total_s: float


def node_variables(case: Case, device: str) -> dict[str, str]:
    """Return the environment variables that depend on the node: threads per rank, and gloo's interface.

    On a GPU, variables that the user has set are kept. On a CPU, perfsuite always sets the number of threads,
    because it is part of the measurement.
    """
    topology = case.topology
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // topology.processes_per_node))}
    if device == "cuda":
        return {name: value for name, value in threads.items() if name not in os.environ}
    return threads if topology.nodes > 1 else {**threads, "GLOO_SOCKET_IFNAME": "lo"}


def bind(pid: int, cores: frozenset[int], ranks: int = 1) -> None:
    """Bind a new process to those of `cores` that the calling process is allowed to use.

    `ranks` is the number of processes that share the cores. The new process is not bound if fewer than
    `ranks` cores remain, for example because the job runs on another socket.
    """
    allowed = os.sched_getaffinity(0)
    near = cores & allowed
    if near == allowed or len(near) < ranks:
        return
    with contextlib.suppress(OSError):  # the process has ended
        os.sched_setaffinity(pid, near)


def read_cpu(stat: Path, cores: set[int]) -> Cpu | None:
    """Return the time of these cores, read from /proc/stat. None if the format of the file is unknown.

    psutil cannot be used, because it does not report which core a time belongs to.
    """
    processes = steal = total = 0
    try:
        with stat.open() as file:
            for line in takewhile(lambda line: line.startswith("cpu"), file):
                name, *columns = line.split()
                if name != "cpu" and int(name[3:]) in cores:
                    ticks = [int(column) for column in columns[:8]]
                    user, nice, system, _, _, _, _, stolen = ticks
                    processes += user + nice + system
                    steal += stolen
                    total += sum(ticks)
    except (OSError, ValueError):
        return None
    per_s = os.sysconf("SC_CLK_TCK")
    return Cpu(processes_s=processes / per_s, steal_s=steal / per_s, total_s=total / per_s)
