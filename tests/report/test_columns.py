import math
import re

import pytest

from perfsuite.case.case import Unit
from perfsuite.report import terminal
from perfsuite.report.columns import LAUNCHES, MEMORY_CHANGE, SPEED_CHANGE, extras, figure, of_cases, speed_in
from perfsuite.results.metric import MFU, STEP_S_P95, TOKENS_PER_S_MEAN, Metric
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.arms import judge_counts
from tests.counted import FACTS, limit, make_counts, make_dry, make_entries
from tests.samples import BEFORE, make_compared, make_image_result, make_result, never_run, now
from tests.twin_counts import counts, launch


@pytest.mark.parametrize(
    ("metric", "heading", "cell"),
    [(MFU, "MFU", ("42.3%", 0.423)), (STEP_S_P95, "p95", ("45.6 ms", 0.0456))],
    ids=["MFU", "p95"],
)
def test_metric_decides_heading_and_format(metric: Metric, heading: str, cell: tuple[str, float]) -> None:
    column = figure(metric)
    assert (column.heading, column.cell(make_result(now()))) == (heading, cell)


@pytest.mark.parametrize("metric", [MFU, STEP_S_P95], ids=["MFU", "p95"])
def test_a_case_that_never_ran_has_dashes(metric: Metric) -> None:
    column = figure(metric)
    assert (column.cell(never_run()), column.text(never_run())) == (None, "-")


def test_the_mean_speed_is_that_with_stalls() -> None:
    assert figure(TOKENS_PER_S_MEAN).heading == "tokens/s with stalls"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_only_text(bad: float) -> None:
    result = make_result(now(tokens_per_s_mean=bad), before=None)
    assert figure(TOKENS_PER_S_MEAN).cell(result) == (str(bad), None)


@pytest.mark.parametrize(
    ("unit", "texts"),
    [("tokens", ["98,765", "1,234 samples/s"]), ("samples", ["98,765 tokens/s", "1,234"])],
)
def test_a_speed_of_another_unit_names_it(unit: Unit, texts: list[str]) -> None:
    column = speed_in(unit)
    assert column.heading == f"{unit}/s"
    assert [column.text(result) for result in (make_result(now()), make_image_result())] == texts


def test_changes_are_those_that_were_judged() -> None:
    result = make_result(*[now(tokens_per_s=79_012, peak_memory_bytes=2 * 67_108_900)] * 3)
    assert SPEED_CHANGE.cell(result) == ("-20.0%", result.verdict.checks[0].change)
    assert MEMORY_CHANGE.text(result) == "+100.0%"
    first = make_result(now(), before=None)
    assert SPEED_CHANGE.text(first) == MEMORY_CHANGE.text(first) == MEMORY_CHANGE.text(never_run()) == "-"


def test_package_metrics_have_a_column_if_present() -> None:
    extra = BEFORE.replace(figures=BEFORE.figures.replace(extra={"b": 1.5, "a": 3.0}))
    results = [make_result(run, before=None) for run in (now(), extra)]
    assert [column.heading.split()[0] for column in extras(results)] == ["a", "b"]
    cells = [[column.text(result) for column in extras(results)] for result in results]
    assert cells == [["-", "-"], ["3.00", "1.50"]]
    assert extras(results[:1]) == []


def cells(*results: Measurement) -> dict[str, str]:
    """Return the row of the last result as a dictionary: heading -> cell."""
    return {column.heading: column.text(results[-1]) for column in of_cases(results, [])}


DRY_CELLS = {"computed": "551.0 TFLOP", "collectives": "59.9 GiB", "live peak": "41.0 GiB"}
PREDICTED = make_dry(dry_facts=FACTS)


def test_dry_runs_have_columns_of_their_own() -> None:
    assert cells(make_dry()) == cells(never_run(), make_dry()) == DRY_CELLS
    assert cells(PREDICTED) == DRY_CELLS | {"of card": "81%: tight", "max tokens/s": "941,530"}


def test_a_dry_run_without_a_prediction_has_dashes() -> None:
    assert cells(PREDICTED, make_dry(dry_facts=FACTS.replace(fit=None)))["of card"] == "-"
    toy = FACTS.replace(roofline=limit(flops=1, wire_bytes=0))
    assert cells(PREDICTED, make_dry(dry_facts=toy))["max tokens/s"] == "-"


def test_cells_of_a_dry_run_are_those_of_the_busiest_rank() -> None:
    bare = make_counts(memory=None, flops={}, collectives=())
    assert cells(make_dry(counts=make_entries(bare, make_counts()))) == DRY_CELLS


def test_a_dry_run_without_counts_has_no_columns_for_them() -> None:
    bare = make_counts(memory=None, flops={}, collectives=())
    assert cells(make_dry(counts=())) == {}
    assert cells(make_dry(counts=make_entries(bare))) == {"computed": "0 FLOP", "collectives": "0 bytes"}


@pytest.mark.parametrize(
    "results",
    [[make_dry(), make_result(now())], [never_run()], []],
    ids=["a dry run", "never run", "none"],
)
def test_columns_are_usual_unless_all_cases_are_dry(results: list[Measurement]) -> None:
    measured = [figure(MFU)]
    assert of_cases(results, measured) == measured


def test_only_launched_cases_have_launches() -> None:
    launched = (make_dry(), make_result(*[now()] * 3), never_run())
    assert [LAUNCHES.text(result) for result in launched] == ["-", "3", "0"]


def test_two_arms_appear_side_by_side() -> None:
    columns = of_cases([make_compared(0.7)], [figure(MFU)])
    headings = ["tokens/s A", "B", "B vs A (99%)", "memory B vs A", "pairs"]
    assert [column.heading for column in columns] == headings
    a, b, change, memory, pairs = (column.text(make_compared(0.7)) for column in columns)
    assert (a, b, memory, pairs) == ("98,765", "69,136", "+0.0% (-1.6% to +1.6%)", "5 of 5")
    assert re.fullmatch(r"-(29|30)\.\d% \(-3\d\.\d% to -2\d\.\d%\)", change)
    undecided = make_compared(pairs=1).replace(verdict=Verdict(outcome="unhealthy", launches=2))
    assert [column.text(undecided) for column in columns][2:] == ["-", "-", "1 of 1"]


def test_failed_case_stays_in_the_table() -> None:
    run = launch(counts())
    cases = list[Measurement]()
    crashed = run.replace(counts=(), failure=Failure(kind="crash", message="boom", at=0.0))
    for other in (run, crashed):
        result = make_result(other, verdict=judge_counts(run, other))
        cases.append(result.replace(before=(run,)))
    headings = [
        [column.heading for column in of_cases(chosen, [])] for chosen in (cases[:1], cases, cases[1:])
    ]
    assert headings[0] == headings[1] == ["computed", "collectives", "live peak"]
    assert headings[2] == []
    assert "after one launch of each arm" in " ".join(terminal.explanation(cases[1]).split())
    assert "tokens/s" not in terminal.table(cases, color=False, width=None)
