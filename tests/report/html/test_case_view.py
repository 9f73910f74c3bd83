import math
from types import SimpleNamespace

import pytest

from perfsuite.report.html.case_view import case_view, overview
from perfsuite.results.metric import ROOFLINE_SHARE
from perfsuite.results.session_file import Measurement
from tests.report.test_expected import STEP, launched
from tests.samples import BEFORE, make_result, never_run, now
from tests.sessions import make_gpu_result, make_session


def view(result: Measurement) -> SimpleNamespace:
    columns = overview("tokens")
    return SimpleNamespace(
        **case_view(result, make_session(0), anchor="case-x", columns=columns, commands=())
    )


def test_band_is_the_baselines_step_and_tolerance() -> None:
    seen = view(never_run())
    assert not any(
        (seen.steps, seen.health, seen.explained.tracebacks, seen.checks, seen.launches, seen.before)
    )
    assert (seen.loss, seen.band, seen.findings, seen.ranks) == (None, None, None, ())
    result = make_gpu_result(2, "regressed")
    band = view(result).band
    baseline = result.verdict.checks[0].baseline
    assert baseline is not None
    assert band.baseline_s == pytest.approx(256 * 8 / baseline)
    assert band.allowed_s == pytest.approx(1.03 * band.baseline_s)


def test_the_share_of_expected_follows_that_of_the_roofline() -> None:
    columns = overview("tokens")
    headings = [column.heading for column in columns]
    place = headings.index("of expected")
    assert headings[place - 1] == ROOFLINE_SHARE.heading
    assert columns[place].text(launched(expected=STEP)) == "62.0%"
    assert columns[place].text(launched(no_expected="the model is compiled")) == "-"


def test_captions_say_what_the_chart_cannot() -> None:
    steps = (math.nan, *[0.1] * 500, 7.5, 8.5)
    run = BEFORE.replace(step_s=steps, window=(10, len(steps)), loss=(5.0,) * 503)
    seen = view(make_result(run, now().replace(step_s=(), window=(0, 0)), now(), before=None))
    assert [figure.caption.split(":")[0] for figure in seen.steps] == ["Launch 1", "Launch 3"]
    seen = view(make_result(run))
    beyond = "2 measured steps are off the scale (▲), the longest 8,500.0 ms at step 502"
    gap = "gap in the line: 1 step without a finite time"
    assert seen.steps[0].caption == f"Launch 1: median 12.3 ms; {beyond}; {gap}."
    assert seen.loss.caption == "Loss, mean over ranks. Final value: 5.0000."
    assert (
        "set aside because the machine was unhealthy"
        in view(make_gpu_result(3, "throttled")).steps[0].caption
    )
