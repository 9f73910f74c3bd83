"""Tests of the limits of a session."""

import pytest

from tests.verdict.judging import (
    BASELINE_H100,
    check_of,
    gpu,
    noise_of,
    session,
)


@pytest.mark.parametrize(("tolerance", "outcome"), [(None, "passed"), (0.015, "regressed")])
def test_a_session_can_have_a_smaller_tolerance(tolerance: float | None, outcome: str) -> None:
    verdict = session(gpu(0.98), BASELINE_H100, noise_of(0.002), tolerance=tolerance)
    check = check_of(verdict, "tokens_per_s")
    assert check.outcome == outcome
    assert check.allowed == pytest.approx(0.0291 if tolerance is None else 0.0148, abs=1e-4)
    assert check_of(verdict, "tokens_per_s_mean").allowed == pytest.approx(0.0476, abs=1e-4)
