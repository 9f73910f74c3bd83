"""Each format is checked by its published description, and by a parser of its own where there is one."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest

from perfsuite.frameworks.fake import Fake
from perfsuite.report.export import FORMATS, figures, hud, newest, openmetrics
from perfsuite.results.outcome import CountCheck, Verdict
from perfsuite.results.session_file import Measurement, SessionFile
from tests.counted import NOT_COUNTED
from tests.samples import IMAGES, judged, make_case, make_figures, make_machine, make_result, make_run
from tests.sessions import KINDS, make_session

EVERYTHING = make_session(len(KINDS))
"""A case of each kind: passed, crashed, regressed, throttled, larger, improved, recorded."""

WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}


def record(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT = {"type": "string"}
VERSION = record([], repo=TEXT, branch=TEXT, sha=TEXT, version=TEXT, extra_info=WORDS)
RUNNER = record(
    [],
    **dict.fromkeys(("name", "type", "cpu_info", "mem_info", "gpu_info", "gpu_mem_info"), TEXT),
    **dict.fromkeys(("cpu_count", "avail_mem_in_gb", "gpu_count", "avail_gpu_mem_in_gb"), COUNT),
    extra_info=WORDS,
)
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "number"}
NUMBERS = {"type": "array", "items": NUMBER}
HUD_SCHEMA = {
    "type": "array",
    "items": record(
        ["benchmark", "model", "metric"],
        benchmark=record(["name"], name=TEXT, mode=TEXT, dtype=TEXT, extra_info=WORDS),
        model=record(["name"], name=TEXT, type=TEXT, backend=TEXT, origins=TEXTS, extra_info=WORDS),
        metric=record(["name"], name=TEXT, benchmark_values=NUMBERS, target_value=NUMBER, extra_info=WORDS),
        inputs={"type": "object", "additionalProperties": record([], dtype=TEXT, extra_info=WORDS)},
        dependencies={"type": "object", "additionalProperties": VERSION},
        runners={"type": "array", "items": RUNNER},
    ),
}
"""Written from the columns of the table, `clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql` in
github.com/pytorch/test-infra, less those that the upload adds; what is required, from "Benchmark results
format" in github.com/pytorch/pytorch/wiki/PyTorch-OSS-benchmark-infra."""


def session_of(*results: Measurement) -> SessionFile:
    return make_session(0).replace(results=results)


def records(session: SessionFile) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(hud(session), parse_constant=pytest.fail)
    jsonschema.validate(found, HUD_SCHEMA)
    return found


def samples(session: SessionFile) -> dict[tuple[str, str], tuple[float, dict[str, str]]]:
    """Value and labels by metric and case, as parsers of OpenMetrics and of the older format read them."""
    text = openmetrics(session)
    by_format = [
        {
            (sample.name, sample.labels["case"]): (sample.value, dict(sample.labels))
            for family in parse(text)
            for sample in family.samples
        }
        for parse in (
            prometheus_client.openmetrics.parser.text_string_to_metric_families,
            prometheus_client.parser.text_string_to_metric_families,
        )
    ]
    assert by_format[0] == by_format[1]
    return by_format[0]


def test_hud_has_a_record_for_each_figure_with_the_value_of_each_launch() -> None:
    (result,) = make_session(1).results
    speed, memory, outcome = records(make_session(1))
    values = [run.figures.tokens_per_s for run in result.runs]
    assert speed["metric"] == {"name": "tokens_per_s", "benchmark_values": values}
    assert memory["metric"]["name"] == "peak_memory_bytes"
    told = {"outcome": "passed", "counts": "not counted"}
    assert outcome["metric"] == {"name": "outcome", "extra_info": told}
    for each in (speed, memory, outcome):
        assert each["benchmark"]["dtype"] == "bf16-mixed"
        assert each["benchmark"]["extra_info"]["hardware_class"] == "h100-80gb-sxm"
        assert each["benchmark"]["extra_info"]["topology"] == "1x8"
        assert each["model"] == {"name": result.case_id, "backend": "fake", "type": "llama-3.1-8b"}
        assert each["dependencies"] == {"torch": {"version": "2.13.0"}}
        (runner,) = each["runners"]
        assert (runner["gpu_info"], runner["gpu_count"]) == ("NVIDIA H100 80GB HBM3", 8)
        assert runner["avail_gpu_mem_in_gb"] == 640
    (runner,), machine = records(session_of(make_result(make_run())))[0]["runners"], make_machine()
    assert runner["cpu_count"] == machine.devices
    assert runner["avail_mem_in_gb"] == round(machine.memory_bytes / 2**30)
    assert "gpu_count" not in runner


def test_openmetrics_has_gauges_with_the_case_the_class_and_the_outcome() -> None:
    (result,) = make_session(1).results
    name = 'a"b\\c\nd'
    session = session_of(result.replace(framework=name))
    value, labels = samples(session)["perfsuite_tokens_per_s", result.case_id]
    assert value == result.figures.tokens_per_s
    assert labels == {"case": result.case_id, "framework": name, "hardware_class": "h100-80gb-sxm"}
    value, labels = samples(session)["perfsuite_outcome", result.case_id]
    assert (value, labels["outcome"], labels["framework"]) == (1, "passed", name)
    assert openmetrics(session).endswith("\n# EOF\n")
    images = make_result(make_run(case=IMAGES), before=None)
    assert set(figures(images)) == {"samples_per_s", "peak_memory_bytes"}
    assert "perfsuite_samples_per_s" in openmetrics(session_of(images))


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (None, "not counted"),
        (NOT_COUNTED, "not counted"),
        (CountCheck(outcome="passed"), "passed"),
    ],
)
def test_a_case_whose_counts_are_unknown_does_not_look_as_one_whose_counts_passed(
    counts: CountCheck | None, told: str
) -> None:
    result = judged(make_result(make_run()), outcome="passed", counts=counts)
    session = session_of(result)
    for each in records(session):
        assert each["benchmark"]["extra_info"]["counts"] == told
    assert samples(session)["perfsuite_outcome", result.case_id][1]["counts"] == told


def test_no_format_has_figures_of_what_failed_or_was_unhealthy() -> None:
    cases = {result.case_id for result in EVERYTHING.results}
    left_out = {each.case_id for each in EVERYTHING.results if each.outcome in ("failed", "unhealthy")}
    shown = cases - left_out
    assert len(left_out) == 2
    found, gauges = records(EVERYTHING), samples(EVERYTHING)
    assert {each["model"]["name"] for each in found if each["metric"].get("benchmark_values")} == shown
    assert {each["model"]["name"] for each in found if each["metric"]["name"] == "outcome"} == cases
    assert {case for name, case in gauges if name == "perfsuite_tokens_per_s"} == shown
    assert {case for name, case in gauges if name == "perfsuite_outcome"} == cases


def test_launches_on_a_sick_machine_and_injected_faults_are_not_among_the_values() -> None:
    slow, usual = make_figures(tokens_per_s=1), make_figures(tokens_per_s=100)
    result = make_result(make_run(figures=slow), make_run(figures=usual), make_run(figures=usual))
    result = judged(result, outcome="passed", unhealthy_launches=(1,))
    assert figures(result)["tokens_per_s"] == [100, 100]
    injected = make_result(make_run(inject="slowdown=30%"))
    assert figures(injected) == {}


def test_what_is_not_measured_is_left_out_and_never_zero() -> None:
    result = make_result(make_run(figures=make_figures(peak_memory_bytes=None, tokens_per_s=math.inf)))
    result = result.replace(verdict=Verdict(outcome="recorded", launches=1))
    session = session_of(result)
    assert figures(result) == {}
    assert [each["metric"]["name"] for each in records(session)] == ["outcome"]
    assert list(samples(session)) == [("perfsuite_outcome", result.case_id)]
    assert {name: write(session_of()) for name, write in FORMATS.items()} == {
        "hud": "[]\n",
        "openmetrics": "# EOF\n",
    }


def test_a_case_that_was_never_launched_has_an_outcome() -> None:
    result = make_result(make_run()).replace(runs=(), verdict=Verdict(outcome="failed", launches=0))
    session = session_of(result)
    (only,) = records(session)
    assert only["metric"]["extra_info"] == {"outcome": "failed", "counts": "not counted"}
    assert "runners" not in only
    assert samples(session)["perfsuite_outcome", result.case_id][1]["outcome"] == "failed"
    (excused,) = records(session_of(result.replace(excused="known issue")))
    assert excused["metric"]["extra_info"]["outcome"] == "known issue"


def test_of_a_case_measured_twice_the_last_result_is_written() -> None:
    first, last = (
        make_result(make_run(figures=make_figures(tokens_per_s=speed)), before=None) for speed in (100, 200)
    )
    other = make_result(make_run(case=make_case(framework=Fake(step_ms=9))), before=None)
    session = session_of(first, other, last)
    assert len(newest(session)) == 2
    assert samples(session)["perfsuite_tokens_per_s", first.case_id][0] == 200
