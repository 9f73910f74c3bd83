from perfsuite.report import spans
from perfsuite.report.html import page
from perfsuite.report.markdown import render
from perfsuite.report.terminal import explanation
from perfsuite.report.text import NONE
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from tests.samples import make_figures, make_result, make_run
from tests.sessions import make_session

WARM = {"start-up": 8.0, "start-up: imports": 6.0, "start-up: first step": 2.0}
COLD = {"cold start-up": 60.0, "cold start-up: imports": 7.0, "cold start-up: first step": 53.0}


def launch(factor: float = 1, **others: float) -> Run:
    of_start_up = {name: factor * seconds for name, seconds in WARM.items()}
    return make_run(figures=make_figures(spans_s={**of_start_up, **others}))


COLD_LAUNCH = make_run(figures=make_figures(spans_s=COLD))


def result(before: Run | None = None) -> Measurement:
    return make_result(COLD_LAUNCH, launch(1), launch(2), launch(1.5), before=before)


def rows(measured: Measurement) -> dict[str, list[str]]:
    return {name: others for name, *others in spans.table(measured).rows}


def test_cold_and_warm_launches_are_told_apart() -> None:
    assert {name: (row[1], row[4]) for name, row in rows(result()).items()} == {
        "start-up": ("12.00 s", "60.00 s"),
        "start-up: first step": ("3,000.0 ms", "53.00 s"),
        "start-up: imports": ("9,000.0 ms", "7,000.0 ms"),
    }


def test_a_span_is_told_with_what_it_is_judged_by() -> None:
    verdict, _, baseline, *_ = rows(result(before=launch()))["start-up: imports"]
    assert (verdict, baseline) == ("inconclusive", "6,000.0 ms"), "nobody knows how much it scatters"


def test_a_span_that_the_baseline_lacks_is_shown_without_a_verdict() -> None:
    verdict, seconds, baseline, *_ = rows(make_result(launch(save=5.0), before=launch()))["save"]
    assert (verdict, seconds, baseline) == (NONE, "5,000.0 ms", NONE)


def test_events_come_after_the_start_up() -> None:
    assert list(rows(make_result(launch(save=5.0), before=None)))[-1] == "save"


def test_start_ups_of_cases_are_one_table() -> None:
    table = spans.start_ups([result(), make_result(make_run(), before=None)])
    assert table.headers == ("case", "start-up", "first step", "imports", "cold start-up")
    assert [row[1:] for row in table.rows] == [("12.00 s", "3,000.0 ms", "9,000.0 ms", "60.00 s")]


def test_all_reports_show_them() -> None:
    measured = result()
    session = make_session(0).replace(results=(measured,))
    assert "start-up: imports" in explanation(measured)
    assert "Start-up in seconds: 1" in render([session])
    assert "start-up: imports" in page.render([session])
