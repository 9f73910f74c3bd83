"""Test the simulation of the gate, and the gate's error rates, with few trials and a fixed seed.

The bounds leave room for the noise of 2,000 trials: 0.1% is two trials.
"""

import math
from statistics import fmean, pstdev
from typing import Any

import pytest

from perfsuite.verdict.sequential import MAX_LAUNCHES
from tests.benchmarks import simulated_data_wait, simulated_spans
from tests.benchmarks.simulated_gate import _draws, simulate

TRIALS = 2_000
LITTLE = (0.5, 0.005, MAX_LAUNCHES, 0.99)
"""A gate of this kind has few false alarms, and finds a drop of a third."""


def test_without_scatter_each_drop_has_one_outcome() -> None:
    drops = (-0.05, 0.0, 0.04, 0.06)
    table = simulate(sigma=1e-6, drops=drops, trials=4)
    faster, same, slower, slowest = (table.row(drop) for drop in drops)
    assert (faster.improved, same.passed, slower.regressed, slowest.regressed) == (1, 1, 1, 1)
    assert (faster.passed, same.improved, slower.inconclusive) == (0, 0, 0)
    assert [row.mean_launches for row in table.rows] == [3, 1, 3, 3]
    assert [row.fixed_tolerance for row in table.rows] == [0, 0, 1, 1]
    assert [row.fixed_5_percent for row in table.rows] == [0, 0, 0, 1]
    assert table.blind == 0
    assert table.minimum_detectable_drop < 0.01


@pytest.mark.parametrize(
    ("launches", "degrees", "baselines"),
    [(10, 30, 4), (5, 30, 9), (5, None, 1), (2, 1, 2), (2, 8, 10), (20, 1, 1)],
)
def test_draws_baselines_for_the_requested_freedom(
    launches: int, degrees: int | None, baselines: int
) -> None:
    """Each launch of a baseline, except the first, adds 0.8 degrees of freedom.

    The factor 0.8 is the efficiency of the clipped variance.
    """
    usual: dict[str, Any] = {"sigma": 0.01, "drops": (0.0,), "trials": 1}
    table = simulate(baseline_launches=launches, pooled_degrees=degrees, **usual)
    drawn = f"{baselines} baselines of {launches}, at most {MAX_LAUNCHES} launches, 1 trials"
    assert table.title == f"sigma 1% (normal), tolerance 3%, {drawn}"


def draw(
    *, sigma: float = 0.01, session_sigma: float = 0.0, trials: int = 400, is_contaminated: bool = False
) -> tuple[list[float], list[float]]:
    """Return two lists of log(seconds).

    The first has one value for each launch of the baselines. The second has one value for each trial, the
    mean over today's launches.
    """
    before = []
    today = []
    for baselines, launches in _draws(
        sigma, (2, 5), 50, session_sigma, trials, 0, is_contaminated=is_contaminated
    ):
        before += [math.log(seconds) for baseline in baselines for seconds in baseline]
        today.append(fmean(math.log(seconds) for seconds in launches))
    return before, today


@pytest.mark.parametrize(("session_sigma", "of_means"), [(0.0, 0.01 / math.sqrt(50)), (0.05, 0.05)])
def test_launches_scatter_and_sessions_may_differ(session_sigma: float, of_means: float) -> None:
    before, today = draw(session_sigma=session_sigma)
    assert pstdev(before) == pytest.approx(0.01, rel=0.1)
    assert pstdev(today) == pytest.approx(of_means, rel=0.1)
    assert abs(fmean(before)) < 0.001


def test_one_launch_in_20_is_10_percent_slow() -> None:
    before, today = draw(sigma=1e-9, trials=4000, is_contaminated=True)
    assert fmean(today) / math.log(1.1) == pytest.approx(1 / 20, abs=0.0012)  # from 200,000 launches
    assert {round(math.exp(value), 4) for value in before} == {1.0, 1.1}
    assert fmean(value > 0.05 for value in before) == pytest.approx(0.05, abs=0.012)
    tails, _ = draw(is_contaminated=True)
    assert fmean(value < -0.0318 for value in tails) == pytest.approx(0.025 * 0.95, abs=0.01)


def test_known_session_noise_raises_the_minimum() -> None:
    known_noise, untold = (
        simulate(sigma=0.01, drops=(0.0,), trials=5, known_session_sigma=sigma_s) for sigma_s in (0.02, 0.0)
    )
    assert known_noise.minimum_detectable_drop > 2 * untold.minimum_detectable_drop


@pytest.mark.simulation
def test_finds_a_tolerance_sized_drop() -> None:
    """The baseline has 10 launches, its class has a known noise of 1%, and the tolerance is 3%.

    Two fixed thresholds are simulated for comparison.
    """
    table = simulate(sigma=0.01, drops=(-0.03, 0.0, 0.02, 0.03, 0.05), trials=TRIALS, seed=1)
    faster, same, _, slower, slowest = table.rows
    assert max(same.regressed, same.improved) <= 0.0015
    assert same.mean_launches <= 2.0
    assert (slower.regressed >= 0.97, slower.passed <= 0.02, slowest.regressed) == (True, True, 1)
    assert (faster.improved > 0.8, faster.regressed) == (True, 0)
    regressed = [row.regressed for row in table.rows]
    assert regressed == sorted(regressed)
    assert slower.fixed_5_percent == pytest.approx(0.08, abs=0.03)
    assert slower.fixed_tolerance == pytest.approx(0.5, abs=0.04)
    assert 0.02 < table.minimum_detectable_drop < 0.03
    assert table.blind < 0.2


@pytest.mark.simulation
@pytest.mark.parametrize("sigma", [0.005, 0.01])
def test_finds_the_stated_minimum_95_times_in_100(sigma: float) -> None:
    minimum = simulate(sigma=sigma, drops=(0.0,), trials=200).minimum_detectable_drop
    table = simulate(sigma=sigma, tolerance=minimum, drops=(minimum,), trials=1_000)
    assert table.row(minimum).regressed == pytest.approx(0.955, abs=0.02)


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("how", "drop", "alarms", "launches", "detected"),
    [
        ({"sigma": 0.01, "tolerance": 0.02, "baseline_launches": 20}, 0.02, 0.0015, 3.05, 0.94),
        ({"sigma": 0.003, "trials": 500}, 0.03, 0, 1.009, 0.982),  # with low noise, one launch is enough
        ({"sigma": 0.01, "is_contaminated": True}, 0.05, 0.005, MAX_LAUNCHES, 0.9005),
        *(  # there is only one baseline, of five launches. The noise is estimated from it
            ({"sigma": sigma, "baseline_launches": 5, "pooled_degrees": None, "trials": 1_000}, *LITTLE)
            for sigma in (0.003, 0.01, 0.02, 0.05)
        ),
    ],
)
def test_false_alarms_are_few_and_drops_are_found(
    how: dict[str, Any], drop: float, alarms: float, launches: float, detected: float
) -> None:
    table = simulate(**{"trials": TRIALS, **how}, drops=(0.0, drop))
    assert table.row(0.0).regressed <= alarms
    assert table.row(0.0).mean_launches <= launches
    assert table.row(drop).regressed >= detected


@pytest.mark.simulation
def test_high_noise_is_inconclusive_not_wrong() -> None:
    table = simulate(sigma=0.02, drops=(0.0, 0.03), trials=TRIALS)
    assert table.row(0.0).regressed <= 0.002
    assert table.row(0.03).inconclusive > table.row(0.03).passed
    assert table.blind > 0.9


@pytest.mark.simulation
def test_known_session_drift_is_harmless() -> None:
    drift: dict[str, Any] = {"sigma": 0.01, "session_sigma": 0.01, "drops": (0.0,), "trials": 1_000}
    assert simulate(**drift).row(0.0).regressed > 0.01
    assert simulate(**drift, known_session_sigma=0.01).row(0.0).regressed <= 0.002


def test_equal_seeds_give_equal_tables() -> None:
    first = simulate(sigma=0.01, drops=(0.03,), trials=50, seed=7)
    assert simulate(sigma=0.01, drops=(0.03,), trials=50, seed=7) == first
    assert simulate(sigma=0.01, drops=(0.03,), trials=50, seed=8) != first


@pytest.mark.simulation
def test_equal_data_wait_rarely_alarms() -> None:
    """The wait is 5% of a step and scatters by 30%. In one launch of 20, it is three times as long."""
    same = simulated_data_wait.simulate(wait=0.05, scatter=0.3, trials=TRIALS)
    longer = simulated_data_wait.simulate(wait=0.05, scatter=0.3, growth=0.1, trials=200)
    for outcomes in vars(same).values():
        assert outcomes.get("regressed", 0) <= 0.002
    for outcomes in vars(longer).values():
        assert outcomes.get("regressed", 0) >= 0.95


@pytest.mark.simulation
def test_equal_start_up_rarely_alarms() -> None:
    """Imports take 5 s with a scatter of 5%. In one launch of 20, they take twice as long."""
    same = simulated_spans.simulate(seconds=5, scatter=0.05, trials=TRIALS)
    longer = simulated_spans.simulate(seconds=5, scatter=0.05, growth_s=2, trials=200)
    for outcomes in (same.against_baseline, same.in_pairs):
        assert outcomes.get("regressed", 0) <= 0.002
    for outcomes in (longer.against_baseline, longer.in_pairs):
        assert outcomes.get("regressed", 0) >= 0.95
