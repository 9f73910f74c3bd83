import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import psutil
import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, Topology
from perfsuite.errors import LaunchError
from perfsuite.frameworks.script import Script
from perfsuite.node import agent
from perfsuite.node.agent import oom_kills
from perfsuite.node.lease import Lease
from perfsuite.node.processes import JOB_MARK, POLL_S
from perfsuite.node.ranks import AgentJob
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import RunDir
from tests.node.conftest import Passing, exit_code_of, fork
from tests.node.fake_nvml import Nvml
from tests.samples import make_case

KILLED = Failure(kind="crash", message="exit code -9 (SIGKILL)", rank=0, at=1.0)


def job_of(directory: Path, *, nodes: int = 1, node: int = 0, device: Any = "cpu") -> AgentJob:
    topology = Topology(nodes=nodes, processes_per_node=2)
    case = make_case(framework=Script(path="train.py"), topology=topology)
    return AgentJob(RunDir(directory), CaseFile(case=case, device=device), node)


def written(job: AgentJob, node: int = 0) -> LaunchFile:
    return documents.read(job.run_dir.launch(node), LaunchFile)


Run = Callable[[AgentJob], list[Failure]]


def watched(job: AgentJob, run: Run) -> list[Failure]:
    """Run the agent while its driver lives. `run` replaces the work of its ranks."""
    return agent._watched(job, run=run, new_lease=Mock(spec=Lease))


def start_and_get_sigterm(file: Path) -> None:
    """Start a process, write its id into a file, and handle SIGTERM as an agent does."""
    file.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    agent._end_the_job(signal.SIGTERM, None)


@pytest.mark.parametrize(("variables", "ended"), [({}, None), ({JOB_MARK: uuid.uuid4().hex}, -9)])
def test_signal_ends_the_job_then_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ended: int | None
) -> None:
    """An agent without a mark knows only its descendants."""
    monkeypatch.delenv(JOB_MARK, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(["sleep", "60"]) as another:
        forked = fork(start_and_get_sigterm, tmp_path / "pid")
        if ended is not None:
            another.wait(20)
        forked.join(60)
        status = another.poll()
        another.kill()
    assert (forked.exitcode, status) == (128 + signal.SIGTERM, ended)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("is_told", "code"), [(True, 0), (False, 1)], ids=["told to end", "left"])
def test_ranks_that_an_agent_kills_have_not_failed(tmp_path: Path, is_told: bool, code: int) -> None:
    """With another status, a scheduler might end nodes that are still writing the stacks of their ranks."""
    ranks_are_killed = threading.Event()
    has_told = threading.Event()
    codes = Queue[int]()
    endings: list[Any] = []

    def run(job: AgentJob) -> list[Failure]:
        ranks_are_killed.wait()
        has_told.set()
        job.tell([KILLED])
        return [KILLED]

    def end(why: str, status: int) -> None:
        # Ranks on a GPU take a while to end, and the agent's other thread continues meanwhile.
        ranks_are_killed.set()
        has_told.wait(20)
        codes.put(status)

    def new_lease(file: Path, on_end: Any, on_lost: Any) -> Any:
        endings.append(on_end.__self__)
        ends = on_end if is_told else partial(on_lost, "the driver is gone")
        return SimpleNamespace(hold=threading.Thread(target=ends, daemon=True).start)

    job = job_of(tmp_path)
    returned: list[Any] = []

    def watch() -> None:
        returned.append(agent._watched(job, run=run, new_lease=new_lease, end=end))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        assert (codes.get(timeout=20), returned) == (code, [])
        assert job.run_dir.launch(0).exists() == is_told
        assert not is_told or written(job).failures == ()
    finally:
        # The agent would be gone now. Here, its other thread goes on, so let it end.
        endings[0]._lock.release()
        watcher.join()


def test_writes_a_failure_while_other_ranks_run(tmp_path: Path) -> None:
    seen: list[LaunchFile] = []
    job = job_of(tmp_path)

    def run(job: AgentJob) -> list[Failure]:
        job.tell([KILLED])
        seen.append(written(job))
        return [KILLED]

    assert watched(job, run) == [KILLED]
    assert (seen[0].failures, seen[0].is_over) == ((KILLED,), False)
    assert written(job).is_over


@pytest.mark.parametrize(("nodes", "where"), [(1, ""), (2, f"{socket.gethostname()}: ")])
def test_an_error_of_an_agent_fails_the_launch(tmp_path: Path, nodes: int, where: str) -> None:
    def run(job: AgentJob) -> NoReturn:
        raise LaunchError("node 0 has not told")

    job = job_of(tmp_path, nodes=nodes)
    with pytest.raises(LaunchError):
        watched(job, run)
    (failure,) = written(job).failures
    assert (failure.kind, failure.message) == ("error", f"{where}LaunchError: node 0 has not told")


def test_ranks_learn_the_cores_near_their_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near: list[frozenset[int]] = []

    def run(job: AgentJob) -> list[Failure]:
        near.extend(job.near_cores)
        return []

    two_sockets = Nvml(*({"nvmlDeviceGetCpuAffinity": (mask,)} for mask in ([0b0011], [0b1100])))
    monkeypatch.setitem(sys.modules, "pynvml", two_sockets)
    watched(job_of(tmp_path, device="cuda"), run)
    assert near == [{0, 1}, {2, 3}]


def test_ranks_see_only_the_gpus_of_their_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a process group could otherwise train on every GPU that it sees."""
    seen: list[str | None] = []

    def run(job: AgentJob) -> list[Failure]:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return []

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(*[{}] * 4))
    watched(job_of(tmp_path, device="cuda"), run)
    assert seen == ["3,1"]


def lose_driver_on_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        sys.stdout = full
        agent._end("the driver is gone", 3)


def test_an_agent_ends_though_it_cannot_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log cannot be written. Then a process of the job cannot be killed either."""

    def fail() -> NoReturn:
        (tmp_path / "tried").touch()
        raise LaunchError("a process cannot be killed")

    monkeypatch.setenv(JOB_MARK, "mine")
    monkeypatch.setattr(psutil, "process_iter", fail)
    assert exit_code_of(lose_driver_on_a_full_disk) == 3
    assert (tmp_path / "tried").exists()


@pytest.mark.parametrize(("after", "waited"), [(0, 0), (3, 3 * POLL_S), (float("inf"), agent.PEERS_S)])
def test_waits_for_the_stacks_of_other_nodes(
    tmp_path: Path, passing: Passing, after: float, waited: float
) -> None:
    """When another node's ranks are killed, ranks here end as well, and then cannot write their stacks."""
    job = job_of(tmp_path, nodes=2, node=1)
    documents.write(job.run_dir.launch(1), LaunchFile(node=1))

    def end_the_other(looks: int) -> None:
        if looks >= after:
            documents.write(job.run_dir.launch(0), LaunchFile(node=0))

    passing.meanwhile = end_the_other
    end_the_other(0)
    agent._wait_for_peers(job)
    assert passing.seconds == pytest.approx(waited, abs=1.01 * POLL_S)


@pytest.mark.parametrize(
    ("groups", "file", "count", "counted"),
    [
        ("0::/\n", "memory.events", "3", 3),
        ("0::/user.slice/a:b.scope\n", "user.slice/a:b.scope/memory.events", "3", 3),
        ("4:cpu,memory:/job\n1:cpu:/other\n0::/\n", "memory/job/memory.oom_control", "3", 3),
        ("0::/job\n", "job/memory.events", "many", 0),
        ("0::/job\n", "other/memory.events", "3", 0),
        ("no control groups\n", "memory.events", "3", 0),
    ],
    ids=["a container", "version 2", "version 1", "no number", "no counter", "odd"],
)
def test_counts_oom_kills_of_our_cgroup(
    tmp_path: Path, groups: str, file: str, count: str, counted: int
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(groups)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")
    assert oom_kills(tmp_path, tmp_path) == counted
    assert oom_kills(tmp_path / "nowhere", tmp_path) == 0


@pytest.mark.parametrize(("node", "expected"), [(0, "{caches}/inductor"), (1, "{caches}/inductor-of-node-1")])
def test_nodes_share_no_directory_of_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, expected: str
) -> None:
    run_dir = RunDir.of_launch(tmp_path, 1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{run_dir.compile_caches}/inductor")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    agent.keep_compile_caches_apart(run_dir, node)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == expected.format(caches=run_dir.compile_caches)
    assert os.environ["TRITON_CACHE_DIR"] == "/mine", "a directory that the user has set wins"
