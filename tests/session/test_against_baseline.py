from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case.case import Case, KnownIssue, Topology
from perfsuite.errors import AllocationOverError, CaseError, PerfsuiteError
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch.lock import MachineLock
from perfsuite.results import baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import CountBaseline, target_of
from perfsuite.results.counts import Counts, RankCounts, merged
from perfsuite.results.dry_facts import DryFacts, Forecast
from perfsuite.results.outcome import CountCheck, Verdict
from perfsuite.results.profile import of_baseline
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import DeviceHealth, Health, Run
from perfsuite.results.session_file import ArmFacts, Measurement, SessionReference
from perfsuite.results.store import Store
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.plan import Budget
from perfsuite.session.reference import ReferenceArm
from perfsuite.verdict.overall import Reference
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.tonight import Tonight
from tests.analysis.step_time.test_forecast import step
from tests.samples import (
    BEFORE,
    DISTURBED,
    make_case,
    make_figures,
    make_gpu_machine,
    make_machine,
    make_result,
    make_run,
    make_session_file,
    metric_check,
    now,
)
from tests.session.making import PASSED, RECORDED, Sessions, reviewed
from tests.suite import waiver
from tests.traces import EAGER, launch_profile, taken, unseen_profile
from tests.twin_counts import baseline_of, counts, launch

ISSUE = {"known_issue": KnownIssue(url="https://example.org/issues/209", failure="timeout")}
SWEPT = {"may_run_out_of_memory": True}


def test_does_not_record_an_unhealthy_launch(sessions: Sessions) -> None:
    runs = [make_run(figures=make_figures(tokens_per_s=speed)) for speed in (1000, 10, 1002)]
    sessions.launch(*runs, verdict=Verdict(outcome="recorded", launches=3, unhealthy_launches=(2,)))
    ours = sessions.make()
    result = ours.measure(make_case(), "test")
    assert result.figures.tokens_per_s == 1001
    assert result.baseline_file == str(ours.setup.baselines.local_file("cpu-test-2c", make_case().id))
    held = documents.read(Path(result.baseline_file), Baseline)
    assert held.values("tokens_per_s") == [1000, 1002]
    assert {launch.session for launch in held.launches} == {ours.record.directory.name}


def test_case_with_a_baseline_may_not_be_skipped(sessions: Sessions) -> None:
    too_large = make_case(topology=Topology(processes_per_node=5))
    ours = sessions.make(fail_without_baseline=True)
    others = sessions.make()
    for session in (ours, others):
        session.setup.host.machine = make_machine()
    file = ours.setup.baselines.write_reviewed(baseline.from_runs([make_run(case=too_large)]))
    why = "it needs 5 cores (one per process), but this machine has 2"
    assert others.skip_reason(too_large) == why
    with pytest.raises(CaseError) as caught:
        ours.skip_reason(too_large)
    missing = f"the case has a reviewed baseline ({file}) and --perf-missing-baseline=fail is set"
    assert str(caught.value) == f"{why}, but {missing}"
    assert ours.skip_reason(too_large.replace(micro_batch=3)) == why
    ours.record_error(too_large, "test", caught.value)
    (kept,) = ours.record.results
    assert (kept.outcome, kept.verdict.failure, kept.excused) == ("failed", "error", None)
    assert kept.verdict.reasons == (str(caught.value),)


@pytest.mark.parametrize(
    ("changes", "failure", "has_baseline", "excused"),
    [
        (ISSUE, "timeout", False, "known issue"),
        (SWEPT, "out_of_memory", False, "out of memory"),
        (SWEPT, "out_of_memory", True, None),
        ({}, "crash", False, None),
    ],
)
def test_expected_failure_fails_nothing(
    sessions: Sessions, changes: dict[str, Any], failure: Any, has_baseline: bool, excused: str | None
) -> None:
    asked = make_case(**changes)
    sessions.launch(make_run(case=asked), verdict=Verdict(outcome="failed", launches=1, failure=failure))
    ours = sessions.make()
    if has_baseline:
        before = reviewed(*[make_run(case=asked, machine=ours.setup.host.machine)] * 5)
        ours.setup.baselines.write_reviewed(before)
    result = ours.measure(asked, "test")
    assert result.excused == excused
    assert ours.setup.options.is_failing(result) is (excused is None)
    assert ours.record.tally.nothing_measured is (excused != "known issue")


def test_out_of_memory_beside_others_is_no_misfit(sessions: Sessions) -> None:
    asked = make_case(**SWEPT)
    failure = Failure(kind="out_of_memory", message="CUDA out of memory", at=0.0)
    card = DeviceHealth(index=0, held_before_bytes=70 * 2**30)
    beside = Health(samples=9, seconds=9, steps=9, devices=(card,))
    for run, excused in (
        (make_run(case=asked, failure=failure, health=beside, machine=make_gpu_machine()), None),
        (make_run(case=asked, failure=failure, health=DISTURBED), "out of memory"),
    ):
        sessions.launch(run, verdict=Verdict(outcome="failed", launches=1, failure="out_of_memory"))
        assert sessions.make().measure(asked, "test").excused == excused


def test_compares_with_a_baseline_made_meanwhile(sessions: Sessions) -> None:
    ours = sessions.make()
    before = baseline.from_runs([make_run(machine=ours.setup.host.machine)] * 5)
    measure = Mock(side_effect=AllocationOverError("enough"))
    lock = Mock(spec=MachineLock)
    lock.take.side_effect = lambda say: ours.setup.baselines.write_local(before)
    ours.setup.lock = lock
    sessions.measure = measure
    with pytest.raises(AllocationOverError):
        ours.measure(make_case(), "test")
    *_, reference, _ = measure.call_args.args
    assert (reference.baseline, measure.call_count) == (before, 1)


@pytest.mark.fault("baseline is missing")
@pytest.mark.parametrize(
    ("changes", "outcome", "failure", "launched", "excused"),
    [
        ({}, "recorded", None, False, None),
        (ISSUE, "recorded", None, True, None),
        (ISSUE, "failed", "timeout", True, "known issue"),
        (SWEPT, "failed", "out_of_memory", True, "out of memory"),
    ],
)
def test_only_excused_cases_lack_a_baseline(
    sessions: Sessions,
    changes: dict[str, Any],
    outcome: Any,
    failure: Any,
    launched: bool,
    excused: str | None,
) -> None:
    recorded = Verdict(outcome=outcome, launches=2, failure=failure, unhealthy_launches=(2,))
    sessions.launch(make_run(), make_run(), verdict=recorded)
    result = sessions.make(fail_without_baseline=True).measure(make_case(**changes), "test")
    assert (result.outcome, result.excused, bool(result.runs)) == ("failed", excused, launched)
    assert result.verdict.failure == (failure or "no_baseline")
    assert result.verdict.launches == len(result.runs)
    assert result.verdict.unhealthy_launches == ((2,) if launched else ()), "the launch remains set aside"
    assert not (sessions.directory / "store" / "baselines").exists()


def test_injected_fault_ignores_a_small_baseline(sessions: Sessions) -> None:
    ours = sessions.make(policy=Policy(record_launches=1))
    ours.setup.baselines.write_local(baseline.from_runs([make_run(machine=ours.setup.host.machine)]))
    for changes, option in (({"inject": "nan"}, "--perf-inject"), ({"fail_without_baseline": True}, "fail")):
        (reason,) = sessions.make(**changes).measure(make_case(), "test").verdict.reasons
        assert reason.startswith("no baseline of 3 launches or more on ")
        assert option in reason
    sessions.launch(make_run())
    assert ours.measure(make_case(), "test").outcome == "passed"


@pytest.mark.parametrize(("launch_s", "compares"), [(20.0, False), (40.0, True)])
def test_small_baseline_counts_if_time_is_short(sessions: Sessions, launch_s: float, compares: bool) -> None:
    """If small baselines were ignored, a short budget would lead to a new baseline in every session."""
    ours = sessions.make()
    small = baseline.from_runs([make_run(machine=ours.setup.host.machine)])
    ours.setup.baselines.write_local(small)
    case = make_case()
    ours.setup.budget = Budget(100, {case.id: launch_s})
    measure = Mock(side_effect=AllocationOverError("enough"))
    sessions.measure = measure
    with pytest.raises(AllocationOverError):
        ours.measure(case, "test")
    *_, reference, _ = measure.call_args.args
    assert (reference.baseline == small) is compares


MORE = counts(host_reads={"forward": 2, "optimizer": 39})


def measured(sessions: Sessions, run: Run, verdict: Verdict, **options: Any) -> Measurement:
    """Return the result of a session with one launch of a case."""
    sessions.launch(run, verdict=verdict)
    return sessions.make(**options).measure(make_case(), "test")


def counts_in(sessions: Sessions) -> list[str]:
    files = sessions.make().setup.baselines.counts.files()
    return [documents.read(file, CountBaseline).target for file in files]


def test_records_counts_then_judges_them(sessions: Sessions) -> None:
    first = measured(sessions, launch(), RECORDED)
    ours = sessions.make()
    file = ours.setup.baselines.counts.local_file("cpu", make_case().id)
    assert file.exists()
    assert first.verdict.counts == CountCheck(outcome="recorded", compared=False, baseline_file=str(file))
    ours.setup.baselines.write_local(baseline.from_runs([make_run(machine=ours.setup.host.machine)] * 3))
    second = measured(sessions, launch(MORE), PASSED)
    assert (second.outcome, second.verdict.counts and second.verdict.counts.outcome) == ("regressed",) * 2
    assert ours.setup.options.is_failing(second)
    third = measured(sessions, launch(), PASSED)
    assert third.outcome == "passed"
    assert third.verdict.counts == CountCheck(outcome="passed", baseline_file=str(file))


def test_reviewed_counts_serve_a_new_machine(sessions: Sessions) -> None:
    sessions.make().setup.baselines.counts.write_reviewed(baseline_of())
    worse = measured(sessions, launch(MORE), RECORDED)
    assert (worse.outcome, worse.baseline_file) == ("regressed", None)
    assert not (sessions.directory / "store" / "baselines").exists()
    timed = RECORDED.replace(checks=(metric_check(outcome="recorded", baseline=None),))
    better = measured(sessions, launch(counts(host_reads={})), timed)
    assert better.outcome == "improved"
    assert better.baseline_file is not None
    assert Path(better.baseline_file).exists()
    assert counts_in(sessions) == ["cpu"]


def test_counts_switched_off_are_not_judged(sessions: Sessions) -> None:
    sessions.make().setup.baselines.counts.write_reviewed(baseline_of())
    assert measured(sessions, launch(counts=()), PASSED, counts=False).verdict.counts is None


def test_only_a_baseline_of_times_can_be_required(sessions: Sessions) -> None:
    ours = sessions.make().setup
    ours.baselines.write_reviewed(baseline.from_runs([make_run(machine=ours.host.machine)] * 3))
    assert measured(sessions, launch(), PASSED, fail_without_baseline=True).outcome == "passed"
    assert counts_in(sessions) == ["cpu"]


def test_bad_count_file_fails_before_launching(sessions: Sessions) -> None:
    ours = sessions.make()
    file = ours.setup.baselines.counts.write_reviewed(baseline_of())
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    sessions.measure = lambda *args, **options: pytest.fail("launched")
    with pytest.raises(PerfsuiteError, match="this perfsuite reads 1, got 2"):
        ours.measure(make_case(), "test")
    assert [result.outcome for result in ours.record.results] == ["failed"]


TRAINS = make_case(model="llama-tiny", framework=DDP())
SLOWER = Verdict(outcome="regressed", launches=3, checks=(metric_check(outcome="regressed"),))


class Explained:
    """A session with `--perf-explain`. Its launches and profiles are replaced."""

    def __init__(
        self, sessions: Sessions, verdict: Verdict, *, counted: bool = False, **options: Any
    ) -> None:
        self.profile = Mock(return_value=taken(EAGER))
        sessions.profile_once = self.profile
        self.session = sessions.make(**{"explain": True, **options})
        self.baselines = self.session.setup.baselines
        self.run = make_run(case=TRAINS, machine=self.session.setup.host.machine)
        launched = self.run.replace(counts=launch().counts) if counted else self.run
        sessions.launch(*[launched] * 3, verdict=verdict)

    @property
    def profiled(self) -> list[Path]:
        """Return the directory of each launch for a profile."""
        return [launched.args[2] for launched in self.profile.call_args_list]

    def has_baseline(self, *, profile: bool = True) -> None:
        before = reviewed(*[self.run] * 5)
        self.baselines.write_reviewed(before)
        if profile:
            self.baselines.profiles.write_reviewed(of_baseline(before, launch_profile()))

    def has_counts(self) -> bool:
        return self.baselines.counts.find(target_of(self.run.machine, dry=False), TRAINS) is not None

    def measure(self) -> Measurement:
        return self.session.measure(TRAINS, "test")


def test_profiles_a_slower_case(sessions: Sessions) -> None:
    ours = Explained(sessions, SLOWER)
    ours.has_baseline()
    result = ours.measure()
    assert ours.profiled == [Path(result.directory, "profile")]
    assert result.verdict.profiled is not None
    assert result.verdict.profiled.calls == ("aten::bmm 0 -> 24 calls a step",)
    assert result.profile == taken(EAGER)
    assert len(result.runs) == 3
    assert ours.session.record.running is None
    assert ours.session.record.session_file("complete").results == (result,)


@pytest.mark.parametrize("is_broken", [False, True])
def test_explains_a_missing_baseline_profile(sessions: Sessions, is_broken: bool) -> None:
    ours = Explained(sessions, SLOWER)
    ours.has_baseline(profile=is_broken)
    for file in sessions.directory.glob("baselines/profiles/*/*.json"):
        file.write_text("{")
    profiled = ours.measure().verdict.profiled
    assert profiled is not None
    assert "there is no profile of the baseline" in profiled.notes[0]
    assert ("not JSON" in profiled.notes[0]) is is_broken


@pytest.mark.fault("launch for a profile fails")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AllocationOverError("no more launches"), "no more launches"),
        (OSError("Cannot allocate memory"), "OSError: Cannot allocate memory"),
    ],
)
def test_a_profile_that_fails_costs_no_verdict(sessions: Sessions, error: Exception, why: str) -> None:
    ours = Explained(sessions, SLOWER)
    ours.profile.side_effect = error
    result = ours.measure()
    assert result.outcome == "regressed"
    assert result.verdict.profiled is not None
    assert result.verdict.profiled.notes == (f"no profile was taken: {why}",)
    assert ours.session.record.results == [result]


@pytest.mark.parametrize("verdict", [SLOWER, RECORDED], ids=lambda verdict: verdict.outcome)
def test_interrupted_profile_costs_no_verdict(sessions: Sessions, verdict: Verdict) -> None:
    ours = Explained(sessions, verdict, counted=verdict == RECORDED)
    ours.profile.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ours.measure()
    left = ours.session.record.session_file("interrupted")
    assert left.interrupted_case is None
    assert [result.verdict.replace(counts=None) for result in left.results] == [verdict]
    assert ours.has_counts() is (verdict == RECORDED)


def test_recorded_baseline_has_its_profile(sessions: Sessions) -> None:
    ours = Explained(sessions, RECORDED)
    assert ours.measure().verdict.profiled is None
    stored = ours.baselines.find(ours.run.machine.hardware_class, TRAINS)
    assert stored is not None
    assert ours.baselines.profile_of(stored) == launch_profile(EAGER)


@pytest.mark.parametrize(("share", "outcome"), [(0.0, "recorded"), (0.9, "not counted")])
def test_does_not_record_counts_that_lack_work(sessions: Sessions, share: float, outcome: str) -> None:
    ours = Explained(sessions, RECORDED, counted=True)
    ours.profile.return_value = taken(unseen_profile(share))
    result = ours.measure()
    assert result.verdict.counts is not None
    assert result.verdict.counts.outcome == outcome
    assert ours.session.record.session_file("complete").results == (result,)
    assert ours.has_counts() is (outcome == "recorded")


@pytest.mark.parametrize(
    ("verdict", "least", "explain", "case", "profiled"),
    [
        (PASSED, 1, True, TRAINS, 0),
        (PASSED, 5, True, TRAINS, 1),
        (SLOWER, 1, False, TRAINS, 0),
        (Verdict(outcome="failed", launches=1), 5, True, TRAINS, 0),
        (Verdict(outcome="unhealthy", launches=1), 5, True, TRAINS, 0),
        (RECORDED, 1, True, make_case(), 0),
    ],
)
def test_which_cases_are_profiled(
    sessions: Sessions, verdict: Verdict, least: int, explain: bool, case: Case, profiled: int
) -> None:
    ours = Explained(sessions, verdict, explain=explain, policy=Policy(min_launches=least))
    ours.session.measure(case, "test")
    assert len(ours.profiled) == profiled


EXPECTED = step(1)
INTERVAL = Forecast(low_s=1.1, high_s=1.3, cases=("a",), gpu_factor=1.2, host_factor=None)


class Predictions(Sessions):
    """Makes sessions on a machine with GPUs. The dry run that follows the launches is replaced."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.case = make_case(hardware="h100")
        of_a_dry_run = {"counts": does(flops=100), "dry_facts": DryFacts(expected=EXPECTED)}
        self.runs_dry = Mock(return_value=make_run(dry=True, **of_a_dry_run))
        self.dry_run = self.runs_dry

    def result(
        self,
        verdict: Verdict = RECORDED,
        run: Run | None = None,
        budget: Budget | None = None,
        **options: Any,
    ) -> Measurement:
        self.launch(run or make_run(case=self.case, machine=make_gpu_machine()), verdict=verdict)
        ours = self.make(**options)
        ours.setup.host.machine = make_gpu_machine()
        ours.setup.budget = budget
        return ours.measure(self.case, "test")


def does(flops: int) -> tuple[RankCounts, ...]:
    """Return the counts of two ranks that do this many FLOPs in a step."""
    return merged({rank: Counts(flops={"forward": flops}) for rank in (0, 1)})


@pytest.fixture
def predictions(tmp_path: Path) -> Predictions:
    return Predictions(tmp_path)


def test_a_first_baseline_is_compared_with_a_dry_run(predictions: Predictions) -> None:
    result = predictions.result()
    assert result.prediction == DryFacts(expected=EXPECTED)
    assert result.baseline_file is not None
    assert documents.read(Path(result.baseline_file), Baseline).expected == EXPECTED
    case, directory = predictions.runs_dry.call_args.args
    assert (case, directory.name) == (predictions.case, "prediction")
    assert predictions.runs_dry.call_args.kwargs["gpu"] == make_gpu_machine().device_name


def test_a_measured_case_has_the_forecast_of_an_earlier_dry_run(predictions: Predictions) -> None:
    promised = DryFacts(expected=EXPECTED, forecast=INTERVAL)
    run = make_run(case=predictions.case, machine=make_gpu_machine(), dry=True, dry_facts=promised)
    session = Store(predictions.directory / "store").new_session()
    documents.write(session.results, make_session_file(make_result(run, before=None)))
    assert predictions.result().prediction == promised


def test_the_same_work_has_the_expected_time_of_its_baseline(predictions: Predictions) -> None:
    first, more = (
        make_run(case=predictions.case, machine=make_gpu_machine(), counts=does(flops))
        for flops in (100, 200)
    )
    predictions.result(run=first)
    assert predictions.result(PASSED, first).prediction == DryFacts(expected=EXPECTED)
    assert predictions.result(PASSED, more).prediction is None
    assert predictions.runs_dry.call_count == 1


@pytest.mark.parametrize(
    ("verdict", "options", "runs_dry"),
    [
        (PASSED, {}, False),
        (PASSED, {"explain": True}, True),
        (PASSED, {"policy": Policy(min_launches=5)}, True),
        (RECORDED, {"inject": "slowdown=5%"}, False),
        (Verdict(outcome="unhealthy", launches=1), {"explain": True}, False),
    ],
)
def test_only_possible_baselines_need_a_dry_run(
    predictions: Predictions, verdict: Verdict, options: dict[str, Any], runs_dry: bool
) -> None:
    if "inject" in options:
        predictions.result()
        predictions.runs_dry.reset_mock()
    predictions.result(verdict, **options)
    assert predictions.runs_dry.called is runs_dry


def test_a_cpu_has_no_expected_speed(predictions: Predictions) -> None:
    predictions.case = make_case()
    predictions.launch(make_run(), verdict=RECORDED)
    assert predictions.make().measure(make_case(), "test").prediction is None
    assert not predictions.runs_dry.called


def test_a_failed_prediction_keeps_the_verdict(predictions: Predictions) -> None:
    predictions.runs_dry.side_effect = ValueError("a fault of the model")
    result = predictions.result()
    assert result.outcome == "recorded"
    assert result.prediction is not None
    assert "a fault of the model" in str(result.prediction.no_expected)


def test_a_dry_run_needs_time_in_the_budget(predictions: Predictions) -> None:
    assert predictions.result(budget=Budget(seconds=0)).prediction is None


def slower_case(
    sessions: Sessions, *outcomes: str, confirm: Exception | None = None
) -> tuple[Mock, Mock, Measurement]:
    """Measure a case in a session with a reference, and return the mocks of the reference and of `measure`.

    `outcomes` are those of tokens/s, by call of `measure`. `confirm` is an error of the confirming launches.
    """
    verdicts = [
        Verdict(outcome=outcome, launches=3, checks=(metric_check(outcome=outcome, change=-0.2),))
        for outcome in outcomes
    ]

    def launch(case: Case, *args: Any, runs: list[Run]) -> tuple[list[Run], Verdict]:
        args[-1].on_launch(case, 1)
        runs += [make_run()] * 3
        return runs, verdicts.pop(0)

    measure = Mock(side_effect=launch)
    sessions.measure = measure
    ours = sessions.make()
    ours.setup.baselines.write_reviewed(reviewed(*[make_run(machine=ours.setup.host.machine)] * 5))
    reference = Mock(spec=ReferenceArm, launches_of_cases=0)
    reference.tonight.side_effect = [Tonight(), CONFIRMING]
    reference.confirm.side_effect = confirm
    reference.facts.return_value = SessionReference(arm=ArmFacts(text="v1", facts={}))
    assert isinstance(ours.mode, AgainstBaseline)
    ours.mode.reference = reference
    return reference, measure, ours.measure(make_case(), "test")


CONFIRMING = Tonight(confirming={"x": Mock()})


@pytest.mark.parametrize("outcome", ["regressed", "inconclusive"])
def test_a_slower_case_is_judged_again_beside_the_old_code(sessions: Sessions, outcome: str) -> None:
    reference, measure, result = slower_case(sessions, outcome, "passed")
    assert result.outcome == "passed"
    case, launches, _ = reference.confirm.call_args.args
    assert (case, launches) == (make_case(), 3)
    assert [call.args[3].tonight for call in measure.call_args_list] == [Tonight(), CONFIRMING]
    assert measure.call_args.kwargs["runs"][:3] == [make_run()] * 3, "the first launches count"


def test_a_case_that_passes_needs_no_launch_of_the_reference(sessions: Sessions) -> None:
    reference, measure, _ = slower_case(sessions, "passed")
    assert (reference.confirm.call_count, measure.call_count) == (0, 1)


def test_the_end_of_an_allocation_keeps_a_decided_verdict(sessions: Sessions) -> None:
    """The job can end while the reference is launched to confirm a verdict."""
    ends = AllocationOverError("the job is over")
    _, _, result = slower_case(sessions, "regressed", "regressed", confirm=ends)
    assert result.outcome == "regressed"


def test_the_judge_knows_the_waivers(sessions: Sessions) -> None:
    (sessions.directory / "perf-waivers.toml").write_text(waiver(tolerated="60%"))
    slow = make_result(*[now(tokens_per_s=50_000)] * 3)
    sessions.launch(*slow.runs, verdict=slow.verdict)
    launch = sessions.measure
    seen: list[bool] = []

    def measure(*args: Any, **how: Any) -> Any:
        seen.extend(arg.policy.waives(slow.verdict.checks) for arg in args if isinstance(arg, Reference))
        return launch(*args, **how)

    sessions.measure = measure
    sessions.make().measure(BEFORE.case, "test")
    assert seen == [True]
