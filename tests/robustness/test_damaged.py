"""Tests of which improved results `tests.benchmarks.damaged` counts as wrong, and which it excuses."""

import json
from typing import Any

import pytest

from tests.benchmarks.damaged.running import Said, words_of
from tests.benchmarks.damaged.shown import Kind, excuse
from tests.samples import make_baseline, make_launches
from tests.suite import waiver

HEADING = "This branch changes the files that judge it, compared with 0123abcd0123:\n"
BASELINE = make_baseline(*make_launches(1.0))
SLOWER = make_baseline(*make_launches(0.3))
INI = "[pytest]\nperf_missing_baseline = fail\n"
LATE = waiver(tolerated="99%", until="2020-01-01")
TRACE = {"tolerance": 0.03, "baseline": [[0.1]] * 3, "launches": [[0.2]] * 3}


def excused(kind: Kind, before: str, now: str, output: str = "", *, usual: str = "", name: str = "") -> Any:
    return excuse(kind, name, before.encode(), now.encode(), output, usual)


@pytest.mark.parametrize(
    ("kind", "name", "before", "now"),
    [
        ("settings", "pytest.ini", INI, f"# a comment\n{INI.replace(' ', '')}"),
        ("waivers", "perf-waivers.toml", LATE, f"# a comment\n{LATE}"),
        ("baseline", "x.json", BASELINE.as_json(), json.dumps(json.loads(BASELINE.as_json()))),
        ("sealed", "results.json", '{"a": 1}', '{ "a":1 }'),
    ],
)
def test_equivalent_document_is_excused(kind: Kind, name: str, before: str, now: str) -> None:
    assert excused(kind, before, now, name=name) == "equal"


@pytest.mark.parametrize(
    "now", ['{"a": 2}', '{"a": true}', '{"a": 1.0}', "{}", '{"a": 1', '{"a": 1, "a": 1}']
)
def test_other_perfsuite_document_is_not_excused(now: str) -> None:
    assert excused("sealed", '{"a": 1}', now, f"{HEADING}  everything changed\n") is None


@pytest.mark.parametrize("damage", ["fifo", "device", "dangling"])
def test_what_is_no_file_is_not(damage: str) -> None:
    assert (
        excuse("settings", "pytest.ini", INI.encode(), damage, f"{HEADING}  perf_missing_baseline\n", "")
        is None
    )


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (f"{HEADING}  pytest.ini: perf_missing_baseline fail -> not set\n", "shown"),
        (f"{HEADING}  pytest.ini: perf_strict inconclusive -> not set\n", None),
        (f"{HEADING}  pytest.ini, of perf_missing_baseline, cannot be read now\n", None),
        ("pytest.ini: perf_missing_baseline fail -> not set\n", None),
        ("", None),
    ],
)
def test_a_setting_has_to_be_in_a_sentence(output: str, reason: str | None) -> None:
    assert excused("settings", INI, "[pytest]\n", output, name="pytest.ini") == reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("waiver of fake-* on tokens/s: until 2020-01-01 -> 2120-01-01", "shown"),
        ("waiver of fake-* on tokens/s: tolerated 9% -> 99%", None),
    ],
)
def test_waiver_field_must_be_in_a_sentence(line: str, reason: str | None) -> None:
    now = LATE.replace("2020-", "2120-")
    assert excused("waivers", LATE, now, f"{HEADING}  {line}\n", name="perf-waivers.toml") == reason


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("  x 3.33 slower\n  x 3.33 slower with stalls\n", "shown"),
        ("  x 3.33 slower\n", None),
        ("  nothing that is judged has changed\n", None),
    ],
)
def test_judged_figure_must_be_in_a_sentence(sentence: str, reason: str | None) -> None:
    assert excused("baseline", BASELINE.as_json(), SLOWER.as_json(), HEADING + sentence) == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("     1  passed  +90.00%  tolerance 99.00%\n", "shown"),
        ("     1  passed  +90.00%\n", None),
        ("     1  regressed  +90.00%  tolerance 3.00%\n", None),
        ("", None),
    ],
)
def test_a_trace_has_to_show_its_tolerance(row: str, reason: str | None) -> None:
    before = json.dumps(TRACE)
    now = json.dumps({**TRACE, "tolerance": 0.99})
    usual = "     1  regressed  +90.00%  tolerance 3.00%\n"
    assert excused("traces", before, now, row, usual=usual) == reason


def test_a_file_without_traces_is_not_excused() -> None:
    assert excused("traces", json.dumps(TRACE), "", "is empty, so nothing was judged\n") is None


RED = Said(1, ("regressed",), "")


@pytest.mark.parametrize(
    ("said", "usual", "is_better"),
    [
        (Said(0, ("regressed",), ""), RED, True),
        (Said(1, ("inconclusive",), ""), RED, True),
        (Said(2, (), ""), RED, False),
        (Said(2, ("passed",), ""), RED, False),
        (Said(0, (), ""), Said(0, ("regressed",), ""), True),
        (Said(0, ("failed",), ""), Said(0, ("regressed",), ""), False),
        (Said(0, ("failed",), "", True), Said(0, ("failed", "regressed"), "", True), True),
        (Said(0, ("failed", "passed"), "", True), Said(0, ("failed",), "", True), False),
    ],
)
def test_what_is_greener(said: Said, usual: Said, is_better: bool) -> None:
    assert said.is_better_than(usual) == is_better


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (("pytest", "x"), "a case failed\nVERDICT regressed\n", ("regressed",)),
        (
            ("history", "failures"),
            "cpu  id  2026-01-02 0123abcd  regressed (shadow)  no\n0 failed",
            ("regressed",),
        ),
        (("history", "failures", "--json"), '[{"verdict": "failed"}]', ("failed",)),
        (("history", "trend"), "  tokens/s: -23.0% (99% interval -1.0% to +1.0%): worse\n", ("worse",)),
        (("history", "trend"), "  tokens/s: -23.0% (a): worse, accepted\n1 still worse, 0 others\n", ()),
        (("history", "trend", "--json"), '"open": true', ("worse",)),
        (("judge", "t"), "     1  passed  +1%\n     2  regressed  +9%\n1 passed", ("passed", "regressed")),
        (("report", "r", "--out", "out"), "written: failed\nVERDICT passed\n", ("passed",)),
        (("report", "r"), "1 regressed", ("regressed",)),
    ],
)
def test_the_verdicts_in_an_output(command: tuple[str, ...], text: str, words: tuple[str, ...]) -> None:
    assert words_of(command, text)[0] == words
