from __future__ import annotations

import pytest

from perfsuite.case.case import Unit
from perfsuite.report.columns import (
    LAUNCHES,
    MEMORY_CHANGE,
    SPEED_CHANGE,
    extras,
    figure,
    speed_in,
)
from perfsuite.results.metric import MFU, STEP_S_P95, TOKENS_PER_S_MEAN
from tests.samples import BEFORE, make_image_result, make_result, never_run, now


def test_a_figure_is_headed_and_written_as_its_metric_says() -> None:
    result = make_result(now())
    assert [
        (column.heading, column.value(result), column.cell(result))
        for column in map(figure, (MFU, STEP_S_P95))
    ] == [
        ("MFU", 0.423, "42.3%"),
        ("p95", 0.0456, "45.6 ms"),
    ]
    assert figure(TOKENS_PER_S_MEAN).heading == "tokens/s with stalls"


def test_what_was_not_measured_is_missing() -> None:
    column = figure(MFU)
    assert column.value(never_run()) is None
    assert (column.cell(never_run()), column.cell(never_run(), missing="?")) == ("-", "?")


@pytest.mark.parametrize(
    ("unit", "cells"), [("tokens", ["98,765", "1,234 samples/s"]), ("samples", ["98,765 tokens/s", "1,234"])]
)
def test_a_speed_in_another_unit_than_the_heading_says_so(unit: Unit, cells: list[str]) -> None:
    column = speed_in(unit)
    assert column.heading == f"{unit}/s"
    assert [column.cell(result) for result in (make_result(now()), make_image_result())] == cells


def test_changes_are_those_that_were_judged() -> None:
    result = make_result(*[now(tokens_per_s=79_012, peak_memory_bytes=2 * 67_108_900)] * 3)
    assert (SPEED_CHANGE.cell(result), MEMORY_CHANGE.cell(result)) == ("-20.0%", "+100.0%")
    first = make_result(now(), before=None)
    assert (SPEED_CHANGE.cell(first), MEMORY_CHANGE.cell(first), MEMORY_CHANGE.cell(never_run())) == (
        "-",
        "-",
        "-",
    )


def test_launches_are_counted() -> None:
    assert [LAUNCHES.cell(result) for result in (make_result(*[now()] * 3), never_run())] == ["3", "0"]


def test_metrics_of_other_packages_have_a_column_where_any_case_has_them() -> None:
    extra = BEFORE.replace(figures=BEFORE.figures.replace(extra={"b": 1.5, "a": 3.0}))
    results = [make_result(now(), before=None), make_result(extra, before=None)]
    assert [column.heading.split()[0] for column in extras(results)] == ["a", "b"]
    assert [[column.cell(result) for column in extras(results)] for result in results] == [
        ["-", "-"],
        ["3.0", "1.5"],
    ]
    assert extras(results[:1]) == []
