"""Tests of the table of steps, and of the first two steps. The functions that they call are fake."""

from typing import Any

import pytest

from perfsuite.doctor.rows import passed
from perfsuite.features.first_night.cases import Size
from perfsuite.features.first_night.steps import NAMES, STEPS, machine_rows, selftest_rows
from tests.features.first_night.nights import by_check, make_night
from tests.samples import make_gpu_machine

BUDGET_MIN = 120  # the whole time of a first night


def test_the_steps_have_an_order() -> None:
    assert NAMES == ("machine", "selftest", "spread", "faults", "frameworks", "container", "cores", "cases")
    assert [step.name for step in STEPS if not step.needs_quiet] == ["machine"]


@pytest.mark.parametrize("size", ["full", "tiny", "simulated"])
def test_the_steps_leave_time_for_cases(size: Size) -> None:
    """The step `cases` gets the time that the other steps leave. Its own time depends on the cases."""
    expected = [step.minutes[size][0] for step in STEPS if step.name != "cases"]
    assert sum(expected) <= BUDGET_MIN - 30
    assert all(step.minutes[size][0] < step.minutes[size][1] for step in STEPS)


@pytest.mark.parametrize(("size", "is_quick"), [("full", False), ("simulated", True)])
def test_the_doctor_examines_what_nvidia_smi_describes(
    monkeypatch: pytest.MonkeyPatch, size: Size, is_quick: bool
) -> None:
    asked: list[bool] = []

    def examine(machine: Any, *, quick: bool, load_command: Any, say: Any) -> Any:
        asked.append(quick)
        return [passed("all_reduce_gb_s", "170 over 8 GPUs")]

    monkeypatch.setenv("PATH", "/nowhere")
    rows = by_check(machine_rows(make_night(machine=make_gpu_machine(), size=size), examine=examine))
    assert [*rows] == ["topology", "all_reduce_gb_s", "nccl-tests"]
    assert asked == [is_quick]


@pytest.mark.parametrize(("size", "checks"), [("tiny", ["time", "count"]), ("simulated", ["time"])])
def test_the_selftest_counts_what_trains(size: str, checks: list[str]) -> None:
    rows = by_check(
        selftest_rows(
            make_night(size=size),
            inject_all=lambda case, machine: iter([passed("time", case.framework.name)]),
            inject_structural=lambda machine: iter([passed("count", "")]),
        )
    )
    assert [*rows] == checks
    assert rows["time"].found == ("ddp" if size == "tiny" else "fake")


@pytest.mark.usefixtures("torch_for_cpus")
def test_a_selftest_that_cannot_run_says_why() -> None:
    (row,) = selftest_rows(make_night(machine=make_gpu_machine(), size="full"))
    assert row.status == "unknown"
    assert row.found.startswith("not run: torch")
