from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents, git, session
from perfsuite import measure as running
from perfsuite.case import torch_build
from perfsuite.case.case import Case, KnownIssue, Topology
from perfsuite.case.hardware import AllocatedNode, Allocation, Machine
from perfsuite.documents import plain
from perfsuite.errors import AllocationOverError, BusyError, CaseError, PerfsuiteError
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch import local
from perfsuite.launch.lock import MachineLock
from perfsuite.node.machine import gpu_machine
from perfsuite.report.progress import Progress
from perfsuite.report.summary import interruption, reason
from perfsuite.results import baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import CountBaseline, target_of
from perfsuite.results.outcome import Check, CountCheck, Verdict
from perfsuite.results.preflight import NodePreflight, Preflight
from perfsuite.results.profile import TakenProfile, of_baseline
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import DeviceHealth, Health, Run
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.results.store import FoundBaseline, SessionDir, Store
from perfsuite.session import Options, Session, session_file
from perfsuite.verdict.judge import Policy
from tests.samples import (
    COMMIT,
    DISTURBED,
    make_case,
    make_figures,
    make_gpu_machine,
    make_machine,
    make_run,
    make_shared,
    never_run,
)
from tests.traces import EAGER, launch_profile, taken, unseen_profile
from tests.twin_counts import baseline_of, counts, launch

RECORDED = Verdict(outcome="recorded", launches=1)
PASSED = Verdict(outcome="passed", launches=1)


class Unlocked(MachineLock):
    """Of sessions that launch nothing, several of which a test may have at a time."""

    def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
        pass


def make_session(directory: Path, said: list[str] | None = None) -> Session:
    said = [] if said is None else said
    options = Options(
        root=directory, store=directory / "store", baselines=directory / "baselines", policy=Policy()
    )
    ours = Session(options, Progress(line=said.append, live=lambda text: None))
    ours.lock = Unlocked()
    return ours


def stand_in(monkeypatch: pytest.MonkeyPatch, runs: list[Run], verdict: Verdict) -> None:
    """Nothing is launched: this is what was measured."""

    def measure(*args: object, on_launch: Callable[[int], None], **options: object) -> Any:
        on_launch(1)
        return runs, verdict

    monkeypatch.setattr(session, "measure", measure)


def test_an_unhealthy_launch_is_no_part_of_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(figures=make_figures(tokens_per_s=speed)) for speed in (1000, 10, 1002)]
    verdict = Verdict(outcome="recorded", launches=3, unhealthy_launches=(2,))
    stand_in(monkeypatch, runs, verdict)
    ours = make_session(tmp_path)
    result = ours.measure(make_case(), "test")
    assert result.figures.tokens_per_s == 1001
    assert result.baseline_file == str(ours.baselines.local_file("cpu-test-2c", make_case().id))
    assert documents.read(Path(result.baseline_file), Baseline).values("tokens_per_s") == [1000, 1002]


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

    monkeypatch.setattr(session, "measure", refuse)
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

    monkeypatch.setattr(session, "measure", broken)
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


def test_a_machine_with_gpus_is_a_cpu_machine_for_a_cpu_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = gpu_machine(["NVIDIA H100 80GB HBM3"], count=8, memory_bytes=2**36, driver=None)
    monkeypatch.setattr(local, "detect", lambda: gpus)
    ours = make_session(tmp_path)
    assert ours.host.machine_for(make_case(hardware="cpu")).device == "cpu"
    assert ours.host.machine_for(make_case(hardware=("cpu", "h100"))) == gpus
    assert ours.host.machine_for(make_case(hardware="a100")) == gpus
    assert "this machine is h100-80gb-sxm" in str(ours.skip_reason(make_case(hardware="a100")))
    assert ours.skip_reason(make_case(hardware="cpu")) is None


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


def test_a_case_that_this_hardware_could_run_once_is_no_skip_where_baselines_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "unsupported", lambda case, machine: "no nanotron")
    ours = make_session(tmp_path)
    file = ours.baselines.write_reviewed(baseline.from_runs([make_run(machine=ours.host.machine)]))
    assert ours.skip_reason(make_case()) == "no nanotron"
    ours.options = replace(ours.options, fail_without_baseline=True)
    with pytest.raises(CaseError) as caught:
        ours.skip_reason(make_case())
    assert str(caught.value) == f"no nanotron; but there is {file}, and --perf-no-baseline=fail"
    assert ours.skip_reason(make_case(micro_batch=3)) == "no nanotron"
    ours.record_error(make_case(), "test", caught.value)
    (kept,) = ours.results
    assert (kept.outcome, kept.verdict.failure, kept.excused) == ("failed", "error", None)
    assert kept.verdict.reasons == (str(caught.value),)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "wait"),
        ({"wait_quiet_s": 0}, "again"),
        ({"allow_shared": True}, "stop"),
        ({"allow_shared": True, "wait_quiet_s": 0}, "stop"),
    ],
)
def test_what_is_done_about_others_follows_from_the_options(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    assert replace(make_session(tmp_path).options, **options).when_shared == expected


@pytest.mark.parametrize(
    ("outcome", "strict", "failing"),
    [
        ("regressed", {}, True),
        ("failed", {}, True),
        ("passed", {}, False),
        ("unhealthy", {}, False),
        ("improved", {}, False),
        ("improved", {"strict_improved": True}, True),
        ("inconclusive", {}, False),
        ("inconclusive", {"strict_inconclusive": True}, True),
    ],
)
def test_which_outcomes_fail(tmp_path: Path, outcome: str, strict: dict[str, Any], failing: bool) -> None:
    ours = make_session(tmp_path)
    ours.options = replace(ours.options, **strict)
    verdict = never_run().verdict.replace(outcome=outcome)
    assert ours.options.is_failing(never_run().replace(verdict=verdict)) is failing


ISSUE = {"known_issue": KnownIssue(url="https://example.org/issues/209", failure="timeout")}
SWEPT = {"may_run_out_of_memory": True}


@pytest.mark.parametrize(
    ("changes", "failure", "has_baseline", "excused"),
    [
        (ISSUE, "timeout", False, "known issue"),
        (ISSUE, "crash", False, None),
        (ISSUE, "timeout", True, None),
        (ISSUE, "mismatch", False, None),
        (ISSUE, "no_baseline", False, None),
        (ISSUE, "out_of_memory", False, None),
        (SWEPT, "out_of_memory", False, "out of memory"),
        (SWEPT, "out_of_memory", True, None),
        (SWEPT, "crash", False, None),
        ({}, "out_of_memory", False, None),
    ],
)
def test_which_failures_are_no_surprise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    failure: Any,
    has_baseline: bool,
    excused: str | None,
) -> None:
    asked = make_case(**changes)
    verdict = Verdict(outcome="failed", launches=1, failure=failure)
    stand_in(monkeypatch, [make_run(case=asked)], verdict)
    ours = make_session(tmp_path)
    if has_baseline:
        acceptance = baseline.Acceptance(by="somebody", date="2026-01-01", commit=None)
        before = baseline.from_runs(
            [make_run(case=asked, machine=ours.host.machine)] * 5, accepted=acceptance
        )
        ours.baselines.write_reviewed(before)
    result = ours.measure(asked, "test")
    assert result.excused == excused
    assert ours.options.is_failing(result) is (excused is None)
    assert ours.nothing_measured is (excused != "known issue")


def test_a_case_that_ran_out_of_memory_beside_others_is_not_taken_for_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_case(**SWEPT)
    failure = Failure(kind="out_of_memory", message="CUDA out of memory", at=0.0)
    verdict = Verdict(outcome="failed", launches=1, failure="out_of_memory")
    card = DeviceHealth(index=0, held_before_bytes=70 * 2**30)
    beside = Health(samples=9, seconds=9, steps=9, devices=(card,))
    on_gpu = make_run(case=asked, failure=failure, health=beside, machine=make_gpu_machine())
    stand_in(monkeypatch, [on_gpu], verdict)
    assert make_session(tmp_path).measure(asked, "test").excused is None
    cores_in_use = make_run(case=asked, failure=failure, health=DISTURBED)
    stand_in(monkeypatch, [cores_in_use], verdict)
    assert make_session(tmp_path).measure(asked, "test").excused == "out of memory"


def test_what_another_session_records_while_this_one_waits_is_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make_session(tmp_path)
    asked = make_case()
    before = baseline.from_runs([make_run(case=asked, machine=ours.host.machine)] * 5)

    class Waits(Unlocked):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            ours.baselines.write_local(before)

    ours.lock = Waits()
    stand_in(monkeypatch, [make_run(case=asked, machine=ours.host.machine)], PASSED)
    known: list[Baseline | None] = []
    real = ours._launch

    def _launch(case: Case, machine: Machine, found: FoundBaseline | None, counts: None) -> Verdict:
        known.append(None if found is None else found.baseline)
        return real(case, machine, found, counts)

    monkeypatch.setattr(ours, "_launch", _launch)
    ours.measure(asked, "test")
    assert known == [before]


def test_what_is_recorded_says_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [make_run()] * 3, Verdict(outcome="recorded", launches=3))
    ours = make_session(tmp_path)
    file = ours.measure(make_case(), "test").baseline_file
    assert file is not None
    assert {launch.session for launch in documents.read(Path(file), Baseline).launches} == {
        ours.directory.name
    }


@pytest.mark.parametrize(
    ("changes", "outcome", "failure", "launched", "excused"),
    [
        ({}, "recorded", None, False, None),
        (ISSUE, "recorded", None, True, None),
        (ISSUE, "failed", "timeout", True, "known issue"),
        (SWEPT, "failed", "out_of_memory", True, "out of memory"),
    ],
)
def test_where_a_baseline_is_required_only_a_case_that_may_fail_is_launched_without_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    outcome: Any,
    failure: Any,
    launched: bool,
    excused: str | None,
) -> None:
    stand_in(monkeypatch, [make_run()], Verdict(outcome=outcome, launches=1, failure=failure))
    ours = make_session(tmp_path)
    ours.options = replace(ours.options, fail_without_baseline=True)
    result = ours.measure(make_case(**changes), "test")
    assert (result.outcome, result.excused, bool(result.runs)) == ("failed", excused, launched)
    assert result.verdict.failure == (failure or "no_baseline")
    assert result.verdict.launches == len(result.runs)
    assert not (tmp_path / "store" / "baselines").exists()


def test_what_was_set_aside_stays_so_where_a_baseline_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Verdict(outcome="recorded", launches=2, unhealthy_launches=(2,))
    stand_in(monkeypatch, [make_run(), make_run()], recorded)
    ours = make_session(tmp_path)
    ours.options = replace(ours.options, fail_without_baseline=True)
    result = ours.measure(make_case(**ISSUE), "test")
    assert (result.verdict.failure, result.verdict.unhealthy_launches) == ("no_baseline", (2,))


def test_an_injected_fault_finds_a_baseline_of_too_few_launches_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies there, and must not be denied."""
    ours = make_session(tmp_path)
    file = ours.baselines.write_local(baseline.from_runs([make_run(machine=ours.host.machine)]))
    for changes, option in (({"inject": "nan"}, "--perf-inject"), ({"fail_without_baseline": True}, "fail")):
        ours.options = replace(make_session(tmp_path).options, **changes)
        (reason,) = ours.measure(make_case(), "test").verdict.reasons
        assert reason.startswith(f"the baseline in {file} is of 1 launch, and ")
        assert f"{option} asks for 3 or more: run once without it, which records it anew" in reason
        assert "--perf-record-launches=1 to compare with it as it is" in reason
    ours.options = replace(ours.options, policy=Policy(record_launches=1))
    stand_in(monkeypatch, [make_run()], Verdict(outcome="passed", launches=1))
    assert ours.measure(make_case(), "test").outcome == "passed"


# What is on disk, and going on with it


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

    def measure(*args: object, on_launch: Callable[[int], None], **options: object) -> Any:
        on_launch(1)
        seen.append(on_disk(tmp_path))
        return [make_run()], PASSED

    monkeypatch.setattr(session, "measure", measure)
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
    monkeypatch.setattr(session, "measure", None)
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
    run = make_run(machine=first.host.machine)
    stand_in(monkeypatch, [run] * 3, Verdict(outcome="recorded", launches=3))
    recorded = first.measure(make_case(), "one")
    assert resumed(tmp_path).earlier_result(make_case(), "one") is not None
    first.baselines.write_reviewed(baseline.from_runs([run] * 3))
    assert resumed(tmp_path).earlier_result(make_case(), "one") is None
    first.baselines.reviewed_file(run.machine.hardware_class, make_case().id).write_text("{")
    assert resumed(tmp_path).earlier_result(make_case(), "one") is None, "that it is bad is said of its test"
    assert recorded.baseline_file is not None


def test_a_case_whose_counts_have_another_baseline_now_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_git(monkeypatch)
    first = make_session(tmp_path)
    run = launch(machine=first.host.machine)
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
    ours.lock, ours.options = Held(), replace(ours.options, no_wait=True)
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


# Counts

MORE = counts(host_reads={"forward": 2, "optimizer": 39})


def measured(
    directory: Path, monkeypatch: pytest.MonkeyPatch, run: Run, verdict: Verdict, **options: Any
) -> Measurement:
    """What a session finds that launches a case once."""
    stand_in(monkeypatch, [run], verdict)
    ours = make_session(directory)
    ours.options = replace(ours.options, **options)
    return ours.measure(make_case(), "test")


def counts_in(directory: Path) -> list[str]:
    store = make_session(directory).baselines.counts
    return [documents.read(file, CountBaseline).target for file in store.files()]


def test_counts_are_recorded_beside_the_times_and_judged_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(tmp_path, monkeypatch, launch(), RECORDED)
    file = make_session(tmp_path).baselines.counts.local_file("cpu", make_case().id)
    assert file.exists()
    assert first.verdict.counts == CountCheck(outcome="recorded", compared=False, baseline_file=str(file))
    ours = make_session(tmp_path)
    ours.baselines.write_local(baseline.from_runs([make_run(machine=ours.host.machine)] * 3))
    second = measured(tmp_path, monkeypatch, launch(MORE), PASSED)
    assert (second.outcome, second.verdict.counts and second.verdict.counts.outcome) == ("regressed",) * 2
    assert ours.options.is_failing(second)
    third = measured(tmp_path, monkeypatch, launch(), PASSED)
    assert third.outcome == "passed"
    assert third.verdict.counts == CountCheck(outcome="passed", baseline_file=str(file))


def test_a_reviewed_baseline_of_counts_serves_a_machine_whose_times_are_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_session(tmp_path).baselines.counts.write_reviewed(baseline_of())
    worse = measured(tmp_path, monkeypatch, launch(MORE), RECORDED)
    assert (worse.outcome, worse.baseline_file) == ("regressed", None)
    assert not (tmp_path / "store" / "baselines").exists()
    better = measured(tmp_path, monkeypatch, launch(counts(host_reads={})), checked("recorded"))
    assert better.outcome == "improved"
    assert better.baseline_file is not None
    assert Path(better.baseline_file).exists()
    assert counts_in(tmp_path) == ["cpu"]


def checked(outcome: Any) -> Verdict:
    check = Check(metric="x", label="x", unit="", outcome=outcome, measured=1, baseline=None, allowed=0.1)
    return Verdict(outcome=outcome, launches=1, checks=(check,))


@pytest.mark.parametrize(
    ("run", "verdict", "options"),
    [
        (launch(inject="nan"), PASSED, {}),
        (launch(), Verdict(outcome="regressed", launches=1), {}),
        (launch(), Verdict(outcome="failed", launches=1, failure="loss"), {}),
        (launch(), RECORDED, {"fail_without_baseline": True}),
        (launch(counts=()), PASSED, {}),
    ],
)
def test_what_is_worse_failed_injected_or_not_counted_is_never_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, verdict: Verdict, options: dict[str, Any]
) -> None:
    measured(tmp_path, monkeypatch, run, verdict, **options)
    assert counts_in(tmp_path) == []


def test_only_a_baseline_of_times_can_be_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_session(tmp_path)
    ours.baselines.write_reviewed(baseline.from_runs([make_run(machine=ours.host.machine)] * 3))
    result = measured(tmp_path, monkeypatch, launch(), PASSED, fail_without_baseline=True)
    assert result.outcome == "passed"
    assert counts_in(tmp_path) == ["cpu"]


def test_a_bad_file_of_counts_fails_its_case_before_it_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make_session(tmp_path)
    file = ours.baselines.counts.write_reviewed(baseline_of())
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    monkeypatch.setattr(session, "measure", lambda *args, **options: pytest.fail("launched"))
    with pytest.raises(PerfsuiteError, match="this perfsuite reads 1, got 2"):
        ours.measure(make_case(), "test")
    assert [result.outcome for result in ours.results] == ["failed"]


# Others on the machine


class Busy:
    """A session whose launches are `runs`, on a machine where waiting for quiet ends as `waits` say."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        *runs: Run,
        waits: tuple[bool, ...] = (),
        **options: Any,
    ) -> None:
        self.said: list[str] = []
        self.waited = list(waits)
        self.launched = 0
        self.session = make_session(directory, self.said)
        self.session.options = replace(self.session.options, **options)
        neighbours = self.session.neighbours
        monkeypatch.setattr(neighbours, "launch_begins", lambda machine: None)
        monkeypatch.setattr(neighbours, "during_launch", lambda machine, devices: "train (pid 4711) 45%")
        monkeypatch.setattr(neighbours, "wait", lambda machine, devices: self.waited.pop(0))
        left = list(runs)

        def launch(*args: object, **options: object) -> Run:
            self.launched += 1
            return left.pop(0)

        monkeypatch.setattr(running, "launch_once", launch)

    def measure(self) -> Measurement:
        return self.session.measure(make_case(), "test")


BESIDE_OTHERS = make_run(health=DISTURBED)


def test_who_used_the_machine_is_said_after_the_launch_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(tmp_path, monkeypatch, BESIDE_OTHERS, *[make_run()] * 3, waits=(True,))
    result = busy.measure()
    assert (result.outcome, result.verdict.unhealthy_launches) == ("recorded", (1,))
    assert busy.waited == []
    name = make_case().id
    assert busy.said[1] == (
        f"perfsuite: launch 1 of {name} is no evidence: other processes used 60% of the cores' time "
        "(at most 20% is healthy); seen: train (pid 4711) 45%"
    )
    assert busy.said[2] == f"perfsuite: [1/0] {name} launch 2 launched"
    assert result.runs[0].notes == ("seen beside launch 1: train (pid 4711) 45%",)
    assert result.runs[1].notes == ()


def test_after_a_wait_in_vain_no_launch_is_made_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(tmp_path, monkeypatch, *[BESIDE_OTHERS] * 3, waits=(False,))
    result = busy.measure()
    assert (result.outcome, result.shared, busy.launched) == ("unhealthy", True, 1)
    assert busy.session.nothing_measured
    assert not list(tmp_path.glob("store/baselines/*/*"))


def test_who_does_not_want_to_wait_launches_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(tmp_path, monkeypatch, *[BESIDE_OTHERS] * 3, wait_quiet_s=0)
    assert (busy.measure().outcome, busy.launched) == ("unhealthy", 3)


def test_shared_figures_are_shown_on_request_and_prove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(tmp_path, monkeypatch, BESIDE_OTHERS, allow_shared=True)
    result = busy.measure()
    assert (result.outcome, result.shared, busy.launched) == ("unhealthy", True, 1)
    assert result.figures.tokens_per_s == 1000
    assert result.verdict.checks == ()
    assert busy.session.shown_only == [result]
    assert not busy.session.options.is_failing(result)
    assert not busy.session.nothing_measured
    assert not list(tmp_path.glob("store/baselines/*/*"))


def test_only_shared_figures_excuse_that_nothing_was_judged(tmp_path: Path) -> None:
    ours = make_session(tmp_path)
    ours.options = replace(ours.options, allow_shared=True)
    ours.results = [never_run()]
    assert ours.nothing_measured
    throttled = make_shared().replace(runs=(make_run(),), shared=False)
    empty = make_shared().replace(runs=(make_run(health=DISTURBED, window=(0, 0)),))
    ours.results = [throttled, empty]
    assert ours.nothing_measured
    ours.results = [*ours.results, make_shared()]
    assert not ours.nothing_measured
    ours.options = replace(ours.options, allow_shared=False)
    assert ours.nothing_measured


def test_a_share_of_the_cases_is_judged_if_it_is_reached_to_the_digit(tmp_path: Path) -> None:
    ours = make_session(tmp_path)
    ours.options = replace(ours.options, min_judged=0.28)
    assert not ours.too_few_judged
    other = never_run().replace(verdict=PASSED.replace(outcome="inconclusive"))
    judged = never_run().replace(verdict=PASSED)
    ours.results = [judged] * 7 + [other] * 18
    assert not ours.too_few_judged
    ours.results = [judged] * 6 + [other] * 19
    assert ours.too_few_judged


def test_launches_that_nobody_disturbed_are_judged_and_recorded_whatever_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(tmp_path, monkeypatch, *[make_run()] * 3, allow_shared=True)
    assert (busy.measure().outcome, busy.session.shown_only) == ("recorded", [])


def test_a_crash_beside_others_is_a_failure_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = BESIDE_OTHERS.replace(failure=Failure(kind="crash", message="x"))
    busy = Busy(tmp_path, monkeypatch, crash, allow_shared=True)
    result = busy.measure()
    assert (result.outcome, result.verdict.failure) == ("failed", "crash")
    assert busy.session.options.is_failing(result)


def test_where_another_session_measures_and_nobody_waits_there_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(MachineLock):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            assert not wait
            raise BusyError("another session")

    busy = Busy(tmp_path, monkeypatch, no_wait=True)
    busy.session.lock = Held()
    with pytest.raises(BusyError):
        busy.measure()
    assert (busy.session.results, busy.launched) == ([], 0)


def test_a_session_that_launches_nothing_takes_no_lock(tmp_path: Path) -> None:
    class Untouched(MachineLock):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            pytest.fail("nothing is launched")

    ours = make_session(tmp_path)
    ours.lock = Untouched()
    ours.options = replace(ours.options, fail_without_baseline=True)
    assert ours.measure(make_case(), "test").verdict.failure == "no_baseline"


# Several nodes

FOUR = Allocation(job_id="7", nodes=tuple(AllocatedNode(name=f"n{number}") for number in range(1, 5)))


def on_nodes(count: int) -> Case:
    return make_case(framework=DDP(), topology=Topology(nodes=count, processes_per_node=1))


class Nodes:
    """A session on four nodes: each preflight finds those bad that are named next in `bad`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *bad: set[str]) -> None:
        self.bad, self.said, self.launched = list(bad), list[str](), list[str]()
        self.session = make_session(directory, self.said)
        self.session.host.machine = make_machine().replace(nodes=4, allocation=FOUR)
        monkeypatch.setattr(session, "preflight", self.preflight)

        def measure(case: Case, *args: object, on_launch: Callable[[int], None], **options: object) -> Any:
            self.launched.append(case.id)
            on_launch(1)
            return [make_run(case=case)], PASSED

        monkeypatch.setattr(session, "measure", measure)

    def preflight(
        self, launcher: object, machine: Machine, nodes: int, directory: Path, *, names: list[str]
    ) -> Preflight:
        assert names == ["n1", "n2", "n3", "n4"][:nodes]
        assert machine.allocation is None
        assert self.session.running is not None
        directory.mkdir(parents=True)
        bad = self.bad.pop(0)
        found = [
            NodePreflight(name=name, problems=("matmul 0.02 TFLOP/s",) if name in bad else ())
            for name in names
        ]
        return Preflight(
            started_at="2026-01-02T03:04:05+00:00",
            duration_s=1,
            machine=machine,
            nodes=tuple(found),
            directory=str(directory),
        )

    def outcomes(self, *counts: int) -> list[str]:
        return [self.session.measure(on_nodes(count), f"test{count}").outcome for count in counts]


@pytest.mark.fault("node is bad")
def test_a_case_on_a_bad_node_is_unhealthy_and_not_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch, {"n3"}, {"n3"}, set())
    assert nodes.outcomes(3, 4, 2, 1) == ["unhealthy", "unhealthy", "passed", "passed"]
    assert nodes.launched == [on_nodes(2).id, on_nodes(1).id]
    verdict = nodes.session.results[0].verdict
    assert (verdict.launches, verdict.reasons) == (0, ("n3, by two preflights: matmul 0.02 TFLOP/s",))
    assert reason(nodes.session.results[0]) == "n3, by two preflights: matmul 0.02 TFLOP/s"
    told = session_file(nodes.session, "complete")
    assert [len(each.nodes) for each in told.preflights] == [3, 3, 2], "that of 4 nodes would find n3 again"
    assert [Path(each.directory).name for each in told.preflights] == [
        f"preflight-{number}" for number in (1, 2, 3)
    ]
    assert documents.read(nodes.session.directory.results, SessionFile).preflights == told.preflights
    assert nodes.session.running is None


def test_what_a_second_preflight_does_not_find_again_was_no_bad_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch, {"n1"}, {"n2"})
    assert nodes.outcomes(2, 2) == ["passed", "passed"]
    assert nodes.bad == []
    assert any("counts if a second one finds that node bad, too" in line for line in nodes.said)


def test_each_set_of_nodes_is_looked_at_once_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch, set(), set())
    assert nodes.outcomes(2, 4, 2, 4) == ["passed"] * 4
    assert nodes.bad == []
    assert [line.splitlines()[0] for line in nodes.said if "preflight" in line] == [
        f"perfsuite: preflight of {count} nodes ({make_machine().device_name}) in 1 s: none of them bad"
        for count in (2, 4)
    ]


def test_one_machine_and_what_trains_nothing_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    assert nodes.outcomes(1) == ["passed"]
    simulated = make_case(topology=Topology(nodes=2, processes_per_node=1))
    assert nodes.session.measure(simulated, "test").outcome == "passed"
    nodes.session.options = replace(nodes.session.options, preflight=False)
    assert nodes.outcomes(4) == ["passed"]


def test_without_torch_beside_perfsuite_there_is_no_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build, "installed", dict)
    assert Nodes(tmp_path, monkeypatch).outcomes(2) == ["passed"]


def test_a_session_that_goes_on_looks_again_and_keeps_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Nodes(tmp_path, monkeypatch, {"n2"}, {"n2"})
    assert first.outcomes(2) == ["unhealthy"]
    second = Nodes(tmp_path, monkeypatch, set())
    second.session.earlier = session_file(first.session, "interrupted")
    second.session.directory = first.session.directory
    assert second.outcomes(2) == ["passed"]
    told = session_file(second.session, "complete").preflights
    assert [bool(each.problems) for each in told] == [True, True, False]
    assert Path(told[2].directory).name == "preflight-3"


def test_the_lock_is_taken_before_nodes_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(MachineLock):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            raise BusyError("another session")

    nodes = Nodes(tmp_path, monkeypatch)
    nodes.session.lock = Held()
    with pytest.raises(BusyError):
        nodes.outcomes(2)


TRAINS = make_case(model="llama-tiny", framework=DDP())
SLOWER = Verdict(outcome="regressed", launches=3, checks=(Check(
    metric="tokens_per_s", label="tokens/s", unit="tokens/s", outcome="regressed", measured=1.0, baseline=2.0,
    allowed=0.1),))  # fmt: skip


class Explained:
    """A session with `--perf-explain`, whose launches and profiles are stood in for."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
        self.session = make_session(directory)
        self.session.options = replace(self.session.options, explain=True)
        self.profiled: list[Path] = []
        self.run = make_run(case=TRAINS, machine=self.session.host.machine)
        stand_in(monkeypatch, [self.run] * 3, verdict)
        monkeypatch.setattr(session, "profile_once", self._profile)
        self.taken: TakenProfile | BaseException = taken(EAGER)

    def _profile(self, case: Case, machine: Machine, directory: Path, **options: Any) -> TakenProfile:
        self.profiled.append(directory)
        if isinstance(self.taken, BaseException):
            raise self.taken
        return self.taken

    def has_baseline(self, *, profile: bool = True) -> None:
        acceptance = baseline.Acceptance(by="somebody", date="2026-01-01", commit=None)
        before = baseline.from_runs([self.run] * 5, accepted=acceptance)
        self.session.baselines.write_reviewed(before)
        if profile:
            self.session.baselines.profiles.write_reviewed(of_baseline(before, launch_profile()))

    def measure(self) -> Measurement:
        return self.session.measure(TRAINS, "test")


def test_a_slower_case_is_profiled_beside_the_profile_of_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Explained(tmp_path, monkeypatch, SLOWER)
    ours.has_baseline()
    result = ours.measure()
    assert ours.profiled == [Path(result.directory, "profile")]
    assert result.verdict.profiled is not None
    assert result.verdict.profiled.calls == ("aten::bmm 0 -> 24 calls a step",)
    assert result.profile == taken(EAGER)
    assert len(result.runs) == 3
    assert ours.session.running is None
    assert session_file(ours.session, "complete").results == (result,)


@pytest.mark.parametrize("why", ["none", "broken"])
def test_without_a_profile_of_the_baseline_it_is_said_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    ours = Explained(tmp_path, monkeypatch, SLOWER)
    ours.has_baseline(profile=why == "broken")
    for file in tmp_path.glob("baselines/profiles/*/*.json"):
        file.write_text("{")
    profiled = ours.measure().verdict.profiled
    assert profiled is not None
    assert "there is no profile of the baseline" in profiled.notes[0]
    assert ("not JSON" in profiled.notes[0]) is (why == "broken")


@pytest.mark.fault("launch for a profile fails")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AllocationOverError("no more launches"), "no more launches"),
        (OSError("Cannot allocate memory"), "OSError: Cannot allocate memory"),
    ],
)
def test_a_profile_that_cannot_be_taken_costs_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    ours = Explained(tmp_path, monkeypatch, SLOWER)
    ours.taken = error
    result = ours.measure()
    assert result.outcome == "regressed"
    assert result.verdict.profiled is not None
    assert result.verdict.profiled.notes == (f"no profile was taken: {why}",)
    assert ours.session.results == [result]


def test_an_interrupted_profile_costs_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Explained(tmp_path, monkeypatch, SLOWER)
    ours.taken = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ours.measure()
    left = session_file(ours.session, "interrupted")
    assert left.interrupted_case is None
    assert [result.verdict for result in left.results] == [SLOWER]


def test_what_is_recorded_has_its_profile_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Explained(tmp_path, monkeypatch, RECORDED)
    result = ours.measure()
    assert result.verdict.profiled is None
    found = ours.session.baselines.find(ours.run.machine.hardware_class, TRAINS)
    assert found is not None
    assert ours.session.baselines.profile_of(found) == launch_profile(EAGER)


@pytest.mark.parametrize(("share", "outcome"), [(0.0, "recorded"), (0.9, "not counted")])
def test_counts_of_which_the_profile_says_that_they_lack_work_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, outcome: str
) -> None:
    ours = Explained(tmp_path, monkeypatch, RECORDED)
    run = ours.run.replace(counts=launch().counts)
    stand_in(monkeypatch, [run], RECORDED)
    ours.taken = taken(unseen_profile(share))
    result = ours.measure()
    assert result.verdict.counts is not None
    assert result.verdict.counts.outcome == outcome
    assert session_file(ours.session, "complete").results == (result,)
    stored = ours.session.baselines.counts.find(target_of(run.machine, dry=False), TRAINS)
    assert (stored is not None) is (outcome == "recorded")


def test_counts_are_recorded_though_the_profile_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Explained(tmp_path, monkeypatch, RECORDED)
    run = ours.run.replace(counts=launch().counts)
    stand_in(monkeypatch, [run], RECORDED)
    ours.taken = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ours.measure()
    assert ours.session.baselines.counts.find(target_of(run.machine, dry=False), TRAINS) is not None


@pytest.mark.parametrize(
    ("verdict", "least", "explain", "profiled"),
    [
        (PASSED, 1, True, 0),
        (PASSED, 5, True, 1),
        (SLOWER, 1, False, 0),
        (Verdict(outcome="failed", launches=1), 5, True, 0),
        (Verdict(outcome="unhealthy", launches=1), 5, True, 0),
    ],
)
def test_which_cases_are_profiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict,
    least: int,
    explain: bool,
    profiled: int,
) -> None:
    ours = Explained(tmp_path, monkeypatch, verdict)
    policy = replace(ours.session.options.policy, min_launches=least)
    ours.session.options = replace(ours.session.options, explain=explain, policy=policy)
    ours.measure()
    assert len(ours.profiled) == profiled


def test_a_case_that_trains_nothing_is_not_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Explained(tmp_path, monkeypatch, RECORDED)
    ours.session.measure(make_case(), "test")
    assert not ours.profiled
