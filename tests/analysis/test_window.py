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


@pytest.mark.parametrize(
    ("series", "max_warmup", "start"),
    [
        pytest.param([0.1] * 30, 20, 2, id="flat"),
        pytest.param([1 + 0.01 * (-1) ** step for step in range(40)], 20, 2, id="small noise"),
        *(
            pytest.param([0.5] * slow + [0.1] * 40, 20, max(slow, 2), id=f"{slow} slow steps")
            for slow in (1, 2, 3, 4, 7, 12)
        ),
        pytest.param([0.8] * 8 + [1.0] * 40, 20, 8, id="a GPU that throttles after some steps"),
        *(
            pytest.param([1.0] * at + [10.0] + [1.0] * (39 - at), 20, 2, id=f"a slow step {at}")
            for at in (0, 5, 19, 20, 25, 39)
        ),
        pytest.param([2.0] * 25 + [1.0] * 35, 20, 20, id="a warm-up longer than allowed"),
        pytest.param([9.0] + [1.0] * 19, 0, 0, id="no warm-up allowed"),
        pytest.param([0.0] * 20, 5, 2, id="an empty clock"),
        # Steps of 0.9 and 1.1 s in turn: 0.2 s from step to step, 0.141 s around the level.
        pytest.param([1.28] * 6 + [0.9, 1.1] * 20, 6, 2, id="within twice the noise"),
        pytest.param([1.29] * 6 + [0.9, 1.1] * 20, 6, 6, id="beyond twice the noise"),
        # In the third step the worker looks at what runs.
        *(pytest.param([1.0] * 40, most, 2, id=f"a warm-up of up to {most}") for most in (2, 3, 20)),
    ],
)
def test_warm_up_ends_where_the_series_becomes_flat(series: list[float], max_warmup: int, start: int) -> None:
    assert find_window(series, max_warmup) == Window(start, len(series), True)
    assert UNMEASURED_STEPS == 2


def test_decaying_warm_up_ends_where_it_comes_within_the_bound() -> None:
    series = [1 + 0.5 * 0.8**step for step in range(60)]
    window = find_window(series, 30)
    assert window.steady
    assert series[window.start] <= 1 + FLAT < series[window.start - 3]


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


@pytest.mark.parametrize(
    ("step_s", "first", "start"), [(0.5, 4, 24), (0.3, 4, 38), (20.0, 4, 5), (10.0, 2, 3), (0.01, 4, 80)]
)
def test_a_gpu_settles_in_ten_seconds_after_its_first_steps(step_s: float, first: int, start: int) -> None:
    assert settled([60.0] * first + [step_s] * (80 - first), first) == start
