import math
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import Fake, documents
from perfsuite.case.case import CaseFile
from perfsuite.doctor.injected import EXPECTED, Expectation, inject_all, small_case
from perfsuite.doctor.rows import Row
from perfsuite.launch.job import Job, OnProgress
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import Launching
from perfsuite.node.machine import detect
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import LaunchFile
from tests.samples import (
    DISTURBED,
    known,
    make_case,
    make_gpu_machine,
    make_machine,
    make_report,
    write_launch,
)


@pytest.mark.nightly
def test_catches_every_fault_and_no_clean_run() -> None:
    rows = list(inject_all(small_case(detect()).replace(framework=Fake()), detect()))
    assert len(rows) == 1 + len(EXPECTED) + 1
    assert {row.status for row in rows} == {"pass"}


QUIET = DISTURBED.replace(foreign_cpu=0.0)


def injected(*expectations: Expectation, disturbed_from: int = 99, **limits: int) -> list[Row]:
    """Return the rows of these faults, from launches that only write the files of their ranks.

    From row `disturbed_from` on, others use the machine.
    """
    rows: list[Row] = []

    def launch(job: Job, on_progress: OnProgress) -> None:
        fault = str(documents.read(job.run_dir.case, CaseFile).inject)
        speed = {"slowdown=60%": 0.4, "slowdown=50%": 0.5, "slowdown=1%": 0.99}.get(fault, 1.0)
        speed *= 1 + known(job.run_dir.number) / 1e4
        failures = (Failure(kind="crash", message="x"),) if fault == "crash" else ()
        health = DISTURBED if len(rows) >= disturbed_from else QUIET
        documents.write(job.run_dir.launch(0), LaunchFile(node=0, failures=failures, health=health))
        loss: dict[str, Any] = {"loss": (math.nan,) * 25} if fault == "nan" else {}
        for rank in () if failures else (0, 1):
            report = make_report(rank, clock="perf_counter", step_s=(0.1 / speed,) * 25, **loss)
            documents.write(job.run_dir.rank(rank), report)

    how = Launching(launcher=Mock(launch=launch))
    for row in inject_all(make_case(), make_machine(), expectations=expectations, how=how, **limits):
        rows.append(row)
    return rows


SLOW = Expectation("slowdown=60%", ("regressed",))
CRASH = Expectation("crash", failure="crash")


@pytest.mark.parametrize(
    ("blind", "shown", "advice"),
    [
        (Expectation("slowdown=1%", ("regressed",)), "passed after", "expected regressed"),
        (Expectation("nan", failure="crash"), "failed (loss) after", "expected failed (crash); "),
        (
            SLOW._replace(inject="slowdown=50%", metric="peak_memory_bytes"),
            "regressed after",
            "expected regressed",
        ),
    ],
)
def test_uncaught_fault_fails_the_self_test(blind: Expectation, shown: str, advice: str) -> None:
    recorded, caught, missed, clean = injected(SLOW, blind)
    assert (recorded.check, recorded.found) == ("baseline", "recorded from 5 launches")
    assert caught.found == "regressed after 3 launches"
    assert (missed.check, missed.status) == (f"inject {blind.inject}", "fail")
    assert missed.found.startswith(shown)
    assert str(missed.advice).startswith(advice)
    assert (clean.check, {row.status for row in (recorded, caught, clean)}) == ("inject nothing", {"pass"})


def test_unhealthy_machine_is_not_a_broken_gate() -> None:
    """The baseline is recorded on a quiet machine. After that, others use the machine."""
    rows = injected(SLOW, CRASH, disturbed_from=1, max_unhealthy=2)
    assert [row.status for row in rows] == ["pass", "unknown", "pass", "unknown"], "a crash always counts"
    assert rows[1].found == "the machine was unhealthy in 2 launches, so nothing is known"


@pytest.mark.parametrize(("is_reached", "status"), [(False, "unknown"), (True, "pass")])
def test_a_launch_killed_before_it_hangs_is_unknown(is_reached: bool, status: str) -> None:
    def launch(job: Job, on_progress: OnProgress) -> Failure | None:
        if documents.read(job.run_dir.case, CaseFile).inject is None:
            write_launch(job.run_dir.path, make_report(0), make_report(1))
            return None
        if is_reached:
            job.run_dir.injected.touch()
        return Failure(kind="timeout", message="killed after 30 s")

    expectations = (Expectation("hang", failure="timeout"),)
    how = Launching(launcher=Mock(launch=launch))
    _, hang, _ = inject_all(make_case(), make_machine(), expectations=expectations, how=how)
    assert (hang.check, hang.status) == ("inject hang", status)
    assert hang.found.startswith("failed (timeout)" if is_reached else "the fault was not reached: ")


def test_no_baseline_on_an_unhealthy_machine() -> None:
    [row] = injected(SLOW, disturbed_from=0, max_unhealthy=2)
    assert (row.check, row.status) == ("baseline", "unknown")


def test_it_runs_on_every_gpu_of_any_kind() -> None:
    machine = make_gpu_machine("NVIDIA Imaginary X1")
    case = small_case(machine)
    assert unsupported(case, machine) is None
    assert case.topology.world_size == 8
    assert case.timeout_s == 300, "the first import from a network file system takes long"
