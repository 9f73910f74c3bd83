import pytest

from perfsuite.verdict.robust import clipped_variance, location, middle, t_quantile


@pytest.mark.parametrize(
    ("degrees", "z", "exact"),  # exact: scipy.stats.t.isf(scipy.stats.norm.sf(z), degrees)
    [
        (3, 1.645, 2.35370),
        (3, 2.576, 5.84194),
        (3, 3.2, 11.60475),
        (4, 1.645, 2.13212),
        (4, 2.576, 4.60475),
        (4, 3.2, 7.92179),
        (6, 1.645, 1.94340),
        (6, 2.576, 3.70784),
        (6, 3.2, 5.60520),
        (10, 1.645, 1.81265),
        (10, 2.576, 3.16956),
        (10, 3.2, 4.38145),
        (30, 1.645, 1.69742),
        (30, 2.576, 2.75020),
        (30, 3.2, 3.52707),
    ],
)
def test_t_quantile_is_close_and_never_too_small(degrees: float, z: float, exact: float) -> None:
    assert exact * 0.9999 <= t_quantile(z, degrees) <= exact * (1.09 if degrees < 6 else 1.012)


def test_t_quantile_of_no_knowledge_is_endless() -> None:
    assert t_quantile(3.2, 0.01) == float("inf")


def test_one_outlier_moves_the_location_by_a_bounded_amount() -> None:
    good = [-0.01, -0.005, 0.0, 0.005]
    near, far = location([*good, 0.05], 0.01), location([*good, 50.0], 0.01)
    assert near == far
    assert abs(far - location(good, 0.01)) < 0.01


def test_the_location_of_close_values_is_their_mean() -> None:
    assert location([1.0, 2.0, 6.0], 10.0) == pytest.approx(3.0)


def test_middle_of_even_and_odd() -> None:
    assert middle([1.0, 2.0, 9.0]) == 2.0
    assert middle([1.0, 2.0, 4.0, 9.0]) == 3.0


def test_a_prior_outweighs_few_residuals() -> None:
    alone = clipped_variance([4.0, 4.0, 4.0, 4.0], 4)
    assert clipped_variance([4.0, 4.0, 4.0, 4.0], 4, prior=1.0, prior_degrees=100) < alone / 2


def test_no_residuals_and_no_prior_are_no_variance() -> None:
    assert clipped_variance([], 0) == 0.0
