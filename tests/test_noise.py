from __future__ import annotations

import math
import random
from typing import Any

import pytest

from perfsuite.baseline import Baseline, from_runs
from perfsuite.metric import GATED, PEAK_MEMORY, TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric
from perfsuite.noise import PROBE_CORRECTED, ClassNoise, class_noise
from perfsuite.result import Run
from perfsuite.robust import SCALE_EFFICIENCY
from perfsuite.sequential import SIGMA_FLOOR, Noise, pooled_noise
from tests.samples import make_launches

SPEEDS = (1.0, 1.03, 0.98, 1.01, 0.97, 1.02, 0.99, 1.04, 0.96, 1.005)


def recorded(*speeds: float, **figures: Any) -> Baseline:
    return from_runs(make_launches(*speeds, **figures))


def drifting(seed: int, *, own: float = 0.003, launches: int = 5, **figures: Any) -> list[Run]:
    """Launches that scatter by 5 %: by what the machine does, which the probe sees, and a bit of `own`."""
    rng = random.Random(seed)
    runs = []
    for _ in range(launches):
        machine, case = rng.lognormvariate(0, 0.05), rng.lognormvariate(0, own)
        probe = 0.01 * machine * rng.lognormvariate(0, 0.003)
        runs += make_launches(1 / (machine * case), **{"probe_s_p50": probe, **figures})
    return runs


def known(noise: ClassNoise, metric: Metric) -> Noise:
    found = noise.of(metric)
    assert found is not None
    return found


def without_probes(runs: list[Run]) -> list[Run]:
    return [run.replace(figures=run.figures.replace(probe_s_p50=None)) for run in runs]


def test_of_no_baseline_nothing_is_known() -> None:
    assert class_noise([]) == ClassNoise(by_metric={}, probe_exponent=0.0)
    assert ClassNoise().of(TOKENS_PER_S) is None


def test_one_launch_tells_no_noise() -> None:
    noise = class_noise([recorded(1.0)])
    assert [noise.of(metric) for metric in GATED] == [None] * len(GATED)


def test_two_launches_of_one_baseline_tell_too_little() -> None:
    assert class_noise([recorded(1.0, 1.02)]).of(TOKENS_PER_S) is None


def test_three_launches_of_one_baseline_tell_a_noise() -> None:
    noise = class_noise([recorded(1.0, 1.03, 0.97)])
    assert [known(noise, metric).degrees_of_freedom for metric in GATED] == [2 * SCALE_EFFICIENCY] * len(
        GATED
    )
    assert 0.015 < known(noise, TOKENS_PER_S).sigma < 0.06
    assert known(noise, PEAK_MEMORY).sigma == SIGMA_FLOOR


def test_what_each_baseline_alone_does_not_tell_they_tell_together() -> None:
    pairs = [recorded(1.0, 1.02), recorded(1.0, 0.99)]
    assert known(class_noise(pairs), TOKENS_PER_S).degrees_of_freedom == 2 * SCALE_EFFICIENCY
    singles = [recorded(speed) for speed in SPEEDS]
    assert class_noise(singles).of(TOKENS_PER_S) is None


def test_noise_is_pooled_within_baselines_not_between_them() -> None:
    fast, slow = recorded(*SPEEDS), recorded(*(speed / 40 for speed in SPEEDS))
    one, both = known(class_noise([fast]), TOKENS_PER_S), known(class_noise([fast, slow]), TOKENS_PER_S)
    assert both.sigma == pytest.approx(one.sigma, rel=1e-3)
    assert both.degrees_of_freedom == pytest.approx(18 * SCALE_EFFICIENCY)
    assert 0.02 < both.sigma < 0.03


def test_a_baseline_of_one_launch_neither_helps_nor_harms() -> None:
    assert class_noise([recorded(*SPEEDS), recorded(0.001)]) == class_noise([recorded(*SPEEDS)])


def test_each_metric_has_its_own_noise() -> None:
    runs = make_launches(*SPEEDS)
    spread = [
        run.replace(figures=run.figures.replace(tokens_per_s_mean=990 * speed**5))
        for run, speed in zip(runs, SPEEDS, strict=True)
    ]
    noise = class_noise([from_runs(spread)])
    speed = known(noise, TOKENS_PER_S).sigma
    assert known(noise, TOKENS_PER_S_MEAN).sigma == pytest.approx(5 * speed, rel=1e-3)
    assert known(noise, PEAK_MEMORY).sigma == SIGMA_FLOOR


def test_noise_is_that_of_the_cost() -> None:
    runs = [run for speed in (1.0, 1.1, 1.5) for run in make_launches(speed, peak_memory_bytes=speed)]
    noise = class_noise([from_runs(runs)])
    assert known(noise, TOKENS_PER_S) == pooled_noise([[1 / 1000, 1 / 1100, 1 / 1500]])
    assert known(noise, PEAK_MEMORY) == pooled_noise([[1.0, 1.1, 1.5]])


def test_a_metric_that_a_baseline_lacks_is_known_from_the_others() -> None:
    lacking = recorded(*SPEEDS, peak_memory_bytes=None)
    assert class_noise([lacking]).of(PEAK_MEMORY) is None
    noise = class_noise([lacking, recorded(*SPEEDS[:4])])
    assert known(noise, PEAK_MEMORY).degrees_of_freedom == pytest.approx(3 * SCALE_EFFICIENCY)
    assert known(noise, TOKENS_PER_S).degrees_of_freedom == pytest.approx(12 * SCALE_EFFICIENCY)


def test_memory_of_nothing_tells_no_noise() -> None:
    """A tiny model's memory on a CPU can be 0 above the level before it."""
    noise = class_noise([recorded(*SPEEDS, peak_memory_bytes=0)])
    assert noise.of(PEAK_MEMORY) is None
    assert noise.of(TOKENS_PER_S) is not None


def test_without_probes_nothing_is_corrected() -> None:
    noise = class_noise([from_runs(without_probes(drifting(seed))) for seed in range(4)])
    assert noise.probe_exponent == 0
    assert known(noise, TOKENS_PER_S).sigma > 0.03


def test_a_probe_that_the_speed_follows_takes_the_machine_out_of_both_speeds_only() -> None:
    groups = [drifting(seed) for seed in range(4)]
    raw = class_noise([from_runs(without_probes(group)) for group in groups])
    noise = class_noise([from_runs(group) for group in groups])
    assert PROBE_CORRECTED == (TOKENS_PER_S, TOKENS_PER_S_MEAN)
    assert noise.probe_exponent > 0.95
    for metric in PROBE_CORRECTED:
        assert known(noise, metric).sigma < known(raw, metric).sigma / 5
        assert known(noise, metric).degrees_of_freedom == pytest.approx(15 * SCALE_EFFICIENCY)
        assert known(raw, metric).degrees_of_freedom == pytest.approx(16 * SCALE_EFFICIENCY)
        assert noise.of(metric, corrected=False) == known(raw, metric)
        assert raw.of(metric, corrected=False) == known(raw, metric)
    memory = known(noise, PEAK_MEMORY)
    assert memory == known(raw, PEAK_MEMORY) == noise.of(PEAK_MEMORY, corrected=False)


def test_a_probe_that_the_speed_does_not_follow_is_left_alone() -> None:
    groups = [
        make_launches(speed, probe_s_p50=probe)[0]
        for speed, probe in zip(SPEEDS, (1.0, 0.9, 1.1, 1.0, 0.9, 1.1, 1.0, 1.1, 0.9, 1.0), strict=True)
    ]
    noise = class_noise([from_runs(groups)])
    assert noise.probe_exponent == 0
    assert known(noise, TOKENS_PER_S) == known(class_noise([recorded(*SPEEDS)]), TOKENS_PER_S)


@pytest.mark.parametrize("probe", [None, 0.0, -1.0, math.nan, math.inf])
def test_a_launch_without_a_sound_probe_is_left_out_of_what_the_probe_corrects(probe: float | None) -> None:
    groups = [drifting(seed) for seed in range(4)]
    last = groups[3][-1]
    partly = [*groups[:3], [*groups[3][:-1], last.replace(figures=last.figures.replace(probe_s_p50=probe))]]
    noise = class_noise([from_runs(group) for group in partly])
    less = class_noise([from_runs(group) for group in (*groups[:3], groups[3][:-1])])
    assert noise.probe_exponent == less.probe_exponent > 0.95
    for metric in PROBE_CORRECTED:
        assert known(noise, metric) == known(less, metric)
        assert known(noise, metric).degrees_of_freedom == pytest.approx(14 * SCALE_EFFICIENCY)
    assert known(noise, PEAK_MEMORY).degrees_of_freedom == pytest.approx(16 * SCALE_EFFICIENCY)


def test_a_probe_is_never_paired_with_another_launchs_figure() -> None:
    """Where one launch lacks the speed and another the probe, the lists are equally long."""
    groups = [drifting(seed) for seed in range(4)]
    first, second, *others = groups[0]
    first = first.replace(figures=first.figures.replace(tokens_per_s=None))
    [second] = without_probes([second])
    noise = class_noise([from_runs([first, second, *others]), *map(from_runs, groups[1:])])
    less = class_noise([from_runs(others), *map(from_runs, groups[1:])])
    assert noise.probe_exponent == less.probe_exponent
    assert known(noise, TOKENS_PER_S) == known(less, TOKENS_PER_S)


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("probed", [True, False])
def test_a_figure_that_is_no_size_is_left_out(value: float | None, probed: bool) -> None:
    groups = [drifting(seed) if probed else without_probes(drifting(seed)) for seed in range(4)]
    bad = groups[0][2].figures.replace(**dict.fromkeys([metric.name for metric in GATED], value))
    spoilt = [*groups[0][:2], groups[0][2].replace(figures=bad), *groups[0][3:]]
    without = [*groups[0][:2], *groups[0][3:]]
    assert class_noise([from_runs(group) for group in (spoilt, *groups[1:])]) == class_noise(
        [from_runs(group) for group in (without, *groups[1:])]
    )


@pytest.mark.parametrize("lacking", [{"tokens_per_s_mean": None}, {"tokens_per_s_mean": 0.0}])
def test_a_corrected_metric_that_a_baseline_lacks_is_known_from_the_others(lacking: dict[str, Any]) -> None:
    groups = [*(drifting(seed) for seed in range(3)), drifting(3, **lacking)]
    noise = class_noise([from_runs(group) for group in groups])
    assert noise.probe_exponent > 0.95
    assert known(noise, TOKENS_PER_S).degrees_of_freedom == pytest.approx(15 * SCALE_EFFICIENCY)
    assert known(noise, TOKENS_PER_S_MEAN).degrees_of_freedom == pytest.approx(11 * SCALE_EFFICIENCY)


def test_a_corrected_metric_that_too_few_launches_have_is_not_known() -> None:
    """The exponent, fitted to the same launches, costs one."""
    full = [drifting(seed, tokens_per_s_mean=None) for seed in range(3)]
    few = class_noise([from_runs(group) for group in (*full, drifting(9, launches=3))])
    assert few.probe_exponent > 0.95
    assert few.of(TOKENS_PER_S_MEAN) is None
    more = class_noise([from_runs(group) for group in (*full, drifting(9, launches=4))])
    assert known(more, TOKENS_PER_S_MEAN).degrees_of_freedom == pytest.approx(2 * SCALE_EFFICIENCY)


def test_too_few_launches_never_correct() -> None:
    assert class_noise([from_runs(drifting(0, launches=3))]).probe_exponent == 0
