"""Tests of two sessions of the user's cases."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.features.first_night import sessions
from perfsuite.features.first_night.sessions import case_rows, compared, marker_of, measured, session_words
from perfsuite.results.baseline import from_runs
from perfsuite.results.outcome import Check, CountCheck, Verdict
from perfsuite.results.rank_report import Observed
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.verdict.unchanged import unless_unchanged
from tests.features.first_night.nights import by_check, make_night
from tests.samples import make_case, make_gpu_machine, make_result, make_run, make_session_file, metric_check
from tests.twin_counts import launch

CASES = [make_case(micro_batch=size) for size in range(1, 7)]


def result(number: int, outcome: Any, **changes: Any) -> Measurement:
    verdict = Verdict(outcome=outcome, launches=3, **changes)
    return make_result(make_run(case=CASES[number]), verdict=verdict)


def check(**changes: Any) -> Check:
    usual: dict[str, Any] = {
        "metric": "tokens_per_s",
        "label": "tokens/s",
        "unit": "tokens/s",
        "outcome": "passed",
    }
    return Check(**{**usual, "measured": 1.0, "baseline": 1.0, "allowed": 0.03, **changes})


def test_only_steady_cases_are_fit() -> None:
    recorded = [result(number, "recorded") for number in range(4)]
    first = make_session_file(*recorded, result(4, "failed", reasons=("OOM",)), result(5, "unhealthy"))
    skipped = Skipped(nodeid="n", case_id="big", framework="fake", reason="it needs 8 GPUs")
    second = make_session_file(
        result(0, "passed", checks=(check(minimum_detectable=0.01),)),
        result(1, "passed", checks=(check(minimum_detectable=0.2),)),
        result(2, "regressed", reasons=("slower",)),
    )
    rows = by_check(compared(first.replace(skipped=(skipped,)), second))
    statuses = [rows[case.id].status for case in CASES]
    assert statuses == ["pass", "unknown", "fail", "unknown", "fail", "unknown"]
    detects = "changes of {} or more in tokens/s can be detected"
    assert rows[CASES[0].id].found.endswith(f"then passed; {detects.format('1.0%')}")
    allowed = "and the allowed change is 3.0%"
    assert rows[CASES[1].id].found == f"passed, but only {detects.format('20.0%')}, {allowed}"
    assert rows[CASES[3].id].found == "recorded, but not measured again"
    assert rows["big"].found == "not run: it needs 8 GPUs"
    assert {row.status for row in compared(first, None)} == {"unknown", "fail"}


@pytest.mark.parametrize(
    ("outcome", "change", "status", "shown"),
    [("regressed", -0.12, "fail", "-12.0%"), ("improved", 0.07, "unknown", "+7.0%")],
)
def test_sessions_that_differ_are_not_fit(outcome: Any, change: float, status: str, shown: str) -> None:
    """Nothing changed between the sessions, so the real rule blames the machine for the second verdict."""
    seen = Observed(settings={}, environment={"torch": "2.13.0"}, code="0123456789ab")
    run = launch(observed=seen)
    judged = Verdict(
        outcome=outcome,
        launches=3,
        checks=(metric_check(outcome=outcome, metric="tokens_per_s", change=change),),
        counts=CountCheck(outcome="passed"),
    )
    verdict = unless_unchanged(judged, [run] * 3, from_runs([run] * 3))
    assert verdict.outcome != outcome, "the rule applies"
    first = make_session_file(make_result(run, verdict=Verdict(outcome="recorded", launches=3)))
    (row,) = compared(first, make_session_file(make_result(run, verdict=verdict)))
    assert row.status == status
    assert row.found == f"two sessions of the same code differ: tokens/s {shown}"


@pytest.mark.parametrize("excuse", ["known issue", "out of memory"])
def test_excused_cases_are_not_failed(excuse: Any) -> None:
    bad = result(0, "failed", failure="crash").replace(excused=excuse)
    (row,) = compared(make_session_file(bad), None)
    assert (row.status, row.found) == ("unknown", f"no baseline: {excuse}: crash")
    good = make_session_file(result(0, "recorded"))
    (row,) = compared(good, make_session_file(bad))
    assert (row.status, row.found) == ("unknown", f"recorded, then {excuse}: crash")
    waived = result(0, "regressed").replace(excused="waived")
    (row,) = compared(good, make_session_file(waived))
    assert row.status == "unknown"


def test_a_session_without_a_case_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bench_cases").mkdir()
    monkeypatch.setattr(sessions, "refused", lambda *words: None)
    monkeypatch.setattr(sessions, "measured", lambda night, words, out: make_session_file())
    (row,) = case_rows(make_night())
    assert (row.status, row.found) == ("unknown", "the first session measured no case")


def test_without_cases_it_says_how_to_write_them() -> None:
    (row,) = case_rows(make_night(machine=make_gpu_machine(), size="full"))
    assert row.found == "not run: there is no directory bench_cases"
    assert row.advice == "write cases with: perfsuite init --hardware h100"
    assert marker_of(make_gpu_machine("NVIDIA Imaginary X1")) == "gpu"
    assert marker_of(make_night().machine) == "cpu"


def test_both_sessions_have_half_of_the_time() -> None:
    words = session_words(make_night(left_s=lambda: 1000.0, wait_quiet_s=7), Path("x"))
    assert "--perf-budget=480s" in words
    assert "--perf-wait-quiet=7" in words
    assert not any(word.startswith("--perf-budget") for word in session_words(make_night(), Path("x")))


def test_what_pytest_refuses_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bench_cases").mkdir()
    monkeypatch.setattr(sessions, "refused", lambda *words: "pytest selects no case")
    (row,) = case_rows(make_night())
    assert row.found == "not run: pytest selects no case"
    monkeypatch.setattr(sessions, "refused", lambda *words: None)
    monkeypatch.setattr(sessions, "measured", lambda night, words, out: None)
    (row,) = case_rows(make_night())
    assert (row.status, row.found) == ("fail", "the first session wrote no results")


def test_the_second_session_has_the_first_as_its_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bench_cases").mkdir()
    asked: list[tuple[str, ...]] = []

    def measured(night: object, words: list[str], out: Path) -> SessionFile:
        asked.append((out.name, *words))
        outcome = "recorded" if out.name == "first" else "passed"
        return make_session_file(result(0, outcome))

    monkeypatch.setattr(sessions, "refused", lambda *words: None)
    monkeypatch.setattr(sessions, "measured", measured)
    (row,) = case_rows(make_night())
    assert (row.check, row.status) == (CASES[0].id, "pass")
    first, second = asked
    assert (first[0], second[0]) == ("first", "second")
    assert first[1:] == second[1:]
    assert "--perf-store=night/steps/cases/store" in first


SLEEPS = """
import signal, sys, time
from pathlib import Path
try:
    Path("begun").touch()
    time.sleep(60)
except KeyboardInterrupt:
    Path("interrupted").touch()
"""


def test_an_interrupt_lets_pytest_write_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m pytest` runs the `pytest.py` that the test writes into the current directory."""
    Path("pytest.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    Path("out").mkdir()

    def interrupt() -> None:
        until = time.monotonic() + 30
        while not Path("begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR2)

    def end(number: int, frame: object) -> None:
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR2, end)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(SystemExit):
            measured(make_night(), [], Path("out/first"))
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert Path("interrupted").exists()


def test_results_are_read_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out/first").mkdir(parents=True)
    Path("pytest.py").write_text("print('collected nothing')")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    assert measured(make_night(), [], Path("out/first")) is None
    assert Path("out/first.log").read_text() == "collected nothing\n"
    documents.write(Path("out/first/results.json"), make_session_file())
    assert measured(make_night(), [], Path("out/first")) == make_session_file()
