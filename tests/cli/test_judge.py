"""What `perfsuite judge` says of the step times of launches, whatever logs they come from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.cli.judge import as_json, judged, seconds_per_step
from perfsuite.verdict.sequential import decide, pooled_noise
from tests.cli.commands import run
from tests.samples import deterministic

KEYS = ["outcome", "estimate", "interval", "launches_used", "minimum_detectable_drop", "blind"]
BASELINE = [[s] for s in (0.991, 1.012, 0.997, 1.004, 0.985, 1.008, 1.001, 0.994, 1.003, 1.006)]
UNCHANGED = [[s] for s in (1.004, 0.993, 1.009, 0.998, 1.001, 1.012, 0.99, 1.003, 0.996, 1.0)]
QUIET = [[1 + (s - 1) / 3] for [s] in BASELINE]
NOISY = [[1 + 5 * (s - 1)] for [s] in BASELINE]


def slower(launches: Sequence[Sequence[float]], drop: float) -> list[list[float]]:
    return [[s * (1 + drop) for s in series] for series in launches]


def test_no_change_passes_and_a_slowdown_regresses_and_a_speedup_improves() -> None:
    same, worse, better = (judged(BASELINE, slower(UNCHANGED, drop), 0.03) for drop in (0, 0.05, -0.05))
    assert same.outcome == "passed"
    assert same.interval[0] < same.estimate < same.interval[1] < 0.03
    assert not same.blind
    assert worse.outcome == "regressed"
    assert worse.estimate == pytest.approx(0.05, abs=0.01)
    assert worse.launches_used == 3
    assert better.outcome == "improved"
    assert better.estimate == pytest.approx(-0.05, abs=0.01)


def test_it_answers_as_the_engine_does_at_the_same_launch() -> None:
    answer = judged(QUIET, slower(UNCHANGED, 0.025), 0.03)
    baseline = [series[0] for series in QUIET]
    launches = [1.025 * series[0] for series in UNCHANGED[: answer.launches_used]]
    noise = pooled_noise([baseline])
    assert answer == decide(baseline, launches, tolerance=0.03, noise=noise, max_launches=10)


@pytest.mark.parametrize(
    ("baseline", "launches", "outcome"),
    [
        (QUIET, UNCHANGED[:1], "passed"),
        (NOISY, UNCHANGED[:1], "inconclusive"),
        (QUIET, slower(UNCHANGED[:1], 0.05), "inconclusive"),
        (QUIET, slower(UNCHANGED[:2], 10), "inconclusive"),
        (QUIET, slower(UNCHANGED[:2], -0.2), "passed"),
    ],
    ids=["clear", "unclear", "one slower", "two slower", "two faster"],
)
def test_what_few_launches_show_is_never_a_regression(
    baseline: list[list[float]], launches: list[list[float]], outcome: str
) -> None:
    assert judged(baseline, launches, 0.03).outcome == outcome


def test_at_most_fifteen_launches_are_used() -> None:
    doubtful = [[1.02 + 0.001 * (number % 3)] for number in range(40)]
    assert 4 < judged(NOISY, doubtful, 0.03).launches_used <= 15


def test_a_gate_that_is_blind_says_so(tmp_path: Path) -> None:
    answer = judged(NOISY, UNCHANGED, 0.03)
    assert answer.blind
    assert answer.minimum_detectable_drop > 0.03
    logs = [[write(tmp_path / f"{name}{n}.json", each) for n, each in enumerate(of)] for name, of in SIDES]
    before, now = logs
    shown = run("judge", *now, *(word for log in before for word in ("--baseline", log)))
    assert shown.stdout.endswith("  blind\n")


SIDES = (("before", NOISY), ("now", UNCHANGED))


def write(file: Path, series: Sequence[float]) -> Path:
    file.write_text(json.dumps({"step_s": series}))
    return file


def real_steps(seed: int, *, level: float = 0.2, count: int = 70, warmup: int = 8) -> list[float]:
    """As real launches look: slow first steps, noise correlated in time, some steps twice as slow."""
    random = Random(seed)
    steps, drift = [], 0.0
    for step in range(count):
        drift = 0.8 * drift + random.gauss(0, 0.01)
        slow = 1.5 if step < warmup else 2.0 if random.random() < 0.06 else 1.0
        steps.append(level * math.exp(drift) * slow)
    return steps


@pytest.mark.parametrize(("count", "warmup"), [(5, 1), (14, 4), (15, 4), (30, 8), (70, 20), (300, 20)])
def test_slow_first_steps_and_stalls_do_not_move_a_launch(count: int, warmup: int) -> None:
    for seed in range(20):
        steps = real_steps(seed, count=count, warmup=warmup)
        assert seconds_per_step(steps) == pytest.approx(0.2, rel=0.08)


@pytest.mark.parametrize(
    ("series", "seconds"),
    [
        ([9.0, 1.0, 2.0], 2.0),
        ([1.0, 2.0], 1.5),
        ([2.0] * 20 + [1.0] * 24 + [1.01] * 26, 1.01),
        ([2.0] * 4 + [1.0] * 11, 1.0),
    ],
)
def test_a_short_series_is_its_plain_median_and_a_long_one_has_the_window_of_a_real_run(
    series: list[float], seconds: float
) -> None:
    assert seconds_per_step(series) == seconds


def test_real_steps_find_a_drop_and_raise_no_alarm() -> None:
    baseline = [real_steps(seed) for seed in range(10)]
    for drop, outcome in ((0.0, "passed"), (0.08, "regressed")):
        launches = [real_steps(seed, level=0.2 * (1 + drop)) for seed in range(100, 115)]
        assert judged(baseline, launches, 0.03).outcome == outcome


seconds = st.floats(min_value=0, max_value=1e15, exclude_min=True, exclude_max=True)
series = st.lists(seconds, min_size=1, max_size=40)
baselines = st.lists(series, min_size=3, max_size=20)
tolerances = st.floats(0, 1, exclude_min=True, exclude_max=True)


@deterministic
@given(baselines, st.lists(series, min_size=1, max_size=20), tolerances)
def test_whatever_the_seconds_the_answer_is_strict_json(
    baseline: list[list[float]], launches: list[list[float]], tolerance: float
) -> None:
    answer = json.loads(as_json(judged(baseline, launches, tolerance)), parse_constant=pytest.fail)
    assert list(answer) == KEYS
    assert answer["outcome"] in ("passed", "improved", "regressed", "inconclusive")
    assert 1 <= answer["launches_used"] <= min(15, len(launches))
