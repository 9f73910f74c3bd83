import re
from pathlib import Path
from typing import Any

import pytest

from perfsuite.doctor.injected import small_case
from perfsuite.doctor.launches import LAUNCHES, launch_rows, noise_row, well_row
from perfsuite.results.outcome import Verdict
from tests.samples import make_gpu_machine, make_launches, make_machine, make_report, make_run, write_launch

RECORDED = Verdict(outcome="recorded", launches=LAUNCHES)


def test_few_launches_show_rates_health_and_noise() -> None:
    def measure(case: Any, machine: Any, directory: Path, reference: Any, how: Any) -> Any:
        how.on_launch(case, 1)
        report = make_report(device_probe={"matmul_tflops": 700.0})
        write_launch(directory / "launch-1", report, make_report(1, device_probe=report.device_probe))
        return make_launches(1.0, 1.01, 0.99, 1.005, 0.995), RECORDED

    said: list[str] = []
    machine = make_gpu_machine(count=2)
    rows = launch_rows(machine, said.append, measure=measure)
    assert [row.check for row in rows] == ["matmul_tflops", "launches", "noise"]
    assert {row.status for row in rows} == {"pass"}
    assert said == [f"launch 1 of {small_case(machine).id}"]


def test_launches_that_were_set_aside_fail() -> None:
    runs = make_launches(*[1.0] * LAUNCHES)
    assert well_row(runs, RECORDED).status == "pass"
    row = well_row(runs, RECORDED.replace(unhealthy_launches=(1,), reasons=("launch 1 set aside: hot",)))
    assert (row.status, row.found) == ("fail", "launch 1 set aside: hot")


@pytest.mark.parametrize(
    ("speeds", "status"),
    [((1.0, 1.01, 0.99, 1.005, 0.995), "pass"), ((1.0, 1.6, 0.7, 1.3, 0.8), "fail"), ((1.0, 1.0), "unknown")],
)
def test_noise_says_which_tolerance_holds(speeds: tuple[float, ...], status: str) -> None:
    """A failed launch does not count as evidence of the noise."""
    runs = [*make_launches(*speeds), make_run(failure={"kind": "crash", "message": "x"})]
    row = noise_row(runs, RECORDED.replace(launches=len(runs)), make_machine())
    assert row.status == status
    if status == "fail":
        figure = r"(?:it finds drops of|drops below) ([\d.]+%)"
        assert re.findall(figure, row.found) == re.findall(figure, str(row.advice)) != []
    if status == "unknown":
        assert row.found == "2 healthy launches are too few to estimate the noise"
