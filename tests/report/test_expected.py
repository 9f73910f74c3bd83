from typing import Any

import pytest

from perfsuite.report.expected import of_dry_run, of_launches
from perfsuite.report.summary import quiet_notes
from perfsuite.report.terminal import explanation
from perfsuite.results.dry_facts import DryFacts, Forecast
from perfsuite.results.session_file import Measurement
from tests.counted import make_expected
from tests.samples import make_figures, make_gpu_machine, make_result, make_run

STEP = make_expected(
    matmul_s=0.027, host_s=0.319, tokens=346, published=(0.75, 1.16), by_host=((0.0, 0.027), (1.0, 0.346))
)
INTERVAL = Forecast(low_s=0.5, high_s=0.6, cases=("a", "b"), gpu_factor=1.1, host_factor=None)


def launched(**facts: Any) -> Measurement:
    """Return a result with 620 tokens/s, where 1,000 tokens/s were expected."""
    run = make_run(machine=make_gpu_machine(), figures=make_figures(tokens_per_s=620))
    return make_result(run, before=None, prediction=DryFacts(**facts))


def test_launches_are_compared_with_the_expected_speed() -> None:
    result = launched(expected=STEP)
    assert result.expected_share == pytest.approx(0.62)
    assert of_launches(result) == [
        "62% of the expected speed; published steps on this accelerator reach 75% to 116% of it (a hint, "
        "not judged)",
        "parts of the expected 346.0 ms of a step: matmuls 27.0 ms, waiting for the host 319.0 ms",
    ]
    assert "62% of the expected speed" in explanation(result)


def test_a_missing_share_has_a_reason() -> None:
    result = launched(no_expected="the model is compiled")
    assert of_launches(result) == ["no comparison with an expected speed: the model is compiled"]
    assert result.expected_share is None


def test_only_a_first_baseline_is_a_note_of_a_quiet_case() -> None:
    first = launched(expected=STEP)
    assert first.verdict.is_recorded
    assert any("of the expected speed" in note for note in quiet_notes(first))
    later = first.replace(verdict=first.verdict.replace(outcome="passed", checks=()))
    assert not any("of the expected speed" in note for note in quiet_notes(later))


def test_an_earlier_forecast_is_checked() -> None:
    held = "a step took 558.1 ms, which is in the forecast of 500.0 ms to 600.0 ms"
    assert of_launches(launched(expected=STEP, forecast=INTERVAL))[-1] == held
    missed = of_launches(launched(expected=STEP, forecast=INTERVAL.replace(high_s=0.55)))[-1]
    assert missed == "a step took 558.1 ms, which is not in the forecast of 500.0 ms to 550.0 ms"


def test_cases_without_a_prediction_say_nothing() -> None:
    assert of_launches(launched().replace(prediction=None)) == []
    assert of_launches(launched()) == []


def test_words_give_a_forecast_or_why_there_is_none() -> None:
    facts = DryFacts(forecast=INTERVAL.replace(host_factor=2.5, held=5, checked=6))
    assert of_dry_run(facts, "tokens") == [
        "forecast of 500.0 ms to 600.0 ms for a step on this kind of GPU (meant to hold nine times out of "
        "ten), based on 2 measured cases with the same parallelism, in which the GPU also sets the pace. "
        "Measurements show that the GPU takes 1.10 times as long as expected, and the host 2.50 times",
        "of 6 earlier forecasts with a later measurement, 5 held",
    ]
    (line,) = of_dry_run(DryFacts(forecast=INTERVAL), "tokens")
    assert "host" not in line
    (line,) = of_dry_run(DryFacts(forecast=INTERVAL.replace(host_pace=True)), "tokens")
    assert "with the same parallelism, in which the host can also set the pace. Measurements" in line
    why = DryFacts(no_forecast="no case is alike")
    assert of_dry_run(why, "tokens") == ["no forecast for this kind of GPU: no case is alike"]
