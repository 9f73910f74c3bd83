"""Tests of the step that measures the spread of one case. Launches are fake."""

from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row
from perfsuite.features.first_night.spread import cores_row, counts_row, spread_rows
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Observed
from tests.features.first_night.nights import by_check, make_night, write_numa_nodes
from tests.samples import make_gpu_machine, make_launches, make_machine, make_report, make_run, write_launch
from tests.twin_counts import counts, launch

GPUS = make_gpu_machine(count=2)
RECORDED = Verdict(outcome="recorded", launches=5)


@pytest.mark.usefixtures("torch_for_gpus")
def test_shows_rates_noise_counts_and_cores() -> None:
    asked: list[Any] = []

    def measure(case: Any, machine: Any, directory: Path, reference: Any, how: Any) -> Any:
        asked.append((case.framework.name, reference.policy.record_launches))
        probe = {"matmul_tflops": 700.0}
        write_launch(directory / "launch-1", make_report(device_probe=probe), make_report(1))
        return make_launches(1.0, 1.01, 0.99, 1.005, 0.995), RECORDED

    night = make_night(machine=GPUS, size="full", measure=measure)
    rows = by_check(spread_rows(night))
    assert asked == [("fsdp2", 5)]
    assert [*rows] == ["matmul_tflops", "launches", "noise", "counts", "cores of the ranks"]
    assert rows["counts"].found == "not counted: no launch was counted"


@pytest.mark.parametrize(("size", "is_said"), [("simulated", True), ("tiny", False)])
def test_only_simulated_noise_is_marked_as_such(size: str, is_said: bool) -> None:
    measure: Any = lambda *arguments: (make_launches(1.0, 1.01, 0.99), RECORDED)  # noqa: E731
    row = by_check(spread_rows(make_night(size=size, measure=measure)))["noise"]
    assert "so the gate now finds drops of " in row.found
    said = "simulated on CPUs: nothing here says anything about GPUs; "
    assert row.found.startswith(said) == is_said


@pytest.mark.usefixtures("torch_for_cpus")
def test_a_case_that_cannot_run_is_not_launched() -> None:
    (row,) = spread_rows(make_night(machine=make_gpu_machine(), size="full"))
    assert row.status == "unknown"
    assert row.found.startswith("not run: ")


def cores_of(*cores: str | None, root: Path, machine: Machine = GPUS) -> Row:
    observed = [Observed(settings={}, environment={} if seen is None else {"cores": seen}) for seen in cores]
    reports = [make_report(rank, observed=seen) for rank, seen in enumerate(observed)]
    return cores_row(reports, machine, root=root)


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    root = tmp_path / "two"
    write_numa_nodes(root, {0}, {1})
    return root


def test_ranks_with_cores_of_their_own_pass(two_sockets: Path) -> None:
    apart = cores_of("0-47", "48-95", root=two_sockets)
    assert (apart.status, apart.found) == ("pass", "0-47: rank 0; 48-95: rank 1")


@pytest.mark.parametrize("cores", [("0-95", "0-95"), ("0-47", None)], ids=["shared", "not reported"])
def test_ranks_that_share_all_cores_are_unknown(two_sockets: Path, cores: tuple[str | None, ...]) -> None:
    assert cores_of(*cores, root=two_sockets).status == "unknown"


def test_ranks_that_report_no_cores_are_named(two_sockets: Path) -> None:
    assert cores_of(root=two_sockets).found == "no rank reported its cores"


def test_ranks_may_share_the_cores_of_one_socket(tmp_path: Path) -> None:
    write_numa_nodes(tmp_path, {0, 1})
    assert cores_of("0-95", "0-95", root=tmp_path).status == "pass"


def test_cores_are_compared_only_on_gpus(tmp_path: Path) -> None:
    write_numa_nodes(tmp_path, {0, 1})
    on_a_cpu = cores_of("0-1", root=tmp_path, machine=make_machine())
    assert on_a_cpu.found.startswith("not run: ")


def test_counts_must_be_there_and_steady() -> None:
    assert counts_row([make_run(hidden=("a CUDA graph was replayed",))]).found == (
        "not counted: a CUDA graph was replayed"
    )
    assert counts_row([]).found == "not counted: no launch was counted"
    steady = counts_row([launch(counts())] * 3)
    assert (steady.status, steady.found) == ("pass", "the same in 3 launches")
    changed = counts_row([launch(counts()), launch(counts(host_reads={"forward": 99}))])
    assert changed.status == "fail"
    assert counts_row([launch(counts())]).status == "unknown"
