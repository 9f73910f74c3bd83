from __future__ import annotations

import pytest

from perfsuite import Case, Fake
from perfsuite.hardware import detect, gpu_machine
from perfsuite.run import unsupported
from perfsuite.selftest import CLEAN, EXPECTED, Expectation, selftest, small_case

FAKE: Case = small_case(detect()).replace(framework=Fake())


@pytest.mark.launch
def test_every_fault_is_caught_and_a_clean_run_is_not() -> None:
    said: list[str] = []
    assert selftest(FAKE, detect(), said.append) in CLEAN.outcomes
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
    assert selftest(FAKE, detect(), said.append, expectations=(blind,)) is None
    assert said[1].startswith("BAD ")


def test_it_runs_on_any_gpu() -> None:
    machine = gpu_machine(["NVIDIA Imaginary X1"], count=8, memory_bytes=2**36, driver=None)
    assert unsupported(small_case(machine), machine) is None
