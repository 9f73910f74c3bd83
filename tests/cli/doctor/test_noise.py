from __future__ import annotations

import re

import pytest

from perfsuite.cli.doctor.noise import LAUNCHES, noise_row, well_row
from perfsuite.results.outcome import Verdict
from tests.samples import make_launches, make_machine, make_run


def test_launches_that_were_set_aside_fail() -> None:
    runs, verdict = make_launches(*[1.0] * LAUNCHES), Verdict(outcome="recorded", launches=LAUNCHES)
    assert well_row(runs, verdict).status == "pass"
    aside = well_row(runs, verdict.replace(unhealthy_launches=(1,), reasons=("launch 1 set aside: hot",)))
    assert (aside.status, aside.found) == ("fail", "launch 1 set aside: hot")


@pytest.mark.parametrize(
    ("speeds", "status"),
    [((1.0, 1.01, 0.99, 1.005, 0.995), "pass"), ((1.0, 1.6, 0.7, 1.3, 0.8), "fail"), ((1.0, 1.0), "unknown")],
)
def test_noise_says_which_tolerance_the_machine_can_hold(speeds: tuple[float, ...], status: str) -> None:
    """A failed launch is no evidence of it."""
    runs = [*make_launches(*speeds), make_run(failure={"kind": "crash", "message": "x"})]
    row = noise_row(runs, Verdict(outcome="recorded", launches=len(runs)), make_machine())
    assert row.status == status
    if status == "fail":
        figure = r"(?:and by|drops below) ([\d.]+%)"
        assert re.findall(figure, row.found) == re.findall(figure, str(row.advice)) != []
    if status == "unknown":
        assert row.found == "2 healthy launches cannot tell it"
