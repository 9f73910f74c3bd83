from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median, quantiles
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.case.hardware import Machine
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.metric import GATED, PEAK_MEMORY, Metric
from perfsuite.results.outcome import UNMEASURED, Check, Outcome
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import DeviceHealth, Run
from perfsuite.verdict import judge as judge_module
from perfsuite.verdict.judge import MAX_UNHEALTHY, TOO_FEW_LAUNCHES, Policy, tolerance_check
from perfsuite.verdict.noise import ClassNoise, class_noise
from perfsuite.verdict.sequential import MAX_LAUNCHES, Noise
from tests.samples import (
    DISTURBED,
    deterministic,
    make_case,
    make_figures,
    make_launches,
    make_run,
)
from tests.verdict.judging import (
    BASELINE,
    BASELINE_H100,
    H100,
    LOUD,
    MIB,
    NAMES,
    ORDINARY,
    PROBED,
    QUIET,
    SICK_GPU,
    check_of,
    judged,
    noise_of,
    of_sessions,
    on_gpu,
    on_machine,
    outcomes,
    run_with,
    session,
    usual,
    with_loss,
    with_stack,
)


def test_a_session_as_slow_as_others_were_is_no_regression() -> None:
    """Sessions of unchanged code differ by 2 %. Who knows one of them calls the next one regressed."""
    today = usual(0.975, machine=H100)
    one, three = of_sessions(1.0), of_sessions(1.0, 0.98, 1.01)
    alone = check_of(session(today, one, class_noise([one])), "tokens_per_s")
    assert (alone.outcome, alone.blind) == ("regressed", False)
    among = check_of(session(today, three, class_noise([three])), "tokens_per_s")
    assert (among.outcome, among.blind) == ("inconclusive", True)
    assert check_of(
        session(usual(0.8, machine=H100), three, class_noise([three])), "tokens_per_s"
    ).outcome == ("regressed")


def test_what_other_baselines_say_of_sessions_holds_for_one_of_a_single_session() -> None:
    one, three = of_sessions(1.0), of_sessions(1.0, 0.98, 1.01)
    noise = class_noise([one, three])
    widths = []
    for baseline in (one, three):
        check = check_of(session(usual(machine=H100), baseline, noise), "tokens_per_s")
        assert check.interval is not None
        widths.append(math.log1p(check.interval[1]) - math.log1p(check.interval[0]))
    assert widths[0] / widths[1] == pytest.approx(math.sqrt(2 / (4 / 3)), rel=0.03)


# Launches until decided


def test_unchanged_code_passes_after_one_launch_where_noise_is_low() -> None:
    verdict = session(usual())
    assert (verdict.outcome, verdict.launches) == ("passed", 1)
    assert (verdict.failure, verdict.reasons, verdict.changed) == (None, (), ())
    assert outcomes(verdict) == dict.fromkeys(NAMES, "passed")


def test_every_check_says_how_much_how_sure_and_how_much_is_allowed() -> None:
    verdict = session(usual())
    for check, metric in zip(verdict.checks, GATED, strict=True):
        assert (check.metric, check.label, check.unit) == (metric.name, metric.label, metric.unit)
        allowed = metric.tolerances["cpu"]
        assert check.allowed == pytest.approx(allowed if metric.better == "lower" else 1 - 1 / (1 + allowed))
        assert check.change is not None
        assert check.interval is not None
        low, high = check.interval
        assert -check.allowed < low < check.change < high < check.allowed
        assert check.minimum_detectable is not None
        assert 0.01 < check.minimum_detectable < 0.02
        assert not check.blind
        assert check.note is None
    speed = check_of(verdict, "tokens_per_s")
    assert speed.measured == pytest.approx(1001)
    assert speed.baseline == 1000


def test_a_case_that_looks_better_than_the_tolerance_and_not_surely_so_passes() -> None:
    verdict = session(usual(1.174) * 5, noise=noise_of(0.12))
    check = check_of(verdict, "tokens_per_s")
    assert (check.outcome, verdict.launches) == ("passed", MAX_LAUNCHES)
    assert check.change is not None
    assert check.interval is not None
    assert check.allowed < check.change == pytest.approx(0.174, abs=0.001)
    assert -check.allowed < check.interval[0] < 0.05


def test_in_doubt_another_launch_is_asked_for_until_it_passes() -> None:
    """7 % slower with a noise of 4 % may be the 15 % that must not pass, or nothing."""
    runs = usual(0.93)
    assert judged(runs[:1], noise=ORDINARY).outcome == "undecided"
    verdict = session(runs, noise=ORDINARY)
    assert verdict.outcome == "passed"
    assert 3 < verdict.launches < MAX_LAUNCHES


def test_measured_is_the_median_of_the_launches_and_baseline_that_of_its_own() -> None:
    verdict = judged(make_launches(0.6, 0.72, 0.71), from_runs(make_launches(1.0, 1.2, 1.01)))
    check = check_of(verdict, "tokens_per_s")
    assert check.measured == pytest.approx(710)
    assert check.baseline == 1010


@pytest.mark.parametrize("slow", [0.8, 0.5, 0.1, 1e-3, 1e-9])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_slow_launch_of_any_size_is_never_a_regression_and_passes_with_normal_ones(
    slow: float, place: int
) -> None:
    runs = usual()
    runs[place : place + 1] = make_launches(slow, peak_memory_bytes=64 * MIB / slow)
    for used in range(1, len(runs) + 1):
        assert judged(runs[:used]).outcome in ("undecided", "passed")
    assert judged(runs[:1], min_launches=3).outcome == "undecided"
    verdict = session(runs, min_launches=3)
    assert (verdict.outcome, outcomes(verdict)) == ("passed", dict.fromkeys(NAMES, "passed"))
    assert verdict.launches <= 6


@pytest.mark.parametrize("fast", [1.3, 10.0, 1e9])
def test_one_fast_launch_is_never_an_improvement(fast: float) -> None:
    runs = [*make_launches(fast), *usual()]
    assert judged(runs[:1]).outcome == "undecided"
    assert session(runs).outcome == "passed"


def test_slower_launches_regress_and_faster_ones_improve() -> None:
    slower = session(usual(0.8))
    assert (slower.outcome, slower.launches, slower.failure) == ("regressed", 3, None)
    check = check_of(slower, "tokens_per_s")
    assert check.change == pytest.approx(-0.2, abs=0.01)
    assert check.interval is not None
    assert check.interval[0] < -0.2 < check.interval[1] < -1 / 6
    assert outcomes(slower) == {
        "tokens_per_s": "regressed",
        "tokens_per_s_mean": "regressed",
        "peak_memory_bytes": "passed",
    }
    faster = session(usual(1.3))
    assert (faster.outcome, faster.launches, faster.failure) == ("improved", 3, None)
    assert check_of(faster, "tokens_per_s").change == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1, "passed"), (0.96, "regressed"), (0.985, "passed"), (1.05, "improved")]
)
def test_an_accelerator_is_held_to_tighter_tolerances(factor: float, outcome: str) -> None:
    verdict = session(usual(factor, machine=H100), BASELINE_H100)
    assert verdict.outcome == outcome
    assert [check.allowed for check in verdict.checks] == pytest.approx([1 - 1 / 1.03, 1 - 1 / 1.05, 0.01])
    assert session(usual(factor)).outcome == "passed"


@pytest.mark.parametrize("max_launches", [3, 6, MAX_LAUNCHES])
def test_launches_used_up_are_inconclusive(max_launches: int) -> None:
    """9 % slower with a noise of 6 %: neither passes nor regresses."""
    verdict = session(usual(0.92), noise=noise_of(0.06), max_launches=max_launches)
    assert (verdict.outcome, verdict.launches) == ("inconclusive", max_launches)
    assert verdict.failure is None


@pytest.mark.parametrize("max_launches", [1, 2])
def test_of_one_or_two_launches_a_verdict_is_passed_or_inconclusive(max_launches: int) -> None:
    for factor in (0.5, 0.8, 1.3, 3.0):
        doubtful = session(usual(factor), max_launches=max_launches)
        assert (doubtful.outcome, doubtful.launches) == ("inconclusive", max_launches)
        check = check_of(doubtful, "tokens_per_s")
        assert check.change == pytest.approx(factor - 1, abs=0.02 * factor)
        assert (check.note, check.minimum_detectable) == (TOO_FEW_LAUNCHES, None)
    good = session(usual(), max_launches=max_launches)
    assert (good.outcome, good.launches) == ("passed", 1)
    assert check_of(good, "tokens_per_s").minimum_detectable is None


@pytest.mark.parametrize(("memory", "outcome"), [(70, "regressed"), (64, "unhealthy"), (60, "unhealthy")])
def test_an_unhealthy_machine_hides_no_exact_metric_that_is_worse(memory: float, outcome: str) -> None:
    healthy = usual(machine=H100, peak_memory_bytes=memory * MIB)[:1]
    held = DISTURBED.replace(devices=(DeviceHealth(index=0, held_before_bytes=8 * 2**30),))
    disturbed = [run.replace(health=held) for run in healthy] * 3
    verdict = judged([*healthy, *disturbed], BASELINE_H100, LOUD)
    assert (verdict.outcome, len(verdict.unhealthy_launches)) == (outcome, 3)


WEIGHTS = Metric(
    name="weight_bytes",
    label="weights",
    unit="bytes",
    better="lower",
    judged="exact",
    tolerances={"cpu": 0.01, "cuda": 0.01},
)
"""A metric of another package."""


@pytest.mark.parametrize(("weights", "outcome"), [(110.0, "regressed"), (100.0, "unhealthy")])
def test_nor_one_of_another_package(monkeypatch: pytest.MonkeyPatch, weights: float, outcome: str) -> None:
    monkeypatch.setattr("perfsuite.verdict.judge.judged", lambda figures, device: [*GATED, WEIGHTS])
    before = from_runs(usual(extra={WEIGHTS.name: 100.0})[:5])
    disturbed = [run.replace(health=DISTURBED) for run in usual(extra={WEIGHTS.name: weights})[:3]]
    verdict = judged(disturbed, before)
    assert verdict.outcome == outcome
    assert [check.metric for check in verdict.checks] == [WEIGHTS.name] * (outcome == "regressed")


def test_what_further_launches_would_hardly_decide_is_inconclusive_early() -> None:
    verdict = session(usual(machine=H100), BASELINE_H100, LOUD)
    assert verdict.outcome == "inconclusive"
    assert verdict.launches < 6


def test_a_gate_that_would_miss_its_tolerance_says_that_it_is_blind() -> None:
    verdict = session(usual(machine=H100), BASELINE_H100, LOUD)
    blind = {check.metric: check.blind for check in verdict.checks}
    assert blind == {
        "tokens_per_s": True,
        "tokens_per_s_mean": True,
        "peak_memory_bytes": False,
    }
    assert check_of(verdict, "tokens_per_s").minimum_detectable == pytest.approx(0.25, abs=0.02)
    assert not any(check.blind for check in session(usual(machine=H100), BASELINE_H100).checks)


def test_a_blind_gate_still_finds_a_large_drop() -> None:
    verdict = session(usual(0.5, machine=H100), BASELINE_H100, LOUD)
    assert verdict.outcome == "regressed"
    assert check_of(verdict, "tokens_per_s").blind


@pytest.mark.parametrize(("factor", "outcome"), [(1, "passed"), (1.3, "improved")])
def test_min_launches_are_made_though_fewer_would_do(factor: float, outcome: str) -> None:
    runs = usual(factor)
    early = judged(runs[:4], min_launches=5)
    assert early.outcome == "undecided"
    assert check_of(early, "tokens_per_s").outcome == outcome
    verdict = session(runs, min_launches=5)
    assert (verdict.outcome, verdict.launches) == (outcome, 5)


@pytest.mark.fault("settings are not the baseline's")
def test_min_launches_are_made_of_what_is_worse_or_unlike_too() -> None:
    """A slower baseline is accepted like any other: from enough launches."""
    slower = session(usual(0.8), min_launches=9)
    assert (slower.outcome, slower.launches) == ("regressed", 9)
    loud = session(usual(machine=H100), BASELINE_H100, LOUD, min_launches=9)
    assert (loud.outcome, loud.launches) == ("inconclusive", 9)
    unlike = session([run.replace(case=make_case(micro_batch=4)) for run in usual()], min_launches=5)
    assert (unlike.failure, unlike.launches) == ("unlike", 5)
    other_loss = [with_loss(1.1, first=12)] * 6
    differing = session(other_loss, from_runs([with_loss(1)] * 5), min_launches=5)
    assert (differing.failure, differing.launches) == ("loss", 5)


def test_min_launches_do_not_delay_a_failure() -> None:
    broken = [make_run(failure=Failure(kind="crash", message="x"))] * 5
    assert session(broken, min_launches=5).launches == 1
    assert session([run_with(peak_memory_bytes=None)] * 5, min_launches=5).launches == 1


def test_more_launches_may_be_asked_for_than_a_verdict_may_cost() -> None:
    """`--perf-min-launches=20` to accept a baseline, `--perf-max-launches` as it was."""
    verdict = session(usual() * 2, min_launches=20)
    assert (verdict.outcome, verdict.launches) == ("passed", 20)
    doubtful = session(usual(0.92) * 2, noise=noise_of(0.06), max_launches=3, min_launches=9)
    assert (doubtful.outcome, doubtful.launches) == ("inconclusive", 9)
    recorded = session(usual() * 2, None, max_launches=3, min_launches=9)
    assert (recorded.outcome, recorded.launches) == ("recorded", 9)


# Without a baseline


def test_without_a_baseline_as_many_launches_are_recorded_as_tell_their_noise() -> None:
    runs = usual()
    assert [judged(runs[:used], None).outcome for used in (1, 2)] == ["undecided"] * 2
    verdict = session(runs, None)
    assert (verdict.outcome, verdict.launches, verdict.failure) == ("recorded", 3, None)
    assert [(check.metric, check.outcome, check.baseline) for check in verdict.checks] == [
        (name, "recorded", None) for name in NAMES
    ]
    assert [(check.measured, check.change, check.interval) for check in verdict.checks] == [
        (pytest.approx(1001), None, None),
        (pytest.approx(990.99), None, None),
        (64 * MIB, None, None),
    ]


@pytest.mark.parametrize(
    ("policy", "launches"),
    [
        ({"record_launches": 1}, 1),
        ({"record_launches": 5}, 5),
        ({"min_launches": 6}, 6),
        ({"record_launches": 5, "min_launches": 2}, 5),
        ({"record_launches": 5, "max_launches": 4}, 4),
    ],
)
def test_policy_says_how_many_launches_are_recorded(policy: dict[str, int], launches: int) -> None:
    verdict = session(usual(), None, QUIET, **policy)
    assert (verdict.outcome, verdict.launches) == ("recorded", launches)


def test_launches_that_are_set_aside_are_none_of_those_that_a_baseline_may_cost() -> None:
    beside = make_run(health=DISTURBED)
    runs = [*usual()[:2], beside, beside, *usual()[2:]]
    verdict = session(runs, None, QUIET, max_launches=4)
    assert (verdict.outcome, verdict.launches, verdict.unhealthy_launches) == ("recorded", 4, (3, 4))


def test_nothing_is_unhealthy_where_there_is_nothing_to_compare_the_machine_with() -> None:
    runs = [run_with(probe_s_p50=probe) for probe in (0.01, 0.1, 1.0)]
    assert session(runs, None).outcome == "recorded"


# The worst metric, and each metric's own verdict


@pytest.mark.parametrize(
    ("figures", "outcome"),
    [
        ({"tokens_per_s": 2000, "peak_memory_bytes": 128 * MIB}, "regressed"),
        ({"tokens_per_s": 500, "peak_memory_bytes": 32 * MIB}, "regressed"),
        ({"tokens_per_s": 2000, "peak_memory_bytes": 32 * MIB}, "improved"),
        ({"tokens_per_s": 2000}, "improved"),
        ({"tokens_per_s": 500, "peak_memory_bytes": None}, "failed"),
    ],
)
def test_the_worst_metric_is_the_verdict(figures: dict[str, float | None], outcome: str) -> None:
    assert session([run_with(**figures)] * 5).outcome == outcome


def test_one_metric_in_doubt_asks_for_another_launch_though_the_others_are_sure() -> None:
    known = {**QUIET.by_metric, "peak_memory_bytes": Noise(sigma=0.3, degrees_of_freedom=30)}
    verdict = judged(usual()[:1], noise=ClassNoise(by_metric=known))
    assert verdict.outcome == "undecided"
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "passed"), "peak_memory_bytes": "undecided"}


def test_a_regression_is_told_though_another_metric_is_in_doubt() -> None:
    known = {**QUIET.by_metric, "peak_memory_bytes": Noise(sigma=0.3, degrees_of_freedom=30)}
    runs = usual(0.8, peak_memory_bytes=64 * MIB * 1.36)
    verdict = session(runs, noise=ClassNoise(by_metric=known))
    assert (verdict.outcome, verdict.launches) == ("regressed", 3)
    assert outcomes(verdict)["peak_memory_bytes"] == "undecided"


def test_more_memory_of_a_gpu_hides_no_slowdown_that_takes_more_launches_to_see() -> None:
    runs = usual(0.92, machine=H100, peak_memory_bytes=66 * MIB)
    first = judged(runs[:1], BASELINE_H100, ORDINARY)
    assert outcomes(first)["peak_memory_bytes"] == "regressed"
    assert (first.outcome, outcomes(first)["tokens_per_s"]) == ("undecided", "undecided")
    verdict = session(runs, BASELINE_H100, noise_of(0.01))
    assert verdict.outcome == "regressed"
    assert outcomes(verdict)["tokens_per_s"] == outcomes(verdict)["peak_memory_bytes"] == "regressed"


def test_one_metric_inconclusive_makes_the_verdict_so() -> None:
    known = {**QUIET.by_metric, "peak_memory_bytes": Noise(sigma=2.0, degrees_of_freedom=30)}
    verdict = session(usual(), noise=ClassNoise(by_metric=known))
    assert verdict.outcome == "inconclusive"
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "passed"), "peak_memory_bytes": "inconclusive"}
    assert session(usual(0.8), noise=ClassNoise(by_metric=known)).outcome == "regressed"


def test_the_order_of_the_checks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [
        [run_with(tokens_per_s=500, peak_memory_bytes=None)],
        [run_with(tokens_per_s=500, peak_memory_bytes=32 * MIB)] * 5,
        [run_with(tokens_per_s=2000, peak_memory_bytes=32 * MIB)] * 5,
        usual(0.93),
    ]
    before = [session(runs, noise=ORDINARY) for runs in sessions]
    monkeypatch.setattr(judge_module, "judged", lambda launches, device: GATED[::-1])
    after = [session(runs, noise=ORDINARY) for runs in sessions]
    assert [verdict.checks[::-1] for verdict in after] == [verdict.checks for verdict in before]
    assert [verdict.replace(checks=()) for verdict in after] == [v.replace(checks=()) for v in before]
    assert [verdict.outcome for verdict in before] == ["failed", "regressed", "improved", "passed"]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_launches_changes_nothing(seed: int) -> None:
    runs = make_launches(*(0.8 + 0.04 * index for index in range(9)))
    before = judged(runs, noise=ORDINARY, max_launches=9)
    random.Random(seed).shuffle(runs)
    assert judged(runs, noise=ORDINARY, max_launches=9) == before


def test_stalls_show_in_the_mean_while_the_median_passes() -> None:
    verdict = session(usual(tokens_per_s_mean=700))
    assert (verdict.outcome, verdict.launches) == ("regressed", 3)
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "passed"), "tokens_per_s_mean": "regressed"}
    assert check_of(verdict, "tokens_per_s_mean").change == pytest.approx(700 / 990 - 1, abs=0.01)


@pytest.mark.parametrize("jitter", [0.5, 2.2, 1e9, None])
def test_p95_over_p50_decides_nothing(jitter: float | None) -> None:
    """Where a few steps of each launch stall, it jumps from launch to launch."""
    verdict = session(usual(step_jitter=jitter))
    assert (verdict.outcome, verdict.launches) == ("passed", 1)
    assert "step_jitter" not in outcomes(verdict)


WITH_CPU_TIME = from_runs(usual(cpu_s_per_step=0.100)[:5])
CPU_TIME = noise_of(0.005).by_metric["tokens_per_s"]
KNOWN = ClassNoise(by_metric={**QUIET.by_metric, "cpu_s_per_step": CPU_TIME})


@pytest.mark.parametrize(("now", "outcome"), [(0.100, "passed"), (0.140, "regressed"), (0.070, "improved")])
def test_cpu_time_has_a_verdict_of_its_own(now: float, outcome: Outcome) -> None:
    verdict = session(usual(cpu_s_per_step=now), WITH_CPU_TIME, KNOWN)
    assert verdict.outcome == outcome
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "passed"), "cpu_s_per_step": outcome}


def test_cpu_time_is_not_corrected_by_the_probe() -> None:
    """Which follows the time on the wall: half the speed of a busy machine is not half the work."""
    probed = [run.replace(figures=run.figures.replace(probe_s_p50=0.01)) for run in usual(cpu_s_per_step=0.1)]
    noise = replace(KNOWN, probe_exponent=1.0, knows_exponent=True)
    check = check_of(judged(probed[:1], from_runs(probed[:5]), noise), "cpu_s_per_step")
    assert (check.outcome, check.probe_exponent) == ("passed", None)


def test_beside_a_gpu_cpu_time_is_not_judged() -> None:
    slower = usual(cpu_s_per_step=0.9, machine=H100)
    before = from_runs(usual(cpu_s_per_step=0.1, machine=H100)[:5])
    assert outcomes(session(slower, before, KNOWN)) == dict.fromkeys(NAMES, "passed")


def test_cpu_time_that_the_baseline_has_must_be_measured() -> None:
    verdict = judged(usual()[:1], WITH_CPU_TIME, KNOWN)
    assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
    assert check_of(verdict, "cpu_s_per_step").note == "the baseline has it, this run does not"


def stalling(rng: random.Random, share: float, machine: Machine) -> Run:
    """50 steps with noise of 1 %, and of 0.5 % between launches; a share of them takes twice as long."""
    speed = rng.lognormvariate(0, 0.005)
    steps = [speed * rng.lognormvariate(0, 0.01) * (2 if rng.random() < share else 1) for _ in range(50)]
    p50, p95 = median(steps), quantiles(steps, n=20, method="inclusive")[-1]
    figures = make_figures(
        tokens_per_s=1000 / p50, tokens_per_s_mean=1000 / fmean(steps), step_jitter=p95 / p50
    )
    return make_run(machine=machine, figures=figures)


@pytest.mark.parametrize(("share", "now", "outcome"), [(0.04, 0.04, "passed"), (0.04, 0.15, "regressed")])
def test_steps_that_stall_now_and_then_are_no_regression_and_more_of_them_are_found(
    share: float, now: float, outcome: str
) -> None:
    rng = random.Random(1)
    baselines = [from_runs([stalling(rng, share, H100) for _ in range(10)]) for _ in range(10)]
    noise = class_noise(baselines)
    verdicts = Counter[str](
        session([stalling(rng, now, H100) for _ in range(MAX_LAUNCHES)], baseline, noise).outcome
        for baseline in baselines * 10
    )
    assert verdicts[outcome] >= 95
    assert outcome == "regressed" or not verdicts["regressed"]


# Memory


@pytest.mark.parametrize(
    ("memory", "outcome"),
    [
        (64, "passed"),
        (64.63, "passed"),
        (64.65, "regressed"),
        (128, "regressed"),
        (63.37, "passed"),
        (63.35, "improved"),
    ],
)
def test_on_a_gpu_memory_is_exact_to_one_percent_and_one_launch_suffices(memory: float, outcome: str) -> None:
    runs = usual(machine=H100, peak_memory_bytes=memory * MIB)
    verdict = session(runs, BASELINE_H100)
    assert (verdict.outcome, verdict.launches) == (outcome, 1)
    check = check_of(verdict, "peak_memory_bytes")
    assert (check.outcome, check.interval, check.blind) == (outcome, None, False)
    assert check.change == pytest.approx(memory / 64 - 1, abs=3e-6)
    assert check.minimum_detectable == check.allowed == 0.01


def test_on_a_gpu_memory_is_judged_though_no_noise_is_known() -> None:
    verdict = judged(usual(machine=H100, peak_memory_bytes=70 * MIB)[:1], BASELINE_H100, ClassNoise())
    assert verdict.outcome == "regressed"
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "inconclusive"), "peak_memory_bytes": "regressed"}


@pytest.mark.parametrize(("memory", "outcome"), [(70, "passed"), (90, "regressed"), (45, "improved")])
def test_on_a_cpu_memory_is_statistical(memory: float, outcome: str) -> None:
    runs = usual(peak_memory_bytes=memory * MIB)
    verdict = session(runs)
    assert verdict.outcome == outcome
    assert verdict.launches == (1 if outcome == "passed" else 3)
    check = check_of(verdict, "peak_memory_bytes")
    assert check.interval is not None
    assert check.interval[0] < memory / 64 - 1 < check.interval[1]
    assert check.allowed == 0.2


# What was not measured, or is no number


@pytest.mark.parametrize("metric", NAMES)
def test_a_metric_that_only_the_baseline_has_fails(metric: str) -> None:
    verdict = judged([run_with(**{metric: None})])
    check = check_of(verdict, metric)
    assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", "missing_metric", 1)
    assert (check.outcome, check.measured, check.change) == ("failed", None, None)
    assert check.note == "the baseline has it, this run does not"
    assert [name for name, outcome in outcomes(verdict).items() if outcome == "failed"] == [metric]


@pytest.mark.parametrize("metric", NAMES)
def test_a_metric_that_one_of_several_launches_lacks_fails(metric: str) -> None:
    runs = [*usual()[:2], run_with(**{metric: None})]
    for baseline in (BASELINE, None):
        verdict = judged(runs, baseline)
        assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
        assert check_of(verdict, metric).measured is None


@pytest.mark.parametrize("metric", NAMES)
def test_a_metric_that_was_never_measured_fails_at_once_without_a_baseline_too(metric: str) -> None:
    verdict = judged([run_with(**{metric: None})], None)
    assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", "missing_metric", 1)
    assert check_of(verdict, metric).note == "was not measured"


def test_a_lesser_metric_that_the_baseline_lacks_is_not_known() -> None:
    metric = "tokens_per_s_mean"
    baseline = from_runs([run_with(**{metric: None})] * 3)
    verdict = judged(usual()[:1], baseline)
    assert verdict.outcome == "inconclusive"
    assert check_of(verdict, metric).note == "not in the baseline: accept or record it anew"


@pytest.mark.parametrize("metric", ["tokens_per_s", "peak_memory_bytes"])
def test_a_baseline_without_speed_or_memory_never_passes(metric: str) -> None:
    verdict = judged(usual()[:1], from_runs([run_with(**{metric: None})] * 3))
    assert verdict.outcome == "failed"
    assert check_of(verdict, metric).note == "the baseline lacks it: accept or record it anew"


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_figure_that_is_no_size_never_passes(metric: str, value: float) -> None:
    for baseline in (BASELINE, None):
        verdict = judged([run_with(**{metric: value})], baseline)
        assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
        assert check_of(verdict, metric).note == f"the measured value is {value}"


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_figure_that_is_no_size_never_passes_among_good_ones(metric: str, value: float, place: int) -> None:
    """The median alone would not show it, and it has no logarithm."""
    runs = usual()[:3]
    runs[place] = run_with(**{metric: value})
    for baseline in (BASELINE, None):
        verdict = judged(runs, baseline, min_launches=3)
        assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
        assert check_of(verdict, metric).note == f"the measured value is {value}"


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_baseline_of_which_one_launch_is_no_size_never_passes(metric: str, value: float) -> None:
    spoilt = from_runs([*usual()[:2], run_with(**{metric: value})])
    verdict = judged(usual()[:1], spoilt)
    assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
    assert check_of(verdict, metric).note == f"the baseline's value is {value}"


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_on_a_gpu_memory_that_is_no_size_never_passes(value: float) -> None:
    [run] = make_launches(1, machine=H100, peak_memory_bytes=value)
    verdict = judged([run], BASELINE_H100)
    assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_baseline_that_is_no_size_never_passes(metric: str, value: float) -> None:
    verdict = judged([make_run()], from_runs([run_with(**{metric: value})] * 3))
    assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
    assert check_of(verdict, metric).note == f"the baseline's value is {value}"


@pytest.mark.parametrize("used", [1, 2, 3])
@pytest.mark.parametrize("kind", ["out_of_memory", "timeout", "crash", "loss"])
def test_a_failed_launch_is_failed_with_its_kind_whatever_its_figures(used: int, kind: Any) -> None:
    runs = usual()[:used]
    runs[-1] = runs[-1].replace(failure=Failure(kind=kind, message="it went wrong", rank=1))
    for baseline in (BASELINE, None):
        verdict = judged(runs, baseline)
        assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", kind, used)
        assert verdict.reasons == (f"{kind}: it went wrong",)
        assert verdict.checks == ()


# The machine


@pytest.mark.parametrize("speed", [0.5, 0.79, 1.26, 2, math.nan, math.inf])
@pytest.mark.parametrize("tokens", [0.3, 1, 3])
def test_an_unhealthy_machine_is_the_verdict_after_three_launches_whatever_they_measured(
    speed: float, tokens: float
) -> None:
    runs = [on_machine(speed, tokens=tokens)] * 9
    early = judged(runs[: MAX_UNHEALTHY - 1], PROBED)
    assert (early.outcome, early.checks) == ("undecided", ())
    verdict = session(runs, PROBED)
    assert (verdict.outcome, verdict.launches, verdict.failure) == ("unhealthy", MAX_UNHEALTHY, None)
    assert verdict.reasons == tuple(
        f"launch {number} set aside: by the probe, "
        f"the machine ran at {speed:.0%} of its speed at the baseline"
        for number in (1, 2, 3)
    )


def test_fewer_unhealthy_launches_are_the_verdict_where_more_would_be_in_vain() -> None:
    runs = [make_run(health=DISTURBED)] * 9
    assert session(runs, max_unhealthy=1).launches == 1
    assert session([make_run(), make_run(), *runs], None, max_unhealthy=1).unhealthy_launches == (3, 4)


def test_a_disturbed_launch_is_none_of_those_that_are_recorded_from() -> None:
    disturbed = make_run(health=DISTURBED, figures=make_figures(tokens_per_s=1))
    verdict = session([disturbed, *usual()], None)
    assert (verdict.outcome, verdict.launches) == ("recorded", 4)
    assert check_of(verdict, "tokens_per_s").measured == pytest.approx(1001)


def test_a_failure_that_speaks_of_broken_hardware_says_so() -> None:
    said = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    failure = Failure(kind="crash", message="exit code 1", traceback=f"Traceback\n{said}\n", rank=3)
    verdict = session([on_gpu(None).replace(failure=failure)])
    assert (verdict.outcome, verdict.failure) == ("failed", "crash")
    assert verdict.reasons == (
        "crash: exit code 1",
        f"meanwhile hardware: {said}: look at `nvidia-smi -q` and dmesg (Xid)",
    )


def test_a_system_without_its_fabric_manager_is_no_fault_of_the_code() -> None:
    said = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    verdict = session([on_gpu(None).replace(failure=Failure(kind="crash", message=said))])
    where = "look at the Fabric Manager (systemctl status nvidia-fabricmanager)"
    assert verdict.reasons == (f"crash: {said}", f"meanwhile hardware: {said}: {where}")


def test_what_changed_is_told_of_an_unhealthy_machine_too() -> None:
    before = [with_stack(run) for run in usual()]
    runs = [with_stack(run, OMP_NUM_THREADS="2").replace(health=DISTURBED) for run in usual()]
    verdict = session(runs, from_runs(before))
    assert (verdict.outcome, verdict.changed) == ("unhealthy", ("OMP_NUM_THREADS: unset -> 2",))


@pytest.mark.parametrize(
    ("machine", "tokens", "outcome"),
    [
        (0.7, 0.7, "inconclusive"),  # a slower machine, or a slower matrix product
        (1.2, 1, "inconclusive"),  # a faster matrix product, and nothing else
        (1, 0.7, "regressed"),
        (0.9, 0.6, "regressed"),
        (1, 1, "passed"),
        (0.97, 0.97, "passed"),
    ],
)
def test_on_a_cpu_with_other_software_a_verdict_holds_with_and_without_the_probe(
    machine: float, tokens: float, outcome: str
) -> None:
    before = from_runs([with_stack(on_machine(1)) for _ in range(5)])
    after = [with_stack(on_machine(machine, tokens=tokens), torch="2.14.0") for _ in range(15)]
    verdict = session(after, before, noise_of(0.005, exponent=1))
    assert verdict.outcome == outcome
    note = check_of(verdict, "tokens_per_s").note
    assert (note is not None and "the software that the probe runs through changed" in note) == (
        outcome == "inconclusive"
    )
    if machine in (0.7, 1.2):
        assert any(line.startswith("probe between the steps (s): ") for line in verdict.changed)


@pytest.mark.parametrize(
    ("machine", "tokens", "outcome"),
    [(0.82, 0.82, "inconclusive"), (1, 0.8, "regressed"), (0.9, 0.6, "regressed"), (0.85, 0.95, "passed")],
)
def test_on_a_cpu_a_slower_machine_is_not_called_a_regression_while_its_effect_is_unknown(
    machine: float, tokens: float, outcome: str
) -> None:
    verdict = session([on_machine(machine, tokens=tokens)] * 15, PROBED)
    assert verdict.outcome == outcome
    if outcome == "inconclusive":
        said = check_of(verdict, "tokens_per_s").note
        assert said == (
            "as measured regressed, corrected for the machine's own speed passed; "
            "how speed follows the probe is unknown: accept more launches"
        )


def test_where_speed_is_known_not_to_follow_the_probe_a_regression_is_one() -> None:
    runs = [on_machine(0.85, tokens=0.8)] * 15
    assert session(runs, PROBED).outcome == "inconclusive"
    known = ClassNoise(by_metric=QUIET.by_metric, knows_exponent=True)
    assert session(runs, PROBED, known).outcome == "regressed"


@pytest.mark.parametrize(
    ("changes", "outcome", "failure"),
    [
        ({}, "unhealthy", None),
        ({"figures": make_figures(peak_memory_bytes=65 * MIB)}, "regressed", None),
        ({"figures": make_figures(peak_memory_bytes=60 * MIB)}, "unhealthy", None),
        ({"loss": tuple(9.0 for _ in SICK_GPU.loss)}, "failed", "loss"),
        ({"case": make_case(micro_batch=4)}, "failed", "unlike"),
    ],
)
def test_what_no_sick_machine_explains_is_told_of_one_too(
    changes: dict[str, Any], outcome: str, failure: str | None
) -> None:
    baseline = from_runs([on_gpu(700)] * 5)
    verdict = session([SICK_GPU.replace(**changes)] * 3, baseline)
    assert (verdict.outcome, verdict.failure, verdict.launches) == (outcome, failure, 3)
    assert verdict.unhealthy_launches == (1, 2, 3)


def test_a_failure_on_a_disturbed_machine_says_so() -> None:
    out_of_memory = Failure(kind="out_of_memory", message="x")
    verdict = judged([make_run(failure=out_of_memory, health=DISTURBED)])
    assert verdict.failure == "out_of_memory"
    assert verdict.reasons[1].startswith("meanwhile other processes used 60% of the cores")


@pytest.mark.parametrize("sick", [1, 2])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("tokens", "outcome"), [(1, "passed"), (0.8, "regressed")])
def test_a_few_unhealthy_launches_among_healthy_ones_are_no_evidence(
    sick: int, first: bool, tokens: float, outcome: str
) -> None:
    bad = [on_machine(0.5, tokens=0.4)] * sick
    good = [on_machine(1, tokens=tokens)] * 3
    verdict = judged([*bad, *good] if first else [*good, *bad], PROBED)
    assert (verdict.outcome, verdict.launches) == (outcome, sick + 3)
    assert verdict.checks == judged(good, PROBED).checks


def test_unhealthy_launches_are_none_of_the_launches_that_are_asked_for() -> None:
    runs = [on_machine(1), on_machine(0.5), on_machine(2), *[on_machine(1)] * 9]
    verdict = session(runs, PROBED, min_launches=5)
    assert (verdict.outcome, verdict.launches) == ("passed", 7)


@pytest.mark.parametrize("most", [6, MAX_LAUNCHES])
def test_launches_that_are_set_aside_are_among_the_most_that_are_made(most: int) -> None:
    doubtful = [on_machine(1, tokens=0.92 * factor) for factor in (1, 1.04, 0.97, 1.02, 0.99) * 4]
    assert session(doubtful, PROBED, ORDINARY, max_launches=most).launches == most
    mixed = [
        run for pair in zip(doubtful[::2], doubtful[1::2], strict=True) for run in (*pair, on_machine(0.5))
    ]
    verdict = session(mixed, PROBED, ORDINARY, max_launches=most)
    assert (verdict.outcome, verdict.launches) == ("inconclusive", most)
    assert len(verdict.unhealthy_launches) == most // 3
    assert session(mixed, PROBED, ORDINARY, max_launches=most, min_launches=12).launches >= 12 + 6 - 1
    few = [mixed[0], mixed[2], mixed[2], mixed[1]]
    assert check_of(session(few, PROBED, ORDINARY, max_launches=4), "tokens_per_s").note == TOO_FEW_LAUNCHES


def test_which_launches_were_unhealthy_is_told() -> None:
    runs = [on_machine(speed) for speed in (1, 0.5, 1, 2, 0.7)]
    verdict = session(runs, PROBED, min_launches=9)
    assert verdict.outcome == "unhealthy"
    assert verdict.unhealthy_launches == (2, 4, 5)
    assert [reason.split(":")[0] for reason in verdict.reasons] == [
        "launch 2 set aside",
        "launch 4 set aside",
        "launch 5 set aside",
    ]


def test_unhealthy_launches_that_are_outnumbered_do_not_end_it() -> None:
    verdict = session([on_machine(speed) for speed in (1, 0.5, 1, 0.5, 1, 1, 0.5, 1)], PROBED, min_launches=5)
    assert verdict.outcome == "passed"
    assert verdict.unhealthy_launches == (2, 4, 7)


def test_an_unhealthy_machine_does_not_excuse_a_failure() -> None:
    crash = on_machine(0.5).replace(failure=Failure(kind="crash", message="x"))
    assert judged([on_machine(0.5), crash], PROBED).failure == "crash"


@pytest.mark.parametrize(
    ("machine", "tokens", "outcome", "change"),
    [
        (0.85, 0.85, "passed", 0),  # the machine, not the code
        (1.2, 1.2, "passed", 0),
        (1.0, 0.8, "regressed", -0.2),  # the code
        (0.85, 0.68, "regressed", -0.2),  # both
        (1.2, 0.96, "regressed", -0.2),  # the code, on a machine that hides it
        (0.85, 1.0, "improved", 1 / 0.85 - 1),
    ],
)
def test_both_speeds_are_corrected_by_what_the_probe_says_of_the_machine(
    machine: float, tokens: float, outcome: str, change: float
) -> None:
    runs = [on_machine(machine, tokens=tokens)] * 9
    verdict = session(runs, PROBED, noise_of(0.005, exponent=1), min_launches=3)
    assert verdict.outcome == outcome
    for metric in ("tokens_per_s", "tokens_per_s_mean"):
        check = check_of(verdict, metric)
        assert check.change == pytest.approx(change, abs=0.005)
        assert check.measured == pytest.approx(tokens * (1000 if metric == "tokens_per_s" else 990))
        assert (check.probe_exponent, check.note) == (1, None)
    memory = check_of(verdict, "peak_memory_bytes")
    assert (memory.probe_exponent, memory.note, memory.outcome) == (None, None, "passed")


def test_the_probe_corrects_as_far_as_speed_follows_it() -> None:
    run = on_machine(0.9, tokens=0.9)
    change = [
        check_of(judged([run], PROBED, noise_of(0.005, exponent=exponent)), "tokens_per_s").change
        for exponent in (0, 0.5, 1)
    ]
    assert change == pytest.approx([0.9 - 1, 0.9**0.5 - 1, 0], abs=0.002)


def test_where_speed_does_not_follow_the_probe_nothing_is_corrected() -> None:
    verdict = judged([on_machine(0.85)], PROBED)
    check = check_of(verdict, "tokens_per_s")
    assert check.change == pytest.approx(0, abs=0.005)
    assert check.probe_exponent is None


def test_launches_without_a_probe_among_others_leave_all_as_measured() -> None:
    corrected = noise_of(0.005, exponent=1)
    probed, bare = on_machine(0.85, tokens=0.85), make_launches(0.85)[0]
    for runs in ([probed, bare], [bare, probed]):
        check = check_of(judged(runs, PROBED, corrected), "tokens_per_s")
        assert check.change == pytest.approx(0.85 - 1, abs=0.005)
        assert check.probe_exponent is None


@pytest.mark.parametrize("probe", [None, 0.0, math.nan])
def test_a_baseline_with_a_launch_without_a_sound_probe_leaves_all_as_measured(probe: float | None) -> None:
    probed = make_launches(1.0, 1.003, 0.998, 1.001, probe_s_p50=0.01)
    spoilt = from_runs([*probed, run_with(probe_s_p50=probe)])
    verdict = judged([on_machine(0.85, tokens=0.85)], spoilt, noise_of(0.005, exponent=1))
    check = check_of(verdict, "tokens_per_s")
    assert check.change == pytest.approx(0.85 - 1, abs=0.005)
    assert check.probe_exponent is None


def test_a_probe_is_never_paired_with_another_launchs_figure() -> None:
    """Where one launch lacks the speed and another the probe, the lists are equally long."""
    mixed = [run_with(tokens_per_s=None, probe_s_p50=0.012), run_with(), *[on_machine(1)] * 3]
    verdict = judged([on_machine(1)], from_runs(mixed), noise_of(0.005, exponent=1))
    assert check_of(verdict, "tokens_per_s").probe_exponent is None


def test_a_baseline_launch_without_the_figure_is_left_out_of_the_correction() -> None:
    lacking = run_with(tokens_per_s=None, probe_s_p50=0.012)
    corrected = noise_of(0.005, exponent=1)
    verdict = judged([on_machine(0.85, tokens=0.85)], from_runs([lacking, *[on_machine(1)] * 3]), corrected)
    check = check_of(verdict, "tokens_per_s")
    assert check.change == pytest.approx(0, abs=0.005)
    assert check.probe_exponent == 1


def test_what_is_not_corrected_is_judged_by_the_noise_of_what_is_not() -> None:
    """The noise of corrected launches would be too small for it: false alarms, and drops let pass."""
    corrected, raw = (Noise(sigma=sigma, degrees_of_freedom=30) for sigma in (0.005, 0.06))
    noise = ClassNoise(
        by_metric=dict.fromkeys(NAMES, corrected),
        probe_exponent=1,
        uncorrected=dict.fromkeys(("tokens_per_s", "tokens_per_s_mean"), raw),
    )
    probed = judged([on_machine(1)], PROBED, noise)
    bare = judged(usual()[:1], PROBED, noise)
    for metric in ("tokens_per_s", "tokens_per_s_mean"):
        assert not check_of(probed, metric).blind
        assert check_of(bare, metric).minimum_detectable == pytest.approx(0.16, abs=0.015)
    assert check_of(bare, "peak_memory_bytes") == check_of(probed, "peak_memory_bytes")


# Noise


@pytest.mark.parametrize("factor", [0.1, 1, 10])
def test_where_noise_is_unknown_it_is_inconclusive_and_says_why(factor: float) -> None:
    verdict = judged(usual(factor)[:1], noise=ClassNoise())
    assert (verdict.outcome, verdict.launches, verdict.failure) == ("inconclusive", 1, None)
    for check in verdict.checks:
        assert check.note == (
            "the noise between launches is unknown, too few launches are in the baselines of this hardware: "
            "accept more (--perf-min-launches)"
        )
        assert (check.change, check.interval, check.blind) == (None, None, False)
        assert check.measured is not None
        assert check.baseline is not None


def test_the_noise_of_one_metric_unknown_makes_that_one_inconclusive() -> None:
    known = {name: noise for name, noise in QUIET.by_metric.items() if name != "peak_memory_bytes"}
    verdict = judged(usual()[:1], noise=ClassNoise(by_metric=known))
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "passed"), "peak_memory_bytes": "inconclusive"}
    assert verdict.outcome == "inconclusive"


# What holds for all launches


speeds = st.lists(st.floats(0.3, 3), min_size=1, max_size=MAX_LAUNCHES)
baseline_speeds = st.lists(st.floats(0.9, 1.1), min_size=1, max_size=10)
noises = st.sampled_from([QUIET, ORDINARY, LOUD])


def unrounded(launches: Sequence[Run]) -> Baseline:
    """`from_runs` keeps six digits, of which a change of unit may change the last."""
    baseline = from_runs(launches)
    exact = [kept.replace(figures=run.figures) for kept, run in zip(baseline.launches, launches, strict=True)]
    return baseline.replace(launches=tuple(exact))


@deterministic
@given(baseline_speeds, speeds, noises, st.floats(1e-6, 1e6))
def test_the_unit_of_speed_changes_no_outcome(
    before: list[float], now: list[float], noise: ClassNoise, unit: float
) -> None:
    here = judged(make_launches(*now), unrounded(make_launches(*before)), noise)
    scaled = unrounded(make_launches(*(unit * speed for speed in before)))
    there = judged(make_launches(*(unit * speed for speed in now)), scaled, noise)
    assert (there.outcome, outcomes(there)) == (here.outcome, outcomes(here))


SEVERITY: tuple[Outcome, ...] = ("improved", "passed", "undecided", "inconclusive", "regressed")


@deterministic
@given(
    st.lists(st.floats(0.95, 1.05), min_size=3, max_size=15), noises, st.floats(0.3, 0.9), st.floats(0, 0.5)
)
def test_a_larger_drop_never_turns_a_regression_into_a_pass(
    around: list[float], noise: ClassNoise, drop: float, further: float
) -> None:
    small = judged(make_launches(*(drop * speed for speed in around)), noise=noise)
    large = judged(make_launches(*(drop * (1 - further) * speed for speed in around)), noise=noise)
    if small.outcome == "regressed":
        assert large.outcome == "regressed"
    if large.outcome in ("passed", "improved"):
        assert small.outcome in ("passed", "improved")


@deterministic
@given(
    st.lists(st.tuples(st.floats(0.3, 3), st.floats(0.5, 1.6)), min_size=18, max_size=18),
    noises,
    st.sampled_from([1, 2, 3, 5, MAX_LAUNCHES]),
    st.integers(1, 3),
)
def test_every_session_ends(
    launches: list[tuple[float, float]], noise: ClassNoise, max_launches: int, min_launches: int
) -> None:
    runs = [on_machine(machine, tokens=tokens) for tokens, machine in launches]
    verdict = session(runs, PROBED, noise, max_launches=max_launches, min_launches=min_launches)
    assert verdict.outcome != "undecided"
    most = max(max_launches, min_launches)
    # Of unhealthy launches there are fewer than MAX_UNHEALTHY, or than healthy ones so far.
    assert verdict.launches <= most + max(MAX_UNHEALTHY, most - 1) - 1


def test_what_measured_nothing_are_outcomes() -> None:
    assert {"failed", "unhealthy"} == UNMEASURED
    assert set(get_args(Outcome)) >= UNMEASURED


def test_a_policy_has_defaults() -> None:
    assert Policy() == Policy(max_launches=MAX_LAUNCHES, min_launches=1, record_launches=3)


def test_a_disturbed_cpu_that_needs_more_memory_is_unhealthy_not_regressed() -> None:
    """On a CPU memory is judged by statistics, of healthy launches."""
    run = run_with(peak_memory_bytes=128 * MIB).replace(health=DISTURBED)
    assert session([run] * 3).outcome == "unhealthy"


def test_a_sick_gpu_whose_memory_was_not_measured_is_unhealthy() -> None:
    sick = SICK_GPU.replace(figures=make_figures(peak_memory_bytes=None))
    assert session([sick] * 3, from_runs([on_gpu(700)] * 5)).outcome == "unhealthy"


def test_what_changed_is_that_of_the_last_launch() -> None:
    runs = [with_stack(run) for run in usual()[:3]]
    later = [*runs[:2], with_stack(runs[2], OMP_NUM_THREADS="2")]
    assert judged(later, from_runs(runs)).changed == ("OMP_NUM_THREADS: unset -> 2",)
    assert judged(later[::-1], from_runs(runs)).changed == ()


def test_whether_the_probe_runs_through_other_software_is_seen_in_the_last_launch() -> None:
    before = from_runs([with_stack(on_machine(1)) for _ in range(5)])
    slower = [with_stack(on_machine(0.82, tokens=0.82)) for _ in range(4)]
    other = with_stack(slower[0], torch="2.14.0")
    noise = noise_of(0.005, exponent=1)
    assert check_of(judged([*slower, other], before, noise), "tokens_per_s").outcome == "inconclusive"
    assert check_of(judged([other, *slower], before, noise), "tokens_per_s").outcome == "passed"


def test_the_first_of_several_figures_that_are_no_size_is_named() -> None:
    verdict = judged([run_with(tokens_per_s=-1.0), run_with(tokens_per_s=0.0)])
    assert check_of(verdict, "tokens_per_s").note == "the measured value is -1.0"


def test_three_launches_can_show_a_regression_and_say_which() -> None:
    check = check_of(session(usual(), max_launches=3), "tokens_per_s")
    assert check.minimum_detectable is not None
    assert session(usual(0.8), max_launches=3).outcome == "regressed"


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [(126, "regressed"), (125, "passed"), (100, "passed"), (75, "passed"), (74, "improved")],
)
def test_an_exact_metric_may_change_by_just_its_tolerance(measured: float, outcome: str) -> None:
    check = Check(
        metric=PEAK_MEMORY.name,
        label="",
        unit="bytes",
        outcome="recorded",
        measured=measured,
        baseline=100,
        allowed=0.25,
    )
    assert tolerance_check(PEAK_MEMORY, check, 0.25).outcome == outcome


def test_unhealthy_launches_end_a_case_by_default_with_the_third() -> None:
    runs = [make_run(health=DISTURBED)] * 4
    assert [judged(runs[:used]).outcome for used in (1, 2, 3, 4)] == [
        "undecided",
        "undecided",
        "unhealthy",
        "unhealthy",
    ]
