"""Tests of the step that measures the user's cases, a few at a time. What pytest measures is fake."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case, CollectedTest, Topology
from perfsuite.doctor.rows import Row
from perfsuite.features.first_night import sessions
from perfsuite.features.first_night.running import TimeUp, run_steps
from perfsuite.features.first_night.sessions import (
    CASE_MIN,
    MOST_REFUSED,
    REACHED,
    case_rows,
    marker_of,
    number_of_cases,
    results_in,
    selected,
)
from perfsuite.features.first_night.steps import STEPS
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.results.store import Store
from tests.features.first_night.nights import collects, make_night, make_record, measurement
from tests.features.first_night.test_running import Saved
from tests.samples import make_case, make_gpu_machine, make_session_file

CASES = [make_case(micro_batch=size) for size in range(1, 19)]
IDS = [case.id for case in CASES]
STORE = Store(Path("night/steps/cases/store"))


def result(case_id: str, outcome: Any) -> Measurement:
    return measurement(CASES[IDS.index(case_id)], outcome)


def is_recorded(case_id: str, results: sessions.Results) -> bool:
    return case_id in results and results[case_id][0].verdict.is_recorded


@dataclass
class FakePytest:
    """Replaces `measured`: a case is recorded in its first session, and passes in its second.

    The session raises `error` after `most` results. Each result is written to the store at once.
    """

    ids: Sequence[str]  # ids of all cases that this machine can run
    others: Sequence[Case] = ()  # cases that it cannot run
    skipped: Sequence[str] = ()  # ids of the cases whose tests skip them
    lost: Sequence[str] = ()  # ids of the cases for which no result is written
    shared: Sequence[str] = ()  # ids of the cases that it measures while others use the machine
    most: float = float("inf")
    error: BaseException = field(default_factory=TimeUp)
    asked: list[list[str]] = field(default_factory=list)  # the cases of each session

    def __post_init__(self) -> None:
        collects(*(CollectedTest(nodeid=case.id, case=case) for case in self.cases))

    @property
    def cases(self) -> list[Case]:
        return [*(case for case in CASES if case.id in self.ids), *self.others]

    def rows(self, **of_night: Any) -> list[Row]:
        """Return the rows of the step."""
        return [*case_rows(make_night(**of_night), measured=self)]

    def __call__(self, words: Sequence[str], log: Path, store: Store) -> Iterator[SessionFile]:
        out = {word.removeprefix("--deselect=") for word in words if word.startswith("--deselect=")}
        left = [case.id for case in self.cases if case.id not in out]
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
def _cases() -> None:
    """Make a directory of cases."""
    Path("bench_cases").mkdir()


def statuses(rows: Sequence[Row]) -> dict[str, str]:
    """Return the status of the last row of each check."""
    return {row.check: row.status for row in rows}


def night_of(record: Any, saved: Saved, fake: FakePytest) -> Any:
    (step,) = [step for step in STEPS if step.name == "cases"]
    with_fake = replace(step, run=partial(case_rows, measured=fake))
    return run_steps(make_night(), record, [with_fake], saved.how())


def test_a_few_cases_are_measured_twice_before_the_next() -> None:
    fake = FakePytest(IDS[:8])
    rows = fake.rows()
    together = sessions.MOST_TOGETHER
    assert fake.asked == [IDS[:together], IDS[:together], IDS[together:8], IDS[together:8]]
    assert statuses(rows) == dict.fromkeys([REACHED, *IDS[:8]], "pass")


@pytest.mark.parametrize("error", [TimeUp(), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("most", [0, 1, 7, 16])
def test_a_cut_night_keeps_its_results_and_continues(error: BaseException, most: int) -> None:
    saved = Saved()
    cut_short = FakePytest(IDS, most=most, error=error)
    if isinstance(error, TimeUp):
        night_of(make_record(), saved, cut_short)
    else:
        with pytest.raises(type(error)):
            night_of(make_record(), saved, cut_short)
    (cut,) = saved.records[-1].results
    assert not cut.is_complete
    kept = results_in(STORE)
    assert sum(map(len, kept.values())) == most
    shown = statuses(cut.rows)
    assert {case_id: shown[case_id] for case_id in kept} == {
        case_id: "pass" if len(of_case) == 2 else "unknown" for case_id, of_case in kept.items()
    }
    fake = FakePytest(IDS)
    (whole,) = night_of(saved.records[-1], saved, fake).results
    assert whole.is_complete
    assert statuses(whole.rows) == dict.fromkeys([REACHED, *IDS], "pass")
    assert sum(map(len, fake.asked)) == 2 * len(IDS) - most, "nothing was measured a third time"


def test_a_killed_night_has_a_page_with_its_results() -> None:
    """A record is saved after each row. So a record with the results exists even after SIGKILL."""
    saved = Saved()
    with pytest.raises(KeyboardInterrupt):
        night_of(make_record(), saved, FakePytest(IDS[:3], most=2, error=KeyboardInterrupt()))
    before_the_end = saved.records[-2].results[0]
    assert IDS[1] in statuses(before_the_end.rows)
    assert not before_the_end.is_complete


def test_cases_that_do_not_fit_leave_the_step_incomplete() -> None:
    """Nobody knows at first that a case takes ten seconds."""
    fake = FakePytest(IDS)
    left_s = [3.5 * 60 * CASE_MIN["simulated"], 130.0, 5.0]
    rows = fake.rows(left_s=lambda: left_s[min(len(fake.asked), 2)])
    assert fake.asked == [IDS[:3], IDS[:3]], "as many as fit twice"
    (row,) = [row for row in rows if row.check == REACHED][-1:]
    assert row.found == "not run: not reached: 3 of 18 cases done. The others take about 5 min"
    assert row.status == "unknown"


def test_a_complete_step_begins_anew() -> None:
    FakePytest(IDS[:2]).rows(is_continued=True)
    fake = FakePytest(IDS[:2])
    fake.rows(is_continued=True)
    assert fake.asked == []
    fake.rows()
    assert fake.asked == [IDS[:2], IDS[:2]]


def test_a_case_without_a_result_fails() -> None:
    fake = FakePytest(IDS[:2], lost=IDS[:1])
    assert statuses(fake.rows()) == {REACHED: "unknown", IDS[0]: "fail", IDS[1]: "pass"}
    assert len(fake.asked) == 3, "it ends"


def test_cases_of_a_busy_machine_are_measured_again() -> None:
    """While others use the machine, figures prove nothing. The others might be gone by the next night."""
    saved = Saved()
    fake = FakePytest(IDS[:2], shared=IDS[:1])
    (cut,) = night_of(make_record(), saved, fake).results
    assert fake.asked == [IDS[:2], IDS[1:2], IDS[:1]], "a second time in the same night, but not for ever"
    assert statuses(cut.rows) == {REACHED: "unknown", IDS[0]: "unknown", IDS[1]: "pass"}
    assert not cut.is_complete
    (whole,) = night_of(saved.records[-1], saved, FakePytest(IDS[:2])).results
    assert statuses(whole.rows) == dict.fromkeys([REACHED, *IDS[:2]], "pass")
    assert whole.is_complete


def test_a_busy_machine_does_not_make_sessions_longer() -> None:
    saved = Saved()
    night_of(make_record(), saved, FakePytest(IDS, shared=IDS))
    fake = FakePytest(IDS)
    night_of(saved.records[-1], saved, fake)
    assert max(map(len, fake.asked)) == sessions.MOST_TOGETHER


def test_a_case_that_its_test_skips_is_done() -> None:
    rows = {row.check: row for row in FakePytest(IDS[:2], skipped=IDS[:1]).rows()}
    assert rows[IDS[0]].found == "not run: later"
    assert rows[REACHED].status == "pass"


def too_large(number: int) -> list[Case]:
    """Return cases that need more cores than the machine has."""
    return [
        make_case(micro_batch=size, topology=Topology(processes_per_node=64)) for size in range(1, number + 1)
    ]


def test_a_case_for_a_larger_machine_is_not_waited_for() -> None:
    (large,) = too_large(1)
    fake = FakePytest(IDS[:1], others=[large])
    rows = {row.check: row for row in fake.rows()}
    assert rows[large.id].found == ("not run: it needs 64 cores (one per process), but this machine has 2")
    assert rows[REACHED].status == "pass"
    assert fake.asked == [IDS[:1]] * 2


def test_only_some_of_the_refused_cases_are_listed() -> None:
    rows = FakePytest([], others=too_large(MOST_REFUSED + 1)).rows()
    assert sum("it needs 64 cores" in row.found for row in rows) == MOST_REFUSED
    (more,) = [row for row in rows if row.check == "more cases"]
    assert more.found == "not run: 1 more cannot run on this machine"


def test_a_plan_counts_the_cases_that_are_left() -> None:
    with pytest.raises(TimeUp):
        FakePytest(IDS[:3], most=2).rows()
    assert number_of_cases(make_night()) == 3
    with pytest.raises(TimeUp):
        FakePytest(IDS[:3], most=2).rows(is_continued=True)
    assert number_of_cases(make_night(is_continued=True)) == 1, "two were measured twice"
    assert number_of_cases(make_night(cases=Path("nowhere"))) == 0


def test_a_plan_without_cases_says_what_pytest_says() -> None:
    Path("pytest.py").write_text("raise SystemExit('no module named mine')")
    said: list[str] = []
    assert number_of_cases(make_night(say=said.append)) == 0
    assert said == ["pytest cannot collect the cases in bench_cases: no module named mine"]


def test_without_cases_it_says_how_to_write_them() -> None:
    Path("bench_cases").rmdir()
    (row,) = case_rows(make_night(machine=make_gpu_machine(), size="full"))
    assert row.found == "not run: there is no directory bench_cases"
    assert row.advice == "write cases with: perfsuite init --hardware h100"
    assert marker_of(make_gpu_machine("NVIDIA Imaginary X1")) == "gpu"
    assert marker_of(make_night().machine) == "cpu"


def test_cases_that_pytest_refuses_are_not_run() -> None:
    Path("pytest.py").write_text("raise SystemExit(5)  # no tests collected")
    (row,) = case_rows(make_night())
    assert row.found.startswith("not run: pytest selects no case: bench_cases -m cpu ")
    documents.write(STORE.sessions / "a/results.json", make_session_file(result(IDS[0], "recorded")))
    rows = [*case_rows(make_night(is_continued=True))]
    assert [row.check for row in rows] == [IDS[0], "cases"], "earlier results are still shown"
    assert rows[1].found.startswith("not run: not reached: pytest selects no case: ")


def test_sessions_share_a_store_without_reviewed_baselines() -> None:
    words = sessions.session_words(make_night(wait_quiet_s=7), Path("x"))
    assert "--perf-store=x/store" in words
    assert "--perf-baselines=x/none" in words
    assert "--perf-wait-quiet=7" in words
    assert not any(word.startswith("--perf-budget") for word in words), "it would spread launches"


def test_selects_the_cases_for_this_hardware() -> None:
    collects(
        CollectedTest(nodeid="a", case=CASES[0]),
        CollectedTest(nodeid="b", case=CASES[1], left_out="deselected"),
        CollectedTest(nodeid="c", case=CASES[2], left_out="skipped: later"),
    )
    assert [test.nodeid for test in selected(make_night())] == ["a", "c"]
    words = json.loads(Path("words.json").read_text())
    assert words[0] == "bench_cases"
    assert "-m cpu" in " ".join(words)
