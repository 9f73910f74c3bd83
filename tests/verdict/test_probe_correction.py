import math
import random
from statistics import fmean

import pytest

from perfsuite.verdict.pairs import Differences
from perfsuite.verdict.probe_correction import (
    Pair,
    corrected_noise,
    paired_exponent,
    probe_corrected,
    probe_exponent,
)
from perfsuite.verdict.robust import SCALE_EFFICIENCY


def launches(
    count: int, seed: int, *, machine: float, probe: float = 0.003, case: float = 0.003
) -> list[Pair]:
    """Launches whose steps and probe share the machine's scatter and have some of their own."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        shared = rng.lognormvariate(0, machine)
        own, probed = rng.lognormvariate(0, case), rng.lognormvariate(0, probe)
        pairs.append((0.3 * shared * own, 0.02 * shared * probed))
    return pairs


def test_a_probe_that_shares_the_machines_drift_takes_it_out() -> None:
    groups = [launches(5, seed, machine=0.05) for seed in range(6)]
    exponent = probe_exponent(groups)
    assert exponent > 0.95
    raw, corrected = corrected_noise(groups, 0.0), corrected_noise(groups, exponent)
    assert corrected.sigma < raw.sigma / 5
    assert corrected.degrees_of_freedom < raw.degrees_of_freedom


def test_an_unrelated_probe_is_left_alone() -> None:
    used = [probe_exponent([launches(5, s, machine=0.0)]) for s in range(500)]
    assert sum(exponent > 0 for exponent in used) < 100
    assert sum(used) / len(used) < 0.05


def test_pooling_shrinks_what_an_unrelated_probe_can_do() -> None:
    used = [probe_exponent([launches(10, 10 * s + g, machine=0.0) for g in range(6)]) for s in range(100)]
    assert max(used) < 0.5


def test_the_exponent_is_never_above_one() -> None:
    steep = [((0.02 * p) ** 3, p) for p in (1.0, 1.1, 1.2, 1.05, 1.3, 1.15)]
    assert probe_exponent([steep]) == 1


def test_a_probe_that_runs_against_the_steps_is_not_used() -> None:
    assert probe_exponent([[(1 / p, p) for p in (1.0, 1.1, 1.2, 1.05, 1.3)]]) == 0


def test_a_probe_that_never_varies_is_not_used() -> None:
    assert probe_exponent([[(s, 0.02) for s in (1.0, 1.1, 1.2, 1.05, 1.3)]]) == 0


def test_too_few_launches_never_correct() -> None:
    assert probe_exponent([launches(4, 1, machine=0.05)]) == 0


def test_without_correction_nothing_changes() -> None:
    baseline = launches(4, 1, machine=0.05)
    corrected = probe_corrected(baseline, baseline[:2])
    assert corrected.exponent == 0
    assert corrected.baseline == tuple(seconds for seconds, _ in baseline)


def test_corrected_seconds_are_those_at_the_baselines_probe_speed() -> None:
    baseline = [(1.0, 0.02), (1.1, 0.022), (1.2, 0.024)]
    corrected = probe_corrected(baseline, [(2.4, 0.024)], exponent=1.0)
    assert corrected.baseline == pytest.approx((1.1, 1.1, 1.1))
    assert corrected.launches == pytest.approx((2.2,))


def test_units_of_seconds_and_probe_cancel() -> None:
    pairs = launches(8, 3, machine=0.02)
    rescaled = [(1000 * seconds, 60 * probe) for seconds, probe in pairs]
    assert probe_exponent([rescaled]) == pytest.approx(probe_exponent([pairs]))


def test_a_regression_is_not_corrected_away() -> None:
    baseline = launches(10, 1, machine=0.05)
    slower = [(1.1 * seconds, probe) for seconds, probe in baseline]
    corrected = probe_corrected(baseline, slower)
    assert corrected.exponent > 0.9
    ratios = [b / a for a, b in zip(corrected.baseline, corrected.launches, strict=True)]
    assert ratios == pytest.approx([1.1] * 10)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"probe: launch 1 is 0\.0, expected seconds above 0"):
        probe_exponent([[(1.0, 0.02), (1.0, 0.0)]])
    with pytest.raises(ValueError, match=r"launches probe: launch 0 is -1\.0"):
        probe_corrected([(1.0, 0.02)], [(1.0, -1.0)])
    with pytest.raises(ValueError, match=r"exponent is 1\.5, expected 0 to 1"):
        probe_corrected([(1.0, 0.02)], [(1.0, 0.02)], exponent=1.5)
    with pytest.raises(ValueError, match="baseline seconds: no launches"):
        probe_corrected([], [(1.0, 0.02)])


PARTLY = [
    [(0.3036, 0.02075), (0.3046, 0.02091), (0.2941, 0.01943), (0.3005, 0.01976)],
    [(0.3001, 0.02013), (0.3067, 0.02071), (0.2976, 0.0191), (0.3047, 0.02046), (0.3003, 0.01994)],
    [
        *[(0.3059, 0.02041), (0.3041, 0.01985), (0.3075, 0.02051)],
        *[(0.2984, 0.02008), (0.2962, 0.0191), (0.3046, 0.01942)],
    ],
]
"""Launches of three baselines, which follow their probe in part."""


def test_a_slope_is_shrunk_by_what_chance_makes_of_it() -> None:
    """By hand: the slope within the groups, its squared t statistic F, and (1 - E[F] / F)."""
    x: list[float] = []
    y: list[float] = []
    for group in PARTLY:
        for index, values in ((1, x), (0, y)):
            logs = [math.log(pair[index]) for pair in group]
            values += [value - fmean(logs) for value in logs]
    degrees = len(x) - len(PARTLY) - 1
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    residual = sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / degrees
    f = slope**2 * sum(a * a for a in x) / residual
    assert 0.2 < slope * (1 - degrees / (degrees - 2) / f) < 0.5
    assert probe_exponent(PARTLY) == pytest.approx(slope * (1 - degrees / (degrees - 2) / f))


def test_fewer_than_three_degrees_of_freedom_give_no_exponent() -> None:
    """Launches minus baselines minus the slope."""
    exact = [(p, p) for p in (1.0, 1.1, 1.2, 1.05, 1.3)]
    assert probe_exponent([exact]) == pytest.approx(1)
    assert probe_exponent([exact[:4]]) == 0
    assert probe_exponent([exact[:3], exact[3:]]) == 0
    assert probe_exponent([exact[:3], exact[2:]]) == pytest.approx(1)


def test_a_probe_that_cannot_lower_the_noise_is_not_used() -> None:
    """It is at its floor with and without correction."""
    assert probe_exponent([[(1 + n / 1e5, 1 + n / 1e5) for n in range(9)]]) == 0


def test_an_exponent_costs_one_degree_of_freedom() -> None:
    assert corrected_noise(PARTLY, 0.0).degrees_of_freedom == pytest.approx(12 * SCALE_EFFICIENCY)
    assert corrected_noise(PARTLY, 0.3).degrees_of_freedom == pytest.approx(11 * SCALE_EFFICIENCY)


def test_exponents_from_0_to_1_are_allowed() -> None:
    assert probe_corrected([(1.0, 0.02)], [(1.0, 0.04)], exponent=0).launches == (1.0,)
    assert probe_corrected([(1.0, 0.02)], [(1.0, 0.04)], exponent=1).launches == (0.5,)
    assert probe_corrected([(1.0, 0.02)], [(1.0, 0.08)], exponent=0.5).launches == (0.5,)
    with pytest.raises(ValueError, match=r"exponent is -0\.1"):
        probe_corrected([(1.0, 0.02)], [(1.0, 0.02)], exponent=-0.1)


def followed(
    count: int, seed: int, *, exponent: float, effect: float = 0.0
) -> tuple[Differences, Differences]:
    """Differences of costs, which follow those of probes, and these."""
    rng = random.Random(seed)
    x = [rng.gauss(0, 0.1) for _ in range(2 * count - 1)]
    y = [exponent * probe + rng.gauss(0, 0.01) for probe in x]
    return Differences([cost + effect for cost in y[:count]], y[count:]), Differences(x[:count], x[count:])


def test_how_pairs_follow_their_probe_does_not_depend_on_the_effect_of_an_arm() -> None:
    none, large = (paired_exponent(*followed(8, 1, exponent=0.5, effect=effect)) for effect in (0.0, 0.7))
    assert none == pytest.approx(large)
    assert none == pytest.approx(0.5, abs=0.05)


def test_pairs_that_do_not_follow_their_probe_are_rarely_corrected() -> None:
    used = [paired_exponent(*followed(6, seed, exponent=0.0)) for seed in range(500)]
    assert sum(exponent > 0 for exponent in used) < 150
    assert fmean(used) < 0.02


def test_an_exponent_of_pairs_is_between_0_and_1() -> None:
    assert paired_exponent(*followed(8, 1, exponent=3.0)) == 1
    assert paired_exponent(*followed(8, 1, exponent=-0.5)) == 0
    assert paired_exponent(*followed(3, 1, exponent=0.5)) == 0
