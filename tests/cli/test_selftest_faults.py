from __future__ import annotations

import pytest

from perfsuite import Case, Fake
from perfsuite.cli.selftest_faults import EXPECTED, Expectation, inject_all, small_case
from perfsuite.launch.machine import detect, gpu_machine
from perfsuite.launch.requirements import unsupported

FAKE: Case = small_case(detect()).replace(framework=Fake())


@pytest.mark.launch
def test_every_fault_is_caught_and_a_clean_run_is_not() -> None:
    said: list[str] = []
    assert inject_all(FAKE, detect(), said.append) == "caught"
    assert len(said) == 1 + len(EXPECTED) + 1
    assert all(line.startswith("ok ") for line in said[1:])


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
    said: list[str] = []
    assert inject_all(FAKE, detect(), said.append, expectations=(blind,)) == "missed"
    assert said[1].startswith("BAD ")


@pytest.mark.launch
def test_a_machine_that_stays_unhealthy_is_not_a_broken_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is recorded in quiet; then others use the machine."""
    said: list[str] = []
    monkeypatch.setattr(
        "perfsuite.results.health.machine_problems", lambda health, machine: ["hot"] if said else []
    )
    slow = Expectation(inject="slowdown=60%", outcomes=("regressed",))
    crash = Expectation(inject="crash", outcomes=("failed",), failure="crash")
    assert inject_all(FAKE, detect(), said.append, expectations=(slow, crash)) == "untried"
    assert "??? inject slowdown=60%: the machine was unhealthy 3 times, so nothing is known" in said
    assert any(line.startswith("ok  inject crash") for line in said), "a failure is one on any machine"
    wrong = Expectation(inject="crash", outcomes=("failed",), failure="timeout")
    said.clear()
    assert inject_all(FAKE, detect(), said.append, expectations=(slow, wrong)) == "missed"


def test_it_runs_on_every_gpu_of_any_kind() -> None:
    machine = gpu_machine(["NVIDIA Imaginary X1"], count=8, memory_bytes=2**36, driver=None)
    case = small_case(machine)
    assert unsupported(case, machine) is None
    assert case.topology.world_size == 8
    assert case.timeout_s == 300, "a cold import from a network file system"
