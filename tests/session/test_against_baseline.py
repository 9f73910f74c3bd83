from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite import measure as running
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError, BusyError, CaseError, PerfsuiteError
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch.lock import MachineLock
from perfsuite.results import baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import CountBaseline, target_of
from perfsuite.results.outcome import Check, CountCheck, Verdict
from perfsuite.results.profile import TakenProfile, of_baseline
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import DeviceHealth, Health, Run
from perfsuite.results.session_file import Measurement
from perfsuite.session import against_baseline, setup
from perfsuite.session.session import session_file
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.overall import Reference
from tests.samples import DISTURBED, make_case, make_figures, make_gpu_machine, make_run
from tests.session.making import ISSUE, PASSED, RECORDED, SWEPT, Unlocked, make_session, stand_in
from tests.traces import EAGER, launch_profile, taken, unseen_profile
from tests.twin_counts import baseline_of, counts, launch


def test_an_unhealthy_launch_is_no_part_of_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(figures=make_figures(tokens_per_s=speed)) for speed in (1000, 10, 1002)]
    verdict = Verdict(outcome="recorded", launches=3, unhealthy_launches=(2,))
    stand_in(monkeypatch, runs, verdict)
    ours = make_session(tmp_path)
    result = ours.measure(make_case(), "test")
    assert result.figures.tokens_per_s == 1001
    assert result.baseline_file == str(ours.setup.baselines.local_file("cpu-test-2c", make_case().id))
    assert documents.read(Path(result.baseline_file), Baseline).values("tokens_per_s") == [1000, 1002]


def test_a_case_that_this_hardware_could_run_once_is_no_skip_where_baselines_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "unsupported", lambda case, machine: "no nanotron")
    ours = make_session(tmp_path)
    file = ours.setup.baselines.write_reviewed(
        baseline.from_runs([make_run(machine=ours.setup.host.machine)])
    )
    assert ours.skip_reason(make_case()) == "no nanotron"
    ours.setup.options = replace(ours.setup.options, fail_without_baseline=True)
    with pytest.raises(CaseError) as caught:
        ours.skip_reason(make_case())
    assert str(caught.value) == f"no nanotron; but there is {file}, and --perf-missing-baseline=fail"
    assert ours.skip_reason(make_case(micro_batch=3)) == "no nanotron"
    ours.record_error(make_case(), "test", caught.value)
    (kept,) = ours.results
    assert (kept.outcome, kept.verdict.failure, kept.excused) == ("failed", "error", None)
    assert kept.verdict.reasons == (str(caught.value),)


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
            [make_run(case=asked, machine=ours.setup.host.machine)] * 5, accepted=acceptance
        )
        ours.setup.baselines.write_reviewed(before)
    result = ours.measure(asked, "test")
    assert result.excused == excused
    assert ours.setup.options.is_failing(result) is (excused is None)
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
    before = baseline.from_runs([make_run(case=asked, machine=ours.setup.host.machine)] * 5)

    class Waits(Unlocked):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            ours.setup.baselines.write_local(before)

    ours.setup.lock = Waits()
    known: list[Baseline | None] = []

    def measure(
        case: Case, machine: Machine, directory: Path, reference: Reference, *_: Any, **__: Any
    ) -> Any:
        known.append(reference.baseline)
        raise BusyError("enough")

    monkeypatch.setattr(against_baseline, "measure", measure)
    with pytest.raises(BusyError):
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
    ours.setup.options = replace(ours.setup.options, fail_without_baseline=True)
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
    ours.setup.options = replace(ours.setup.options, fail_without_baseline=True)
    result = ours.measure(make_case(**ISSUE), "test")
    assert (result.verdict.failure, result.verdict.unhealthy_launches) == ("no_baseline", (2,))


def test_an_injected_fault_finds_a_baseline_of_too_few_launches_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies there, and must not be denied."""
    ours = make_session(tmp_path)
    file = ours.setup.baselines.write_local(baseline.from_runs([make_run(machine=ours.setup.host.machine)]))
    for changes, option in (({"inject": "nan"}, "--perf-inject"), ({"fail_without_baseline": True}, "fail")):
        ours.setup.options = replace(make_session(tmp_path).setup.options, **changes)
        (reason,) = ours.measure(make_case(), "test").verdict.reasons
        assert reason.startswith(f"the baseline in {file} is of 1 launch, and ")
        assert f"{option} asks for 3 or more: run once without it, which records it anew" in reason
        assert "--perf-record-launches=1 to compare with it as it is" in reason
    ours.setup.options = replace(ours.setup.options, policy=Policy(record_launches=1))
    stand_in(monkeypatch, [make_run()], Verdict(outcome="passed", launches=1))
    assert ours.measure(make_case(), "test").outcome == "passed"


MORE = counts(host_reads={"forward": 2, "optimizer": 39})


def measured(
    directory: Path, monkeypatch: pytest.MonkeyPatch, run: Run, verdict: Verdict, **options: Any
) -> Measurement:
    """What a session finds that launches a case once."""
    stand_in(monkeypatch, [run], verdict)
    ours = make_session(directory)
    ours.setup.options = replace(ours.setup.options, **options)
    return ours.measure(make_case(), "test")


def counts_in(directory: Path) -> list[str]:
    store = make_session(directory).setup.baselines.counts
    return [documents.read(file, CountBaseline).target for file in store.files()]


def test_counts_are_recorded_beside_the_times_and_judged_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(tmp_path, monkeypatch, launch(), RECORDED)
    file = make_session(tmp_path).setup.baselines.counts.local_file("cpu", make_case().id)
    assert file.exists()
    assert first.verdict.counts == CountCheck(outcome="recorded", compared=False, baseline_file=str(file))
    ours = make_session(tmp_path)
    ours.setup.baselines.write_local(baseline.from_runs([make_run(machine=ours.setup.host.machine)] * 3))
    second = measured(tmp_path, monkeypatch, launch(MORE), PASSED)
    assert (second.outcome, second.verdict.counts and second.verdict.counts.outcome) == ("regressed",) * 2
    assert ours.setup.options.is_failing(second)
    third = measured(tmp_path, monkeypatch, launch(), PASSED)
    assert third.outcome == "passed"
    assert third.verdict.counts == CountCheck(outcome="passed", baseline_file=str(file))


def test_a_reviewed_baseline_of_counts_serves_a_machine_whose_times_are_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_session(tmp_path).setup.baselines.counts.write_reviewed(baseline_of())
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


def test_counts_that_were_switched_off_are_not_judged_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_session(tmp_path).setup.baselines.counts.write_reviewed(baseline_of())
    assert measured(tmp_path, monkeypatch, launch(counts=()), PASSED, counts=False).verdict.counts is None


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
    ours.setup.baselines.write_reviewed(baseline.from_runs([make_run(machine=ours.setup.host.machine)] * 3))
    result = measured(tmp_path, monkeypatch, launch(), PASSED, fail_without_baseline=True)
    assert result.outcome == "passed"
    assert counts_in(tmp_path) == ["cpu"]


def test_a_bad_file_of_counts_fails_its_case_before_it_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make_session(tmp_path)
    file = ours.setup.baselines.counts.write_reviewed(baseline_of())
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    monkeypatch.setattr(against_baseline, "measure", lambda *args, **options: pytest.fail("launched"))
    with pytest.raises(PerfsuiteError, match="this perfsuite reads 1, got 2"):
        ours.measure(make_case(), "test")
    assert [result.outcome for result in ours.results] == ["failed"]


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
        self.session.setup.options = replace(self.session.setup.options, **options)
        neighbours = self.session.setup.neighbours
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
    assert result.runs[0].notes == ("seen during launch 1: train (pid 4711) 45%",)
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
    assert busy.session.only_shown == [result]
    assert not busy.session.setup.options.is_failing(result)
    assert not busy.session.nothing_measured
    assert not list(tmp_path.glob("store/baselines/*/*"))


def test_launches_that_nobody_disturbed_are_judged_and_recorded_whatever_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(tmp_path, monkeypatch, *[make_run()] * 3, allow_shared=True)
    assert (busy.measure().outcome, busy.session.only_shown) == ("recorded", [])


def test_a_crash_beside_others_is_a_failure_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = BESIDE_OTHERS.replace(failure=Failure(kind="crash", message="x"))
    busy = Busy(tmp_path, monkeypatch, crash, allow_shared=True)
    result = busy.measure()
    assert (result.outcome, result.verdict.failure) == ("failed", "crash")
    assert busy.session.setup.options.is_failing(result)


def test_where_another_session_measures_and_nobody_waits_there_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(MachineLock):
        def take(self, say: Callable[[str], None], *, wait: bool = True) -> None:
            assert not wait
            raise BusyError("another session")

    busy = Busy(tmp_path, monkeypatch, fail_if_busy=True)
    busy.session.setup.lock = Held()
    with pytest.raises(BusyError):
        busy.measure()
    assert (busy.session.results, busy.launched) == ([], 0)


TRAINS = make_case(model="llama-tiny", framework=DDP())


SLOWER = Verdict(outcome="regressed", launches=3, checks=(Check(
    metric="tokens_per_s", label="tokens/s", unit="tokens/s", outcome="regressed", measured=1.0, baseline=2.0,
    allowed=0.1),))  # fmt: skip


class Explained:
    """A session with `--perf-explain`, whose launches and profiles are stood in for."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
        self.session = make_session(directory)
        self.session.setup.options = replace(self.session.setup.options, explain=True)
        self.profiled: list[Path] = []
        self.run = make_run(case=TRAINS, machine=self.session.setup.host.machine)
        stand_in(monkeypatch, [self.run] * 3, verdict)
        monkeypatch.setattr(against_baseline, "profile_once", self._profile)
        self.taken: TakenProfile | BaseException = taken(EAGER)

    def _profile(self, case: Case, machine: Machine, directory: Path, *_: Any) -> TakenProfile:
        self.profiled.append(directory)
        if isinstance(self.taken, BaseException):
            raise self.taken
        return self.taken

    def has_baseline(self, *, profile: bool = True) -> None:
        acceptance = baseline.Acceptance(by="somebody", date="2026-01-01", commit=None)
        before = baseline.from_runs([self.run] * 5, accepted=acceptance)
        self.session.setup.baselines.write_reviewed(before)
        if profile:
            self.session.setup.baselines.profiles.write_reviewed(of_baseline(before, launch_profile()))

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
    found = ours.session.setup.baselines.find(ours.run.machine.hardware_class, TRAINS)
    assert found is not None
    assert ours.session.setup.baselines.profile_of(found) == launch_profile(EAGER)


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
    stored = ours.session.setup.baselines.counts.find(target_of(run.machine, dry=False), TRAINS)
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
    assert ours.session.setup.baselines.counts.find(target_of(run.machine, dry=False), TRAINS) is not None


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
    policy = replace(ours.session.setup.options.policy, min_launches=least)
    ours.session.setup.options = replace(ours.session.setup.options, explain=explain, policy=policy)
    ours.measure()
    assert len(ours.profiled) == profiled


def test_a_case_that_trains_nothing_is_not_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Explained(tmp_path, monkeypatch, RECORDED)
    ours.session.measure(make_case(), "test")
    assert not ours.profiled
