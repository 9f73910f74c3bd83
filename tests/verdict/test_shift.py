"""Test the estimate of the machine's shift: how much slower the machine is tonight."""

import math
import random

import pytest

from perfsuite.verdict.noise import LaunchesBySession
from perfsuite.verdict.sequential import Noise
from perfsuite.verdict.shift import (
    CanaryChange,
    Shift,
    canary_change,
    correction,
    estimated_shift,
    own_correction,
    shares,
)
from perfsuite.verdict.variance import Component
from tests.samples import known

OF_CASE = Component(observed=0.002**2 + 1e-6, explained=1e-6, degrees=40)
NOISE = Noise(sigma=0.003, degrees_of_freedom=40, session_sigma=0.01, of_case=OF_CASE)
ONE_SESSION = Noise(sigma=0.003, degrees_of_freedom=40)
SESSIONS = {"a": 0.5, "b": 0.5}


def canary(estimate: float, sessions: dict[str, float] | None = None) -> CanaryChange:
    """Return a canary whose reference changed by `estimate`."""
    return CanaryChange(estimate=estimate, error=0.002, sessions=sessions or SESSIONS)


def canaries(*estimates: float) -> dict[str, CanaryChange]:
    """Return numbered canaries with these changes."""
    return {f"case{number}": canary(estimate) for number, estimate in enumerate(estimates)}


def simulated(shift: float, seed: int, *, case_sigma: float = 0.002) -> Shift:
    """Return the shift that is estimated from five simulated canaries."""
    draw = random.Random(seed)
    spread = math.hypot(case_sigma * math.sqrt(1.5), 0.002)
    return known(estimated_shift(canaries(*(draw.gauss(shift, spread) for _ in range(5))), NOISE))


def test_a_canary_changes_by_the_ratio_of_its_costs() -> None:
    change = canary_change([2.2], {"a": [2.0, 2.0], "b": [2.0, 2.0]}, NOISE, "x")
    assert change.estimate == pytest.approx(math.log(1.1))
    assert change.error == pytest.approx(0.003 * math.sqrt(1 + 1 / 4))
    assert change.sessions == SESSIONS


def test_the_shift_is_the_mean_of_equal_canaries() -> None:
    shift = known(estimated_shift(canaries(0.009, 0.010, 0.011), NOISE))
    assert shift.estimate == pytest.approx(0.010)
    assert shift.canaries == ("case0", "case1", "case2")
    assert shift.sessions == pytest.approx(SESSIONS)


def test_the_interval_covers_the_shift() -> None:
    nights = [simulated(0.01, seed).interval for seed in range(500)]
    assert sum(low <= 0.01 <= high for low, high in nights) >= 490


def test_a_shift_of_five_sigma_is_certain() -> None:
    def is_certain(shift: Shift) -> bool:
        low, high = shift.interval
        return low > 0 or high < 0

    assert sum(is_certain(simulated(0.01, seed)) for seed in range(100)) >= 95
    assert sum(is_certain(simulated(0.0, seed)) for seed in range(100)) <= 2


def test_more_canaries_lower_the_error() -> None:
    few = known(estimated_shift(canaries(0.01, 0.01), NOISE))
    many = known(estimated_shift(canaries(*[0.01] * 8), NOISE))
    assert many.error < 0.6 * few.error


def test_a_canary_that_moved_alone_is_left_out() -> None:
    shift = known(estimated_shift(canaries(0.01, 0.011, 0.009, 0.01, 0.1), NOISE))
    assert shift.apart == ("case4",)
    assert shift.estimate == pytest.approx(0.01, abs=1e-3)


def test_one_canary_needs_the_noise_of_the_baselines() -> None:
    assert estimated_shift(canaries(0.01), ONE_SESSION) is None
    assert known(estimated_shift(canaries(0.01), NOISE)).estimate == pytest.approx(0.01)


def test_two_canaries_do_not_prove_that_cases_agree() -> None:
    assert estimated_shift(canaries(0.01, 0.01), ONE_SESSION) is None


def test_no_canary_gives_no_shift() -> None:
    assert estimated_shift({}, NOISE) is None


def test_canaries_that_disagree_raise_the_noise() -> None:
    alike = known(estimated_shift(canaries(0.01, 0.01, 0.01, 0.01), ONE_SESSION))
    apart = known(estimated_shift(canaries(-0.03, 0.0, 0.02, 0.05), ONE_SESSION))
    assert apart.case_variance > 10 * alike.case_variance


def test_the_correction_replaces_the_noise_between_sessions() -> None:
    shift = known(estimated_shift(canaries(*[0.01] * 5), NOISE))
    made = known(correction(NOISE, SESSIONS, shift))
    noise = made.noise
    assert made.shift == shift.estimate
    assert noise.session_sigma == pytest.approx(math.sqrt(shift.error**2 + 1.5 * shift.case_variance))
    assert noise.session_sigma < NOISE.session_sigma
    assert noise.sigma == NOISE.sigma


def test_other_sessions_add_the_noise_between_sessions() -> None:
    shift = known(estimated_shift(canaries(*[0.01] * 5), NOISE))
    same = known(correction(NOISE, SESSIONS, shift)).noise
    other = known(correction(NOISE, {"c": 0.5, "d": 0.5}, shift)).noise
    added = other.session_sigma**2 - same.session_sigma**2
    assert added == pytest.approx(NOISE.session_sigma**2)


def test_sessions_of_unknown_noise_cannot_be_compared() -> None:
    shift = known(estimated_shift(canaries(*[0.01] * 5), NOISE))
    assert correction(ONE_SESSION, {"c": 1.0}, shift) is None


def test_sessions_without_a_name_belong_to_one_case() -> None:
    assert shares({None: [1.0, 1.0]}, "x") != shares({None: [1.0, 1.0]}, "y")
    assert shares({"a": [1.0], "b": [1.0, 1.0, 1.0]}, "x") == {"a": 0.25, "b": 0.75}


OWN: LaunchesBySession = {"a": [1.0, 1.003, 0.997], "b": [1.002, 0.998, 1.0]}


def test_a_reference_on_the_case_shows_its_whole_shift() -> None:
    made = own_correction(NOISE, OWN, [1.02, 1.02, 1.02], "x")
    assert made.shift == pytest.approx(math.log(1.02), abs=1e-4)


def test_a_reference_on_the_case_leaves_the_noise_of_launches() -> None:
    noise = own_correction(NOISE, OWN, [1.02, 1.021, 1.022, 1.023], "x").noise
    assert noise.session_sigma == pytest.approx(0.003 / math.sqrt(4))
    assert (noise.sigma, noise.degrees_of_freedom) == (NOISE.sigma, NOISE.degrees_of_freedom)


def test_a_reference_that_scatters_on_the_case_is_less_certain() -> None:
    quiet = own_correction(NOISE, OWN, [1.0, 1.001, 1.002], "x").noise
    loud = own_correction(NOISE, OWN, [0.98, 1.0, 1.02], "x").noise
    assert quiet.session_sigma == pytest.approx(0.003 / math.sqrt(3))
    assert loud.session_sigma > 3 * quiet.session_sigma
