"""Test the error rates with a reference, on simulated nights whose machine differs."""

import pytest

from tests.benchmarks.simulated_reference import Setting, simulate

pytestmark = pytest.mark.simulation

NIGHTS = 100
DIFFERING = Setting(0.003, 0.002, 0.01, baseline_sessions=2)


def test_a_reference_finds_regressions_on_nights_that_differ() -> None:
    without = simulate(DIFFERING, nights=NIGHTS, has_reference=False)
    beside = simulate(DIFFERING, nights=NIGHTS, has_reference=True)
    assert without.found < 0.3
    assert beside.found >= 0.95
    assert beside.passed >= 0.99
    assert beside.reference <= 0.3 * beside.launches


@pytest.mark.parametrize("within", [0.0, 0.002, 0.005])
def test_a_reference_ends_the_false_alarms_of_one_session(within: float) -> None:
    setting = Setting(0.003, within, 0.01, baseline_sessions=1)
    assert simulate(setting, nights=NIGHTS, has_reference=False).alarms > 0.5
    assert simulate(setting, nights=NIGHTS, has_reference=True).alarms <= 0.05


def test_the_reference_finds_a_change_that_varying_cases_hide() -> None:
    """If only canaries were launched, one regression in five would be found."""
    varying = Setting(0.003, 0.005, 0.01, baseline_sessions=2, tolerance=0.01)
    beside = simulate(varying, nights=NIGHTS, has_reference=True)
    assert beside.found >= 0.8
    assert beside.alarms <= 0.01
