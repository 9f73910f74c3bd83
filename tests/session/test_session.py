from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents, git
from perfsuite import measure as running
from perfsuite.case.case import Case
from perfsuite.documents import plain
from perfsuite.errors import BusyError, PerfsuiteError
from perfsuite.launch.lock import MachineLock
from perfsuite.report.summary import interruption
from perfsuite.results import baseline
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.results.session_file import SessionFile, Skipped
from perfsuite.results.store import SessionDir, Store
from perfsuite.session import against_baseline
from perfsuite.session.session import Session, session_file
from tests.samples import COMMIT, DISTURBED, make_case, make_run, make_shared, never_run
from tests.session.making import PASSED, RECORDED, make_session, stand_in
from tests.twin_counts import launch


@pytest.mark.fault("baselines are read-only")
def test_the_result_is_kept_if_the_baseline_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = Verdict(outcome="recorded", launches=1)
    stand_in(monkeypatch, [make_run()], verdict)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "baselines").write_text("in the way")
    ours = make_session(tmp_path)
    with pytest.raises(PerfsuiteError, match="cannot write"):
        ours.measure(make_case(), "test")
    assert [result.verdict.outcome for result in ours.results] == ["recorded"]


def test_a_case_that_cannot_be_launched_is_a_failed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> Any:
        raise PerfsuiteError("mine.yaml: num_processes is 4")

    monkeypatch.setattr(against_baseline, "measure", refuse)
    ours = make_session(tmp_path)
    with pytest.raises(PerfsuiteError, match="num_processes"):
        ours.measure(make_case(), "test")
    (told,) = session_file(ours, "complete").results
    assert (told.outcome, told.verdict.failure) == ("failed", "error")
    assert told.verdict.reasons == ("mine.yaml: num_processes is 4",)
    assert session_file(ours, "complete").interrupted_case is None


def test_an_error_that_nobody_expected_is_a_failed_result_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> Any:
        raise ValueError("illegal environment variable name")

    monkeypatch.setattr(against_baseline, "measure", broken)
    ours = make_session(tmp_path)
    with pytest.raises(ValueError, match="illegal"):
        ours.measure(make_case(), "test")
    left = documents.read(ours.directory.results, SessionFile)
    (result,) = left.results
    assert (result.outcome, result.verdict.failure, left.interrupted_case) == ("failed", "error", None)
    file = ours.directory.case(make_case().id) / "traceback.txt"
    (reason,) = result.verdict.reasons
    assert reason == f"ValueError: illegal environment variable name (its traceback: {file})"
    assert "in broken" in file.read_text()


def test_an_unexpected_error_whose_traceback_cannot_be_kept_is_a_result_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_directory(self: SessionDir, case_id: str) -> Path:
        self.path.mkdir(parents=True)
        self.case(case_id).write_text("in the way")
        raise OSError(36, "File name too long")

    monkeypatch.setattr(SessionDir, "new_case", no_directory)
    ours = make_session(tmp_path)
    with pytest.raises(OSError, match="too long"):
        ours.measure(make_case(), "test")
    (result,) = ours.results
    (reason,) = result.verdict.reasons
    assert "File name too long (its traceback was not kept: cannot write" in reason


@pytest.mark.parametrize(
    "end",
    [PerfsuiteError("processes 7 of this job cannot be killed"), ZeroDivisionError(), KeyboardInterrupt()],
)
def test_the_launches_before_an_error_or_an_interrupt_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    runs = [make_run(started_at=f"2026-01-0{day}T00:00:00+00:00") for day in (1, 2)]
    left = list(runs)

    def launch(*args: object, **options: object) -> Run:
        if not left:
            raise end
        return left.pop(0)

    monkeypatch.setattr(running, "launch_once", launch)
    ours = make_session(tmp_path)
    with pytest.raises(type(end)):
        ours.measure(make_case(), "test")
    file = tmp_path / "results.json"
    documents.write(file, session_file(ours, "interrupted"))
    told = documents.read(file, SessionFile)
    if isinstance(end, KeyboardInterrupt):
        assert (told.interrupted_case, told.interrupted_launches) == (make_case().id, tuple(runs))
        assert "was not judged (2 launches of it in results.json);" in str(interruption(told))
        return
    (result,) = told.results
    assert (result.runs, result.verdict.launches) == (tuple(runs), 2)
    assert (result.outcome, result.verdict.failure) == ("failed", "error")
    assert result.directory == str(ours.directory.case(make_case().id))
    assert (told.interrupted_case, told.interrupted_launches) == (None, ())


def test_why_a_case_is_skipped_is_asked_without_a_trace_and_recorded_on_request(tmp_path: Path) -> None:
    ours = make_session(tmp_path)
    case = make_case(hardware="a100")
    reason = ours.skip_reason(case)
    assert reason is not None
    assert session_file(ours, "complete").skipped == ()
    ours.record_skip(case, "test", reason)
    assert session_file(ours, "complete").skipped == (
        Skipped(nodeid="test", case_id=case.id, framework="fake", reason=reason),
    )


def on_disk(directory: Path) -> SessionFile:
    """The newest `results.json` of the store."""
    return documents.read(Store(directory / "store").results()[-1], SessionFile)


def in_git(monkeypatch: pytest.MonkeyPatch, commit: str = COMMIT) -> None:
    monkeypatch.setattr(git, "revision", lambda root: git.Revision(commit, dirty=False))


def resumed(directory: Path, said: list[str] | None = None) -> Session:
    """A session that was asked to go on with the newest one."""
    later = make_session(directory, said)
    later.resume()
    return later


def test_results_are_on_disk_when_a_launch_begins_and_when_a_case_has_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SessionFile] = []

    def measure(case: Case, *args: Any, runs: list[Run]) -> Any:
        args[-1].on_launch(case, 1)
        seen.append(on_disk(tmp_path))
        runs.append(make_run())
        return runs, PASSED

    monkeypatch.setattr(against_baseline, "measure", measure)
    ours = make_session(tmp_path)
    ours.measure(make_case(), "one")
    ours.measure(make_case(micro_batch=3), "two")
    seen.append(on_disk(tmp_path))
    assert [(each.status, len(each.results), each.interrupted_case) for each in seen] == [
        ("running", 0, make_case().id),
        ("running", 1, make_case(micro_batch=3).id),
        ("running", 2, None),
    ]


def test_a_session_that_does_not_save_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [make_run()], PASSED)
    ours = make_session(tmp_path)
    ours.saves = False
    ours.measure(make_case(), "test")
    assert Store(tmp_path / "store").results() == []


def test_results_that_cannot_be_written_are_said_once_and_cost_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, [make_run()], PASSED)
    (tmp_path / "store").write_text("in the way")
    said: list[str] = []
    ours = make_session(tmp_path, said)
    assert ours.measure(make_case(), "test").outcome == "passed"
    (line,) = [line for line in said if "cannot write" in line]
    assert str(ours.directory.results) in line
    assert line.endswith("The session goes on; what it measures is shown at its end")


def test_a_decided_case_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_git(monkeypatch)
    stand_in(monkeypatch, [make_run()], PASSED)
    first = make_session(tmp_path)
    before = first.measure(make_case(), "one")
    said: list[str] = []
    later = resumed(tmp_path, said)
    assert said == [f"perfsuite: --perf-resume: goes on with {first.directory.path}: 1 case measured there"]
    monkeypatch.setattr(against_baseline, "measure", None)
    assert plain(later.measure(make_case(), "one")) == plain(before)
    assert [part.cases for part in session_file(later, "complete").parts] == [1, 0]


@pytest.mark.parametrize(
    ("nodeid", "case", "verdict"),
    [
        ("one", make_case(), Verdict(outcome="unhealthy", launches=1)),
        ("one", make_case(), Verdict(outcome="failed", launches=1, failure="error")),
        ("one", make_case(timeout_s=7), PASSED),
        ("one", make_case(micro_batch=3), PASSED),
        ("two", make_case(), PASSED),
    ],
)
def test_what_is_not_decided_for_this_test_and_case_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodeid: str, case: Case, verdict: Verdict
) -> None:
    in_git(monkeypatch)
    stand_in(monkeypatch, [make_run()], verdict)
    first = make_session(tmp_path).measure(make_case(), "one")
    Path(first.directory).mkdir()
    stand_in(monkeypatch, [make_run(case=case)], Verdict(outcome="passed", launches=3))
    later = resumed(tmp_path)
    result = later.measure(case, nodeid)
    assert result.verdict.launches == 3
    assert result.directory != first.directory
    is_same_test = (nodeid, case.id) == ("one", make_case().id)
    kept = [result] if is_same_test else [later.results[0], result]
    assert on_disk(tmp_path).results == tuple(kept)
    assert [part.cases for part in on_disk(tmp_path).parts] == [1, 1]


def test_a_case_whose_baseline_is_another_now_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_git(monkeypatch)
    stand_in(monkeypatch, [make_run()], RECORDED)
    first = make_session(tmp_path)
    run = make_run(machine=first.setup.host.machine)
    stand_in(monkeypatch, [run] * 3, Verdict(outcome="recorded", launches=3))
    recorded = first.measure(make_case(), "one")
    assert resumed(tmp_path).earlier_result(make_case(), "one") is not None
    first.setup.baselines.write_reviewed(baseline.from_runs([run] * 3))
    assert resumed(tmp_path).earlier_result(make_case(), "one") is None
    first.setup.baselines.reviewed_file(run.machine.hardware_class, make_case().id).write_text("{")
    assert resumed(tmp_path).earlier_result(make_case(), "one") is None, "that it is bad is said of its test"
    assert recorded.baseline_file is not None


def test_a_case_whose_counts_have_another_baseline_now_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_git(monkeypatch)
    first = make_session(tmp_path)
    run = launch(machine=first.setup.host.machine)
    stand_in(monkeypatch, [run] * 3, Verdict(outcome="recorded", launches=3))
    counts = first.measure(make_case(), "one").verdict.counts
    assert resumed(tmp_path).earlier_result(make_case(), "one") is not None
    assert counts is not None
    assert counts.baseline_file is not None
    Path(counts.baseline_file).unlink()
    assert resumed(tmp_path).earlier_result(make_case(), "one") is None


def test_another_commit_begins_a_new_session_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_git(monkeypatch)
    stand_in(monkeypatch, [make_run()], PASSED)
    first = make_session(tmp_path)
    first.measure(make_case(), "one")
    in_git(monkeypatch, "f" * 40)
    said: list[str] = []
    later = resumed(tmp_path, said)
    assert said == [
        f"perfsuite: --perf-resume: a new session begins: the newest session, {first.directory.path}, has "
        "commit 0123abcd0123, not ffffffffffff"
    ]
    assert (later.results, later.directory.name != first.directory.name) == ([], True)


def test_nothing_goes_on_while_another_session_measures(tmp_path: Path) -> None:
    class Held(MachineLock):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            raise BusyError(f"held, wait={wait}")

    ours = make_session(tmp_path)
    ours.setup.lock, ours.setup.options = Held(), replace(ours.setup.options, fail_if_busy=True)
    with pytest.raises(BusyError, match="held, wait=False"):
        ours.resume()


def test_what_an_earlier_part_skipped_is_skipped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_git(monkeypatch)
    stand_in(monkeypatch, [make_run()], PASSED)
    first = make_session(tmp_path)
    first.record_skip(make_case(hardware="a100"), "two", "no such GPU")
    first.measure(make_case(), "one")
    later = resumed(tmp_path)
    later.record_skip(make_case(hardware="a100"), "two", "no such GPU")
    assert len(later.skipped) == 1


def test_only_shared_figures_excuse_that_nothing_was_judged(tmp_path: Path) -> None:
    ours = make_session(tmp_path)
    ours.setup.options = replace(ours.setup.options, allow_shared=True)
    ours.results = [never_run()]
    assert ours.nothing_measured
    throttled = make_shared().replace(runs=(make_run(),), shared=False)
    empty = make_shared().replace(runs=(make_run(health=DISTURBED, window=(0, 0)),))
    ours.results = [throttled, empty]
    assert ours.nothing_measured
    ours.results = [*ours.results, make_shared()]
    assert not ours.nothing_measured
    ours.setup.options = replace(ours.setup.options, allow_shared=False)
    assert ours.nothing_measured


def test_a_share_of_the_cases_is_judged_if_it_is_reached_to_the_digit(tmp_path: Path) -> None:
    ours = make_session(tmp_path)
    ours.setup.options = replace(ours.setup.options, min_judged=0.28)
    assert not ours.too_few_judged
    recorded = never_run().replace(verdict=RECORDED)
    other = never_run().replace(verdict=PASSED.replace(outcome="inconclusive"))
    excused = never_run().replace(excused="known issue")
    judged = never_run().replace(verdict=PASSED)
    ours.results = [judged] * 7 + [other] * 16 + [recorded, excused]
    assert (ours.judged, ours.too_few_judged) == (7, False)
    ours.results = [judged] * 6 + [other] * 17 + [recorded, excused]
    assert (ours.judged, ours.too_few_judged) == (6, True)


def test_a_session_that_launches_nothing_takes_no_lock(tmp_path: Path) -> None:
    class Untouched(MachineLock):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            pytest.fail("nothing is launched")

    ours = make_session(tmp_path)
    ours.setup.lock = Untouched()
    ours.setup.options = replace(ours.setup.options, fail_without_baseline=True)
    assert ours.measure(make_case(), "test").verdict.failure == "no_baseline"
