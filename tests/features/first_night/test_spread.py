"""Tests of the step that measures the spread of one case. Launches are fake."""

from pathlib import Path
from typing import Any

import pytest

from perfsuite.features.first_night import spread
from perfsuite.features.first_night.spread import cores_row, counts_row, spread_rows
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Observed
from tests.features.first_night.nights import by_check, make_night
from tests.samples import make_gpu_machine, make_launches, make_report, make_run, write_launch
from tests.twin_counts import counts, launch

RECORDED = Verdict(outcome="recorded", launches=5)


def test_shows_rates_noise_counts_and_cores() -> None:
    asked: list[Any] = []

    def measure(case: Any, machine: Any, directory: Path, reference: Any, how: Any) -> Any:
        asked.append((case.framework.name, reference.policy.record_launches))
        probe = {"matmul_tflops": 700.0}
        write_launch(directory / "launch-1", make_report(device_probe=probe), make_report(1))
        return make_launches(1.0, 1.01, 0.99, 1.005, 0.995), RECORDED

    night = make_night(machine=make_gpu_machine(count=2), size="full", measure=measure)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "why_not", lambda case, night: None)
        rows = by_check(spread_rows(night))
    assert asked == [("fsdp2", 5)]
    assert [*rows] == ["matmul_tflops", "launches", "noise", "counts", "cores of the ranks"]
    assert rows["counts"].found == "not counted: no launch was counted"


@pytest.mark.parametrize(("size", "is_said"), [("simulated", True), ("tiny", False)])
def test_noise_of_simulated_training_says_so(
    monkeypatch: pytest.MonkeyPatch, size: str, is_said: bool
) -> None:
    monkeypatch.setattr(spread, "why_not", lambda case, night: None)
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


def cores_of(*cores: str | None, night: Any) -> Any:
    observed = [Observed(settings={}, environment={} if seen is None else {"cores": seen}) for seen in cores]
    return cores_row([make_report(rank, observed=seen) for rank, seen in enumerate(observed)], night)


def test_ranks_that_share_all_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    night = make_night(machine=make_gpu_machine(count=2))
    monkeypatch.setattr(spread, "numa_nodes", lambda: [{0}, {1}])
    apart = cores_of("0-47", "48-95", night=night)
    assert (apart.status, apart.found) == ("pass", "0-47: rank 0; 48-95: rank 1")
    assert cores_of("0-95", "0-95", night=night).status == "unknown"
    assert cores_of("0-47", None, night=night).status == "unknown"
    assert cores_of(night=night).found == "no rank reported its cores"
    monkeypatch.setattr(spread, "numa_nodes", lambda: [{0, 1}])
    assert cores_of("0-95", "0-95", night=night).status == "pass", "there is only one socket"
    assert cores_of("0-1", night=make_night()).found.startswith("not run: ")


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
