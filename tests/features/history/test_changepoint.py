import math
import random
from collections.abc import Sequence
from statistics import median

import pytest

from perfsuite.features.history.changepoint import change_points, correlation
from perfsuite.results.trend import ChangePoint


def series(*levels: tuple[int, float], noise: float = 0.01, seed: int = 0) -> list[float]:
    """Return the values of a series. Each of `levels` is a number of nights and their level."""
    luck = random.Random(seed)
    return [level * math.exp(noise * luck.gauss(0, 1)) for nights, level in levels for _ in range(nights)]


def changes_in(values: Sequence[float], min_change: float = 0.005) -> list[ChangePoint]:
    return change_points(values, min_change=min_change)


def numbers_of(change: ChangePoint) -> tuple[float, ...]:
    return (change.index, change.earliest, change.latest, change.before, change.after, *change.interval)


def test_finds_a_step_with_place_and_size() -> None:
    [change] = changes_in(series((60, 2.0), (60, 2.06)))
    assert 58 <= change.index <= 62
    assert change.earliest <= 60 <= change.latest <= change.earliest + 6
    assert change.interval[0] < 0.03 < change.interval[1] < change.interval[0] + 0.015
    assert (change.before, change.after) == pytest.approx((2.0, 2.06), rel=0.005)
    assert change.relative == pytest.approx(change.after / change.before - 1)


def test_finds_a_step_and_its_end() -> None:
    first, second = changes_in(series((50, 1.0), (12, 1.05), (50, 1.0)))
    assert [first.index, second.index] == pytest.approx([50, 62], abs=1)
    assert [first.relative, second.relative] == pytest.approx([0.05, -0.05], abs=0.01)
    assert second.after == pytest.approx(first.before, rel=0.005)


@pytest.mark.parametrize("nights", [*range(6), 200])
def test_steady_nights_have_no_change(nights: int) -> None:
    assert changes_in(series((nights, 1.0))) == changes_in([1000.0] * nights) == []


@pytest.mark.parametrize("nights", [1, 2])
def test_fewer_than_three_bad_nights_make_no_change(nights: int) -> None:
    values = series((60, 1.0))
    values[30 : 30 + nights] = [1.5] * nights
    assert changes_in(values) == []


def test_the_last_two_nights_make_no_change() -> None:
    assert changes_in(series((60, 1.0), (2, 1.2))) == changes_in([1000.0] * 3 + [1100.0] * 2) == []


def test_three_bad_nights_make_a_change() -> None:
    [change] = changes_in(series((60, 1.0), (3, 1.2)))
    assert change.index == 60
    [change] = changes_in([1000.0] * 3 + [1100.0] * 3)
    assert numbers_of(change)[:5] == pytest.approx((3, 3, 3, 1000, 1100))
    [change] = changes_in([1000.0] * 20 + [1010.0] * 3)  # without noise, three nights are enough
    assert numbers_of(change)[:5] == pytest.approx((20, 20, 20, 1000, 1010))


def test_ignores_small_or_unclear_changes() -> None:
    small = series((100, 1.0), (100, 1.004), noise=0.001)
    assert (changes_in(small), len(changes_in(small, min_change=0.002))) == ([], 1)
    values = series((60, 1.0), (14, 1.025))
    assert len(changes_in(values)) == 1
    assert change_points(values, min_change=0.005, correlation=0.6) == []


def test_finds_and_measures_a_slow_drift() -> None:
    """A drift is found as several steps. Apart from noise, their sum is the size of the drift."""
    luck = random.Random(3)
    values = [1.003 ** (night / 7) * math.exp(0.01 * luck.gauss(0, 1)) for night in range(140)]
    stairs = changes_in(values)
    assert len(stairs) >= 2
    assert all(step.relative > 0 for step in stairs)
    assert stairs[-1].after / stairs[0].before == pytest.approx(1.003 ** (100 / 7), rel=0.015)


def good_and_bad_weeks(share: float, nights: int, seed: int) -> list[float]:
    """Return values without a change and with 1% noise.

    The noise of a night is a share of the previous night's noise, plus new noise.
    """
    luck = random.Random(seed)
    now = luck.gauss(0, 0.01)
    values = []
    for _ in range(nights):
        values.append(math.exp(now))
        now = share * now + luck.gauss(0, 0.01 * math.sqrt(1 - share**2))
    return values


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_neighbour_correlation_is_the_share_of_noise(share: float) -> None:
    estimates = [correlation(good_and_bad_weeks(share, 365, seed)) for seed in range(25)]
    assert median(estimates) == pytest.approx(share, abs=0.15)


def test_neighbour_correlation_ignores_steps() -> None:
    assert correlation(series((40, 1.0), (40, 1.1), (40, 1.2), seed=1)) < 0.3
    assert correlation([5.0] * 20) == 0


GONE_AGAIN = series((10, 1.0), (3, 1.06), (10, 1.0), seed=4)
LARGE = series((60, 1.0), (60, 1.016))
SMALL = series((60, 1.0), (60, 1.013), seed=3)


@pytest.mark.parametrize(
    ("values", "alike", "pinned"),
    [
        (LARGE, 0.0, [(60, 56, 62, 1.0000656, 1.0146935, 0.0092696, 0.0200127)]),
        (LARGE, 0.2, [(60, 45, 71, 1.0000656, 1.0146935, 0.0072982, 0.022009)]),
        (SMALL, 0.0, [(60, 56, 65, 0.9971466, 1.0127975, 0.010513, 0.020905)]),
        (
            GONE_AGAIN,
            0.0,
            [
                (10, 10, 10, 1.0017757, 1.0573668, 0.0362012, 0.0751433),
                (13, 13, 13, 1.0573668, 1.0025811, -0.0691436, -0.0341605),
            ],
        ),
    ],
    ids=["large", "large, correlated", "small", "gone again"],
)
def test_changes_stay_the_same(values: list[float], alike: float, pinned: list[tuple[float, ...]]) -> None:
    """The expected values are fixed, so that no change of the noise, threshold or interval is overlooked."""
    seen = change_points(values, min_change=0.005, correlation=alike)
    assert [numbers_of(change) for change in seen] == [pytest.approx(numbers, abs=1e-6) for numbers in pinned]


def test_correlations_stay_the_same() -> None:
    weeks = [correlation(good_and_bad_weeks(0.3, 200, seed)) for seed in range(4)]
    assert weeks == pytest.approx([0.121985, 0.06439, 0.240578, 0.232423], abs=1e-5)


def test_a_correlation_has_an_upper_limit() -> None:
    assert correlation(good_and_bad_weeks(0.99, 200, 0)) == 0.9


@pytest.mark.parametrize("bad", [1.4, 0.6, 1e6, 1e-6])
def test_bad_night_hardly_moves_a_level(bad: float) -> None:
    values = series((30, 1.0), (9, 1.05), (40, 1.0), seed=3)
    values[50] = bad
    first, second = changes_in(values)
    assert numbers_of(first)[:4] == pytest.approx((30, 30, 30, 0.9982406), abs=1e-6)
    assert second.after == pytest.approx(0.998, abs=0.0015)
    assert first.interval[1] - first.interval[0] == pytest.approx(0.0255, rel=0.06)


@pytest.mark.simulation
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_good_and_bad_weeks_are_not_changes(share: float) -> None:
    histories = [good_and_bad_weeks(share, 365, seed) for seed in range(100)]
    alike = median(correlation(values) for values in histories)
    alarms = [change_points(values, min_change=0.005, correlation=alike) for values in histories]
    assert sum(map(bool, alarms)) <= 3


@pytest.mark.simulation
def test_without_a_correction_bad_weeks_are_false_alarms() -> None:
    histories = [good_and_bad_weeks(0.6, 365, seed) for seed in range(100)]
    assert sum(bool(changes_in(values)) for values in histories) > 50


@pytest.mark.simulation
def test_at_most_one_steady_series_in_100_has_an_alarm() -> None:
    """tests/features/history/drift.py prints such rates. The bounds here allow for chance."""
    quiet = [series((120, 1.0), seed=seed) for seed in range(300)]
    assert sum(bool(changes_in(values)) for values in quiet) <= 3


@pytest.mark.simulation
@pytest.mark.parametrize(("nights", "step", "least"), [(12, 1.02, 260), (8, 1.03, 285), (5, 1.05, 297)])
def test_most_steps_are_found_within_days(nights: int, step: float, least: int) -> None:
    seen = [changes_in(series((60, 1.0), (nights, step), seed=seed)) for seed in range(300)]
    hits = sum(any(abs(change.index - 60) <= 7 for change in changes_) for changes_ in seen)
    assert hits >= least
