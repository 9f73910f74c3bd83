from __future__ import annotations

import math
from typing import Any

import pytest

from perfsuite.baseline import Baseline, from_runs
from perfsuite.judge import FAILING, UNMEASURED, Check, Verdict, amount, judge, sentence
from perfsuite.result import Failure, Flops, Observed, Run
from tests.samples import make_case, make_figures, make_gpu_machine, make_machine, make_run

MIB = 2.0**20


def run_with(**figures: Any) -> Run:
    return make_run(figures=make_figures(**figures))


def check_of(verdict: Verdict, metric: str) -> Check:
    return next(check for check in verdict.checks if check.metric == metric)


def observed(**settings: str) -> Observed:
    return Observed(settings=settings, environment={"torch": "2.11", "NCCL_ALGO": "Ring"})


BASELINE = from_runs([make_run()])


def test_without_a_baseline_it_is_recorded() -> None:
    verdict = judge(make_run(), None)
    assert verdict.outcome == "recorded"
    assert [(check.measured, check.baseline, check.worsening) for check in verdict.checks] == [
        (1000, None, None),
        (64 * MIB, None, None),
    ]


@pytest.mark.parametrize(
    ("figures", "outcome", "metric", "worsening"),
    [
        ({}, "passed", "tokens_per_s", 0),
        ({"tokens_per_s": 851}, "passed", "tokens_per_s", 0.149),
        ({"tokens_per_s": 1149}, "passed", "tokens_per_s", -0.149),
        ({"tokens_per_s": 849}, "regressed", "tokens_per_s", 0.151),
        ({"tokens_per_s": 1151}, "improved", "tokens_per_s", -0.151),
        ({"peak_memory_bytes": 73 * MIB}, "passed", "peak_memory_bytes", 9 / 64),
        ({"peak_memory_bytes": 74 * MIB}, "regressed", "peak_memory_bytes", 10 / 64),
        ({"peak_memory_bytes": 54 * MIB}, "improved", "peak_memory_bytes", -10 / 64),
    ],
)
def test_each_metric_is_compared_in_its_own_direction(
    figures: dict[str, float], outcome: str, metric: str, worsening: float
) -> None:
    verdict = judge(run_with(**figures), BASELINE)
    check = check_of(verdict, metric)
    assert (verdict.outcome, check.outcome) == (outcome, outcome)
    assert check.worsening == pytest.approx(worsening, abs=1e-6)
    assert check.tolerance == 0.15


@pytest.mark.parametrize(
    ("figures", "outcome"),
    [
        ({"tokens_per_s": 971}, "passed"),
        ({"tokens_per_s": 969}, "regressed"),
        ({"peak_memory_bytes": 64.5 * MIB}, "passed"),
        ({"peak_memory_bytes": 65 * MIB}, "regressed"),
    ],
)
def test_an_accelerator_is_held_to_tighter_tolerances(figures: dict[str, float], outcome: str) -> None:
    run = make_run(machine=make_gpu_machine())
    now = run.replace(figures=make_figures(**figures))
    assert judge(now, from_runs([run])).outcome == outcome


@pytest.mark.parametrize(
    ("figures", "outcome"),
    [
        ({"tokens_per_s": 2000, "peak_memory_bytes": 128 * MIB}, "regressed"),
        ({"tokens_per_s": 500, "peak_memory_bytes": 32 * MIB}, "regressed"),
        ({"tokens_per_s": 2000, "peak_memory_bytes": 64 * MIB}, "improved"),
        ({"tokens_per_s": 500, "peak_memory_bytes": None}, "failed"),
    ],
)
def test_the_worst_metric_is_the_verdict(figures: dict[str, float | None], outcome: str) -> None:
    assert judge(run_with(**figures), BASELINE).outcome == outcome


def test_a_baseline_of_several_launches_stands_for_their_median() -> None:
    runs = [run_with(tokens_per_s=speed) for speed in (100, 1000, 1010)]
    check = check_of(judge(make_run(), from_runs(runs)), "tokens_per_s")
    assert (check.baseline, check.outcome) == (1000, "passed")


@pytest.mark.parametrize("metric", ["tokens_per_s", "peak_memory_bytes"])
def test_a_metric_that_only_the_baseline_has_fails(metric: str) -> None:
    verdict = judge(run_with(**{metric: None}), BASELINE)
    check = check_of(verdict, metric)
    assert (verdict.outcome, check.outcome) == ("failed", "failed")
    assert check.note == "the baseline has it, this run does not"


@pytest.mark.parametrize("metric", ["tokens_per_s", "peak_memory_bytes"])
def test_a_metric_that_was_never_measured_fails_without_a_baseline_too(metric: str) -> None:
    verdict = judge(run_with(**{metric: None}), None)
    assert verdict.outcome == "failed"
    assert check_of(verdict, metric).note == "was not measured"


def test_a_metric_that_only_the_run_has_is_recorded() -> None:
    verdict = judge(make_run(), from_runs([run_with(peak_memory_bytes=None)]))
    assert check_of(verdict, "peak_memory_bytes").outcome == "recorded"
    assert verdict.outcome == "passed"


@pytest.mark.parametrize("metric", ["tokens_per_s", "peak_memory_bytes"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_no_number_never_passes(metric: str, value: float) -> None:
    assert judge(run_with(**{metric: value}), BASELINE).outcome == "failed"
    assert judge(run_with(**{metric: value}), None).outcome == "failed"


def test_a_baseline_that_is_no_number_never_passes() -> None:
    assert judge(make_run(), from_runs([run_with(tokens_per_s=math.nan)])).outcome == "failed"


def test_a_failed_run_is_failed_with_its_kind_whatever_its_figures() -> None:
    failure = Failure(kind="out_of_memory", message="CUDA out of memory", rank=1)
    for baseline in (BASELINE, None):
        verdict = judge(make_run(failure=failure), baseline)
        assert (verdict.outcome, verdict.reasons) == ("failed", ("out_of_memory: CUDA out of memory",))
        assert verdict.checks == ()


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        (
            {"machine": make_machine(hardware_class="cpu-other-8c")},
            {},
            "hardware class was 'cpu-test-2c' in the baseline and is 'cpu-other-8c'",
        ),
        (
            {"flops": Flops(formula="palm-2", per_token=1, parameters=1, matmul_parameters=1)},
            {"flops": Flops(formula="palm-1", per_token=1, parameters=1, matmul_parameters=1)},
            "FLOP formula was 'palm-1' in the baseline and is 'palm-2'",
        ),
        (
            {"observed": observed(wrapper="DistributedDataParallel")},
            {"observed": observed(wrapper="FSDPModule")},
            "wrapper was 'FSDPModule' in the baseline and is 'DistributedDataParallel'",
        ),
        (
            {"observed": observed(wrapper="x", sharding="Shard(0)")},
            {"observed": observed(wrapper="x")},
            "sharding was '?' in the baseline and is 'Shard(0)'",
        ),
        (
            {"observed": observed(attention="sdpa")},
            {"observed": observed(attention="eager")},
            "attention was 'eager' in the baseline and is 'sdpa'",
        ),
        ({"case": make_case(micro_batch=4)}, {}, "micro_batch was '2' in the baseline and is '4'"),
        (
            {"case": make_case(learning_rate=0.5)},
            {},
            "learning_rate was '0.001' in the baseline and is '0.5'",
        ),
    ],
)
def test_unlike_things_are_not_compared_and_both_values_are_named(
    now: dict[str, Any], before: dict[str, Any], said: str
) -> None:
    verdict = judge(make_run(**now), from_runs([make_run(**before)]))
    assert verdict.outcome == "failed"
    [reason] = verdict.reasons
    assert reason.startswith("cannot be compared: ")
    assert reason.endswith(said)


def test_where_and_how_long_a_case_may_run_does_not_make_it_another() -> None:
    run = make_run(case=make_case(timeout_s=7, hardware=("cpu", "h100")))
    assert judge(run, BASELINE).outcome == "passed"


def test_what_changed_around_it_is_listed_and_forbids_nothing() -> None:
    before = Observed(settings={}, environment={"torch": "2.11", "OMP_NUM_THREADS": "1", "same": "x"})
    now = Observed(settings={}, environment={"torch": "2.12", "NCCL_ALGO": "Tree", "same": "x"})
    verdict = judge(make_run(observed=now), from_runs([make_run(observed=before)]))
    assert verdict.outcome == "passed"
    assert verdict.changed == (
        "NCCL_ALGO: unset -> Tree",
        "OMP_NUM_THREADS: 1 -> unset",
        "torch: 2.11 -> 2.12",
    )


@pytest.mark.parametrize(("now", "before"), [(observed(), None), (None, observed())])
def test_nothing_observed_on_one_side_is_no_difference(now: Observed | None, before: Observed | None) -> None:
    verdict = judge(make_run(observed=now), from_runs([make_run(observed=before)]))
    assert (verdict.outcome, verdict.changed) == ("passed", ())


PROBED: Baseline = from_runs([run_with(probe_s_p50=0.010)])


@pytest.mark.parametrize(
    ("tokens_per_s", "probe_s", "outcome", "worsening"),
    [
        (900, 0.010 / 0.9, "passed", 0),  # a machine 10 % slower: not the code
        (1100, 0.010 / 1.1, "passed", 0),
        (800, 0.010, "regressed", 0.2),  # the same machine: the code
        (720, 0.010 / 0.9, "regressed", 0.2),
        (1000, 0.010 / 0.85, "improved", 1 - 1 / 0.85),
    ],
)
def test_speed_is_corrected_by_what_the_probe_says_of_the_machine(
    tokens_per_s: float, probe_s: float, outcome: str, worsening: float
) -> None:
    verdict = judge(run_with(tokens_per_s=tokens_per_s, probe_s_p50=probe_s), PROBED)
    check = check_of(verdict, "tokens_per_s")
    assert verdict.outcome == outcome
    assert check.worsening == pytest.approx(worsening, abs=1e-6)
    assert check.note is not None
    assert f"{0.010 / probe_s:.1%} of its speed at the baseline" in check.note
    assert check_of(verdict, "peak_memory_bytes").note is None


@pytest.mark.parametrize(
    ("speed", "tokens_per_s", "outcome"),
    [
        (0.81, 810, "passed"),  # within what the probe corrects well
        (1.24, 1240, "passed"),
        (0.79, 790, "unhealthy"),  # beyond it: is it slower only because the machine is?
        (1.26, 1260, "unhealthy"),
        (0.5, 1000, "unhealthy"),
        (0.5, 400, "regressed"),  # slower with and without the correction: the code
        (2, 2400, "improved"),
        (0.79, 860, "passed"),
    ],
)
def test_a_change_that_only_a_far_correction_makes_or_unmakes_is_the_machine(
    speed: float, tokens_per_s: float, outcome: str
) -> None:
    verdict = judge(run_with(tokens_per_s=tokens_per_s, probe_s_p50=0.010 / speed), PROBED)
    check = check_of(verdict, "tokens_per_s")
    assert (verdict.outcome, check.outcome) == (outcome, outcome)
    assert check.note is not None
    assert f"{speed:.1%} of its speed at the baseline" in check.note


def test_a_slow_machine_does_not_excuse_more_memory() -> None:
    verdict = judge(run_with(tokens_per_s=500, probe_s_p50=0.02, peak_memory_bytes=80 * MIB), PROBED)
    assert check_of(verdict, "tokens_per_s").outcome == "unhealthy"
    assert verdict.outcome == "regressed"


def test_a_slow_machine_does_not_excuse_a_missing_metric() -> None:
    verdict = judge(run_with(tokens_per_s=500, probe_s_p50=0.02, peak_memory_bytes=None), PROBED)
    assert verdict.outcome == "failed"


@pytest.mark.parametrize(("now", "before"), [(None, 0.01), (0.01, None)])
def test_without_a_probe_on_both_sides_nothing_is_corrected(now: float | None, before: float | None) -> None:
    verdict = judge(run_with(probe_s_p50=now), from_runs([run_with(probe_s_p50=before)]))
    assert verdict.outcome == "passed"
    assert check_of(verdict, "tokens_per_s").note is None


def test_what_fails_a_test_and_what_measured_nothing() -> None:
    assert {"regressed", "failed"} == FAILING
    assert {"unhealthy", "failed"} == UNMEASURED


@pytest.mark.parametrize(
    ("figures", "metric", "words"),
    [
        (
            {"tokens_per_s": 123_456 * 0.8},
            "tokens_per_s",
            "tokens/s: 98,765 tokens/s, baseline 123,456 tokens/s: 20.0% slower, 15.0% allowed: regressed",
        ),
        (
            {"tokens_per_s": 123_456 * 1.1},
            "tokens_per_s",
            "tokens/s: 135,802 tokens/s, baseline 123,456 tokens/s: 10.0% faster, 15.0% allowed: passed",
        ),
        (
            {"peak_memory_bytes": 80 * MIB},
            "peak_memory_bytes",
            "peak memory: 80.0 MiB, baseline 64.0 MiB: 25.0% more, 15.0% allowed: regressed",
        ),
        (
            {"peak_memory_bytes": 48 * MIB},
            "peak_memory_bytes",
            "peak memory: 48.0 MiB, baseline 64.0 MiB: 25.0% less, 15.0% allowed: improved",
        ),
        (
            {"peak_memory_bytes": None},
            "peak_memory_bytes",
            "peak memory: -, baseline 64.0 MiB (the baseline has it, this run does not)",
        ),
    ],
)
def test_sentence_says_what_against_what_by_how_much_and_how_much_is_allowed(
    figures: dict[str, Any], metric: str, words: str
) -> None:
    verdict = judge(
        run_with(**{"tokens_per_s": 123_456, **figures}), from_runs([run_with(tokens_per_s=123_456)])
    )
    assert sentence(check_of(verdict, metric)) == words


def test_sentence_without_a_baseline() -> None:
    assert [sentence(check) for check in judge(make_run(), None).checks] == [
        "tokens/s: 1,000 tokens/s",
        "peak memory: 64.0 MiB",
    ]


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, "bytes", "-"),
        (1000, "bytes", "1,000 bytes"),
        (1.5 * MIB, "bytes", "1.5 MiB"),
        (2.0**30 * 12.345, "bytes", "12.35 GiB"),
        (93_600.4, "tokens/s", "93,600 tokens/s"),
    ],
)
def test_amount(value: float | None, unit: str, words: str) -> None:
    assert amount(value, unit) == words
