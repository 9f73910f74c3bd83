"""The agent: run one node's part of a job until the job ends or the driver stops it.

The driver starts the agent as `python -m perfsuite.node.agent RUNDIR`. The agent adopts processes of the job
when their parent ends, and leaves no process behind.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import FileError, message_of
from perfsuite.node import ranks
from perfsuite.node.lease import Lease
from perfsuite.node.processes import JOB_MARK, ask_for_stacks, marked, sweep, wait_until
from perfsuite.node.ranks import AgentJob
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import ANCESTOR_PID, COMPILE_CACHES, NODE, RunDir
from perfsuite.worker import leash

if TYPE_CHECKING:
    from perfsuite.node.health_sampler import HealthWatch

NODE_VARIABLE = "PERFSUITE_NODE_VARIABLE"
"""An environment variable. Its value is the name of another variable, in which the scheduler gives the number
of this node (from 0). If one of these variables is not set, this is node 0."""
# If perfsuite's driver is gone, the agent waits at most this many seconds before it ends the job, because
# another of its threads might be writing the launch file.
LATCH_S = 5
PEERS_S = 5  # seconds for which a node waits for the stacks of the other nodes before it ends the job


def main(path: str) -> int:
    """Run this node's part of the job. Returns the exit status: 0 if no rank failed."""
    for number in leash.ENDING:
        signal.signal(number, _end_the_job)
    leash.die_with_parent(signal.SIGTERM)
    leash.adopt_orphans()
    os.environ[ANCESTOR_PID] = str(os.getpid())
    os.environ[NODE] = os.environ.get(os.environ.get(NODE_VARIABLE, ""), "0")
    run_dir = RunDir(Path(path))
    keep_compile_caches_apart(run_dir, int(os.environ[NODE]))
    try:
        request = documents.read(run_dir.case, CaseFile)
        failures = _watched(AgentJob(run_dir, request, int(os.environ[NODE])))
    finally:
        _sweep()
    return 1 if failures else 0


def keep_compile_caches_apart(run_dir: RunDir, node: int) -> None:
    """Give each node except the first its own directories for compiler caches.

    On NFS, a read fails if another node replaces the file meanwhile. In addition, torch names its temporary
    files after process and thread ids, which can be the same on two nodes.
    """
    caches = run_dir.compile_caches.resolve()
    for name in COMPILE_CACHES:
        directory = os.environ.get(name)
        if node > 0 and directory is not None and Path(directory).is_relative_to(caches):
            os.environ[name] = f"{directory}-of-node-{node}"


def _sweep() -> None:
    # Do not kill Python's resource tracker, which cleans up and then ends by itself.
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    sweep(os.environ.get(JOB_MARK), os.getpid(), spare={getattr(tracker, "_pid", None)})


def _end(why: str, status: int) -> NoReturn:
    """End the job on this node from any thread, and log why."""
    try:
        with contextlib.suppress(OSError):  # the log's disk might be full
            print(f"perfsuite: {why}", flush=True)
        _sweep()
    finally:
        os._exit(status)


class _Ending:
    """Writes the launch file of this node, and ends the job on this node if the driver ends it or is gone.

    Only one thread writes the final version of the file: the thread that keeps the lock. If all ranks have
    ended or cannot be started, the agent's main thread writes it. If the driver ends the job, the lease's
    thread writes it. If the driver is gone, nothing more is written, because ranks that are killed for that
    reason have not failed.
    """

    def __init__(self, job: AgentJob, watch: "HealthWatch", end: Callable[[str, int], object]) -> None:
        """`end` ends the job and this process. It gets the reason and the exit status."""
        self._job = job
        self._watch = watch
        self._end = end
        self._killed_before = oom_kills()
        # The thread that ends the job never releases this lock, so other threads wait until the process is
        # gone.
        self._lock = threading.Lock()

    def note(self, failures: Sequence[Failure]) -> None:
        """Write the failures so far, while the job is still running."""
        # Ignore errors here. If the file cannot be written at the end either, that error is raised.
        with self._lock, contextlib.suppress(FileError):
            self._write(failures, is_over=False)

    def finish(self, failures: Sequence[Failure]) -> None:
        """Write the final version of the file. The ranks have ended, or could not be started."""
        self._lock.acquire()
        self._write(failures)

    def stopped_by_driver(self) -> None:
        """Write the ranks' stacks and then the launch file, and end this process."""
        self._lock.acquire()
        try:
            ask_for_stacks(self._job.run_dir, marked(os.environ.get(JOB_MARK, "")), self._job.node)
            self._write()
            _wait_for_peers(self._job)
        finally:
            # End with status 0. Otherwise a scheduler might kill other nodes, which are still writing.
            self._end("perfsuite's driver ends the job", 0)

    def lost_driver(self, why: str) -> None:
        """End this process without writing anything more."""
        self._lock.acquire(timeout=LATCH_S)
        self._end(why, 1)

    def _write(self, failures: Sequence[Failure] = (), *, is_over: bool = True) -> None:
        content = LaunchFile(
            node=self._job.node,
            host=socket.gethostname(),
            is_over=is_over,
            failures=tuple(failures),
            health=self._watch.finish() if is_over else None,
            oom_kills=max(0, oom_kills() - self._killed_before),
        )
        documents.write(self._job.run_dir.launch(self._job.node), content)


def _watched(
    job: AgentJob,
    *,
    run: Callable[[AgentJob], list[Failure]] = ranks.run,
    new_lease: Callable[..., Lease] = Lease,
    end: Callable[[str, int], object] = _end,
) -> list[Failure]:
    """Run the job and sample the node's health, until the job ends or the driver stops it."""
    # Do not import `health_sampler` at the top, because it imports psutil. Ranks import `agent`, and must not
    # need psutil.
    from perfsuite.node.health_sampler import HealthWatch, sampler

    watch = HealthWatch(sampler(job.request.device, job.topology.processes_per_node), job.run_dir.steps_seen)
    ending = _Ending(job, watch, end)
    new_lease(job.run_dir.lease, ending.stopped_by_driver, ending.lost_driver).hold()
    watch.begin()
    if watch.sampler.only_visible is not None:
        # Without a process group, transformers' Trainer would train on every GPU that it sees.
        os.environ["CUDA_VISIBLE_DEVICES"] = watch.sampler.only_visible
    try:
        failures = run(replace(job, near_cores=watch.sampler.near_cores, tell=ending.note))
    except Exception as error:
        where = f"{socket.gethostname()}: " if job.topology.nodes > 1 else ""
        message = f"{where}{type(error).__name__}: {message_of(error)}"
        ending.finish([Failure(kind="error", message=message, at=time.time())])
        raise
    ending.finish(failures)
    return failures


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of our control group the kernel has killed for lack of memory. 0 if unknown.

    Linux counts these kills as `oom_kill`, in the file `memory.events` (control groups v2) or
    `memory.oom_control` (v1).
    """
    kills = 0
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            below = f"memory{path}/memory.oom_control" if controllers else f".{path}/memory.events"
            with contextlib.suppress(OSError, ValueError):
                match = re.search(r"^oom_kill (\d+)$", (cgroups / below).read_text(), re.MULTILINE)
                kills += 0 if match is None else int(match[1])
    return kills


def _wait_for_peers(job: AgentJob) -> None:
    """Wait until every node has written its stacks.

    If this node killed its ranks without waiting, ranks of other nodes might end before they have written
    their stacks.
    """

    def is_over(node: int) -> bool:
        launch = documents.read_or_none(job.run_dir.launch(node), LaunchFile)
        return launch is not None and launch.is_over

    wait_until(lambda: all(map(is_over, range(job.topology.nodes))), PEERS_S)


def _end_the_job(number: int, frame: Any) -> NoReturn:
    _sweep()
    os._exit(128 + number)  # the exit status that shells report for a process killed by this signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
