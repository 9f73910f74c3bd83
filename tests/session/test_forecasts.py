from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.results.dry_facts import DryFacts, Forecast
from perfsuite.results.outcome import CountCheck
from perfsuite.results.run import Figures
from perfsuite.results.session_file import Measurement
from perfsuite.session.forecasts import Forecasts
from tests.analysis.step_time.test_forecast import step
from tests.counted import make_dry
from tests.samples import make_case, make_figures, make_gpu_machine, make_result, make_run, make_session_file

H100 = "NVIDIA H100 80GB HBM3"
FIRST, SECOND = (make_case(micro_batch=size, hardware="h100") for size in (1, 2))
INTERVAL = Forecast(low_s=1.1, high_s=1.3, cases=("a",), gpu_factor=1.2, host_factor=None)


def dry(case: Any, **facts: Any) -> Measurement:
    return make_dry(case=case, dry_facts=DryFacts(**facts))


def launched(case: Any, step_s: float, **changes: Any) -> Measurement:
    """Return the result of a measured case. A step has 1,000 tokens and takes `step_s`."""
    figures = make_figures(tokens_per_s=1000 / step_s)
    machine = make_gpu_machine(changes.pop("device_name", H100))
    return make_result(make_run(case=case, figures=figures, machine=machine), before=None).replace(**changes)


def counted(result: Measurement) -> Measurement:
    """Return the result as one of `compare --counts`, which does not wait until the machine is quiet."""
    verdict = result.verdict.replace(checks=(), counts=CountCheck(outcome="passed"))
    return result.replace(before=result.runs, verdict=verdict)


def forecasts(tmp_path: Path, *sessions: Measurement) -> Forecasts:
    """Return the forecasts that these results allow. Each result is in a separate session."""
    files = [tmp_path / f"{number}.json" for number, _ in enumerate(sessions)]
    for file, result in zip(files, sessions, strict=True):
        documents.write(file, make_session_file(result))
    return Forecasts(files, H100)


def test_a_case_is_measured_and_predicted_in_any_session(tmp_path: Path) -> None:
    for results in (
        [launched(FIRST, 1.2), dry(FIRST, expected=step(1))],
        [dry(FIRST, expected=step(1)), launched(FIRST, 1.2)],
        [launched(FIRST, 1.2, prediction=DryFacts(expected=step(1)))],
    ):
        (case,) = forecasts(tmp_path, *results).cases
        assert case.step_s == pytest.approx(1.2)
        assert (case.case_id, case.expected) == (FIRST.id, step(1))


def test_other_gpus_and_failures_are_left_out(tmp_path: Path) -> None:
    expected = DryFacts(expected=step(1))
    other = launched(FIRST, 1.2, prediction=expected, device_name="NVIDIA A100-SXM4-80GB")
    failed = launched(FIRST, 1.2, prediction=expected)
    failed = failed.replace(verdict=failed.verdict.replace(outcome="failed"))
    shared = launched(FIRST, 1.2, prediction=expected, shared=True)
    busy = counted(launched(FIRST, 1.2, prediction=expected))
    timed = launched(FIRST, 1.2, prediction=expected)
    timed = timed.replace(before=timed.runs)
    assert forecasts(tmp_path, other, failed, shared, busy, timed).cases == [], "arms can have other packages"
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    assert Forecasts([damaged], H100).cases == []


def test_an_unmeasured_case_gets_an_interval(tmp_path: Path) -> None:
    made = forecasts(tmp_path, launched(FIRST, 1.2, prediction=DryFacts(expected=step(1))))
    its = made.added(DryFacts(expected=step(2)), SECOND.id).forecast
    assert its is not None
    assert its.low_s < 2.4 < its.high_s
    assert (its.cases, its.checked) == ((FIRST.id,), 0)


def test_without_measured_cases_nothing_is_said(tmp_path: Path) -> None:
    facts = DryFacts(expected=step(2))
    assert forecasts(tmp_path, dry(FIRST, expected=step(1))).added(facts, SECOND.id) == facts
    unknown = DryFacts(no_expected="the model is compiled")
    made = forecasts(tmp_path, launched(FIRST, 1.2, prediction=DryFacts(expected=step(1))))
    assert made.added(unknown, SECOND.id) == unknown


def test_a_missing_forecast_has_a_reason(tmp_path: Path) -> None:
    made = forecasts(tmp_path, launched(FIRST, 1.25, prediction=DryFacts(expected=step(1))))
    sharded = made.added(DryFacts(expected=step(1, parallelism="sharded")), SECOND.id)
    assert "same parallelism. First measure a case with sharded parameters" in str(sharded.no_forecast)
    again = made.added(DryFacts(expected=step(1)), FIRST.id)
    why = "the case was already measured: a step took 1,250.0 ms, which is 80% of the expected speed"
    assert (again.forecast, again.no_forecast) == (None, why)


def test_each_forecast_is_checked_once(tmp_path: Path) -> None:
    made = forecasts(
        tmp_path,
        dry(FIRST, expected=step(1), forecast=INTERVAL),
        dry(SECOND, expected=step(1), forecast=INTERVAL),
        launched(FIRST, 1.2),
        launched(SECOND, 1.5),
        launched(SECOND, 1.2),
    )
    assert made.checked == [True, False]
    its = made.added(DryFacts(expected=step(2)), "another").forecast
    assert its is not None
    assert (its.held, its.checked) == (1, 2)


def test_an_open_forecast_is_found_until_it_is_measured(tmp_path: Path) -> None:
    promised = dry(FIRST, expected=step(1), forecast=INTERVAL)
    assert forecasts(tmp_path, promised).of(FIRST.id) == INTERVAL
    assert forecasts(tmp_path, promised, launched(FIRST, 1.2)).of(FIRST.id) is None
    assert forecasts(tmp_path, promised).of(SECOND.id) is None


def test_a_launch_without_steps_measures_nothing(tmp_path: Path) -> None:
    result = launched(FIRST, 1.2, prediction=DryFacts(expected=step(1)))
    (run,) = result.runs
    assert forecasts(tmp_path, result.replace(runs=(run.replace(figures=Figures()),))).cases == []
