from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile, Topology
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError
from perfsuite.launch.job import Job
from perfsuite.launch.preflight import judged, preflight
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import DeviceHealth, Health, LaunchFile
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import NodePreflight, Preflight
from tests.samples import make_gpu_machine, make_machine

HEALTH = Health(samples=9, seconds=3, steps=9)
RATES = {"matmul_tflops": 0.1, "copy_gb_s": 10.0}
NAMES = ("n1", "n2", "n3")
GONE = "Connection closed by peer [10.0.0.2]:45"


def report(run_dir: RunDir, rank: int, *, failure: Failure | None = None, **rates: float) -> None:
    world_size = documents.read(run_dir.case, CaseFile).case.topology.world_size
    probed = {} if failure else {**RATES, **rates}
    rank_report = RankReport(rank=rank, world_size=world_size, host="h", clock="none", device_probe=probed)
    documents.write(run_dir.rank(rank), rank_report.replace(failure=failure))


def left(run_dir: RunDir, *, nodes: Iterable[int] = (0, 1, 2), ranks: Iterable[int] = (0, 1, 2)) -> None:
    """Write the files that these nodes and ranks leave if all goes well."""
    for node in nodes:
        documents.write(run_dir.launch(node), LaunchFile(node=node, host=f"host{node}", health=HEALTH))
    for rank in ranks:
        report(run_dir, rank)


def preflight_of(
    directory: Path, work: Callable[[RunDir], Failure | None], machine: Machine | None = None
) -> Preflight:
    """Return the preflight of nodes that do not exist. `work` writes the files that they leave."""

    def launch(job: Job) -> Failure | None:
        return work(job.run_dir)

    return preflight(launch, machine or make_machine(), 3, directory, names=NAMES)


def test_ranks_of_a_preflight_only_probe(tmp_path: Path) -> None:
    jobs: list[Job] = []

    def launch(job: Job) -> None:
        jobs.append(job)
        left(job.run_dir)

    seen = preflight(launch, make_machine(), 3, tmp_path, names=NAMES)
    (job,) = jobs
    asked = documents.read(job.run_dir.case, CaseFile)
    assert (asked.preflight, asked.case, asked.device) == (True, job.case, "cpu")
    assert job.case.topology == Topology(nodes=3, processes_per_node=1)
    assert seen.nodes == tuple(NodePreflight(name=name, rates=RATES, health=HEALTH) for name in NAMES)
    assert (seen.problems, seen.directory) == ([], str(tmp_path))


def test_slowest_rank_of_all_gpus_counts(tmp_path: Path) -> None:
    def work(run_dir: RunDir) -> None:
        left(run_dir, ranks=())
        for rank in range(6):
            report(run_dir, rank, matmul_tflops=100.0 + rank if rank != 3 else 70.0)

    seen = preflight_of(tmp_path, work, make_gpu_machine(count=2))
    assert [node.rates["matmul_tflops"] for node in seen.nodes] == [100, 70, 104]
    assert seen.problems == ["n2: matmul 70 TFLOP/s, n3 has 104 (healthy: at least 75% of this)"]


def test_unnamed_nodes_have_their_agents(tmp_path: Path) -> None:
    def launch(job: Job) -> None:
        left(job.run_dir, nodes=[0], ranks=[0])

    seen = preflight(launch, make_machine(), 2, tmp_path)
    assert [node.name for node in seen.nodes] == ["host0", "node 1"]


@pytest.mark.parametrize(
    ("failures", "problem", "failure"),
    [
        ([GONE, "CUDA error"], "n2: crash in the preflight: CUDA error (see {})", None),
        # The software is the cause.
        (["ImportError"] * 3, None, "crash in the preflight: ImportError (see {})"),
    ],
    ids=["one and its peer", "all"],
)
def test_first_failed_ranks_node_is_bad(
    tmp_path: Path, failures: list[str], problem: str | None, failure: str | None
) -> None:
    def work(run_dir: RunDir) -> None:
        left(run_dir, ranks=())
        for rank, message in enumerate(failures):
            report(run_dir, rank, failure=Failure(kind="crash", message=message, rank=rank, at=rank))

    seen = preflight_of(tmp_path, work)
    assert seen.problems == ([] if problem is None else [problem.format(tmp_path)])
    assert seen.failure == (failure and failure.format(tmp_path))
    assert [node.rates for node in seen.nodes] == [{}, {}, {}]


TIMEOUT = Failure(kind="timeout", message="killed after 300 s", at=9)
KILLED = Failure(kind="crash", message="an agent ended without a report: n2: task 1: Killed", at=9)


@pytest.mark.parametrize(
    ("nodes", "ranks", "ended", "problem", "failure"),
    [
        # The node never answered.
        ((0, 2), (), TIMEOUT, "n2: timeout in the preflight: killed after 300 s", None),
        # srun then ended the other tasks.
        ((), (), KILLED, f"n2: crash in the preflight: {KILLED.message}", None),
        ((0, 1, 2), (0, 2), None, "n2: missing_report in the preflight: no report from rank 1 of 3", None),
        ((), (), TIMEOUT, None, "timeout in the preflight: killed after 300 s"),
    ],
    ids=["silent", "killed", "no report", "nothing tells them apart"],
)
def test_blames_a_node_unlike_the_others(
    tmp_path: Path, nodes: Any, ranks: Any, ended: Failure | None, problem: str | None, failure: str | None
) -> None:
    def work(run_dir: RunDir) -> Failure | None:
        left(run_dir, nodes=nodes, ranks=ranks)
        return ended

    seen = preflight_of(tmp_path, work)
    sentences = [*seen.problems, *filter(None, [seen.failure])]
    assert len(seen.problems) == (problem is not None)
    assert [line.startswith(str(problem or failure)) for line in sentences] == [True]
    assert sentences[0].endswith(f"(see {tmp_path})")


def test_an_unreadable_report_is_a_failure_of_the_launch(tmp_path: Path) -> None:
    def work(run_dir: RunDir) -> None:
        left(run_dir)
        run_dir.rank(1).write_text("{")

    seen = preflight_of(tmp_path, work)
    assert seen.problems == []
    assert "rank-1.json: not JSON" in str(seen.failure)


def test_expired_allocation_blames_no_node(tmp_path: Path) -> None:
    def over(run_dir: RunDir) -> None:
        raise AllocationOverError("the Slurm job 7 is over: CANCELLED")

    with pytest.raises(AllocationOverError):
        preflight_of(tmp_path, over)


# Comparing nodes

GIB = 2**30
SLOW_LINKS = (
    "all-reduce with its neighbours: {} GB/s, between other nodes: {} GB/s (healthy: at least 50% of this)"
)


def make_node(number: int, *, health: Health | None = None, **rates: float) -> NodePreflight:
    usual = {"matmul_tflops": 0.1, "copy_gb_s": 10.0, "all_reduce_gb_s": 0.5, "next_gb_s": 1.0}
    return NodePreflight(name=f"n{number}", rates={**usual, **rates}, health=health)


def linked(*rates: float) -> list[NodePreflight]:
    """Return nodes whose all-reduces with the next node have these rates."""
    return [make_node(number, next_gb_s=rate) for number, rate in enumerate(rates)]


def problems(*nodes: NodePreflight, on_gpu: bool = False) -> list[str]:
    machine = make_gpu_machine() if on_gpu else make_machine()
    at = "2026-01-02T03:04:05+00:00"
    return judged(
        Preflight(started_at=at, duration_s=9, machine=machine, nodes=nodes, directory="d")
    ).problems


def make_health(**card: Any) -> Health:
    notes = card.pop("notes", ())
    device = DeviceHealth(index=3, pci_bus_id="00000000:5B:00.0", **card)
    return Health(samples=9, seconds=3, steps=9, devices=(device,), notes=notes)


@pytest.mark.parametrize(
    ("slow", "on_gpu", "sentence"),
    [
        ({"matmul_tflops": 0.041, "copy_gb_s": 4.0}, False, None),
        (
            {"matmul_tflops": 0.039},
            False,
            "n2: matmul 0.039 TFLOP/s, n3 has 0.1 (healthy: at least 40% of this)",
        ),
        ({"copy_gb_s": 3.9}, False, "n2: copy 3.9 GB/s, n3 has 10 (healthy: at least 40% of this)"),
        ({"matmul_tflops": 0.078}, True, None),
        ({"matmul_tflops": 0.074}, False, None),  # GPUs scatter less than cores
        (
            {"matmul_tflops": 0.074},
            True,
            "n2: matmul 0.074 TFLOP/s, n3 has 0.1 (healthy: at least 75% of this)",
        ),
    ],
)
def test_slow_rate_is_reported_beside_the_best(slow: Any, on_gpu: bool, sentence: str | None) -> None:
    nodes = make_node(1), make_node(2, **slow), make_node(3)
    assert problems(*nodes, on_gpu=on_gpu) == ([] if sentence is None else [sentence])


@pytest.mark.parametrize("nodes", [3, 4, 5])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_node_slow_with_both_neighbours_is_named(nodes: int, bad: int) -> None:
    slow = {bad, (bad - 1) % nodes}
    sentences = problems(*linked(*(0.4 if number in slow else 1.0 for number in range(nodes))))
    assert sentences == [f"n{bad}: {SLOW_LINKS.format('0.4 and 0.4', '1')}"]


SILENT = NodePreflight(name="n3", problems=("crash: exit code 1",))


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        # The links of node 1 are slow compared with the best link between other nodes.
        (linked(0.4, 0.5, 0.3, 1.0, 1.0), []),
        (
            linked(0.4, 0.5, 0.3, 1.1, 1.0),
            [
                f"n1: {SLOW_LINKS.format('0.4 and 0.5', '1.1')}",
                f"n2: {SLOW_LINKS.format('0.5 and 0.3', '1.1')}",
            ],
        ),
        # A single slow link is not evidence against either of its two nodes. Neither is the only known link
        # of a node, or the only link of all.
        (linked(1.0, 0.1, 1.0, 1.0), []),
        ([*linked(1.0, 1.0, 0.1), SILENT, make_node(4, next_gb_s=0.1)], ["n3: crash: exit code 1"]),
        ([make_node(1, next_gb_s=0.001), NodePreflight(name="n2")], []),
    ],
)
def test_a_node_is_bad_if_both_of_its_links_are_slow(nodes: list[NodePreflight], said: list[str]) -> None:
    assert problems(*nodes) == said


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (make_health(memory_pending=("rows wait: reset the GPU",)), "rows wait: reset the GPU"),
        (make_health(throttled={"HwThermalSlowdown": 0.5}), "was throttled: HwThermalSlowdown in 50%"),
        (make_health(foreign_memory_bytes=GIB), "was shared: other processes held 1.00 GiB"),
        (make_health(held_before_bytes=3 * GIB), "3.00 GiB held before the launch"),
        (make_health(notes=("GPU 3: nvmlDeviceGetUUID: GPU is lost",)), "GPU is lost"),
        (make_health(notes=("NVML does not answer (is a GPU lost?)",)), "NVML does not answer"),
        (make_health(throttled={"SwPowerCap": 1.0}, foreign_memory_bytes=2**20), None),
        (make_health(notes=("GPU 3: nvmlDeviceGetTemperature: Unknown Error",)), None),
    ],
)
def test_nvml_faults_of_a_gpu_count_for_its_node(seen: Health, sentence: str | None) -> None:
    """On a CPU, other processes can run meanwhile."""
    assert problems(make_node(1), make_node(2, health=seen.replace(foreign_cpu=0.9, steal=0.5))) == []
    sentences = problems(make_node(1), make_node(2, health=seen), on_gpu=True)
    assert len(sentences) == (sentence is not None)
    assert sentence is None or (sentences[0].startswith("n2: ") and sentence in sentences[0])
