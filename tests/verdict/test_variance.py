"""Test the estimates of variance components."""

import math

import pytest

from perfsuite.verdict.variance import _UPPER_LIMIT, Component, pooled, upper_limit


def chi_squared_cdf(value: float, degrees: int) -> float:
    """Return the cumulative distribution of chi squared, from a series for the incomplete gamma function.

    The series is that of Abramowitz and Stegun 6.5.29.
    """
    a = degrees / 2
    x = value / 2
    term = total = 1 / math.gamma(a + 1)
    for k in range(1, 60):
        term *= x / (a + k)
        total += term
    return math.pow(x, a) * math.exp(-x) * total


@pytest.mark.parametrize(("degrees", "factor"), [*enumerate(_UPPER_LIMIT, 1)])
def test_variance_limit_is_that_of_chi_squared(degrees: int, factor: float) -> None:
    assert chi_squared_cdf(degrees / factor, degrees) == pytest.approx(0.125, rel=0.005)


@pytest.mark.parametrize("degrees", [10, 20, 60])
def test_the_limit_goes_on_beyond_the_table(degrees: int) -> None:
    assert chi_squared_cdf(degrees / upper_limit(degrees), degrees) == pytest.approx(0.125, rel=0.01)


def test_the_limit_falls_with_the_degrees() -> None:
    limits = [upper_limit(degrees) for degrees in range(1, 30)]
    assert limits == sorted(limits, reverse=True)


def test_a_component_is_what_the_levels_below_do_not_explain() -> None:
    component = Component(observed=5.0, explained=1.0, degrees=9)
    assert component.upper == pytest.approx(5.0 * 2.0 - 1.0)


def test_a_small_mean_square_does_not_prove_zero() -> None:
    by_chance = Component(observed=0.0, explained=1.0, degrees=4)
    assert by_chance.upper == pytest.approx(3.28 - 1.0)


def test_pools_estimates_by_their_degrees() -> None:
    first = Component(observed=1.0, explained=0.5, degrees=1)
    second = Component(observed=4.0, explained=2.0, degrees=2)
    assert pooled([first, None, second]) == Component(observed=3.0, explained=1.5, degrees=3)


def test_nothing_known_gives_no_estimate() -> None:
    assert pooled([None, None]) is None


def test_the_standard_deviation_of_nothing_is_0() -> None:
    nothing = Component(observed=1.0, explained=2.0, degrees=9)
    assert nothing.sigma == 0
    assert nothing.upper_sigma == pytest.approx(math.sqrt(2))
    assert Component(observed=5.0, explained=1.0, degrees=9).sigma == 2
