import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results.baseline import from_runs
from perfsuite.results.metric import GATED
from perfsuite.results.outcome import Check, Outcome
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.verdict.metric_checks import TOO_FEW_LAUNCHES
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import MAX_UNHEALTHY
from perfsuite.verdict.sequential import MAX_LAUNCHES, Noise
from tests.samples import DISTURBED, deterministic, make_case, make_figures, make_launches, make_run
from tests.verdict.judging import (
    BASELINE,
    BASELINE_H100,
    LOUD,
    MIB,
    NAMES,
    ORDINARY,
    PROBED,
    QUIET,
    SICK_GPU,
    check_of,
    gpu,
    judged,
    noise_of,
    on_gpu,
    on_machine,
    outcomes,
    run_with,
    session,
    usual,
    with_loss,
    with_stack,
)

SPEEDS = ("tokens_per_s", "tokens_per_s_mean")
LOOSE_MEMORY = Noise(sigma=0.3, degrees_of_freedom=30)
SICK = make_run(health=DISTURBED, figures=make_figures(tokens_per_s=1))


# Number of launches until a decision


def test_unchanged_code_passes_after_one_launch() -> None:
    verdict = session(usual())
    assert (verdict.outcome, verdict.launches) == ("passed", 1)
    assert (verdict.failure, verdict.reasons, verdict.changed) == (None, (), ())
    assert outcomes(verdict) == dict.fromkeys(NAMES, "passed")
    for check, metric in zip(verdict.checks, GATED, strict=True):
        assert (check.metric, check.label, check.unit) == (metric.name, metric.label, metric.unit)
        allowed = metric.tolerances["cpu"]
        assert check.allowed == pytest.approx(allowed if metric.better == "lower" else 1 - 1 / (1 + allowed))
        assert (check.blind, check.note) == (False, None)
        assert check.change is not None
        assert check.interval is not None
        low, high = check.interval
        assert -check.allowed < low < check.change < high < check.allowed
        assert check.minimum_detectable is not None
        assert 0.01 < check.minimum_detectable < 0.02
    medians = judged(make_launches(0.6, 0.72, 0.71), from_runs(make_launches(1.0, 1.2, 1.01)))
    check = check_of(medians, "tokens_per_s")
    assert (check.measured, check.baseline) == pytest.approx((710, 1010))


@pytest.mark.parametrize(("speed", "outcome"), [(0.8, "regressed"), (1.3, "improved")])
def test_slower_launches_regress_faster_improve(speed: float, outcome: Outcome) -> None:
    verdict = session(usual(speed))
    assert (verdict.outcome, verdict.launches, verdict.failure) == (outcome, 3, None)
    check = check_of(verdict, "tokens_per_s")
    assert check.change == pytest.approx(speed - 1, abs=0.01)
    assert check.interval is not None
    assert check.interval[0] < speed - 1 < check.interval[1]
    assert check.interval[1] < -1 / 6 or outcome == "improved"
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, outcome), "peak_memory_bytes": "passed"}
    small = session(gpu(0.96 if speed < 1 else 1.05), BASELINE_H100)
    assert small.outcome == outcome, "a GPU has smaller tolerances"
    assert [check.allowed for check in small.checks] == pytest.approx([1 - 1 / 1.03, 1 - 1 / 1.05, 0.01])
    assert {session(usual(factor)).outcome for factor in (0.96, 1, 1.05)} == {"passed"}
    assert {session(gpu(factor), BASELINE_H100).outcome for factor in (0.985, 1)} == {"passed"}


def test_insensitive_gate_is_blind_and_stops_early() -> None:
    verdict, large, quiet = (
        session(gpu(speed), BASELINE_H100, noise) for speed, noise in ((1, LOUD), (0.5, LOUD), (1, QUIET))
    )
    assert (verdict.outcome, verdict.launches < 6) == ("inconclusive", True)
    assert check_of(verdict, "tokens_per_s").minimum_detectable == pytest.approx(0.25, abs=0.02)
    assert large.outcome == "regressed", "even with this noise, a large drop is found"
    for judged_before, blind in ((verdict, NAMES[:2]), (large, NAMES[:2]), (quiet, [])):
        assert [check.metric for check in judged_before.checks if check.blind] == blind


SIX_PERCENT = noise_of(0.06)
OTHER_CASE = [run.replace(case=make_case(micro_batch=4)) for run in usual()]
ONE_LOSS = from_runs([with_loss(1)] * 5)


@pytest.mark.fault("settings differ from the baseline")
@pytest.mark.parametrize(
    ("said", "launches", "runs", "how"),
    [
        # With a noise of 6%, launches that are 9% slower neither pass nor regress. With less noise, three
        # launches are enough to find a slowdown of 20%.
        *(("inconclusive", n, usual(0.92), {"noise": SIX_PERCENT, "max_launches": n}) for n in (3, 6, 15)),
        ("inconclusive", 9, usual(0.92), {"noise": SIX_PERCENT, "max_launches": 3, "min_launches": 9}),
        ("regressed", 3, usual(0.8), {"max_launches": 3}),
        # Every result needs `min_launches` launches, except some failures, which need only one launch.
        ("passed", 5, usual(), {"min_launches": 5}),
        ("passed", 20, usual() * 2, {"min_launches": 20}),
        ("improved", 5, usual(1.3), {"min_launches": 5}),
        ("regressed", 9, usual(0.8), {"min_launches": 9}),
        ("inconclusive", 9, gpu(), {"baseline": BASELINE_H100, "noise": LOUD, "min_launches": 9}),
        ("unlike", 5, OTHER_CASE, {"min_launches": 5}),
        ("loss", 5, [with_loss(1.1, first=12)] * 6, {"baseline": ONE_LOSS, "min_launches": 5}),
        ("crash", 1, [make_run(failure=Failure(kind="crash", message="x"))] * 5, {"min_launches": 5}),
        ("missing_metric", 1, [run_with(peak_memory_bytes=None)] * 5, {"min_launches": 5}),
        # The worst metric decides the verdict.
        ("regressed", 3, [run_with(tokens_per_s=2000, peak_memory_bytes=128 * MIB)] * 5, {}),
        ("regressed", 3, [run_with(tokens_per_s=500, peak_memory_bytes=32 * MIB)] * 5, {}),
        ("improved", 3, [run_with(tokens_per_s=2000, peak_memory_bytes=32 * MIB)] * 5, {}),
        ("improved", 3, [run_with(tokens_per_s=2000)] * 5, {}),
        ("missing_metric", 1, [run_with(tokens_per_s=500, peak_memory_bytes=None)] * 5, {}),
        # Without a baseline, perfsuite records enough launches to estimate the noise. Launches that are set
        # aside count towards the maximum.
        *(("recorded", n, usual(), {"baseline": None, "record_launches": n}) for n in (1, 5)),
        ("recorded", 6, usual(), {"baseline": None, "min_launches": 6}),
        ("recorded", 5, usual(), {"baseline": None, "record_launches": 5, "min_launches": 2}),
        ("recorded", 4, usual(), {"baseline": None, "record_launches": 5, "max_launches": 4}),
        ("recorded", 9, usual(), {"baseline": None, "max_launches": 3, "min_launches": 9}),
        ("recorded", 4, [SICK, *usual()], {"baseline": None}),
        ("recorded", 4, [*usual()[:2], SICK, SICK, *usual()], {"baseline": None, "max_launches": 4}),
        ("unhealthy", 4, [*usual()[:2], SICK, SICK, SICK], {"baseline": None, "max_unhealthy": 1}),
    ],
)
def test_session_runs_until_decided_or_at_its_limit(
    said: str, launches: int, runs: list[Run], how: dict[str, Any]
) -> None:
    verdict = session(runs, **how)
    assert (verdict.failure or verdict.outcome, verdict.launches) == (said, launches)
    sick = tuple(number for number, run in enumerate(runs[:launches], 1) if run is SICK)
    assert verdict.unhealthy_launches == sick
    if said == "inconclusive":
        assert check_of(verdict, "tokens_per_s").minimum_detectable is not None


# Without a baseline


def test_records_without_any_comparison() -> None:
    """If there is no baseline, a launch is not unhealthy because its machine is slow."""
    verdict = session([on_machine(speed) for speed in (1, 0.1, 10)], None)
    assert (verdict.outcome, verdict.launches, verdict.failure) == ("recorded", 3, None)
    assert outcomes(verdict) == dict.fromkeys(NAMES, "recorded")
    assert [check.measured for check in verdict.checks] == pytest.approx([1000, 990, 64 * MIB])
    assert {(check.baseline, check.change, check.interval) for check in verdict.checks} == {(None,) * 3}
    healthy = check_of(session([SICK, *usual()], None), "tokens_per_s")
    assert healthy.measured == pytest.approx(1001)


# The worst metric, and the verdict on each metric


def test_reports_the_worst_of_all_metrics() -> None:
    larger = usual(0.8, peak_memory_bytes=87 * MIB)
    for sigma, runs, outcome, of_speed, of_memory in (
        (0.3, usual()[:1], "undecided", "passed", "undecided"),  # undecided: another launch follows
        (2.0, usual(), "inconclusive", "passed", "inconclusive"),  # the noise is too large
        (None, usual()[:1], "inconclusive", "passed", "inconclusive"),  # the noise is unknown
        (2.0, usual(0.8), "regressed", "regressed", "inconclusive"),
        (0.3, larger, "regressed", "regressed", "undecided"),
    ):
        by_metric = {name: noise for name, noise in QUIET.by_metric.items() if name != "peak_memory_bytes"}
        if sigma is not None:
            by_metric["peak_memory_bytes"] = Noise(sigma=sigma, degrees_of_freedom=30)
        verdict = session(runs, noise=ClassNoise(by_metric=by_metric))
        assert (verdict.outcome, verdict.launches) == (outcome, min(3, len(runs)))
        assert outcomes(verdict) == {**dict.fromkeys(NAMES, of_speed), "peak_memory_bytes": of_memory}


def test_a_waived_slowdown_hides_no_other_metric() -> None:
    runs = usual(0.8, peak_memory_bytes=87 * MIB)
    noise = ClassNoise(by_metric={**QUIET.by_metric, "peak_memory_bytes": LOOSE_MEMORY})

    def waives(checks: Sequence[Check]) -> bool:
        return {check.metric for check in checks if check.outcome == "regressed"} <= {*SPEEDS}

    verdict = session(runs, noise=noise, waives=waives)
    assert outcomes(verdict) == {**dict.fromkeys(SPEEDS, "regressed"), "peak_memory_bytes": "inconclusive"}
    assert verdict.launches > 3


def test_an_unwaived_regression_ends_the_launches() -> None:
    larger = usual(0.8, peak_memory_bytes=87 * MIB)
    noise = ClassNoise(by_metric={**QUIET.by_metric, "peak_memory_bytes": LOOSE_MEMORY})
    assert session(larger, noise=noise, waives=lambda checks: False).launches == 3


def test_more_gpu_memory_hides_no_slowdown() -> None:
    runs = gpu(0.92, peak_memory_bytes=66 * MIB)
    first = judged(runs[:1], BASELINE_H100, ORDINARY)
    last = session(runs, BASELINE_H100, noise_of(0.01))
    for verdict, outcome in ((first, "undecided"), (last, "regressed")):
        assert verdict.outcome == outcomes(verdict)["tokens_per_s"] == outcome
        assert outcomes(verdict)["peak_memory_bytes"] == "regressed"


def test_stalls_regress_the_mean_not_the_jitter() -> None:
    verdict = session(usual(tokens_per_s_mean=700))
    assert (verdict.outcome, verdict.launches) == ("regressed", 3)
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "passed"), "tokens_per_s_mean": "regressed"}
    assert check_of(verdict, "tokens_per_s_mean").change == pytest.approx(700 / 990 - 1, abs=0.01)
    for jitter in (0.5, 2.2, 1e9, None):
        verdict = session(usual(step_jitter=jitter))
        assert (verdict.launches, outcomes(verdict)) == (1, dict.fromkeys(NAMES, "passed"))


@pytest.mark.parametrize("used", [1, 2, 3])
@pytest.mark.parametrize("kind", ["out_of_memory", "timeout", "crash", "loss"])
def test_failed_launch_keeps_its_kind(used: int, kind: Any) -> None:
    *good, last = usual()[:used]
    failed = last.replace(failure=Failure(kind=kind, message="it went wrong", rank=1))
    for baseline in (BASELINE, None):
        verdict = judged([*good, failed], baseline)
        assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", kind, used)
        assert (verdict.reasons, verdict.checks) == ((f"{kind}: it went wrong",), ())


# The machine


@pytest.mark.parametrize("speed", [0.5, 0.79, 1.26, 2, math.nan, math.inf])
@pytest.mark.parametrize("tokens", [0.3, 1, 3])
def test_three_unhealthy_launches_end_a_session(speed: float, tokens: float) -> None:
    runs = [on_machine(speed, tokens=tokens)] * 9
    early = judged(runs[: MAX_UNHEALTHY - 1], PROBED)
    assert (early.outcome, early.checks) == ("undecided", ())
    verdict = session(runs, PROBED)
    assert (verdict.outcome, verdict.launches, verdict.failure) == ("unhealthy", MAX_UNHEALTHY, None)
    said = f"according to the probe, the machine ran at {speed:.0%} of its speed at the baseline"
    assert verdict.reasons == tuple(f"launch {number} set aside: {said}" for number in (1, 2, 3))
    assert session(runs, PROBED, max_unhealthy=1).launches == 1, "more launches would not help"


def test_failure_reports_an_ailing_machine() -> None:
    crash = make_run(failure=Failure(kind="out_of_memory", message="x"), health=DISTURBED)
    verdict = judged([on_machine(0.5), crash], PROBED)
    assert verdict.failure == "out_of_memory"
    assert verdict.reasons[1].startswith("meanwhile other processes used 60% of the cores")
    said = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    failure = Failure(kind="crash", message="exit code 1", traceback=f"Traceback\n{said}\n", rank=3)
    verdict = session([on_gpu(None).replace(failure=failure)])
    assert (verdict.outcome, verdict.failure) == ("failed", "crash")
    where = "`nvidia-smi -q`, dmesg (Xid) and `systemctl status nvidia-fabricmanager`"
    assert verdict.reasons == ("crash: exit code 1", f"meanwhile hardware: {said}: look at {where}")


def test_a_busy_machine_is_no_reason_for_a_mismatch() -> None:
    run = make_run(failure=Failure(kind="mismatch", message="no such function"), health=DISTURBED)
    assert judged([run], PROBED).reasons == ("mismatch: no such function",)


def test_a_busy_gpu_is_a_fault_of_the_machine() -> None:
    said = "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    verdict = session([on_gpu(None).replace(failure=Failure(kind="crash", message=said, rank=3))])
    assert verdict.reasons[1].startswith(f"meanwhile hardware: {said}: another process holds this GPU in ")
    assert "needs a reset (nvidia-smi -r, dmesg)" in verdict.reasons[1]


def test_changes_are_those_of_the_last_launch() -> None:
    runs = [with_stack(run) for run in usual()[:3]]
    later = [*runs[:2], with_stack(runs[2], OMP_NUM_THREADS="2")]
    for launches, changed in ((later, ("OMP_NUM_THREADS: unset -> 2",)), (later[::-1], ())):
        assert judged(launches, from_runs(runs)).changed == changed
        sick = judged([run.replace(health=DISTURBED) for run in launches], from_runs(runs))
        assert (sick.outcome, sick.changed) == ("unhealthy", changed)


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
def test_sick_machine_reports_unexplained_changes(
    changes: dict[str, Any], outcome: str, failure: str | None
) -> None:
    verdict = session([SICK_GPU.replace(**changes)] * 3, from_runs([on_gpu(700)] * 5))
    assert (verdict.outcome, verdict.failure, verdict.launches) == (outcome, failure, 3)
    assert verdict.unhealthy_launches == (1, 2, 3)
    assert [check.metric for check in verdict.checks] == ["peak_memory_bytes"] * (outcome == "regressed")


@pytest.mark.parametrize("sick", [1, 2])
def test_few_unhealthy_launches_are_no_evidence(sick: int) -> None:
    bad = [on_machine(0.5, tokens=0.4)] * sick
    for tokens, outcome in ((1, "passed"), (0.8, "regressed")):
        good = [on_machine(1, tokens=tokens)] * 3
        for runs in ([*bad, *good], [*good, *bad]):
            verdict = judged(runs, PROBED)
            assert (verdict.outcome, verdict.launches) == (outcome, sick + 3)
            assert verdict.checks == judged(good, PROBED).checks


def test_which_launches_were_unhealthy_is_told() -> None:
    for speeds, least, outcome, unhealthy in (
        ((1, 0.5, 2, *[1] * 4), 5, "passed", (2, 3)),
        ((1, 0.5, 1, 0.5, 1, 1, 0.5, 1), 5, "passed", (2, 4, 7)),  # more launches are healthy than slow
        ((1, 0.5, 1, 2, 0.7), 9, "unhealthy", (2, 4, 5)),
    ):
        verdict = session([on_machine(speed) for speed in (*speeds, 1, 1)], PROBED, min_launches=least)
        assert (verdict.outcome, verdict.launches) == (outcome, len(speeds))
        assert verdict.unhealthy_launches == unhealthy
        assert [why.split(":")[0] for why in verdict.reasons] == [f"launch {n} set aside" for n in unhealthy]


@pytest.mark.parametrize("most", [6, MAX_LAUNCHES])
def test_excluded_launches_count_to_the_limit(most: int) -> None:
    doubtful = [on_machine(1, tokens=0.92 * factor) for factor in (1, 1.04, 0.97, 1.02, 0.99) * 4]
    assert session(doubtful, PROBED, ORDINARY, max_launches=most).launches == most
    sick = on_machine(0.5)
    mixed = [run for pair in zip(doubtful[::2], doubtful[1::2], strict=True) for run in (*pair, sick)]
    verdict = session(mixed, PROBED, ORDINARY, max_launches=most)
    assert (verdict.outcome, verdict.launches) == ("inconclusive", most)
    assert len(verdict.unhealthy_launches) == most // 3
    assert session(mixed, PROBED, ORDINARY, max_launches=most, min_launches=12).launches >= 12 + 6 - 1
    few = [mixed[0], sick, sick, mixed[1]]
    assert check_of(session(few, PROBED, ORDINARY, max_launches=4), "tokens_per_s").note == TOO_FEW_LAUNCHES


# Properties of all launches


WITHOUT_LOSSES = from_runs([on_machine(1, tokens=speed).replace(loss=()) for speed in (1.0, 1.003, 0.998)])


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
    runs = [on_machine(machine, tokens=tokens).replace(loss=()) for tokens, machine in launches]
    verdict = session(runs, WITHOUT_LOSSES, noise, max_launches=max_launches, min_launches=min_launches)
    assert verdict.outcome != "undecided"
    most = max(max_launches, min_launches)
    # A session ends if the number of unhealthy launches reaches both MAX_UNHEALTHY and the number of healthy
    # launches.
    assert verdict.launches <= most + max(MAX_UNHEALTHY, most - 1) - 1
