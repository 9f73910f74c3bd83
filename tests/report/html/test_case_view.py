from __future__ import annotations

import math

import pytest

from perfsuite.report.html.case_view import CaseView, case_view, overview
from perfsuite.report.table import NONE
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.run import Health
from perfsuite.results.session_file import ArmFacts, Measurement
from tests.samples import ARMS, BEFORE, make_compared, make_gpu_machine, make_result, make_run, never_run, now
from tests.sessions import TRACEBACK, make_gpu_result, make_session


def view(result: Measurement, arms: tuple[ArmFacts, ...] = ()) -> CaseView:
    return case_view(result, make_session(0).replace(arms=arms), anchor="case-x", columns=overview("tokens"))


def test_the_summary_holds_text_and_the_number_to_sort_by() -> None:
    summary = view(make_result(now())).summary
    assert (summary["tokens/s"].text, summary["tokens/s"].number) == ("98,765", 98765)
    assert (summary["memory"].text, summary["memory"].number) == ("64.0 MiB", 67_108_900)
    assert (summary["MFU"].text, summary["launches"].text) == ("42.3%", "1")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_cannot_be_sorted_by(bad: float) -> None:
    cell = view(make_result(now(tokens_per_s=bad), before=None)).summary["tokens/s"]
    assert (cell.text, cell.number) == (str(bad), None)


def test_a_case_that_was_never_launched() -> None:
    seen = view(never_run())
    assert not any((seen.steps, seen.health, seen.notes, seen.told.tracebacks))
    assert (seen.checks, seen.loss, seen.band) == (None, None, None)
    assert seen.hardware == NONE
    assert not seen.compared


def test_the_band_is_the_baselines_step_time_and_its_tolerance() -> None:
    result = make_gpu_result(2, "regressed")
    seen, [first, *_] = view(result), result.verdict.checks
    assert seen.band is not None
    assert first.baseline is not None
    tokens_per_step = 256 * 8
    assert seen.band.baseline_s == pytest.approx(tokens_per_step / first.baseline)
    assert seen.band.allowed_s == pytest.approx(1.03 * seen.band.baseline_s)
    assert seen.compared
    assert not seen.corrected


def test_a_verdict_corrected_by_the_probe_says_that_the_charts_are_not() -> None:
    result = make_gpu_result(2)
    [first, *others] = result.verdict.checks
    noted = first.replace(note="corrected by hand")
    plain = view(result.replace(verdict=result.verdict.replace(checks=(noted, *others))))
    probed = first.replace(probe_exponent=0.8)
    seen = view(result.replace(verdict=result.verdict.replace(checks=(probed, *others))))
    assert (plain.corrected, seen.corrected) == (False, True)
    assert plain.checks is not None
    assert seen.checks is not None
    assert "Corrected" not in plain.checks.caption
    assert seen.checks.caption.endswith(
        "Corrected for the machine's own speed, it is not the ratio of the two figures beside it."
    )


def test_each_launch_with_steps_has_its_chart() -> None:
    seen = view(make_result(now(), now().replace(step_s=(), window=(0, 0)), now(), before=None))
    assert [figure.caption.split(":")[0] for figure in seen.steps] == ["Launch 1", "Launch 3"]


def test_captions_say_what_the_chart_cannot() -> None:
    steps = (math.nan, *[0.1] * 500, 7.5, 8.5)
    run = BEFORE.replace(step_s=steps, window=(10, len(steps)), loss=(5.0,) * 503)
    seen = view(make_result(run))
    assert seen.steps[0].caption == (
        "Launch 1: median 12.3 ms; 2 measured steps are off the scale (▲), "
        "the longest 8,500.0 ms at step 502; 1 without a finite time: a gap in the line; "
        "of every 3 steps the shortest and the longest are drawn."
    )
    assert seen.loss is not None
    assert seen.loss.caption == (
        "Loss, mean over ranks; at the end 5.0000; of every 3 steps the lowest and the highest are drawn."
    )


def test_a_launch_set_aside_is_said_under_its_chart() -> None:
    assert "set aside, the machine was not well" in view(make_gpu_result(3, "throttled")).steps[0].caption


def test_every_note_is_told_once() -> None:
    sampled = Health(samples=2, seconds=1, steps=2, notes=("no NVML",))
    run = make_run(notes=("a", "b"), health=sampled, machine=make_gpu_machine().replace(note="unknown peak"))
    assert view(make_result(run, before=None)).notes == ["a", "b", "no NVML", "unknown peak"]


def test_a_traceback_names_launch_and_rank() -> None:
    assert view(make_gpu_result(1, "crash")).told.tracebacks == [("launch 1, traceback of rank 5", TRACEBACK)]


def test_a_comparison_with_a_tolerance_of_its_own_is_repeated_with_it() -> None:
    compared = make_compared(speed=0.93)
    assert "--tolerance" not in view(compared, ARMS).command
    checks = tuple(each.replace(allowed=TOKENS_PER_S.bound(0.03)) for each in compared.verdict.checks)
    own = compared.replace(verdict=compared.verdict.replace(checks=checks))
    again = f"perfsuite compare --against 'main X=1' --arm . --tolerance 3% {compared.case_id}"
    assert view(own, ARMS).command == again


def test_the_command_measures_the_same_again() -> None:
    assert view(make_result(now())).command == "pytest 'bench_cases/test_x.py::test_x[a]'"
    injected = make_result(now().replace(inject="slowdown=30%"))
    assert view(injected).notes == ["a fault was injected: slowdown=30%"]
    assert view(injected).command == "pytest 'bench_cases/test_x.py::test_x[a]' --perf-inject=slowdown=30%"
