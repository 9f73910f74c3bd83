"""Tests of each format against its published description, and with the format's parser if there is one."""

import json
import math
from typing import Any

import jsonschema
import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest

from perfsuite.features.exports.formats import FORMATS, figures, hud, newest, openmetrics
from perfsuite.frameworks.fake import Fake
from perfsuite.results.outcome import CountCheck, Verdict
from perfsuite.results.session_file import Measurement, SessionFile
from tests.counted import NOT_COUNTED
from tests.samples import IMAGES, judged, make_case, make_figures, make_machine, make_result, make_run
from tests.sessions import KINDS, make_session

Schema = dict[str, Any]
TEXT = {"type": "string"}
NUMBER = {"type": "number"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
WORDS = {"type": "object", "additionalProperties": TEXT}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(required: list[str], words: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object with these properties. The properties named in `words` are texts.

    With such properties, the object can also have `extra_info`, which contains more texts.
    """
    properties |= {**dict.fromkeys(words.split(), TEXT), "extra_info": WORDS} if words else {}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


COUNTS = dict.fromkeys(("cpu_count", "avail_mem_in_gb", "gpu_count", "avail_gpu_mem_in_gb"), COUNT)
HUD_SCHEMA = many(
    record(
        ["benchmark", "model", "metric"],
        benchmark=record(["name"], "name mode dtype"),
        model=record(["name"], "name type backend", origins=many(TEXT)),
        metric=record(["name"], "name", benchmark_values=many(NUMBER), target_value=NUMBER),
        inputs={"type": "object", "additionalProperties": record([], "dtype")},
        dependencies={"type": "object", "additionalProperties": record([], "repo branch sha version")},
        runners=many(record([], "name type cpu_info mem_info gpu_info gpu_mem_info", **COUNTS)),
    )
)
"""The schema follows the columns of the table `clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql` in
github.com/pytorch/test-infra, without the columns that the upload adds. The required fields follow "Benchmark
results format" in github.com/pytorch/pytorch/wiki/PyTorch-OSS-benchmark-infra."""


def session_of(*results: Measurement) -> SessionFile:
    return make_session(0).replace(results=results)


def records(*results: Measurement) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(hud(session_of(*results)), parse_constant=pytest.fail)
    jsonschema.validate(rows, HUD_SCHEMA)
    return rows


def samples(*results: Measurement) -> dict[tuple[str, str], tuple[float, dict[str, str]]]:
    """Return the value and the labels of each metric and case.

    The parser of OpenMetrics and the parser of the older format must agree.
    """
    text = openmetrics(session_of(*results))
    assert text.endswith("# EOF\n")
    new, old = (
        {
            (sample.name, sample.labels["case"]): (sample.value, dict(sample.labels))
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }
        for parser in (prometheus_client.openmetrics.parser, prometheus_client.parser)
    )
    assert new == old
    return new


def of_gpus() -> Measurement:
    (result,) = make_session(1).results
    return result


def test_hud_has_a_record_for_each_figure() -> None:
    result = of_gpus()
    speed, memory, outcome = records(result)
    values = [run.figures.tokens_per_s for run in result.runs]
    assert speed["metric"] == {"name": "tokens_per_s", "benchmark_values": values}
    assert memory["metric"]["name"] == "peak_memory_bytes"
    expected = {"outcome": "passed", "counts": "not counted"}
    assert outcome["metric"] == {"name": "outcome", "extra_info": expected}


@pytest.mark.parametrize("record", records(of_gpus()), ids=["speed", "memory", "outcome"])
def test_each_record_names_the_case_and_its_hardware(record: dict[str, Any]) -> None:
    extra_info = record["benchmark"]["extra_info"]
    assert (extra_info["hardware_class"], extra_info["topology"]) == ("h100-80gb-sxm", "1x8")
    assert record["benchmark"]["dtype"] == "bf16-mixed"
    assert record["model"] == {"name": of_gpus().case_id, "backend": "fake", "type": "llama-3.1-8b"}
    assert record["dependencies"] == {"torch": {"version": "2.13.0"}}


@pytest.mark.parametrize("record", records(of_gpus()), ids=["speed", "memory", "outcome"])
def test_each_record_describes_the_gpus(record: dict[str, Any]) -> None:
    (runner,) = record["runners"]
    assert (runner["gpu_info"], runner["gpu_count"]) == ("NVIDIA H100 80GB HBM3", 8)
    assert runner["avail_gpu_mem_in_gb"] == 640


def test_a_record_of_a_cpu_describes_its_cores() -> None:
    (runner,) = records(make_result(make_run()))[0]["runners"]
    machine = make_machine()
    memory_gib = round(machine.memory_bytes / 2**30)
    assert (runner["cpu_count"], runner["avail_mem_in_gb"]) == (machine.devices, memory_gib)
    assert "gpu_count" not in runner


def test_openmetrics_has_labelled_gauges() -> None:
    (result,) = make_session(1).results
    name = 'a"b\\c\nd'
    gauges = samples(result.replace(framework=name))
    common = {"case": result.case_id, "framework": name, "hardware_class": "h100-80gb-sxm"}
    assert gauges["perfsuite_tokens_per_s", result.case_id] == (result.figures.tokens_per_s, common)
    expected = {"outcome": "passed", "counts": "not counted"}
    assert gauges["perfsuite_outcome", result.case_id] == (1, common | expected)
    images = make_result(make_run(case=IMAGES), before=None)
    assert set(figures(images)) == {"samples_per_s", "peak_memory_bytes"}
    assert ("perfsuite_samples_per_s", IMAGES.id) in samples(images)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [(None, "not counted"), (NOT_COUNTED, "not counted"), (CountCheck(outcome="passed"), "passed")],
    ids=["none", "not counted", "passed"],
)
def test_unknown_counts_differ_from_passed_ones(counts: CountCheck | None, expected: str) -> None:
    result = judged(make_result(make_run()), outcome="passed", counts=counts)
    assert {row["benchmark"]["extra_info"]["counts"] for row in records(result)} == {expected}
    assert samples(result)["perfsuite_outcome", result.case_id][1]["counts"] == expected


def test_no_format_shows_failed_figures() -> None:
    results = make_session(len(KINDS)).results
    cases = {result.case_id for result in results}
    shown = {result.case_id for result in results if result.outcome not in ("failed", "unhealthy")}
    assert len(shown) == len(cases) - 2
    rows = records(*results)
    gauges = samples(*results)
    assert {row["model"]["name"] for row in rows if row["metric"].get("benchmark_values")} == shown
    assert {row["model"]["name"] for row in rows if row["metric"]["name"] == "outcome"} == cases
    assert {case for name, case in gauges if name == "perfsuite_tokens_per_s"} == shown
    assert {case for name, case in gauges if name == "perfsuite_outcome"} == cases


def test_omits_figures_of_an_unhealthy_launch() -> None:
    slow, usual = (make_run(figures=make_figures(tokens_per_s=speed)) for speed in (1, 100))
    sick = judged(make_result(slow, usual, usual), outcome="passed", unhealthy_launches=(1,))
    assert figures(sick)["tokens_per_s"] == [100, 100]


def test_omits_figures_of_an_injected_fault() -> None:
    assert figures(make_result(make_run(inject="slowdown=30%"))) == {}


def test_omits_unmeasured_figures() -> None:
    nothing = make_result(make_run(figures=make_figures(peak_memory_bytes=None, tokens_per_s=math.inf)))
    nothing = nothing.replace(verdict=Verdict(outcome="recorded", launches=1))
    assert figures(nothing) == {}
    assert [row["metric"]["name"] for row in records(nothing)] == ["outcome"]
    assert list(samples(nothing)) == [("perfsuite_outcome", nothing.case_id)]


def test_a_session_without_results_is_empty() -> None:
    empty = {name: write(session_of()) for name, write in FORMATS.items()}
    assert empty == {"hud": "[]\n", "openmetrics": "# EOF\n"}


def test_exports_unlaunched_outcomes() -> None:
    result = make_result(make_run()).replace(runs=(), verdict=Verdict(outcome="failed", launches=0))
    (only,) = records(result)
    (excused,) = records(result.replace(excused="known issue"))
    assert only["metric"]["extra_info"] == {"outcome": "failed", "counts": "not counted"}
    assert "runners" not in only
    assert samples(result)["perfsuite_outcome", result.case_id][1]["outcome"] == "failed"
    assert excused["metric"]["extra_info"]["outcome"] == "known issue"


def test_exports_the_newest_result_of_a_case() -> None:
    first, last = (
        make_result(make_run(figures=make_figures(tokens_per_s=speed)), before=None) for speed in (100, 200)
    )
    other = make_result(make_run(case=make_case(framework=Fake(step_ms=9))), before=None)
    assert len(newest(session_of(first, other, last))) == 2
    assert samples(first, other, last)["perfsuite_tokens_per_s", first.case_id][0] == 200
