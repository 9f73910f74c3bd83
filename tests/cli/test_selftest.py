from __future__ import annotations

from collections.abc import Iterator

import pytest

from perfsuite import Case, Fake
from perfsuite.case import torch_build
from perfsuite.case.hardware import Machine
from perfsuite.cli import selftest
from perfsuite.cli.checks import Row, Status
from perfsuite.cli.selftest import EXPECTED, Expectation, inject_all, small_case
from perfsuite.errors import BusyError
from perfsuite.launch.lock import MachineLock
from perfsuite.launch.requirements import unsupported
from perfsuite.node.machine import detect
from tests.cli.commands import run
from tests.samples import make_gpu_machine

FAKE: Case = small_case(detect()).replace(framework=Fake())


@pytest.mark.parametrize("why", ["no [such] thing", "torch 2.13.0+cpu is built without CUDA"])
def test_the_self_test_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why.startswith("torch"):
        monkeypatch.setattr(selftest, "detect", make_gpu_machine)
        monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
    else:
        monkeypatch.setattr(selftest, "unsupported", lambda case, machine: why)
    result = run("selftest", status=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"perfsuite selftest: the self-test cannot run here: {why}")


@pytest.mark.parametrize(
    ("answer", "code", "last"),
    [
        ("pass", 0, "every fault was caught, and a clean run was not"),
        ("fail", 1, "the gate does not catch what it must: do not trust its verdicts here"),
        ("unknown", 3, "part of the gate could not be tried"),
    ],
)
def test_the_self_test_ends_with_its_answer(
    answer: Status, code: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def answered(case: Case, machine: Machine) -> Iterator[Row]:
        with pytest.raises(BusyError):
            MachineLock().take(print, wait=False)
        held.append(True)
        yield Row(check="inject nan", status=answer, found="x")

    monkeypatch.setattr(selftest, "inject_all", answered)
    assert run("selftest", "--framework", "fake", status=code).stdout.splitlines()[-1].startswith(last)
    assert held, "no session measured beside it"
    again = MachineLock()
    again.take(print, wait=False)
    again.release()


@pytest.mark.launch
def test_every_fault_is_caught_and_a_clean_run_is_not() -> None:
    rows = list(inject_all(FAKE, detect()))
    assert len(rows) == 1 + len(EXPECTED) + 1
    assert {row.status for row in rows} == {"pass"}


@pytest.mark.launch
@pytest.mark.parametrize(
    "blind",
    [
        Expectation(inject="slowdown=1%", outcomes=("regressed",)),
        Expectation(inject="nan", outcomes=("failed",), failure="crash"),
        Expectation(inject="slowdown=60%", outcomes=("regressed",), metric="peak_memory_bytes"),
    ],
)
def test_a_fault_that_is_not_caught_as_it_must_fails_the_self_test(blind: Expectation) -> None:
    _, missed, clean = inject_all(FAKE, detect(), expectations=(blind,))
    assert (missed.check, missed.status, clean.status) == (f"inject {blind.inject}", "fail", "pass")
    assert str(missed.advice).startswith(f"expected {blind.outcomes[0]}")


@pytest.mark.launch
def test_a_machine_that_stays_unhealthy_is_not_a_broken_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is recorded in quiet; then others use the machine."""
    seen: list[Row] = []
    monkeypatch.setattr(selftest, "UNHEALTHY_LAUNCHES", 2)
    monkeypatch.setattr(
        "perfsuite.analysis.health.machine_problems", lambda health, machine: ["hot"] if seen else []
    )
    slow = Expectation(inject="slowdown=60%", outcomes=("regressed",))
    crash = Expectation(inject="crash", outcomes=("failed",), failure="crash")
    for row in inject_all(FAKE, detect(), expectations=(slow, crash)):
        seen.append(row)
    assert [row.status for row in seen] == ["pass", "unknown", "pass", "unknown"], "a crash is one anywhere"
    assert seen[1].found == "the machine was unhealthy in 2 launches, so nothing is known"


def test_it_runs_on_every_gpu_of_any_kind() -> None:
    machine = make_gpu_machine("NVIDIA Imaginary X1")
    case = small_case(machine)
    assert unsupported(case, machine) is None
    assert case.topology.world_size == 8
    assert case.timeout_s == 300, "a cold import from a network file system"
