from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, Topology
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError
from perfsuite.launch.base import Job, Launcher, OnProgress, no_progress
from perfsuite.launch.preflight import preflight
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import Health, LaunchFile
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Preflight
from tests.samples import make_gpu_machine, make_machine

HEALTH = Health(samples=9, seconds=3, steps=9)
RATES = {"matmul_tflops": 0.1, "copy_gb_s": 10.0}
NAMES = ("n1", "n2", "n3")
GONE = "Connection closed by peer [10.0.0.2]:45"


class Pretends:
    """A launcher of nodes that are not there: `work` writes what they leave."""

    name: ClassVar[str] = "pretends"
    lock = None

    def __init__(self, work: Callable[[RunDir], Failure | None]) -> None:
        self.work = work
        self.jobs: list[Job] = []

    def machine(self, shared: Path) -> Machine:
        return make_machine().replace(nodes=3)

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        self.jobs.append(job)
        return self.work(job.run_dir)


def report(run_dir: RunDir, rank: int, *, failure: Failure | None = None, **rates: float) -> None:
    world_size = documents.read(run_dir.case, CaseFile).case.topology.world_size
    probed = {} if failure else {**RATES, **rates}
    told = RankReport(rank=rank, world_size=world_size, host="h", clock="none", device_probe=probed)
    documents.write(run_dir.rank(rank), told.replace(failure=failure))


def agents(run_dir: RunDir, *nodes: int) -> None:
    for node in nodes:
        documents.write(run_dir.launch(node), LaunchFile(host=f"host{node}", health=HEALTH))


def found(
    directory: Path, work: Callable[[RunDir], Failure | None], machine: Machine | None = None
) -> Preflight:
    return preflight(Pretends(work), machine or make_machine(), 3, directory, names=NAMES)


def all_good(run_dir: RunDir) -> None:
    agents(run_dir, 0, 1, 2)
    for node in range(3):
        report(run_dir, node)


def test_it_is_a_job_whose_ranks_only_probe(tmp_path: Path) -> None:
    launcher = Pretends(all_good)
    assert isinstance(launcher, Launcher)
    seen = preflight(launcher, make_machine(), 3, tmp_path, names=NAMES)
    (job,) = launcher.jobs
    asked = documents.read(job.run_dir.case, CaseFile)
    assert (asked.preflight, asked.case, asked.device) == (True, job.case, "cpu")
    assert job.case.topology == Topology(nodes=3, processes_per_node=1)
    assert [(node.name, node.rates, node.health) for node in seen.nodes] == [
        (name, RATES, HEALTH) for name in NAMES
    ]
    assert (seen.problems, seen.directory) == ([], str(tmp_path))


def test_each_gpu_has_a_rank_and_the_slowest_one_counts(tmp_path: Path) -> None:
    def work(run_dir: RunDir) -> None:
        for rank in range(6):
            report(run_dir, rank, matmul_tflops=100.0 + rank if rank != 3 else 70.0)
        agents(run_dir, 0, 1, 2)

    seen = found(tmp_path, work, make_gpu_machine(count=2))
    assert [node.rates["matmul_tflops"] for node in seen.nodes] == [100, 70, 104]
    assert seen.problems == ["n2: matmul 70 TFLOP/s, n3 has 104 (at least 75% is healthy)"]


def test_nodes_whose_names_nobody_told_have_their_agents(tmp_path: Path) -> None:
    def work(run_dir: RunDir) -> None:
        agents(run_dir, 0)
        report(run_dir, 0)

    seen = preflight(Pretends(work), make_machine(), 2, tmp_path)
    assert [node.name for node in seen.nodes] == ["host0", "node 1"]


@pytest.mark.parametrize(
    ("failures", "problem", "failure"),
    [
        ([GONE, "CUDA error"], "n2: crash in the preflight: CUDA error (see {})", None),
        (["ImportError"] * 3, None, "crash in the preflight: ImportError (see {})"),  # it is the software
    ],
    ids=["one and its peer", "all"],
)
def test_the_node_of_the_rank_that_failed_first_is_bad_unless_all_failed(
    tmp_path: Path, failures: list[str], problem: str | None, failure: str | None
) -> None:
    def work(run_dir: RunDir) -> None:
        for rank, message in enumerate(failures):
            report(run_dir, rank, failure=Failure(kind="crash", message=message, rank=rank, at=rank))
        agents(run_dir, 0, 1, 2)

    seen = found(tmp_path, work)
    assert seen.problems == ([] if problem is None else [problem.format(tmp_path)])
    assert seen.failure == (failure and failure.format(tmp_path))
    assert [node.rates for node in seen.nodes] == [{}, {}, {}]


TIMEOUT = Failure(kind="timeout", message="killed after 300 s", at=9)
KILLED = Failure(kind="crash", message="an agent ended without a word: n2: task 1: Killed", at=9)


@pytest.mark.parametrize(
    ("told", "reported", "ended", "problem"),
    [
        ((0, 2), (), TIMEOUT, "n2: timeout in the preflight: killed after 300 s"),  # it never answered
        ((), (), KILLED, f"n2: crash in the preflight: {KILLED.message}"),  # srun then ended the others
        ((0, 1, 2), (0, 2), None, "n2: missing_report in the preflight: no report from rank 1 of 3"),
    ],
)
def test_a_node_that_is_told_from_the_others_is_bad(
    tmp_path: Path, told: tuple[int, ...], reported: tuple[int, ...], ended: Failure | None, problem: str
) -> None:
    def work(run_dir: RunDir) -> Failure | None:
        agents(run_dir, *told)
        for rank in reported:
            report(run_dir, rank)
        return ended

    (found_problem,) = found(tmp_path, work).problems
    assert found_problem.startswith(problem)
    assert found_problem.endswith(f"(see {tmp_path})")


def test_where_nothing_tells_them_apart_no_node_is_bad(tmp_path: Path) -> None:
    seen = found(tmp_path, lambda run_dir: TIMEOUT)
    assert seen.problems == []
    assert seen.failure == f"timeout in the preflight: killed after 300 s (see {tmp_path})"


def test_a_report_that_cannot_be_read_is_told_and_no_error(tmp_path: Path) -> None:
    def work(run_dir: RunDir) -> None:
        all_good(run_dir)
        run_dir.rank(1).write_text("{")

    seen = found(tmp_path, work)
    assert seen.problems == []
    assert "rank-1.json: not JSON" in str(seen.failure)


def test_that_the_allocation_is_over_is_said_of_no_node(tmp_path: Path) -> None:
    def over(run_dir: RunDir) -> None:
        raise AllocationOverError("the Slurm job 7 is over: CANCELLED")

    with pytest.raises(AllocationOverError):
        found(tmp_path, over)
