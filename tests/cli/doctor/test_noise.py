from __future__ import annotations

import re

import pytest

from perfsuite.cli.doctor.noise import LAUNCHES, noise_row, well_row
from perfsuite.results.outcome import Verdict
from tests.samples import make_launches, make_machine, make_run


def test_launches_that_were_set_aside_fail() -> None:
    runs = make_launches(*[1.0] * LAUNCHES)
    assert well_row(runs, Verdict(outcome="recorded", launches=LAUNCHES)).status == "pass"
    aside = Verdict(
        outcome="recorded", launches=6, unhealthy_launches=(1,), reasons=("launch 1 set aside: hot",)
    )
    assert well_row(runs, aside).found == "launch 1 set aside: hot"
    assert well_row(runs, aside).status == "fail"


@pytest.mark.parametrize(
    ("speeds", "status"),
    [((1.0, 1.01, 0.99, 1.005, 0.995), "pass"), ((1.0, 1.6, 0.7, 1.3, 0.8), "fail"), ((1.0, 1.0), "unknown")],
)
def test_noise_says_which_tolerance_the_machine_can_hold(speeds: tuple[float, ...], status: str) -> None:
    runs = make_launches(*speeds)
    row = noise_row(runs, Verdict(outcome="recorded", launches=len(runs)), make_machine())
    assert row.status == status
    if status == "fail":
        found, advised = (
            re.search(r"(?:and by|drops below) ([\d.]+%)", str(text)) for text in (row.found, row.advice)
        )
        assert found is not None
        assert advised is not None
        assert found[1] == advised[1]


def test_a_failed_launch_is_no_evidence_of_noise() -> None:
    runs = [*make_launches(1.0, 1.0), make_run(failure={"kind": "crash", "message": "x"})]
    row = noise_row(runs, Verdict(outcome="failed", launches=3), make_machine())
    assert row.found == "2 healthy launches cannot tell it"
