import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.documents import plain
from perfsuite.errors import AllocationOverError, FileError, PerfsuiteError
from perfsuite.report.summary import interruption
from perfsuite.results import baseline
from perfsuite.results.outcome import CountCheck, Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import SessionFile, Skipped
from perfsuite.results.store import Store
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.mode import Launches, Task, Trial
from perfsuite.session.outputs import lines
from perfsuite.session.session import Session
from perfsuite.session.setup import Host, Setup
from tests.samples import (
    COMMIT,
    make_case,
    make_machine,
    make_result,
    make_run,
    now,
)
from tests.session.making import HELD, PASSED, RECORDED, Sessions, make_setup
from tests.session.test_priced import GIB, finding, run_of
from tests.sessions import make_blind
from tests.simulated import EndsAfter
from tests.twin_counts import launch


@pytest.mark.fault("baselines are read-only")
def test_unwritable_baseline_keeps_the_result(sessions: Sessions) -> None:
    sessions.launch(make_run(), verdict=RECORDED)
    (sessions.directory / "store").mkdir()
    (sessions.directory / "store" / "baselines").write_text("in the way")
    ours = sessions.make()
    with pytest.raises(PerfsuiteError, match="cannot write"):
        ours.measure(make_case(), "test")
    assert [result.verdict.outcome for result in ours.record.results] == ["recorded"]


@pytest.mark.parametrize(
    "error", [PerfsuiteError("mine.yaml: num_processes is 4"), ValueError("illegal variable name")]
)
def test_unlaunchable_case_fails_with_traceback(sessions: Sessions, error: Exception) -> None:
    def broken(*args: object, **options: object) -> Any:
        raise error

    sessions.measure = broken
    ours = sessions.make()
    with pytest.raises(type(error), match=str(error)):
        ours.measure(make_case(), "test")
    left = documents.read(ours.record.directory.results, SessionFile)
    assert left.results == ours.record.session_file("complete").results
    (result,) = left.results
    assert (result.outcome, result.verdict.failure, left.interrupted_case) == ("failed", "error", None)
    (reason,) = result.verdict.reasons
    file = ours.record.directory.case(make_case().id) / "traceback.txt"
    if isinstance(error, PerfsuiteError):
        assert reason == str(error)
    else:
        assert reason == f"ValueError: {error} (its traceback: {file})"
        assert "in broken" in file.read_text()


class HasNoTraceback(ValueError):
    """An error whose traceback cannot be made at first. Later, pytest can show it if the test fails."""

    is_broken = True

    def __getattribute__(self, name: str) -> Any:
        if name == "__cause__" and self.is_broken:
            self.is_broken = False
            raise LookupError("the cause is gone")
        return super().__getattribute__(name)


def test_records_an_error_that_cannot_be_written(sessions: Sessions) -> None:
    sessions.measure = Mock(side_effect=HasNoTraceback("what was wrong"))
    ours = sessions.make()
    ours.record.directory.results.mkdir(parents=True)
    with pytest.raises(HasNoTraceback):
        ours.measure(make_case(), "test")
    ((reason,),) = (result.verdict.reasons for result in ours.record.results)
    assert "what was wrong (its traceback could not be written: LookupError: the cause is gone)" in reason
    assert any("cannot write" in line for line in sessions.said)


class LostHost(Host):
    """A host whose machine cannot be read once a case begins."""

    def machine_for(self, case: Case) -> Machine:
        raise OSError(5, "Input/output error")


def test_records_an_error_without_its_traceback(sessions: Sessions) -> None:
    ours = sessions.make()
    ours.setup.host = LostHost()
    in_the_way = ours.record.directory.case(make_case().id)
    documents.write_text(in_the_way, "not a directory")
    with pytest.raises(OSError, match="Input/output error"):
        ours.measure(make_case(), "test")
    (result,) = ours.record.results
    (reason,) = result.verdict.reasons
    assert "Input/output error (its traceback could not be written: cannot write" in reason
    assert result.hardware_class is None, "it is unknown"


class PairHost(Host):
    """A host on which a case runs on several nodes, which are a class of their own."""

    def machine_for(self, case: Case) -> Machine:
        return make_machine(hardware_class="h100-80gb-sxm-8xib400")


def test_a_case_without_launches_belongs_to_its_class(sessions: Sessions) -> None:
    sessions.measure = Mock(side_effect=PerfsuiteError("no such model"))
    ours = sessions.make()
    ours.setup.host = PairHost()
    with pytest.raises(PerfsuiteError, match="no such model"):
        ours.measure(make_case(), "test")
    saved = documents.read(ours.record.directory.results, SessionFile)
    assert saved.machine.hardware_class != "h100-80gb-sxm-8xib400"
    assert [result.hardware_class for result in saved.results] == ["h100-80gb-sxm-8xib400"]


@pytest.mark.parametrize(
    "end",
    [PerfsuiteError("processes 7 of this job cannot be killed"), ZeroDivisionError(), KeyboardInterrupt()],
)
def test_keeps_launches_before_an_error(sessions: Sessions, end: BaseException) -> None:
    ours = sessions.make()
    ours.setup.host.launcher = EndsAfter(2, end)
    with pytest.raises(type(end)):
        ours.measure(make_case(), "test")
    file = sessions.directory / "results.json"
    documents.write(file, ours.record.session_file("interrupted"))
    stored = documents.read(file, SessionFile)
    runs = launched(ours)
    assert len(runs) == 2
    if isinstance(end, KeyboardInterrupt):
        assert (stored.interrupted_case, stored.interrupted_launches) == (make_case().id, runs)
        assert "was not judged (2 launches of it in results.json). Later cases" in str(interruption(stored))
        return
    (result,) = stored.results
    assert (result.runs, result.verdict.launches) == (runs, 2)
    assert (result.outcome, result.verdict.failure) == ("failed", "error")
    assert result.directory == str(ours.record.directory.case(make_case().id))
    assert (stored.interrupted_case, stored.interrupted_launches) == (None, ())


def launched(session: Session) -> tuple[Run, ...]:
    """Return the launches of the usual case, as the session's directory has them."""
    files = session.record.directory.case(make_case().id).glob("launch-*/run.json")
    return tuple(documents.read(file, Run) for file in sorted(files))


def test_a_case_is_not_measured_twice(sessions: Sessions) -> None:
    sessions.launch(make_run())
    ours = sessions.make()
    case = make_case()
    ours.measure(case, "one")
    with pytest.raises(PerfsuiteError, match="was already measured in this session"):
        ours.measure(case, "two")
    assert [result.nodeid for result in ours.record.results] == ["one"]


def test_a_refused_case_has_no_launches_of_another_test(sessions: Sessions) -> None:
    sessions.launch(make_run())
    ours = sessions.make()
    case = make_case()
    ours.measure(case, "one")
    refused = ours.record_error(case, "two", PerfsuiteError("it was not measured"))
    assert (refused.runs, refused.verdict.launches) == ((), 0)


def test_a_spent_allocation_interrupts_the_case(sessions: Sessions) -> None:
    ours = sessions.make()
    ours.setup.host.launcher = EndsAfter(1, AllocationOverError("the Slurm job 7 is over"))
    with pytest.raises(AllocationOverError):
        ours.measure(make_case(), "test")
    stored = ours.record.session_file("interrupted")
    assert stored.results == ()
    assert (stored.interrupted_case, stored.interrupted_launches) == (make_case().id, launched(ours))
    assert len(stored.interrupted_launches) == 1


def test_records_a_skip_only_on_request(sessions: Sessions) -> None:
    ours = sessions.make()
    case = make_case(hardware="a100")
    reason = ours.skip_reason(case)
    assert reason is not None
    assert ours.record.session_file("complete").skipped == ()
    ours.record.skip(case, "test", reason)
    assert ours.record.session_file("complete").skipped == (
        Skipped(nodeid="test", case_id=case.id, framework="fake", reason=reason),
    )


def on_disk(sessions: Sessions) -> SessionFile:
    """Return the content of the newest `results.json` in the store."""
    return documents.read(Store(sessions.directory / "store").results()[-1], SessionFile)


@pytest.fixture
def in_git(sessions: Sessions) -> Sessions:
    """Return sessions in a repository with a clean commit."""
    sessions.commit = COMMIT
    return sessions


def test_writes_results_at_each_launch(sessions: Sessions) -> None:
    seen: list[SessionFile] = []

    def measure(case: Case, *args: Any, runs: list[Run]) -> Any:
        args[-1].on_launch(case, 1)
        seen.append(on_disk(sessions))
        runs.append(make_run())
        return runs, PASSED

    sessions.measure = measure
    ours = sessions.make()
    ours.measure(make_case(), "one")
    ours.measure(make_case(micro_batch=3), "two")
    seen.append(on_disk(sessions))
    assert [(stored.status, len(stored.results), stored.interrupted_case) for stored in seen] == [
        ("running", 0, make_case().id),
        ("running", 1, make_case(micro_batch=3).id),
        ("running", 2, None),
    ]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt])
def test_removes_compiler_caches_after_a_case(sessions: Sessions, end: type[BaseException] | None) -> None:
    caches: list[Path] = []

    def measure(case: Case, _: Any, directory: Path, *args: Any, runs: list[Run]) -> Any:
        args[-1].on_launch(case, 1)
        caches.append(RunDir.of_launch(directory, 1).compile_caches)
        caches[0].mkdir(parents=True)
        (caches[0] / "graph").touch()
        if end is not None:
            raise end
        runs.append(make_run())
        return runs, PASSED

    sessions.measure = measure
    with contextlib.suppress(KeyboardInterrupt):
        sessions.make().measure(make_case(), "test")
    assert [directory.exists() for directory in caches] == [False]
    assert caches[0].parent.exists()


def test_a_decided_case_is_not_measured_again(in_git: Sessions) -> None:
    in_git.launch(make_run())
    first = in_git.make()
    before = first.measure(make_case(), "one")
    later = in_git.resumed()
    goes_on = (
        f"perfsuite: --perf-resume continues {first.record.directory.path}, with 1 case already measured"
    )
    assert in_git.said == [goes_on]
    in_git.measure = Mock(side_effect=AssertionError("measured again"))
    assert plain(later.measure(make_case(), "one")) == plain(before)
    assert [part.cases for part in later.record.session_file("complete").parts] == [1, 0]


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
def test_measures_again_what_is_undecided(
    in_git: Sessions, nodeid: str, case: Case, verdict: Verdict
) -> None:
    in_git.launch(make_run(), verdict=verdict)
    first = in_git.make().measure(make_case(), "one")
    Path(first.directory).mkdir()
    in_git.launch(make_run(case=case), verdict=Verdict(outcome="passed", launches=3))
    later = in_git.resumed()
    result = later.measure(case, nodeid)
    assert result.verdict.launches == 3
    assert result.directory != first.directory
    is_same_test = (nodeid, case.id) == ("one", make_case().id)
    kept = [result] if is_same_test else [later.record.results[0], result]
    assert on_disk(in_git).results == tuple(kept)
    assert [part.cases for part in on_disk(in_git).parts] == [1, 1]


@pytest.mark.parametrize("is_counted", [False, True])
def test_measures_again_with_another_baseline(in_git: Sessions, is_counted: bool) -> None:
    first = in_git.make()
    run = (launch if is_counted else make_run)(machine=first.setup.host.machine)
    in_git.launch(run, run, run, verdict=Verdict(outcome="recorded", launches=3))
    recorded = first.measure(make_case(), "one")
    assert recorded.baseline_file is not None
    assert in_git.resumed().record.earlier_result(make_case(), "one") is not None
    if is_counted:
        assert recorded.verdict.counts is not None
        Path(str(recorded.verdict.counts.baseline_file)).unlink()
    else:
        file = first.setup.baselines.write_reviewed(baseline.from_runs([run] * 3))
        assert in_git.resumed().record.earlier_result(make_case(), "one") is None
        file.write_text("{")  # the damage is reported when the case is measured
    assert in_git.resumed().record.earlier_result(make_case(), "one") is None


def test_measures_again_if_a_baseline_has_new_content(in_git: Sessions) -> None:
    first = in_git.make()
    run = make_run(machine=first.setup.host.machine)
    first.setup.baselines.write_reviewed(baseline.from_runs([run] * 5))
    in_git.launch(run)
    first.measure(make_case(), "one")
    assert in_git.resumed().record.earlier_result(make_case(), "one") is not None
    first.setup.baselines.write_reviewed(baseline.from_runs([run] * 6))
    assert in_git.resumed().record.earlier_result(make_case(), "one") is None


def test_another_commit_starts_a_new_session(in_git: Sessions) -> None:
    in_git.launch(make_run())
    first = in_git.make()
    first.measure(make_case(), "one")
    in_git.commit = "f" * 40
    later = in_git.resumed()
    assert in_git.said == [
        "perfsuite: --perf-resume begins a new session: the newest session, "
        f"{first.record.directory.path}, has commit 0123abcd0123, not ffffffffffff"
    ]
    assert (later.record.results, later.record.directory.name != first.record.directory.name) == ([], True)


def test_skips_once_what_an_earlier_part_skipped(in_git: Sessions) -> None:
    in_git.launch(make_run())
    first = in_git.make()
    first.record.skip(make_case(hardware="a100"), "two", "no such GPU")
    first.measure(make_case(), "one")
    later = in_git.resumed()
    later.record.skip(make_case(hardware="a100"), "two", "no such GPU")
    assert len(later.record.skipped) == 1


def test_takes_the_lock_to_resume_or_to_launch(sessions: Sessions) -> None:
    ours = sessions.make(fail_without_baseline=True)
    ours.setup.lock = HELD
    assert ours.measure(make_case(), "test").verdict.failure == "no_baseline"
    with pytest.raises(FileError, match="held"):
        ours.resume()


def test_result_names_its_baselines(sessions: Sessions) -> None:
    def judged_by() -> str | None:
        ours = sessions.make()
        ours.measure(make_case(), "test")
        return ours.record.results[-1].judged_by

    setup = sessions.make().setup
    run = make_run(machine=setup.host.machine_for(make_case()))
    sessions.launch(run)
    assert judged_by() is None
    setup.baselines.write_local(baseline.from_runs([run] * 3))
    first = judged_by()
    assert (first is None, judged_by() == first) == (False, True)
    setup.baselines.write_local(baseline.from_runs([run] * 4))
    assert judged_by() not in (None, first)


def test_passed_cases_and_blind_ones_share_lines(sessions: Sessions) -> None:
    ours = sessions.make()
    ours.record.results = [make_blind(make_result(now()))]
    blind = "blind: in 1 of 1 case, noise hides changes as large as the tolerance"
    for whole in (False, True):
        text = "\n".join(lines(ours.record, whole=whole, color=False, width=None))
        assert (blind in text, ": passed after 1 launch" in text) == (not whole, whole)


class Judged(AgainstBaseline):
    """A mode that launches nothing, and whose cases all have the same trial."""

    def __init__(self, setup: Setup, trial: Trial) -> None:
        super().__init__(setup)
        self.trial = trial

    def judge(self, task: Task, launches: Launches) -> Trial:
        self.setup.progress.begin(task.case.id, 1, 1)
        return self.trial


def test_launches_that_send_more_bytes_have_a_price(sessions: Sessions) -> None:
    run = run_of(3 * GIB).replace(dry=False)
    counts = CountCheck(outcome="regressed", findings=(finding(GIB, 3 * GIB),))
    trial = Trial(verdict=PASSED.replace(counts=counts), runs=(run,))
    ours = Session(Judged(make_setup(sessions.directory, sessions.said), trial))
    judged = ours.measure(run.case, "test").verdict.counts
    assert judged is not None
    assert "; sending these bytes takes 7.2 ms" in judged.findings[0].in_words()
