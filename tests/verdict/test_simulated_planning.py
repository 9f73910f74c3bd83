"""Test that planned nights find what their plans claim, with few nights and a fixed seed."""

import random

import pytest

from tests.benchmarks.simulated_planning import Machine, night

QUIET = Machine(session=0.01, case_within_session=0.001, launch=0.003)
NIGHTS = 60


def test_a_night_without_noise_finds_the_change() -> None:
    same = Machine(session=1e-6, case_within_session=1e-6, launch=1e-6)
    result = night(same, 2, 0.03, random.Random(0))
    assert (result.is_reached, result.is_found, result.false_alarms) == (True, True, 0)


@pytest.mark.simulation
@pytest.mark.parametrize(("sessions", "find"), [(3, 0.02), (5, 0.02), (3, 0.03)])
def test_a_reached_change_is_found(sessions: int, find: float) -> None:
    draw = random.Random(sessions)
    nights = [night(QUIET, sessions, find, draw) for _ in range(NIGHTS)]
    reached = [result for result in nights if result.is_reached]
    assert len(reached) >= 0.8 * NIGHTS
    assert sum(result.is_found for result in reached) >= 0.9 * len(reached)
    assert sum(result.false_alarms > 0 for result in nights) <= 1
    assert all(result.canary_launches <= 5 for result in nights)
