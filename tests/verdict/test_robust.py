import math
from statistics import NormalDist

import pytest

from perfsuite.verdict import robust
from perfsuite.verdict.robust import (
    SCALE_CLIP,
    Z_95_ONE_SIDED,
    Z_99,
    clipped_variance,
    location,
    sorted_logs,
    squares,
    t_quantile,
)


def test_clipped_square_is_that_of_a_normal() -> None:
    """The expected value is the mean of the clipped z^2 for a normal z, integrated by parts.

    Within [-c, c] the integral is P(|z| < c) - 2 c pdf(c). Outside, z^2 is clipped to c^2.
    """
    normal = NormalDist()
    clip = SCALE_CLIP
    outside = 2 * (1 - normal.cdf(clip))
    expected = 1 - outside - 2 * clip * normal.pdf(clip) + clip**2 * outside
    assert pytest.approx(expected, abs=1e-6) == robust._SCALE_CLIPPED_SQUARE


def test_quantiles_logs_and_squares_are_exact() -> None:
    assert (Z_99, Z_95_ONE_SIDED) == (2.576, 1.645)
    assert sorted_logs([math.e, 1.0]) == [0.0, 1.0]
    assert squares([0.0, 1.0, 4.0]) == [1.0, 0.0, 9.0]
    assert squares([0.0, 2.0]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("degrees", "exact"),  # the column "exact" is scipy.stats.t.isf(scipy.stats.norm.sf(z), degrees)
    [
        (3, {1.645: 2.35370, 2.576: 5.84194, 3.2: 11.60475}),
        (4, {1.645: 2.13212, 2.576: 4.60475, 3.2: 7.92179}),
        (6, {1.645: 1.94340, 2.576: 3.70784, 3.2: 5.60520}),
        (10, {1.645: 1.81265, 2.576: 3.16956, 3.2: 4.38145}),
        (30, {1.645: 1.69742, 2.576: 2.75020, 3.2: 3.52707}),
    ],
)
def test_t_quantile_is_close_and_never_too_small(degrees: float, exact: dict[float, float]) -> None:
    for z, quantile in exact.items():
        assert quantile * 0.9999 <= t_quantile(z, degrees) <= quantile * (1.09 if degrees < 6 else 1.012)
        assert t_quantile(z, 0.001) == math.inf, "with almost no degrees of freedom, it is infinite"


@pytest.mark.parametrize(
    ("values", "sigma", "expected"),
    [
        ([-0.01, -0.005, 0.0, 0.005, 0.05], 0.01, (-0.01 + 0.02) / 5),
        ([-0.01, -0.005, 0.0, 0.005, 50.0], 0.01, (-0.01 + 0.02) / 5),
        ([-1000.0, 0.0, 0.0, 0.0, 1.5], 1.0, (-2 + 1.5) / 5),
        ([-1.5, 0.0, 0.0, 0.0, 1000.0], 1.0, (-1.5 + 2) / 5),
        ([1.0, 2.0, 6.0], 10.0, 3.0),
    ],
    ids=["large", "very large", "low", "high", "none clipped"],
)
def test_location_clips_values_at_two_sigmas(values: list[float], sigma: float, expected: float) -> None:
    assert location(values, sigma) == pytest.approx(expected)


def test_one_large_square_in_ten_hardly_counts() -> None:
    """The expected values are worked out for the first step of the iteration.

    In that step, none of the four squares is clipped. Further steps change the result only a little.
    """
    assert clipped_variance([], 0) == 0.0
    even = [1.0] * 4
    assert clipped_variance(even, 4) == pytest.approx(1.0)
    assert clipped_variance(even, 3, prior=9.0, prior_degrees=3) == pytest.approx((27 + 4) / 6, rel=0.2)
    assert clipped_variance([*[1.0] * 9, 1e6], 9) == pytest.approx((9 + 2.25 * 1.8) / 0.7784655 / 9, rel=0.25)
    assert clipped_variance([*[1.0] * 5, *[1e6] * 5], 9) > 1e5


def test_variance_reproduces_itself_with_a_prior() -> None:
    residuals = [0.1, 0.4, 1.0, 2.0, 3.0, 40.0]
    variance = clipped_variance(residuals, 5, prior=0.5, prior_degrees=2)
    clipped = sum(min(residual, SCALE_CLIP**2 * variance) for residual in residuals) / 0.7784655
    assert (0.5 * 2 + clipped) / 7 == pytest.approx(variance, rel=0.002)
