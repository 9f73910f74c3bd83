from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, Fake, measure
from perfsuite.case.hardware import Machine
from perfsuite.doctor.injected import EXPECTED, Expectation, inject_all, small_case
from perfsuite.doctor.rows import Row
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import Launching
from perfsuite.node.machine import detect
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from tests.samples import DISTURBED, make_case, make_figures, make_gpu_machine, make_machine, make_run


@pytest.mark.nightly
def test_catches_every_fault_and_no_clean_run() -> None:
    rows = list(inject_all(small_case(detect()).replace(framework=Fake()), detect()))
    assert len(rows) == 1 + len(EXPECTED) + 1
    assert {row.status for row in rows} == {"pass"}


def injected(
    monkeypatch: pytest.MonkeyPatch, *expectations: Expectation, disturbed_from: int = 99, **limits: int
) -> list[Row]:
    """Return the rows of these faults from fake launches.

    From row `disturbed_from` on, others use the machine.
    """
    rows: list[Row] = []

    def launch_once(case: Case, machine: Machine, directory: Path, how: Launching) -> Run:
        speed = {"slowdown=60%": 0.4, "slowdown=1%": 0.99}.get(str(how.inject), 1.0)
        number = int(directory.name.removeprefix("launch-"))
        kind: Any = {"nan": "loss", "crash": "crash"}.get(str(how.inject))
        return make_run(
            machine=machine,
            figures=make_figures(tokens_per_s=1000 * speed * (1 + number / 1e4)),
            failure=kind and Failure(kind=kind, message="x"),
            health=DISTURBED if len(rows) >= disturbed_from else None,
        )

    monkeypatch.setattr(measure, "launch_once", launch_once)
    for row in inject_all(make_case(), make_machine(), expectations=expectations, **limits):
        rows.append(row)
    return rows


SLOW = Expectation("slowdown=60%", ("regressed",))
CRASH = Expectation("crash", failure="crash")


@pytest.mark.parametrize(
    ("blind", "shown", "advice"),
    [
        (Expectation("slowdown=1%", ("regressed",)), "passed after", "expected regressed"),
        (Expectation("nan", failure="crash"), "failed (loss) after", "expected failed (crash); "),
        (SLOW._replace(metric="peak_memory_bytes"), "regressed after", "expected regressed"),
    ],
)
def test_uncaught_fault_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch, blind: Expectation, shown: str, advice: str
) -> None:
    recorded, caught, missed, clean = injected(monkeypatch, SLOW, blind)
    assert (recorded.check, recorded.found) == ("baseline", "recorded from 5 launches")
    assert caught.found == "regressed after 3 launches"
    assert (missed.check, missed.status) == (f"inject {blind.inject}", "fail")
    assert missed.found.startswith(shown)
    assert str(missed.advice).startswith(advice)
    assert (clean.check, {row.status for row in (recorded, caught, clean)}) == ("inject nothing", {"pass"})


def test_unhealthy_machine_is_not_a_broken_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is recorded on a quiet machine. After that, others use the machine."""
    rows = injected(monkeypatch, SLOW, CRASH, disturbed_from=1, max_unhealthy=2)
    assert [row.status for row in rows] == ["pass", "unknown", "pass", "unknown"], "a crash always counts"
    assert rows[1].found == "the machine was unhealthy in 2 launches, so nothing is known"


@pytest.mark.parametrize(("is_reached", "status"), [(False, "unknown"), (True, "pass")])
def test_a_launch_killed_before_it_hangs_is_unknown(
    monkeypatch: pytest.MonkeyPatch, is_reached: bool, status: str
) -> None:
    def launch_once(case: Case, machine: Machine, directory: Path, how: Launching) -> Run:
        if how.inject is None:
            return make_run(machine=machine)
        directory.mkdir(parents=True)
        if is_reached:
            RunDir(directory).injected.touch()
        return make_run(machine=machine, failure=Failure(kind="timeout", message="killed after 30 s"))

    monkeypatch.setattr(measure, "launch_once", launch_once)
    expectations = (Expectation("hang", failure="timeout"),)
    _, hang, _ = inject_all(make_case(), make_machine(), expectations=expectations)
    assert (hang.check, hang.status) == ("inject hang", status)
    assert hang.found.startswith("failed (timeout)" if is_reached else "the fault was not reached: ")


def test_no_baseline_on_an_unhealthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = injected(monkeypatch, SLOW, disturbed_from=0, max_unhealthy=2)
    assert (row.check, row.status) == ("baseline", "unknown")


def test_it_runs_on_every_gpu_of_any_kind() -> None:
    machine = make_gpu_machine("NVIDIA Imaginary X1")
    case = small_case(machine)
    assert unsupported(case, machine) is None
    assert case.topology.world_size == 8
    assert case.timeout_s == 300, "the first import from a network file system takes long"
