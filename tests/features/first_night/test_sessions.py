"""Tests of the step that measures the user's cases, a few at a time. The pytest sessions are fake."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import CollectedTest
from perfsuite.doctor.rows import Row
from perfsuite.errors import CaseError
from perfsuite.features.first_night import sessions
from perfsuite.features.first_night.night import Night
from perfsuite.features.first_night.running import TimeUp, run_steps
from perfsuite.features.first_night.sessions import (
    REACHED,
    case_rows,
    marker_of,
    measured,
    number_of_cases,
    results_in,
    selected,
)
from perfsuite.features.first_night.steps import STEPS
from perfsuite.results.outcome import Verdict
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.results.store import Store
from tests.features.first_night.nights import make_night, make_record
from tests.features.first_night.test_running import Saved
from tests.samples import make_case, make_gpu_machine, make_result, make_run, make_session_file

CASES = [make_case(micro_batch=size) for size in range(1, 19)]
IDS = [case.id for case in CASES]
STORE = Store(Path("night/steps/cases/store"))


def result(case_id: str, outcome: Any) -> Measurement:
    run = make_run(case=CASES[IDS.index(case_id)], duration_s=10.0)
    return make_result(run, verdict=Verdict(outcome=outcome, launches=1))


def is_recorded(case_id: str, results: sessions.Results) -> bool:
    return case_id in results and results[case_id][0].verdict.is_recorded


@dataclass
class FakePytest:
    """Replaces pytest: a case is recorded in its first session, and passes in its second.

    The session raises `error` after `most` results. Each result is written to the store at once.
    """

    ids: Sequence[str]  # ids of all cases
    skipped: Sequence[str] = ()  # ids of the cases whose tests skip them
    lost: Sequence[str] = ()  # ids of the cases for which no result is written
    shared: Sequence[str] = ()  # ids of the cases that it measures while others use the machine
    most: float = float("inf")
    error: BaseException = field(default_factory=TimeUp)
    asked: list[list[str]] = field(default_factory=list)  # the cases of each session

    def __call__(self, words: Sequence[str], log: Path, store: Store) -> Iterator[SessionFile]:
        out = {word.removeprefix("--deselect=") for word in words if word.startswith("--deselect=")}
        left = [case_id for case_id in self.ids if case_id not in out]
        self.asked.append(left)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        before = results_in(store)
        file = store.sessions / f"session-{len(store.results())}" / "results.json"
        done: list[Measurement] = []
        for case_id in left:
            if case_id in (*self.skipped, *self.lost):
                continue
            if self.most <= 0:
                raise self.error
            self.most -= 1
            if case_id in self.shared:
                done.append(result(case_id, "unhealthy").replace(shared=True))
            else:
                done.append(result(case_id, "passed" if is_recorded(case_id, before) else "recorded"))
            documents.write(file, make_session_file(*done).replace(status="running"))
            yield documents.read(file, SessionFile)
        skips = [
            Skipped(nodeid=case_id, case_id=case_id, framework="fake", reason="later", by_test=True)
            for case_id in left
            if case_id in self.skipped
        ]
        yield make_session_file(*done).replace(skipped=tuple(skips))


@pytest.fixture(autouse=True)
def _cases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a directory of cases. pytest accepts all of them, and this machine can run them."""
    Path("bench_cases").mkdir()
    monkeypatch.setattr(sessions, "refused", lambda *words: None)
    monkeypatch.setattr(sessions, "why_not", lambda case, night: None)


def with_cases(monkeypatch: pytest.MonkeyPatch, ids: Sequence[str], **how: Any) -> FakePytest:
    tests = [CollectedTest(nodeid=case.id, case=case) for case in CASES if case.id in ids]
    fake = FakePytest(ids, **how)
    monkeypatch.setattr(sessions, "selected", lambda night: tests)
    monkeypatch.setattr(sessions, "measured", fake)
    return fake


def statuses(rows: Sequence[Row]) -> dict[str, str]:
    """Return the status of the last row of each check."""
    return {row.check: row.status for row in rows}


def night_of(record: Any, saved: Saved) -> Any:
    (step,) = [step for step in STEPS if step.name == "cases"]
    return run_steps(make_night(), record, [step], saved.how())


def test_a_few_cases_are_measured_twice_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = with_cases(monkeypatch, IDS[:8])
    rows = [*case_rows(make_night())]
    together = sessions.MOST_TOGETHER
    assert fake.asked == [IDS[:together], IDS[:together], IDS[together:8], IDS[together:8]]
    assert statuses(rows) == dict.fromkeys([REACHED, *IDS[:8]], "pass")


@pytest.mark.parametrize("error", [TimeUp(), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("most", [0, 1, 7, 16])
def test_a_cut_night_keeps_its_results_and_continues(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, most: int
) -> None:
    saved = Saved()
    with_cases(monkeypatch, IDS, most=most, error=error)
    if isinstance(error, TimeUp):
        night_of(make_record(), saved)
    else:
        with pytest.raises(type(error)):
            night_of(make_record(), saved)
    (cut,) = saved.records[-1].results
    assert not cut.is_complete
    kept = results_in(STORE)
    assert sum(map(len, kept.values())) == most
    shown = statuses(cut.rows)
    assert {case_id: shown[case_id] for case_id in kept} == {
        case_id: "pass" if len(of_case) == 2 else "unknown" for case_id, of_case in kept.items()
    }
    fake = with_cases(monkeypatch, IDS)
    (whole,) = night_of(saved.records[-1], saved).results
    assert whole.is_complete
    assert statuses(whole.rows) == dict.fromkeys([REACHED, *IDS], "pass")
    assert sum(map(len, fake.asked)) == 2 * len(IDS) - most, "nothing was measured a third time"


def test_a_killed_night_has_a_page_with_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is saved after each row. So a record with the results exists even after SIGKILL."""
    saved = Saved()
    with_cases(monkeypatch, IDS[:3], most=2, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        night_of(make_record(), saved)
    before_the_end = saved.records[-2].results[0]
    assert IDS[1] in statuses(before_the_end.rows)
    assert not before_the_end.is_complete


def test_cases_that_do_not_fit_leave_the_step_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = with_cases(monkeypatch, IDS)
    monkeypatch.setattr(sessions, "CASE_MIN", {"simulated": 1})
    left_s = [200.0, 130.0, 5.0]
    night = make_night(left_s=lambda: left_s[min(len(fake.asked), 2)])
    rows = [*case_rows(night)]
    assert fake.asked == [IDS[:3], IDS[:3]], "as many as fit twice"
    (row,) = [row for row in rows if row.check == REACHED][-1:]
    assert row.found == "not run: not reached: 3 of 18 cases done. The others take about 5 min"
    assert row.status == "unknown"


def test_a_complete_step_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cases(monkeypatch, IDS[:2])
    [*case_rows(make_night(is_continued=True))]
    fake = with_cases(monkeypatch, IDS[:2])
    [*case_rows(make_night(is_continued=True))]
    assert fake.asked == []
    [*case_rows(make_night())]
    assert fake.asked == [IDS[:2], IDS[:2]]


def test_a_case_without_a_result_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = with_cases(monkeypatch, IDS[:2], lost=IDS[:1])
    rows = statuses([*case_rows(make_night())])
    assert rows == {REACHED: "unknown", IDS[0]: "fail", IDS[1]: "pass"}
    assert len(fake.asked) == 3, "it ends"


def test_cases_of_a_busy_machine_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others use the machine, figures prove nothing. The others might be gone by the next night."""
    saved = Saved()
    fake = with_cases(monkeypatch, IDS[:2], shared=IDS[:1])
    (cut,) = night_of(make_record(), saved).results
    assert fake.asked == [IDS[:2], IDS[1:2], IDS[:1]], "a second time in the same night, but not for ever"
    assert statuses(cut.rows) == {REACHED: "unknown", IDS[0]: "unknown", IDS[1]: "pass"}
    assert not cut.is_complete
    with_cases(monkeypatch, IDS[:2])
    (whole,) = night_of(saved.records[-1], saved).results
    assert statuses(whole.rows) == dict.fromkeys([REACHED, *IDS[:2]], "pass")
    assert whole.is_complete


def test_a_busy_machine_does_not_make_sessions_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved()
    with_cases(monkeypatch, IDS, shared=IDS)
    night_of(make_record(), saved)
    fake = with_cases(monkeypatch, IDS)
    night_of(saved.records[-1], saved)
    assert max(map(len, fake.asked)) == sessions.MOST_TOGETHER


def test_a_case_that_its_test_skips_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cases(monkeypatch, IDS[:2], skipped=IDS[:1])
    rows = {row.check: row for row in case_rows(make_night())}
    assert rows[IDS[0]].found == "not run: later"
    assert rows[REACHED].status == "pass"


def test_a_case_for_a_larger_machine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = with_cases(monkeypatch, IDS[:2])

    def why_not(case: Any, night: Night) -> str | None:
        return "it needs 64 GPUs" if case.id == IDS[0] else None

    monkeypatch.setattr(sessions, "why_not", why_not)
    rows = {row.check: row for row in case_rows(make_night())}
    assert rows[IDS[0]].found == "not run: it needs 64 GPUs"
    assert rows[REACHED].status == "pass"
    assert fake.asked == [IDS[1:2]] * 2
    monkeypatch.setattr(sessions, "MOST_REFUSED", 0)
    rows = {row.check: row for row in case_rows(make_night())}
    assert rows["more cases"].found == "not run: 1 more cannot run on this machine"


def test_a_plan_counts_the_cases_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cases(monkeypatch, IDS[:3], most=2)
    with pytest.raises(TimeUp):
        [*case_rows(make_night())]
    assert number_of_cases(make_night()) == 3
    with_cases(monkeypatch, IDS[:3], most=2)
    with pytest.raises(TimeUp):
        [*case_rows(make_night(is_continued=True))]
    assert number_of_cases(make_night(is_continued=True)) == 1, "two were measured twice"
    assert number_of_cases(make_night(cases=Path("nowhere"))) == 0

    def broken(night: Night) -> None:
        raise CaseError("pytest cannot collect the cases")

    monkeypatch.setattr(sessions, "selected", broken)
    said: list[str] = []
    assert number_of_cases(make_night(say=said.append)) == 0
    assert said == ["pytest cannot collect the cases"]


def test_without_cases_it_says_how_to_write_them() -> None:
    Path("bench_cases").rmdir()
    (row,) = case_rows(make_night(machine=make_gpu_machine(), size="full"))
    assert row.found == "not run: there is no directory bench_cases"
    assert row.advice == "write cases with: perfsuite init --hardware h100"
    assert marker_of(make_gpu_machine("NVIDIA Imaginary X1")) == "gpu"
    assert marker_of(make_night().machine) == "cpu"


def test_what_pytest_refuses_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "refused", lambda *words: "pytest selects no case")
    (row,) = case_rows(make_night())
    assert row.found == "not run: pytest selects no case"
    documents.write(STORE.sessions / "a/results.json", make_session_file(result(IDS[0], "recorded")))
    rows = [*case_rows(make_night(is_continued=True))]
    assert [row.check for row in rows] == [IDS[0], "cases"], "earlier results are still shown"
    assert rows[1].found == "not run: not reached: pytest selects no case"


def test_sessions_share_a_store_without_reviewed_baselines() -> None:
    words = sessions.session_words(make_night(wait_quiet_s=7), Path("x"))
    assert "--perf-store=x/store" in words
    assert "--perf-baselines=x/none" in words
    assert "--perf-wait-quiet=7" in words
    assert not any(word.startswith("--perf-budget") for word in words), "it would spread launches"


def test_selects_the_cases_for_this_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    tests = [
        CollectedTest(nodeid="a", case=CASES[0]),
        CollectedTest(nodeid="b", case=CASES[1], left_out="deselected"),
        CollectedTest(nodeid="c", case=CASES[2], left_out="skipped: later"),
    ]

    def collect(paths: list[str], *words: str, file: Path) -> Any:
        asked.append((paths, *words))
        return SimpleNamespace(tests=tests)

    monkeypatch.setattr(sessions, "collect", collect)
    assert [test.nodeid for test in selected(make_night())] == ["a", "c"]
    assert asked[0][:3] == (["bench_cases"], "-m", "cpu")


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
    """The test writes its own `pytest.py`, which `python -m pytest` then runs instead of pytest."""
    Path("pytest.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))

    def interrupt() -> None:
        wait_for_file("begun")
        os.kill(os.getpid(), signal.SIGUSR2)

    def end(number: int, frame: object) -> None:
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR2, end)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(SystemExit):
            [*measured([], Path("session.log"), Store(Path("store")))]
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert Path("interrupted").exists()


MEASURES = """
from pathlib import Path
from perfsuite.features.first_night.sessions import measured
from perfsuite.results.store import Store
[*measured([], Path("session.log"), Store(Path("store")))]
"""


def wait_for_file(name: str) -> None:
    until = time.monotonic() + 60
    while not Path(name).exists() and time.monotonic() < until:
        time.sleep(0.05)


@pytest.mark.launch
def test_a_killed_night_leaves_no_pytest_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pytest that is left behind would measure at the same time as the next first night.

    The next first night would not see the results of this pytest.
    """
    Path("pytest.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    with subprocess.Popen([sys.executable, "-c", MEASURES]) as night:
        wait_for_file("begun")
        night.kill()
    wait_for_file("interrupted")
    assert Path("interrupted").exists()


def test_results_are_read_while_pytest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of an earlier session, and files that are not yet complete, are ignored."""
    Path("pytest.py").write_text("print('collected nothing')")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    documents.write(STORE.sessions / "a/results.json", make_session_file(result(IDS[0], "recorded")))
    log = Path("session-1.log")
    log.with_suffix(".json").write_text("{")
    assert [*measured([], log, STORE)] == []
    assert log.read_text() == "collected nothing\n"
    documents.write(log.with_suffix(".json"), make_session_file())
    assert [*measured([], log, STORE)] == [make_session_file()]


WRITES = """
import shutil, time
from pathlib import Path
store = Path("night/steps/cases/store/runs")
(store / "b").mkdir(parents=True)
shutil.copy("one.json", store / "b/results.json")
until = time.monotonic() + 30
while not Path("seen").exists() and time.monotonic() < until:
    time.sleep(0.02)
Path("two.json").rename(store / "b/results.json")
"""


def test_results_are_yielded_while_pytest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pytest.py").write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setattr(sessions, "LOOK_S", 0.02)
    numbers = []
    for number in (1, 2):
        contents = make_session_file(*(result(case_id, "recorded") for case_id in IDS[:number]))
        documents.write(Path(("one.json", "two.json")[number - 1]), contents)
    for session in measured([], Path("session-1.log"), STORE):
        numbers.append(len(session.results))
        Path("seen").touch()
    assert numbers == [1, 2]
