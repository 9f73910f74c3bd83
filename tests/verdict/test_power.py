"""The figures that the gate is built for, at a reduced size and a fixed seed.

Bounds leave room for the noise of 2,000 trials: 0.1 % is 2 of them.
"""

import pytest

from perfsuite.verdict.power import PowerTable, simulate

pytestmark = pytest.mark.simulation

TRIALS = 2_000


@pytest.fixture(scope="module")
def usual() -> PowerTable:
    """Baseline of 10, noise 1 % known from its class, tolerance 3 %."""
    return simulate(sigma=0.01, drops=(-0.03, 0.0, 0.02, 0.03, 0.05), trials=TRIALS, seed=1)


def test_unchanged_code_passes_in_two_launches(usual: PowerTable) -> None:
    row = usual.row(0.0)
    assert row.regressed <= 0.0015
    assert row.improved <= 0.0015
    assert row.mean_launches <= 2.0


def test_a_drop_as_large_as_the_tolerance_is_found(usual: PowerTable) -> None:
    row = usual.row(0.03)
    assert row.regressed >= 0.97
    assert row.passed <= 0.02
    assert usual.row(0.05).regressed == 1


def test_an_improvement_is_seen_and_never_a_regression(usual: PowerTable) -> None:
    row = usual.row(-0.03)
    assert row.improved > 0.8
    assert row.regressed == 0


def test_detection_grows_with_the_drop(usual: PowerTable) -> None:
    found = [row.regressed for row in usual.rows]
    assert found == sorted(found)


def test_fixed_thresholds_stand_beside_it(usual: PowerTable) -> None:
    assert usual.row(0.03).fixed_5_percent == pytest.approx(0.08, abs=0.03)
    assert usual.row(0.03).fixed_tolerance == pytest.approx(0.5, abs=0.04)


def test_it_says_what_it_can_detect(usual: PowerTable) -> None:
    assert 0.02 < usual.minimum_detectable_drop < 0.03
    assert usual.blind < 0.2


@pytest.mark.parametrize("sigma", [0.005, 0.01])
def test_a_drop_of_the_stated_minimum_is_found_95_times_in_100(sigma: float) -> None:
    minimum = simulate(sigma=sigma, drops=(0.0,), trials=200).minimum_detectable_drop
    table = simulate(sigma=sigma, tolerance=minimum, drops=(minimum,), trials=1_000)
    assert table.row(minimum).regressed == pytest.approx(0.955, abs=0.02)


def test_twenty_baseline_launches_hold_two_percent() -> None:
    table = simulate(sigma=0.01, tolerance=0.02, baseline_launches=20, drops=(0.0, 0.02), trials=TRIALS)
    assert table.row(0.0).regressed <= 0.0015
    assert table.row(0.0).mean_launches <= 3.05
    assert table.row(0.02).regressed >= 0.94


def test_low_noise_needs_one_launch() -> None:
    table = simulate(sigma=0.003, drops=(0.0, 0.03), trials=500)
    assert table.row(0.0).mean_launches < 1.01
    assert table.row(0.03).regressed > 0.98


def test_high_noise_is_inconclusive_rather_than_wrong() -> None:
    table = simulate(sigma=0.02, drops=(0.0, 0.03), trials=TRIALS)
    assert table.row(0.0).regressed <= 0.002
    assert table.row(0.03).inconclusive > table.row(0.03).passed
    assert table.blind > 0.9


def test_heavy_tails_and_bad_launches_raise_few_false_alarms() -> None:
    table = simulate(sigma=0.01, model="contaminated", drops=(0.0, 0.05), trials=TRIALS)
    assert table.row(0.0).regressed <= 0.005
    assert table.row(0.05).regressed > 0.9


@pytest.mark.parametrize("sigma", [0.003, 0.01, 0.02, 0.05])
def test_five_launches_alone_raise_few_false_alarms(sigma: float) -> None:
    table = simulate(sigma=sigma, baseline_launches=5, pooled_degrees=None, drops=(0.0,), trials=1_000)
    assert table.row(0.0).regressed <= 0.005


def test_drift_of_a_session_is_harmless_where_known() -> None:
    drift = {"sigma": 0.01, "session_sigma": 0.01, "drops": (0.0,), "trials": 1_000}
    unknown = simulate(**drift)  # type: ignore[arg-type]
    known = simulate(**drift, known_session_sigma=0.01)  # type: ignore[arg-type]
    assert unknown.row(0.0).regressed > 0.01
    assert known.row(0.0).regressed <= 0.002


def test_equal_seeds_give_equal_tables() -> None:
    first = simulate(sigma=0.01, drops=(0.03,), trials=50, seed=7)
    assert simulate(sigma=0.01, drops=(0.03,), trials=50, seed=7) == first
    assert simulate(sigma=0.01, drops=(0.03,), trials=50, seed=8) != first


def test_it_prints_as_markdown() -> None:
    text = str(simulate(sigma=0.003, drops=(0.0, 0.05), trials=10))
    assert "| 0 % | 0.000 | 0.000 | 100.000 | 0.000 | 1.00 |" in text
    assert "minimum detectable drop" in text


def test_what_cannot_be_simulated_is_named() -> None:
    with pytest.raises(ValueError, match="nothing to simulate: 0 trials, 1 drops"):
        simulate(sigma=0.01, drops=(0.0,), trials=0)
    with pytest.raises(ValueError, match="noise model 'cauchy', expected one of"):
        simulate(sigma=0.01, model="cauchy", trials=1)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"drop 0\.04 was not simulated"):
        simulate(sigma=0.003, drops=(0.0,), trials=1).row(0.04)


def test_a_baseline_that_shows_no_noise_is_named() -> None:
    with pytest.raises(ValueError, match="a baseline of 1 shows no noise, expected 2 launches or more"):
        simulate(sigma=0.01, baseline_launches=1, trials=1)
    with pytest.raises(ValueError, match="a baseline of 2 shows no noise, expected 3 launches or more"):
        simulate(sigma=0.01, baseline_launches=2, pooled_degrees=None, trials=1)
    assert simulate(sigma=0.01, baseline_launches=2, pooled_degrees=1, drops=(0.0,), trials=1).rows


def test_what_it_states_does_not_depend_on_the_largest_drop() -> None:
    few = simulate(sigma=0.01, baseline_launches=5, pooled_degrees=None, drops=(0.0,), trials=200)
    many = simulate(sigma=0.01, baseline_launches=5, pooled_degrees=None, drops=(0.0, 0.05), trials=200)
    assert few.minimum_detectable_drop == many.minimum_detectable_drop
