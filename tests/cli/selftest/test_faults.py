from __future__ import annotations

import pytest

from perfsuite import Case, Fake
from perfsuite.cli.checks import Row
from perfsuite.cli.selftest import faults
from perfsuite.cli.selftest.faults import EXPECTED, Expectation, inject_all, small_case
from perfsuite.launch.requirements import unsupported
from perfsuite.node.machine import detect, gpu_machine

FAKE: Case = small_case(detect()).replace(framework=Fake())


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
    monkeypatch.setattr(faults, "UNHEALTHY_ATTEMPTS", 2)
    monkeypatch.setattr(
        "perfsuite.analysis.health.machine_problems", lambda health, machine: ["hot"] if seen else []
    )
    slow = Expectation(inject="slowdown=60%", outcomes=("regressed",))
    crash = Expectation(inject="crash", outcomes=("failed",), failure="crash")
    for row in inject_all(FAKE, detect(), expectations=(slow, crash)):
        seen.append(row)
    assert [row.status for row in seen] == ["pass", "unknown", "pass", "unknown"], "a crash is one anywhere"
    assert seen[1].found == "the machine was unhealthy 2 times, so nothing is known"


def test_it_runs_on_every_gpu_of_any_kind() -> None:
    machine = gpu_machine(["NVIDIA Imaginary X1"], count=8, memory_bytes=2**36, driver=None)
    case = small_case(machine)
    assert unsupported(case, machine) is None
    assert case.topology.world_size == 8
    assert case.timeout_s == 300, "a cold import from a network file system"
