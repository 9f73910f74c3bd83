"""Test the estimate of the change that the cases of a session have in common."""

import math
import random

import pytest

from perfsuite.verdict.common_change import CommonChange, Estimate, common_change

BORENSTEIN = {
    name: Estimate(effect, math.sqrt(variance))
    for name, effect, variance in (
        ("Carroll", 0.10, 0.03),
        ("Grant", 0.30, 0.03),
        ("Peck", 0.35, 0.05),
        ("Donat", 0.65, 0.01),
        ("Stewart", 0.45, 0.05),
        ("Young", 0.15, 0.02),
    )
}
"""Effects and variances of an example in Borenstein et al., Introduction to Meta-Analysis (2009)."""


def night(
    common: float, *, scatter: float = 0.0, cases: int = 20, error: float = 0.004, seed: int = 0
) -> dict[str, Estimate]:
    """Return simulated changes of the cases of one night."""
    draw = random.Random(seed)
    spread = math.hypot(scatter, error)
    return {f"case{number}": Estimate(draw.gauss(common, spread), error) for number in range(cases)}


def estimated(changes: dict[str, Estimate]) -> CommonChange:
    """Return the common change. Fail if there is none."""
    common = common_change(changes)
    assert common is not None
    return common


def test_estimates_are_those_of_a_textbook() -> None:
    common = estimated(BORENSTEIN)  # `combine_effects` of statsmodels 0.14 agrees
    assert common.estimate == pytest.approx(0.34425, abs=1e-5)
    assert common.error == pytest.approx(0.08953, abs=1e-5)
    assert common.scatter**2 == pytest.approx(0.03979, abs=1e-5)


def test_the_interval_covers_the_common_change() -> None:
    nights = [estimated(night(0.03, scatter=0.005, seed=seed)) for seed in range(500)]
    covered = sum(low <= 0.03 <= high for low, high in (common.interval for common in nights))
    assert covered >= 480  # 96%, not 99%, because cases can be left out


def test_one_direction_is_shared() -> None:
    shared = [estimated(night(0.011, scatter=0.002, seed=seed)).is_shared for seed in range(100)]
    assert sum(shared) >= 95


def test_changes_around_zero_are_not_shared() -> None:
    shared = [estimated(night(0.0, scatter=0.02, seed=seed)).is_shared for seed in range(100)]
    assert sum(shared) <= 5


def test_a_case_that_changed_more_is_apart() -> None:
    changes = night(0.011, scatter=0.002)
    common = estimated({**changes, "worse": Estimate(0.08, 0.004)})
    assert common.apart == ("worse",)
    assert "worse" not in common.cases
    assert common.estimate == pytest.approx(0.011, abs=0.002)


def test_equal_changes_are_shared() -> None:
    common = estimated({str(number): Estimate(0.02, 0.01) for number in range(4)})
    assert common.estimate == pytest.approx(0.02)
    assert common.scatter == 0
    assert common.apart == ()
    assert common.is_shared


def test_too_few_cases_have_no_common_change() -> None:
    changes = night(0.03, cases=3)
    assert common_change(changes) is None
    assert common_change({}) is None
    # Without the case that differs, too few cases remain.
    near = {str(number): Estimate(0.03 + number / 10_000, 0.001) for number in range(3)}
    assert common_change({**near, "far": Estimate(9.0, 0.001)}) is None
