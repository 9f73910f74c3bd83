"""Tests of the parts of checks that baselines and arms share."""

import pytest

from perfsuite.results.baseline import from_runs
from perfsuite.results.metric import PEAK_MEMORY
from perfsuite.verdict.checks import LOOKS_THE_SAME, NOT_WORTH_A_LAUNCH, tolerance_check, unjudged
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, Noise
from tests.samples import make_run
from tests.verdict.judging import (
    IMPORTS,
    OF_IMPORTS,
    OF_SPANS,
    QUIET,
    check_of,
    judged,
    lasting,
    outcomes,
    session,
    usual,
)


@pytest.mark.parametrize(
    ("now", "launches", "why"), [(0.105, 1, LOOKS_THE_SAME), (0.130, FEWEST_LAUNCHES, NOT_WORTH_A_LAUNCH)]
)
def test_noisy_cpu_time_holds_up_no_verdict(now: float, launches: int, why: str) -> None:
    """CPU time that is too noisy for a decision does not delay the verdict.

    If CPU time seems to have changed, the session only makes the fewest launches that can show a change.
    """
    noisy = {"cpu_s_per_step": Noise(sigma=0.15, degrees_of_freedom=30)}
    before = from_runs(usual(cpu_s_per_step=0.1)[:5])
    verdict = session(usual(cpu_s_per_step=now), before, ClassNoise(by_metric={**QUIET.by_metric, **noisy}))
    assert (verdict.outcome, verdict.launches) == ("passed", launches)
    check = check_of(verdict, "cpu_s_per_step")
    assert (check.outcome, check.note) == ("inconclusive", why)


def test_exact_metric_may_change_by_its_tolerance() -> None:
    sizes = {126: "regressed", 125: "passed", 100: "passed", 75: "passed", 74: "improved"}
    checks = {size: unjudged(PEAK_MEMORY, make_run(), [size], [100], 0.25) for size in sizes}
    assert {
        size: tolerance_check(PEAK_MEMORY, check, 0.25).outcome for size, check in checks.items()
    } == sizes


@pytest.mark.parametrize(("now", "outcome"), [(6.0, "inconclusive"), (7.9, "undecided")], ids=str)
def test_only_a_changed_span_costs_launches(now: float, outcome: str) -> None:
    noise = ClassNoise(by_metric={**OF_SPANS.by_metric, OF_IMPORTS: Noise(sigma=0.15, degrees_of_freedom=30)})
    verdict = judged(lasting(IMPORTS, now)[:3], from_runs(lasting(IMPORTS, 6)[:5]), noise)
    assert outcomes(verdict)[OF_IMPORTS] == outcome
    assert (verdict.outcome == "undecided") is (outcome == "undecided")
