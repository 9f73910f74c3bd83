from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.analysis.window import FLAT, ROLL, UNMEASURED_STEPS, Window, find_window, settled
from tests.samples import deterministic

SERIES = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=2 * ROLL, max_size=60)


def test_flat_from_the_start() -> None:
    assert find_window([0.1] * 30, 20) == Window(UNMEASURED_STEPS, 30, True)


def test_small_noise_is_flat() -> None:
    series = [1 + 0.01 * (-1) ** step for step in range(40)]
    assert find_window(series, 20) == Window(UNMEASURED_STEPS, 40, True)


@pytest.mark.parametrize("slow", [1, 2, 3, 4, 7, 12])
def test_slow_first_steps_are_left_out(slow: int) -> None:
    assert find_window([0.5] * slow + [0.1] * 40, 20) == Window(max(slow, UNMEASURED_STEPS), slow + 40, True)


def test_decaying_warm_up_ends_where_it_comes_within_the_bound() -> None:
    series = [1 + 0.5 * 0.8**step for step in range(60)]
    window = find_window(series, 30)
    assert window.steady
    assert series[window.start] <= 1 + FLAT < series[window.start - 3]


def test_warm_up_that_starts_fast_is_left_out_too() -> None:
    """A GPU that throttles after some steps: the window is where it has settled."""
    assert find_window([0.8] * 8 + [1.0] * 40, 20) == Window(8, 48, True)


@pytest.mark.parametrize("at", [0, 5, 19, 20, 25, 39])
def test_one_slow_step_among_equal_ones_moves_nothing_else(at: int) -> None:
    series = [1.0] * 40
    series[at] = 10.0
    window = find_window(series, 20)
    assert (window.start, window.stop, window.steady) == (UNMEASURED_STEPS, 40, True)


def test_slow_warm_up_longer_than_allowed_is_cut_at_the_bound() -> None:
    window = find_window([2.0] * 25 + [1.0] * 35, 20)
    assert window == Window(20, 60, True)


@pytest.mark.parametrize(
    "series",
    [
        pytest.param([1.05**step for step in range(60)], id="ever slower"),
        pytest.param([0.95**step for step in range(60)], id="ever faster"),
        pytest.param([1 + 0.02 * step + 0.01 * (-1) ** step for step in range(60)], id="linear"),
        pytest.param([1.0] * 40 + [1.2] * 20, id="late change"),
        pytest.param([1.0] * 35 + [2.0] * 25, id="change in the middle"),
    ],
)
def test_a_series_that_never_becomes_flat_is_not_steady(series: list[float]) -> None:
    window = find_window(series, 10)
    assert not window.steady
    assert window.start <= 10


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_no_drift(seed: int) -> None:
    draw = random.Random(seed)
    window = find_window([3.0] * 4 + [math.exp(draw.gauss(0, 0.15)) for _ in range(60)], 10)
    assert window.steady
    assert 4 <= window.start <= 10


@pytest.mark.parametrize("max_warmup", [2, 3, 20])
def test_the_step_in_which_the_worker_looks_at_what_runs_is_never_measured(max_warmup: int) -> None:
    assert find_window([1.0] * 40, max_warmup).start == UNMEASURED_STEPS == 2


def test_no_warm_up_allowed() -> None:
    assert find_window([9.0] + [1.0] * 19, 0) == Window(0, 20, True)


def test_an_empty_clock_is_flat() -> None:
    assert find_window([0.0] * 20, 5) == Window(UNMEASURED_STEPS, 20, True)


@pytest.mark.parametrize(("count", "max_warmup"), [(0, 0), (9, 0), (29, 20), (20, -1)])
def test_too_few_steps_are_an_error_that_says_how_many_must_remain(count: int, max_warmup: int) -> None:
    with pytest.raises(ValueError, match=rf"^{count} steps are too few for .*{max_warmup}: 10 must remain"):
        find_window([1.0] * count, max_warmup)


@deterministic
@given(SERIES, st.data())
def test_bounds(series: list[float], draw: st.DataObject) -> None:
    max_warmup = draw.draw(st.integers(0, len(series) - 2 * ROLL))
    window = find_window(series, max_warmup)
    assert min(UNMEASURED_STEPS, max_warmup) <= window.start <= max_warmup
    assert window.stop == len(series)


@deterministic
@given(SERIES, st.integers(-10, 10), st.data())
def test_does_not_depend_on_the_unit_of_time(series: list[float], exponent: int, draw: st.DataObject) -> None:
    max_warmup = draw.draw(st.integers(0, len(series) - 2 * ROLL))
    scaled = [step * 2.0**exponent for step in series]
    assert find_window(scaled, max_warmup) == find_window(series, max_warmup)


@deterministic
@given(st.lists(st.floats(min_value=3, max_value=9), max_size=10), st.integers(20, 40))
def test_the_median_of_the_window_is_that_of_the_flat_part(slow: list[float], flat: int) -> None:
    series = [*slow, *[1.0] * flat]
    window = find_window(series, len(slow))
    assert median(series[window.start :]) == 1.0
    assert window.steady


@pytest.mark.parametrize(("first", "start"), [(1.28, UNMEASURED_STEPS), (1.29, 6)])
def test_a_noisy_series_is_flat_within_twice_its_noise(first: float, start: int) -> None:
    """Steps of 0.9 and 1.1 s in turn: 0.2 s from step to step, 0.141 s around the level."""
    assert find_window([first] * 6 + [0.9, 1.1] * 20, 6) == Window(start, 46, True)


@pytest.mark.parametrize(
    ("step_s", "first", "start"), [(0.5, 4, 24), (0.3, 4, 38), (20.0, 4, 5), (10.0, 2, 3), (0.01, 4, 80)]
)
def test_a_gpu_settles_in_ten_seconds_after_its_first_steps(step_s: float, first: int, start: int) -> None:
    assert settled([60.0] * first + [step_s] * (80 - first), first) == start
