from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from statistics import fmean, median, quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.case.hardware import Machine
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.metric import GATED, PEAK_MEMORY
from perfsuite.results.outcome import Check, Outcome
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.verdict.judge import MAX_UNHEALTHY, ONE_SESSION, TOO_FEW_LAUNCHES, tolerance_check, unjudged
from perfsuite.verdict.noise import ClassNoise, class_noise
from perfsuite.verdict.sequential import MAX_LAUNCHES, Noise
from tests.samples import (
    DISTURBED,
    deterministic,
    make_case,
    make_figures,
    make_launches,
    make_machine,
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
    large = session(usual(0.8, machine=H100), three, class_noise([three]))
    assert check_of(large, "tokens_per_s").outcome == "regressed"


@pytest.mark.parametrize(("less", "more", "outcome"), [(0.84, 0.82, "regressed"), (1.19, 1.22, "improved")])
def test_a_session_on_a_cpu_may_differ_by_a_fifth_from_the_only_one_that_is_known(
    less: float, more: float, outcome: str
) -> None:
    """Once a step took 15 % more CPU time an hour later, by the same code."""

    def speed(factor: float, baseline: Baseline = BASELINE, **run: Any) -> Check:
        noise = class_noise([baseline])
        return check_of(session(usual(factor, **run), baseline, noise, min_launches=3), "tokens_per_s")

    assert (speed(less).outcome, speed(less).note) == ("inconclusive", ONE_SESSION)
    assert speed(more).outcome == outcome
    two = from_runs(usual()[:10], sessions=["monday"] * 5 + ["tuesday"] * 5)
    assert speed(less, two).outcome == outcome
    assert speed(less, of_sessions(1.0), machine=H100).outcome == outcome


def test_cpu_time_may_differ_from_the_only_session_that_is_known() -> None:
    before = from_runs([run_with(cpu_s_per_step=1.0)] * 5)
    verdict = session([run_with(cpu_s_per_step=1.18)] * 15, before, class_noise([before]))
    assert check_of(verdict, "cpu_s_per_step").note == ONE_SESSION


# Launches until decided


def test_unchanged_code_passes_after_one_launch_and_every_check_says_how_much_how_sure() -> None:
    verdict = session(usual())
    assert (verdict.outcome, verdict.launches) == ("passed", 1)
    assert (verdict.failure, verdict.reasons, verdict.changed) == (None, (), ())
    assert outcomes(verdict) == dict.fromkeys(NAMES, "passed")
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


def test_measured_is_the_median_of_the_launches_and_baseline_that_of_its_own() -> None:
    verdict = judged(make_launches(0.6, 0.72, 0.71), from_runs(make_launches(1.0, 1.2, 1.01)))
    check = check_of(verdict, "tokens_per_s")
    assert check.measured == pytest.approx(710)
    assert check.baseline == 1010


@pytest.mark.parametrize(("speed", "outcome"), [(0.8, "regressed"), (1.3, "improved")])
def test_slower_launches_regress_and_faster_ones_improve(speed: float, outcome: Outcome) -> None:
    verdict = session(usual(speed))
    assert (verdict.outcome, verdict.launches, verdict.failure) == (outcome, 3, None)
    check = check_of(verdict, "tokens_per_s")
    assert check.change == pytest.approx(speed - 1, abs=0.01)
    assert check.interval is not None
    assert check.interval[0] < speed - 1 < check.interval[1]
    assert check.interval[1] < -1 / 6 or outcome == "improved"
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, outcome), "peak_memory_bytes": "passed"}


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
    """9 % slower with a noise of 6 %: neither passes nor regresses. More than that is found by as few."""
    verdict = session(usual(0.92), noise=noise_of(0.06), max_launches=max_launches)
    assert (verdict.outcome, verdict.launches) == ("inconclusive", max_launches)
    assert verdict.failure is None
    assert check_of(verdict, "tokens_per_s").minimum_detectable is not None
    assert session(usual(0.8), max_launches=max_launches).outcome == "regressed"


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


def test_a_gate_that_would_miss_its_tolerance_says_that_it_is_blind_and_gives_up_early() -> None:
    verdict = session(usual(machine=H100), BASELINE_H100, LOUD)
    assert verdict.outcome == "inconclusive"
    assert verdict.launches < 6
    assert [check.metric for check in verdict.checks if check.blind] == ["tokens_per_s", "tokens_per_s_mean"]
    assert check_of(verdict, "tokens_per_s").minimum_detectable == pytest.approx(0.25, abs=0.02)
    assert not any(check.blind for check in session(usual(machine=H100), BASELINE_H100).checks)
    large = session(usual(0.5, machine=H100), BASELINE_H100, LOUD)
    assert large.outcome == "regressed", "a large drop is found all the same"
    assert check_of(large, "tokens_per_s").blind


@pytest.mark.fault("settings are not the baseline's")
@pytest.mark.parametrize(
    ("runs", "baseline", "noise", "least", "expected"),
    [
        pytest.param(usual(), BASELINE, QUIET, 5, ("passed", None), id="passed"),
        pytest.param(usual(1.3), BASELINE, QUIET, 5, ("improved", None), id="improved"),
        pytest.param(usual(0.8), BASELINE, QUIET, 9, ("regressed", None), id="regressed"),
        pytest.param(usual(machine=H100), BASELINE_H100, LOUD, 9, ("inconclusive", None), id="inconclusive"),
        pytest.param(
            [run.replace(case=make_case(micro_batch=4)) for run in usual()],
            *(BASELINE, QUIET, 5, ("failed", "unlike")),
            id="another case",
        ),
        pytest.param(
            [with_loss(1.1, first=12)] * 6,
            *(from_runs([with_loss(1)] * 5), QUIET, 5, ("failed", "loss")),
            id="another loss",
        ),
    ],
)
def test_min_launches_are_made_though_fewer_would_do(
    runs: list[Run], baseline: Baseline, noise: ClassNoise, least: int, expected: tuple[str, str | None]
) -> None:
    """A slower baseline is accepted like any other: from enough launches."""
    assert judged(runs[: least - 1], baseline, noise, min_launches=least).outcome == "undecided"
    verdict = session(runs, baseline, noise, min_launches=least)
    assert (verdict.outcome, verdict.failure, verdict.launches) == (*expected, least)


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


# Without a baseline


def test_without_a_baseline_as_many_launches_are_recorded_as_tell_their_noise() -> None:
    """However the machine is: there is nothing to compare it with."""
    verdict = session([on_machine(speed) for speed in (1, 0.1, 10)], None)
    assert (verdict.outcome, verdict.launches, verdict.failure) == ("recorded", 3, None)
    assert outcomes(verdict) == dict.fromkeys(NAMES, "recorded")
    assert [check.measured for check in verdict.checks] == pytest.approx([1000, 990, 64 * MIB])
    assert {(check.baseline, check.change, check.interval) for check in verdict.checks} == {(None,) * 3}


@pytest.mark.parametrize(
    ("runs", "policy", "launches"),
    [
        (usual(), {"record_launches": 1}, 1),
        (usual(), {"record_launches": 5}, 5),
        (usual(), {"min_launches": 6}, 6),
        (usual(), {"record_launches": 5, "min_launches": 2}, 5),
        (usual(), {"record_launches": 5, "max_launches": 4}, 4),
        (usual(), {"max_launches": 3, "min_launches": 9}, 9),
        ([*usual()[:2], *[make_run(health=DISTURBED)] * 2, *usual()[2:]], {"max_launches": 4}, 4),
    ],
)
def test_policy_says_how_many_launches_are_recorded(
    runs: list[Run], policy: dict[str, int], launches: int
) -> None:
    """Those that are set aside are among the most that a baseline may cost."""
    verdict = session(runs, None, QUIET, **policy)
    assert (verdict.outcome, verdict.launches) == ("recorded", launches)
    assert verdict.unhealthy_launches == ((3, 4) if len(runs) > len(usual()) else ())


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


@pytest.mark.parametrize(
    ("sigma", "runs", "outcome", "of_memory"),
    [
        pytest.param(0.3, usual()[:1], "undecided", "undecided", id="in doubt: another launch"),
        pytest.param(2.0, usual(), "inconclusive", "inconclusive", id="too noisy"),
        pytest.param(None, usual()[:1], "inconclusive", "inconclusive", id="no noise is known"),
        pytest.param(2.0, usual(0.8), "regressed", "inconclusive", id="regressed and too noisy"),
        pytest.param(
            0.3, usual(0.8, peak_memory_bytes=87 * MIB), "regressed", "undecided", id="regressed and in doubt"
        ),
    ],
)
def test_of_one_metric_in_doubt_and_others_that_are_sure_the_worst_is_told(
    sigma: float | None, runs: list[Run], outcome: str, of_memory: Outcome
) -> None:
    known = {name: noise for name, noise in QUIET.by_metric.items() if name != "peak_memory_bytes"}
    if sigma is not None:
        known["peak_memory_bytes"] = Noise(sigma=sigma, degrees_of_freedom=30)
    verdict = session(runs, noise=ClassNoise(by_metric=known))
    assert (verdict.outcome, verdict.launches) == (outcome, min(3, len(runs)))
    of_speed: Outcome = "regressed" if outcome == "regressed" else "passed"
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, of_speed), "peak_memory_bytes": of_memory}


def test_more_memory_of_a_gpu_hides_no_slowdown_that_takes_more_launches_to_see() -> None:
    runs = usual(0.92, machine=H100, peak_memory_bytes=66 * MIB)
    first = judged(runs[:1], BASELINE_H100, ORDINARY)
    assert outcomes(first)["peak_memory_bytes"] == "regressed"
    assert (first.outcome, outcomes(first)["tokens_per_s"]) == ("undecided", "undecided")
    verdict = session(runs, BASELINE_H100, noise_of(0.01))
    assert verdict.outcome == "regressed"
    assert outcomes(verdict)["tokens_per_s"] == outcomes(verdict)["peak_memory_bytes"] == "regressed"


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
    probed = usual(cpu_s_per_step=0.1, probe_s_p50=0.01)
    noise = replace(KNOWN, probe_exponent=1.0, knows_exponent=True)
    check = check_of(judged(probed[:1], from_runs(probed[:5]), noise), "cpu_s_per_step")
    assert (check.outcome, check.probe_exponent) == ("passed", None)


def test_beside_a_gpu_cpu_time_is_not_judged() -> None:
    slower = usual(cpu_s_per_step=0.9, machine=H100)
    before = from_runs(usual(cpu_s_per_step=0.1, machine=H100)[:5])
    assert outcomes(session(slower, before, KNOWN)) == dict.fromkeys(NAMES, "passed")


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
    [(64, "passed"), (64.63, "passed"), (64.65, "regressed"), (63.37, "passed"), (63.35, "improved")],
)
def test_on_a_gpu_memory_is_exact_to_one_percent_and_one_launch_suffices(memory: float, outcome: str) -> None:
    runs = usual(machine=H100, peak_memory_bytes=memory * MIB)
    verdict = session(runs, BASELINE_H100)
    assert (verdict.outcome, verdict.launches) == (outcome, 1)
    check = check_of(verdict, "peak_memory_bytes")
    assert (check.outcome, check.interval, check.blind) == (outcome, None, False)
    assert check.change == pytest.approx(memory / 64 - 1, abs=3e-6)
    assert check.minimum_detectable == check.allowed == 0.01
    blind = judged(runs[:1], BASELINE_H100, ClassNoise())
    assert outcomes(blind) == {**dict.fromkeys(NAMES, "inconclusive"), "peak_memory_bytes": outcome}


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
    disturbed = [run.replace(health=DISTURBED) for run in runs[:3]]
    assert session(disturbed).outcome == "unhealthy", "statistics are of healthy launches"


# What was not measured, or is no number


NO_SIZES = (math.nan, math.inf, -math.inf, 0.0, -1.0)


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("good", [0, 2])
@pytest.mark.parametrize(
    ("baseline", "note"),
    [(BASELINE, "the baseline has it, this run does not"), (None, "was not measured")],
    ids=["a baseline", "no baseline"],
)
def test_a_metric_that_a_launch_lacks_fails_at_once(
    metric: str, good: int, baseline: Baseline | None, note: str
) -> None:
    verdict = judged([*usual()[:good], run_with(**{metric: None})], baseline)
    check = check_of(verdict, metric)
    assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", "missing_metric", good + 1)
    assert (check.outcome, check.measured, check.change, check.note) == ("failed", None, None, note)
    assert [name for name, outcome in outcomes(verdict).items() if outcome == "failed"] == [metric]


@pytest.mark.parametrize(
    ("metric", "outcome", "note"),
    [
        ("tokens_per_s", "failed", "the baseline lacks it: accept or record it anew"),
        ("peak_memory_bytes", "failed", "the baseline lacks it: accept or record it anew"),
        ("tokens_per_s_mean", "inconclusive", "not in the baseline: accept or record it anew"),
    ],
)
def test_a_metric_that_the_baseline_lacks_never_passes(metric: str, outcome: str, note: str) -> None:
    verdict = judged(usual()[:1], from_runs([run_with(**{metric: None})] * 3))
    assert (verdict.outcome, check_of(verdict, metric).note) == (outcome, note)


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("value", NO_SIZES)
@pytest.mark.parametrize(("good", "place"), [(0, 0), (2, 0), (2, 1), (2, 2)])
def test_a_figure_that_is_no_size_never_passes(metric: str, value: float, good: int, place: int) -> None:
    """The median alone would not show it, and it has no logarithm."""
    for machine, baseline in ((make_machine(), BASELINE), (make_machine(), None), (H100, BASELINE_H100)):
        runs = usual(machine=machine)[:good]
        runs.insert(place, run_with(**{metric: value}).replace(machine=machine))
        verdict = judged(runs, baseline, min_launches=3)
        assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
        assert check_of(verdict, metric).note == f"the measured value is {value}"


def test_the_first_of_several_figures_that_are_no_size_is_named() -> None:
    verdict = judged([run_with(tokens_per_s=-1.0), run_with(tokens_per_s=0.0)])
    assert check_of(verdict, "tokens_per_s").note == "the measured value is -1.0"


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("value", NO_SIZES)
@pytest.mark.parametrize("good", [0, 2])
def test_a_baseline_of_which_a_launch_is_no_size_never_passes(metric: str, value: float, good: int) -> None:
    verdict = judged(usual()[:1], from_runs([*usual()[:good], run_with(**{metric: value})]))
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


def test_a_failure_that_speaks_of_broken_hardware_says_where_to_look() -> None:
    said = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    failure = Failure(kind="crash", message="exit code 1", traceback=f"Traceback\n{said}\n", rank=3)
    verdict = session([on_gpu(None).replace(failure=failure)])
    assert (verdict.outcome, verdict.failure) == ("failed", "crash")
    where = "`nvidia-smi -q`, dmesg (Xid) and `systemctl status nvidia-fabricmanager`"
    assert verdict.reasons == ("crash: exit code 1", f"meanwhile hardware: {said}: look at {where}")


def test_what_changed_is_that_of_the_last_launch_of_an_unhealthy_machine_too() -> None:
    runs = [with_stack(run) for run in usual()[:3]]
    later = [*runs[:2], with_stack(runs[2], OMP_NUM_THREADS="2")]
    for launches, changed in ((later, ("OMP_NUM_THREADS: unset -> 2",)), (later[::-1], ())):
        assert judged(launches, from_runs(runs)).changed == changed
        sick = judged([run.replace(health=DISTURBED) for run in launches], from_runs(runs))
        assert (sick.outcome, sick.changed) == ("unhealthy", changed)


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
    ("machine", "tokens", "noise", "outcome"),
    [
        (0.82, 0.82, QUIET, "inconclusive"),
        (1, 0.8, QUIET, "regressed"),
        (0.9, 0.6, QUIET, "regressed"),
        (0.85, 0.95, QUIET, "passed"),
        (0.85, 0.8, QUIET, "inconclusive"),
        (0.85, 0.8, replace(QUIET, knows_exponent=True), "regressed"),  # it does not follow the probe
    ],
)
def test_on_a_cpu_a_slower_machine_is_not_called_a_regression_while_its_effect_is_unknown(
    machine: float, tokens: float, noise: ClassNoise, outcome: str
) -> None:
    verdict = session([on_machine(machine, tokens=tokens)] * 15, PROBED, noise)
    assert verdict.outcome == outcome
    if outcome == "inconclusive":
        said = check_of(verdict, "tokens_per_s").note
        assert said == (
            "as measured regressed, corrected for the machine's own speed passed; "
            "how speed follows the probe is unknown: accept more launches"
        )


@pytest.mark.parametrize(
    ("changes", "outcome", "failure"),
    [
        ({}, "unhealthy", None),
        ({"figures": make_figures(peak_memory_bytes=65 * MIB)}, "regressed", None),
        ({"figures": make_figures(peak_memory_bytes=60 * MIB)}, "unhealthy", None),
        ({"figures": make_figures(peak_memory_bytes=None)}, "unhealthy", None),
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
    assert [check.metric for check in verdict.checks] == ["peak_memory_bytes"] * (outcome == "regressed")


def test_an_unhealthy_machine_does_not_excuse_a_failure_and_is_told_with_it() -> None:
    crash = make_run(failure=Failure(kind="out_of_memory", message="x"), health=DISTURBED)
    verdict = judged([on_machine(0.5), crash], PROBED)
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


@pytest.mark.parametrize(
    ("speeds", "least", "outcome", "unhealthy"),
    [
        pytest.param((1, 0.5, 2, *[1] * 4), 5, "passed", (2, 3), id="none of those asked for"),
        pytest.param((1, 0.5, 1, 0.5, 1, 1, 0.5, 1), 5, "passed", (2, 4, 7), id="outnumbered"),
        pytest.param((1, 0.5, 1, 2, 0.7), 9, "unhealthy", (2, 4, 5), id="too many"),
    ],
)
def test_which_launches_were_unhealthy_is_told(
    speeds: tuple[float, ...], least: int, outcome: str, unhealthy: tuple[int, ...]
) -> None:
    verdict = session([on_machine(speed) for speed in (*speeds, 1, 1)], PROBED, min_launches=least)
    assert (verdict.outcome, verdict.launches) == (outcome, len(speeds))
    assert verdict.unhealthy_launches == unhealthy
    said = [reason.split(":")[0] for reason in verdict.reasons]
    assert said == [f"launch {number} set aside" for number in unhealthy]


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


@pytest.mark.parametrize(
    ("machine", "tokens", "outcome", "change"),
    [
        (0.85, 0.85, "passed", 0),  # the machine, not the code
        (1.2, 1.2, "passed", 0),
        (1.0, 0.8, "regressed", -0.2),  # the code
        (0.85, 0.68, "regressed", -0.2),  # both
        (1.2, 0.96, "regressed", -0.2),  # the code, on a machine that hides it
        (0.85, 1.05, "improved", 1.05 / 0.85 - 1),
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


BARE = make_launches(0.85)[0]
SLOW = on_machine(0.85, tokens=0.85)
FOUR = make_launches(1.0, 1.003, 0.998, 1.001, probe_s_p50=0.01)
NO_SPEED = run_with(tokens_per_s=None, probe_s_p50=0.012)


@pytest.mark.parametrize(
    ("runs", "before", "follows", "exponent", "change"),
    [
        pytest.param([on_machine(0.9, tokens=0.9)], PROBED, 0.5, 0.5, 0.9**0.5 - 1, id="half"),
        pytest.param([on_machine(0.9, tokens=0.9)], PROBED, 1, 1, 0, id="all"),
        pytest.param([on_machine(0.9, tokens=0.9)], PROBED, 0, None, 0.9 - 1, id="nothing"),
        pytest.param([on_machine(0.85)], PROBED, 0, None, 0, id="nothing to correct"),
        pytest.param([SLOW, BARE], PROBED, 1, None, 0.85 - 1, id="the last has no probe"),
        pytest.param([BARE, SLOW], PROBED, 1, None, 0.85 - 1, id="the first has no probe"),
        *(
            pytest.param(
                *([SLOW], from_runs([*FOUR, run_with(probe_s_p50=probe)]), 1, None, 0.85 - 1),
                id=f"a probe of {probe} in the baseline",
            )
            for probe in (None, 0.0, math.nan)
        ),
        pytest.param(  # one launch lacks the speed and another the probe: the lists are equally long
            *([SLOW], from_runs([NO_SPEED, run_with(), *FOUR[:3]]), 1, None, 0.85 - 1),
            id="never paired with another launch's figure",
        ),
        pytest.param(
            [SLOW], from_runs([NO_SPEED, *FOUR[:3]]), 1, 1, 0, id="no speed in a launch of the baseline"
        ),
    ],
)
def test_where_every_launch_has_a_probe_it_corrects_as_far_as_speed_follows_it(
    runs: list[Run], before: Baseline, follows: float, exponent: float | None, change: float
) -> None:
    check = check_of(judged(runs, before, noise_of(0.005, exponent=follows)), "tokens_per_s")
    assert check.change == pytest.approx(change, abs=0.005)
    assert check.probe_exponent == exponent


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
            "the noise between launches is unknown: accept a baseline of more (--perf-min-launches)"
        )
        assert (check.change, check.interval, check.blind) == (None, None, False)
        assert check.measured is not None
        assert check.baseline is not None


# What holds for all launches


@deterministic
@given(
    st.lists(st.tuples(st.floats(0.3, 3), st.floats(0.5, 1.6)), min_size=18, max_size=18),
    st.sampled_from([QUIET, ORDINARY, LOUD]),
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


def test_whether_the_probe_runs_through_other_software_is_seen_in_the_last_launch() -> None:
    before = from_runs([with_stack(on_machine(1)) for _ in range(5)])
    slower = [with_stack(on_machine(0.82, tokens=0.82)) for _ in range(4)]
    other = with_stack(slower[0], torch="2.14.0")
    noise = noise_of(0.005, exponent=1)
    assert check_of(judged([*slower, other], before, noise), "tokens_per_s").outcome == "inconclusive"
    assert check_of(judged([other, *slower], before, noise), "tokens_per_s").outcome == "passed"


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [(126, "regressed"), (125, "passed"), (100, "passed"), (75, "passed"), (74, "improved")],
)
def test_an_exact_metric_may_change_by_just_its_tolerance(measured: float, outcome: str) -> None:
    check = unjudged(PEAK_MEMORY, make_run(), [measured], [100], 0.25)
    assert tolerance_check(PEAK_MEMORY, check, 0.25).outcome == outcome
