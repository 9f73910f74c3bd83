"""Tests of `perfsuite judge`: every line, even a broken line, gets one answer."""

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.features.logs import judge as traces
from perfsuite.features.logs.judge import seconds_per_step
from perfsuite.verdict.sequential import Noise, decide
from tests.cli.commands import run
from tests.samples import deterministic

KEYS = ["outcome", "estimate", "interval", "tolerance", "launches_used", "minimum_detectable_drop", "blind"]
BASELINE = [[s] for s in (0.991, 1.012, 0.997, 1.004, 0.985, 1.008, 1.001, 0.994, 1.003, 1.006)]
UNCHANGED = [[s] for s in (1.004, 0.993, 1.009, 0.998, 1.001, 1.012, 0.99, 1.003, 0.996, 1.0)]
QUIET = {"sigma": 0.003, "degrees_of_freedom": 30}


def trace(**changes: Any) -> dict[str, Any]:
    return {"tolerance": 0.03, "baseline": BASELINE, "launches": UNCHANGED, **changes}


def slower(launches: Sequence[Sequence[float]], drop: float) -> list[list[float]]:
    return [[s * (1 + drop) for s in series] for series in launches]


def judged(*lines: Any, status: int = 0) -> list[dict[str, Any]]:
    """Return the answer to each line. A line is bytes, or a value that is converted to JSON."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    shown = run("judge", "-", "--json", text=b"\n".join(raw) + b"\n", status=status).stdout
    answers = [json.loads(line, parse_constant=pytest.fail) for line in shown.splitlines()]
    assert len(answers) == len(lines)
    return answers


def bad(line: Any) -> tuple[str, str]:
    """Return the field and the message of the answer to a bad line. The lines around it are good."""
    before, answer, after = judged(trace(), line, trace(), status=1)
    assert before == after
    assert list(before) == KEYS
    assert set(answer) == {"error", "line", "field"}
    assert answer["line"] == 2
    return answer["field"], answer["error"]


def test_each_answer_names_its_tolerance() -> None:
    """The tolerance of 30% explains why launches that are 25% slower pass, so the answer must show it."""
    line = trace(launches=slower(UNCHANGED, 0.25), tolerance=0.3, noise=QUIET)
    (answer,) = judged(line)
    assert (answer["outcome"], answer["tolerance"]) == ("passed", 0.3)
    assert " 30.00% " in run("judge", "-", text=json.dumps(line).encode()).stdout


@pytest.mark.parametrize(
    ("drop", "outcome"), [(0.0, "passed"), (0.05, "regressed"), (0.025, "regressed"), (-0.05, "improved")]
)
def test_agrees_with_the_engine_each_launch(drop: float, outcome: str) -> None:
    launches = slower(UNCHANGED, drop)
    answer = judged(trace(launches=launches, noise=QUIET))[0]
    decision = decide(
        [series[0] for series in BASELINE],
        [series[0] for series in launches[: answer["launches_used"]]],
        tolerance=0.03,
        noise=Noise(sigma=QUIET["sigma"], degrees_of_freedom=QUIET["degrees_of_freedom"]),
        max_launches=10,
    )
    assert answer["outcome"] == decision.outcome == outcome
    assert answer["estimate"] == pytest.approx(decision.estimate)
    assert answer["estimate"] == pytest.approx(drop, abs=0.01)
    assert answer["interval"] == pytest.approx(list(decision.interval))
    assert answer["minimum_detectable_drop"] == decision.minimum_detectable_drop


def test_the_tolerance_follows_from_the_noise_of_a_line() -> None:
    assert judged(trace(launches=slower(UNCHANGED, 0.05)))[0]["launches_used"] == 3


@pytest.mark.parametrize("drop", [0.0, 0.05, 0.025, -0.05])
def test_a_quiet_line_is_not_blind(drop: float) -> None:
    assert judged(trace(launches=slower(UNCHANGED, drop), noise=QUIET))[0]["blind"] is False


def test_a_noisy_line_is_blind() -> None:
    assert judged(trace(noise=NOISY))[0]["blind"] is True


NOISY = {"sigma": 0.05, "degrees_of_freedom": 30}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"launches": UNCHANGED[:1], "noise": QUIET}, "passed"),
        ({"launches": UNCHANGED[:1], "noise": NOISY}, "inconclusive"),
        ({"launches": slower(UNCHANGED[:1], 0.05), "noise": QUIET}, "inconclusive"),
        ({"launches": slower(UNCHANGED[:2], 10), "noise": QUIET}, "inconclusive"),
        ({"launches": slower(UNCHANGED[:2], -0.2), "noise": QUIET}, "passed"),
        ({"launches": slower(UNCHANGED[:2], -0.2), "noise": QUIET, "max_launches": 10}, "passed"),
        ({"baseline": BASELINE[:1], "noise": QUIET}, "passed"),
        ({"launches": slower(UNCHANGED, 0.05), "noise": {**QUIET, "session_sigma": 0.05}}, "inconclusive"),
    ],
    ids=["clear", "unclear", "one slower", "two slower", "two faster", "two of ten", "one before", "drift"],
)
def test_few_launches_show_no_regression(changes: dict[str, Any], outcome: str) -> None:
    assert judged(trace(**changes))[0]["outcome"] == outcome


def test_uses_at_most_fifteen_launches() -> None:
    doubtful = {
        "launches": [[1.02 + 0.001 * (number % 3)] for number in range(40)],
        "noise": {"sigma": 0.03, "degrees_of_freedom": 30},
    }
    plenty, fewer = judged(trace(**doubtful), trace(**doubtful, max_launches=4))
    assert plenty["launches_used"] <= 15
    assert fewer["launches_used"] <= 4
    assert fewer["minimum_detectable_drop"] > plenty["minimum_detectable_drop"]
    assert fewer["outcome"] == "inconclusive"


SCATTER = 'Give 3 or more launches in "baseline", or "noise": {"sigma": '


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        (b"  \t", "(whole)", "blank"),
        (b"{", "(whole)", "not JSON: EOF"),
        (b"[" * 100_000, "(whole)", "not JSON: recursion limit"),
        (b"9" * 10_000, "(whole)", ""),
        ([], "(whole)", "object"),
        ({}, "tolerance", "required, but missing: tolerance, baseline, launches"),
        (trace(tolerence=0.03), "tolerence", "unknown field; remove it or correct its name"),
        (trace(**{"k" * 10_000: 1}), "k" * 97 + "...", "kkk..."),
        (trace(tolerance=0), "tolerance", "greater than 0, got 0"),
        (trace(tolerance=1), "tolerance", "less than 1, got 1"),
        (trace(tolerance=math.nan), "tolerance", "finite number"),
        (trace(tolerance="3%"), "tolerance", "valid number, got '3%'"),
        (trace(tolerance=True), "tolerance", "valid number, got True"),
        (trace(launches=[]), "launches", "at least 1 item"),
        (trace(launches=[0.1, 0.2]), "launches.0", "got 0.1"),
        (trace(launches=[[0.1], []]), "launches.1", "at least 1 item"),
        (trace(launches=[[0.1], [0.1, -0.1]]), "launches.1.1", "greater than 0, got -0.1"),
        (trace(launches=[["0.1"]]), "launches.0.0", "valid number, got '0.1'"),
        (trace(baseline=[[0.1], [math.nan]]), "baseline.1.0", "finite number"),
        (b'{"tolerance": 0.03, "baseline": [[1e999]], "launches": [[1]]}', "baseline.0.0", "finite number"),
        (trace(baseline=[[1e305]]), "baseline.0.0", "less than 1000000000000000, got 1e+305"),
        (trace(baseline=[[10**400]]), "baseline.0.0", ""),
        (trace(max_launches=2), "max_launches", "greater than or equal to 3, got 2"),
        (trace(max_launches=10**30), "max_launches", "less than or equal to 1000"),
        (trace(max_launches=5.0), "max_launches", "valid integer"),
        (trace(noise={"sigma": 0.01}), "noise.degrees_of_freedom", "Field required"),
        (trace(noise={**QUIET, "sigma": 0}), "noise.sigma", "greater than 0"),
        (trace(noise={**QUIET, "sigma": 1}), "noise.sigma", "less than 1"),
        (trace(noise={**QUIET, "degrees_of_freedom": 0}), "noise.degrees_of_freedom", "greater than 0"),
        (trace(noise={**QUIET, "degrees_of_freedom": 1e308}), "noise.degrees_of_freedom", "less than"),
        (trace(noise=0.01), "noise", "got 0.01"),
        (
            trace(baseline=BASELINE[:1]),
            "noise",
            f"cannot be estimated from a baseline of 1. {SCATTER}",
        ),
        (trace(baseline=BASELINE[:2]), "noise", f"of 2. {SCATTER}0.01, "),
    ],
    ids=itertools.count(),
)
def test_bad_line_names_its_field_and_others_go_on(line: Any, field: str, message: str) -> None:
    named, error = bad(line)
    assert named == field
    assert message in error
    assert len(error) <= 600


def test_the_whole_file_is_answered_line_by_line() -> None:
    text = json.dumps(trace())
    answers = judged(b"\xef\xbb\xbf" + text.encode() + b"\r", b"", trace(), b"{", trace(), status=1)
    assert [answer.get("line") for answer in answers] == [None, 2, None, 4, None]
    assert len(run("judge", "-", "--json", text=text).stdout.splitlines()) == 1, "the end has no newline"


def test_answers_each_line_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def lines() -> Iterator[bytes]:
        for number in range(3):
            assert len(said) == number
            yield json.dumps(trace()).encode()

    all_lines = lines()
    stream = SimpleNamespace(readline=lambda most: next(all_lines, b""))
    monkeypatch.setattr(typer, "echo", said.append)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    traces.judge(files=["-"], as_json=True)
    assert len(said) == 3


def test_a_table_has_a_row_for_each_line(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    slow = trace(launches=slower(UNCHANGED, 0.05))
    lines = [trace(), slow, trace(noise=NOISY), trace(**{"\x1b[31m": 1})]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = run("judge", file, status=1)
    rows = result.output.splitlines()
    assert rows[1].split()[:2] == ["1", "passed"]
    assert rows[2].split()[:2] == ["2", "regressed"]
    assert rows[3].endswith("blind")
    assert "bad line" in rows[4]
    assert "\x1b" not in result.output
    assert rows[5] == "1 bad, 1 inconclusive, 1 passed, 1 regressed"


@pytest.mark.parametrize("name", ["missing", ""], ids=["missing", "a directory"])
def test_names_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    assert f"cannot read {file}: " in run("judge", file, "--json", status=2).stderr


def test_says_that_an_empty_file_was_not_judged() -> None:
    nothing = run("judge", "-", "--json", text="", status=1)
    assert nothing.stdout == ""
    assert "is empty, so nothing was judged" in nothing.stderr


def real_steps(seed: int, *, level: float = 0.2, count: int = 70, warmup: int = 8) -> list[float]:
    """Return realistic steps: the first are slow, the noise is correlated, and some take twice as long."""
    random = Random(seed)
    steps = []
    drift = 0.0
    for step in range(count):
        drift = 0.8 * drift + random.gauss(0, 0.01)
        slow = 1.5 if step < warmup else 2.0 if random.random() < 0.06 else 1.0
        steps.append(level * math.exp(drift) * slow)
    return steps


@pytest.mark.parametrize(("count", "warmup"), [(5, 1), (14, 4), (15, 4), (30, 8), (70, 20), (300, 20)])
def test_slow_starts_and_stalls_move_nothing(count: int, warmup: int) -> None:
    estimates = [seconds_per_step(real_steps(seed, count=count, warmup=warmup)) for seed in range(20)]
    assert estimates == pytest.approx([0.2] * 20, rel=0.08)


def test_short_series_use_a_median_long_a_window() -> None:
    assert [seconds_per_step(series) for series in ([9.0, 1.0, 2.0], [1.0, 2.0])] == [2.0, 1.5]
    assert seconds_per_step([2.0] * 20 + [1.0] * 24 + [1.01] * 26) == 1.01
    assert seconds_per_step([2.0] * 4 + [1.0] * 11) == 1.0


@pytest.mark.parametrize(("drop", "outcome"), [(0.0, "passed"), (0.08, "regressed")])
def test_finds_a_real_drop_without_alarms(drop: float, outcome: str) -> None:
    noise = {"sigma": 0.01, "degrees_of_freedom": 30}
    baseline = [real_steps(seed) for seed in range(10)]
    launches = [real_steps(seed, level=0.2 * (1 + drop)) for seed in range(100, 115)]
    assert judged(trace(baseline=baseline, launches=launches, noise=noise))[0]["outcome"] == outcome


seconds = st.floats(min_value=0, max_value=1e15, exclude_min=True, exclude_max=True)
series = st.lists(st.lists(seconds, min_size=1, max_size=20), min_size=1, max_size=6)
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
freedom = st.floats(0, 1e9, exclude_min=True)
noises = st.none() | st.fixed_dictionaries({"sigma": shares, "degrees_of_freedom": freedom})


@deterministic
@given(series, series, noises, shares)
def test_answers_in_strict_json_for_any_seconds(
    baseline: list[list[float]], launches: list[list[float]], noise: Any, tolerance: float
) -> None:
    line = {"tolerance": tolerance, "baseline": baseline, "launches": launches, "noise": noise}
    text = traces.as_json(traces.answer(1, json.dumps(line).encode()))
    answer = json.loads(text, parse_constant=pytest.fail)
    if noise is None and len(baseline) < 3:
        assert answer["field"] == "noise"
    else:
        assert answer["outcome"] in ("passed", "improved", "regressed", "inconclusive")
        assert 1 <= answer["launches_used"] <= len(launches)


@deterministic
@given(st.binary(max_size=200))
def test_whatever_the_bytes_there_is_an_answer(line: bytes) -> None:
    assert json.loads(traces.as_json(traces.answer(2, line)))["line"] == 2


def test_equal_fields_of_a_line_are_refused() -> None:
    line = json.dumps(trace()).replace("{", '{"tolerance": 0.9, ', 1).encode()
    assert bad(line) == ("(whole)", "not JSON: the field 'tolerance' appears twice")
