import math
import random
from statistics import fmean

import pytest

from perfsuite.verdict.paired_test import Differences, paired_exponent
from perfsuite.verdict.probe_correction import Pair, probe_corrected, probe_exponent
from perfsuite.verdict.sequential import pooled_noise

PROBES = (1.0, 1.1, 1.2, 1.05, 1.3, 1.15)
EXACT = [(probe, probe) for probe in PROBES]


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
    corrected = pooled_noise([probe_corrected(group, group, exponent) for group in groups])
    assert corrected.sigma < pooled_noise([[seconds for seconds, _ in group] for group in groups]).sigma / 5


def test_an_unrelated_probe_is_left_alone() -> None:
    used = [probe_exponent([launches(5, s, machine=0.0)]) for s in range(500)]
    assert sum(exponent > 0 for exponent in used) < 100
    assert sum(used) / len(used) < 0.05


def test_pooling_shrinks_what_an_unrelated_probe_can_do() -> None:
    used = [probe_exponent([launches(10, 10 * s + g, machine=0.0) for g in range(6)]) for s in range(100)]
    assert max(used) < 0.5


@pytest.mark.parametrize(
    ("groups", "exponent"),
    [
        pytest.param([[((0.02 * p) ** 3, p) for p in PROBES]], 1, id="never above one"),
        pytest.param([[(1 / p, p) for p in PROBES]], 0, id="it runs against the steps"),
        pytest.param([[(p, 0.02) for p in PROBES]], 0, id="it never varies"),
        pytest.param([[(1 + n / 1e5, 1 + n / 1e5) for n in range(9)]], 0, id="at the floor of the noise"),
        pytest.param([EXACT[:5]], 1, id="5 launches"),
        pytest.param([EXACT[:4]], 0, id="4 launches: less than 3 degrees of freedom beyond the slope"),
        pytest.param([EXACT[:3], EXACT[3:5]], 0, id="5 launches of 2 baselines"),
        pytest.param([EXACT[:3], EXACT[2:5]], 1, id="6 launches of 2 baselines"),
    ],
)
def test_an_exponent_is_from_0_to_1_and_above_0_where_it_lowers_the_noise(
    groups: list[list[Pair]], exponent: float
) -> None:
    assert probe_exponent(groups) == pytest.approx(exponent)
    assert probe_exponent(groups) <= 1


def test_corrected_seconds_are_those_at_the_baselines_probe_speed() -> None:
    baseline = [(1.0, 0.02), (1.1, 0.022), (1.2, 0.024)]
    assert probe_corrected(baseline, baseline, 1.0) == pytest.approx([1.1, 1.1, 1.1])
    assert probe_corrected([(2.4, 0.024)], baseline, 1.0) == pytest.approx([2.2])
    assert probe_corrected([(2.4, 0.088)], baseline, 0.5) == pytest.approx([1.2])
    assert probe_corrected([(2.4, 0.024)], baseline, 0) == [2.4]


def test_units_of_seconds_and_probe_cancel() -> None:
    pairs = launches(8, 3, machine=0.02)
    rescaled = [(1000 * seconds, 60 * probe) for seconds, probe in pairs]
    assert probe_exponent([rescaled]) == pytest.approx(probe_exponent([pairs]))


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
