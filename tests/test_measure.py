import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from perfsuite import documents
from perfsuite import measure as flow
from perfsuite.case.case import Case
from perfsuite.errors import FileError
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.script import Script
from perfsuite.launch.arm import Arm
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.quiet import Neighbours
from perfsuite.measure import Launching, WhenShared, launch_once, measure, profile_once, until_decided
from perfsuite.node.machine import detect_cpu
from perfsuite.results import baseline
from perfsuite.results.counts import Counts
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.verdict.overall import Reference, with_counts
from perfsuite.verdict.policy import Policy
from tests.packages import Packages
from tests.samples import (
    DISTURBED,
    make_case,
    make_launches,
    make_machine,
    make_report,
    make_run,
    write_launch,
)
from tests.twin_counts import baseline_of, counts, launch

RECORDS = Policy(record_launches=1)
NOTHING = Reference()
CASE = make_case()
MACHINE = make_machine()
BESIDE_OTHERS = make_run(health=DISTURBED)
Measured = Callable[..., tuple[list[Run], Verdict]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    """Return a function that calls `measure` with these runs in place of launches, each in its directory."""

    def measured(
        *runs: Run,
        case: Case = CASE,
        reference: Reference = NOTHING,
        earlier: Sequence[Run] = (),
        **how: Any,
    ) -> tuple[list[Run], Verdict]:
        left = list(enumerate(runs, len(earlier) + 1))

        def launch(case: Any, machine: Any, directory: Path, how: Launching) -> Run:
            number, run = left.pop(0)
            assert directory == RunDir.of_launch(tmp_path, number).path
            return run

        monkeypatch.setattr(flow, "launch_once", launch)
        return measure(case, MACHINE, tmp_path, reference, Launching(**how), runs=[*earlier])

    return measured


def others_who(*, end: bool = True) -> Mock:
    """Return other users of the machine. `end` is whether they end while perfsuite waits for them."""
    others = Mock(spec=Neighbours, say=Mock())
    others.during_launch.side_effect = lambda machine, devices: f"train (pid 4711) on {devices}"
    others.wait.return_value = end
    return others


LONG, SHORT = (counts(flops={"forward": flops}) for flops in (200, 100))
SCRIPTED = make_case(framework=Script(command=("train",)))


ONE_LAUNCH = Policy(max_launches=1, record_launches=1)
CRASHED = launch(LONG, failure=Failure(kind="crash", message="x"))


@pytest.mark.parametrize(
    ("case", "ends_of", "policy", "expected"),
    [
        pytest.param(CASE, (LONG, SHORT), RECORDS, (1, "regressed"), id="no script"),
        pytest.param(SCRIPTED, (LONG, SHORT), RECORDS, (2, "passed"), id="once"),
        pytest.param(SCRIPTED, (LONG, LONG), RECORDS, (2, "regressed"), id="twice"),
        pytest.param(SCRIPTED, (SHORT, LONG), RECORDS, (1, "passed"), id="not at first"),
        pytest.param(SCRIPTED, (LONG, SHORT), ONE_LAUNCH, (1, "regressed"), id="only one launch is allowed"),
        pytest.param(SCRIPTED, (CRASHED,), RECORDS, (1, None), id="it failed"),
    ],
)
def test_counts_of_one_odd_launch_are_no_regression(
    measured: Measured,
    case: Case,
    ends_of: tuple[Counts | Run, ...],
    policy: Policy,
    expected: tuple[int, str | None],
) -> None:
    """Another launch must confirm that a script does more work in a step.

    A script without a seed might get a long batch in the counted step of one launch, and a short batch in
    that of another launch.
    """
    before = baseline_of(launch(SHORT, case=case))
    ends = [one if isinstance(one, Run) else launch(one, case=case) for one in ends_of]
    runs, verdict = measured(*ends, case=case, reference=Reference(counts=before, policy=policy))
    check = with_counts(verdict, runs, before).counts
    assert (len(runs), None if check is None else check.outcome) == expected


OPEN = Verdict(outcome="undecided", launches=1)
UNHEALTHY = Verdict(outcome="unhealthy", launches=1)
DECIDED = Verdict(outcome="passed", launches=2)


def test_launches_while_the_verdict_is_open() -> None:
    launch = Mock(return_value=False)
    is_free = Mock()
    assert until_decided(launch, Mock(side_effect=[OPEN, OPEN, DECIDED]), is_free) == DECIDED
    assert (launch.call_count, is_free.call_count) == (3, 0)


@pytest.mark.parametrize(("is_free", "judged", "expected"), [(True, 0, DECIDED), (False, 1, UNHEALTHY)])
def test_others_who_stay_end_the_launches(is_free: bool, judged: int, expected: Verdict) -> None:
    judge = Mock(side_effect=[OPEN, expected])
    assert until_decided(Mock(return_value=True), judge, lambda: is_free) == expected
    assert judge.call_args_list == [call(), [call(), call(max_unhealthy=1)][judged]]


def test_waits_for_nobody_after_the_verdict() -> None:
    is_free = Mock()
    assert until_decided(Mock(return_value=True), lambda: DECIDED, is_free) == DECIDED
    assert not is_free.called


def test_launches_again_if_one_unhealthy_is_too_few() -> None:
    """A judge's rule can require more than one launch, no matter who uses the machine."""
    launch = Mock(return_value=True)
    assert until_decided(launch, Mock(side_effect=[OPEN, OPEN, DECIDED]), lambda: False) == DECIDED
    assert launch.call_count == 2


@pytest.mark.parametrize(("has_time", "launches"), [(True, 3), (False, 1)])
def test_records_what_there_is_time_for(measured: Measured, has_time: bool, launches: int) -> None:
    runs, verdict = measured(*[make_run(duration_s=9)] * 3, has_time=lambda case, longest_s: has_time)
    assert (len(runs), verdict.outcome) == (launches, "recorded")


def test_no_time_is_left_to_repeat_a_disturbed_launch(measured: Measured) -> None:
    runs, verdict = measured(BESIDE_OTHERS, make_run(), has_time=lambda case, longest_s: False)
    assert (len(runs), verdict.outcome) == (1, "unhealthy")


def test_has_time_knows_the_longest_launch(measured: Measured) -> None:
    has_time = Mock(return_value=True)
    measured(*[make_run(duration_s=seconds) for seconds in (9, 12, 10)], has_time=has_time)
    assert has_time.call_args_list == [call(CASE, longest_s) for longest_s in (9, 12, 12)]


def test_launches_until_the_reference_decides(measured: Measured) -> None:
    begins = Mock()
    runs, verdict = measured(*make_launches(1, 1.01, 0.99), on_launch=begins)
    assert (verdict.outcome, verdict.launches, len(runs)) == ("recorded", 3, 3)
    assert begins.call_args_list == [call(CASE, number) for number in (1, 2, 3)]
    _, verdict = measured(*make_launches(1), reference=Reference(policy=RECORDS))
    assert (verdict.outcome, verdict.launches) == ("recorded", 1)
    reference = Reference(baseline=baseline.from_runs(make_launches(1, 1.01, 0.99)))
    _, verdict = measured(*make_launches(1), reference=reference)
    assert verdict.outcome == "inconclusive"  # the noise is unknown
    assert verdict.checks[0].baseline == 1000


def test_judges_earlier_launches_before_it_launches(measured: Measured) -> None:
    earlier = make_launches(1, 1.01, 0.99)
    runs, verdict = measured(earlier=earlier)
    assert (runs, verdict.outcome) == (earlier, "recorded")


def test_adds_to_earlier_launches_until_they_decide(measured: Measured) -> None:
    runs, verdict = measured(*make_launches(0.99), earlier=make_launches(1, 1.01))
    assert (len(runs), verdict.outcome) == (3, "recorded")


@pytest.mark.parametrize(
    ("disturbed", "when_shared", "end", "outcome", "made", "waits"),
    [
        pytest.param(3, "wait", True, "unhealthy", 3, 2, id="others come again"),
        pytest.param(3, "wait", False, "unhealthy", 1, 1, id="they stay"),
        pytest.param(3, "again", True, "unhealthy", 3, 0, id="nobody waits"),
        pytest.param(3, "stop", True, "unhealthy", 1, 0, id="it stops"),
        pytest.param(1, "wait", True, "recorded", 4, 1, id="after they have gone the launches decide"),
        pytest.param(0, "wait", True, "recorded", 3, 0, id="nobody disturbs it"),
    ],
)
def test_neighbours_decide_what_follows_a_launch(
    measured: Measured,
    disturbed: int,
    when_shared: WhenShared,
    end: bool,
    outcome: str,
    made: int,
    waits: int,
) -> None:
    others = others_who(end=end)
    ends = [*[BESIDE_OTHERS] * disturbed, *[make_run()] * 3]
    runs, verdict = measured(*ends, neighbours=others, when_shared=when_shared)
    assert (verdict.outcome, len(runs), others.launch_begins.call_count) == (outcome, made, made)
    assert others.wait.call_args_list == [call(MACHINE, 2)] * waits
    beside = range(1, min(disturbed, made) + 1)
    assert verdict.unhealthy_launches == tuple(beside)
    seen = [(f"seen during launch {number}: train (pid 4711) on 2",) for number in beside]
    assert [run.notes for run in runs] == [*seen, *[()] * (made - len(seen))]
    why = "other processes used 60% of the cores' time (at most 20% is healthy); seen: train (pid 4711) on 2"
    first = call(f"launch 1 of {CASE.id} is set aside: {why}")
    assert others.say.call_args_list[:1] == [first][:disturbed]


def test_failure_beside_others_is_final(measured: Measured) -> None:
    others = others_who()
    crash = BESIDE_OTHERS.replace(failure=Failure(kind="crash", message="x"))
    _, verdict = measured(crash, neighbours=others, when_shared="wait")
    assert (verdict.outcome, verdict.failure) == ("failed", "crash")
    assert not others.wait.called
    assert not others.say.called


def test_relaunches_if_asked_to_wait_for_quiet(measured: Measured) -> None:
    runs, verdict = measured(*[BESIDE_OTHERS] * 3, when_shared="wait")
    assert (verdict.outcome, len(runs), runs[0].notes) == ("unhealthy", 3, ())


class Cancels(LocalLauncher):
    """A launcher whose scheduler ends each job."""

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure:
        return Failure(kind="cancelled", message="the scheduler needs the nodes", at=1.0)


@pytest.mark.fault("scheduler ends a launch")
def test_reports_the_words_of_a_scheduler(tmp_path: Path) -> None:
    run = launch_once(CASE, MACHINE, tmp_path, Launching(launcher=Cancels()))
    assert run.failure is not None
    assert (run.failure.kind, run.failure.message) == ("cancelled", "the scheduler needs the nodes")


@pytest.mark.fault("report is from another launch")
def test_refuses_a_directory_with_a_launch(tmp_path: Path) -> None:
    RunDir(tmp_path).case.write_text("{}")
    with pytest.raises(
        FileError, match=rf"^{tmp_path} contains another launch, .*\. Give an empty directory\.$"
    ):
        launch_once(CASE, MACHINE, tmp_path)


@pytest.mark.parametrize("ended", [KeyboardInterrupt, FileError])
def test_checkpoints_are_removed_however_it_ends(tmp_path: Path, ended: type[BaseException]) -> None:
    def launch(*args: Any) -> None:
        (RunDir(tmp_path).checkpoints / "2").mkdir(parents=True)
        raise ended

    how = Launching(launcher=Mock(launch=launch))
    with pytest.raises(ended):
        launch_once(make_case(), make_machine(), tmp_path, how)
    assert RunDir(tmp_path).case.exists()
    assert not RunDir(tmp_path).checkpoints.exists()


def test_a_broken_metric_stops_no_launch(tmp_path: Path, packages: Packages) -> None:
    def launch(job: Job, on_progress: OnProgress) -> None:
        write_launch(job.run_dir.path, make_report(0), make_report(1))

    packages.install("extra-broken", "raise RuntimeError('no such GPU')", metrics="x = extra_broken:X")
    run = launch_once(CASE, MACHINE, tmp_path, Launching(launcher=Mock(launch=launch)))
    assert run.failure is None
    assert re.search(r"extra-broken 1\.5 .*RuntimeError: no such GPU.*pip uninstall", run.notes[-1])


def test_figures_that_cannot_be_written_are_shown(tmp_path: Path) -> None:
    def launch(job: Job, on_progress: OnProgress) -> None:
        write_launch(job.run_dir.path, make_report(0), make_report(1))

    RunDir(tmp_path).run.mkdir()
    run = launch_once(CASE, MACHINE, tmp_path, Launching(launcher=Mock(launch=launch)))
    assert run.figures.tokens_per_s == pytest.approx(2560)
    assert run.notes[-1].startswith(f"cannot write {RunDir(tmp_path).run}: ")


SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
message = torch.ones(int(os.environ["MESSAGE"]))
for step in range(100):
    model(torch.ones(4, 64)).square().mean().backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    dist.all_reduce(message)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_script_profile_shows_its_waits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    script = Script(path=str(tmp_path / "train.py"))
    case = make_case(framework=script, hardware="cpu", max_warmup_steps=3, steps=10, timeout_s=300)
    how = Launching(arm=Arm(given={"MESSAGE": "20000000"}))
    profile_of_launch = profile_once(case, detect_cpu("cpu"), tmp_path / "launch", how).profile
    assert profile_of_launch is not None
    profile = profile_of_launch.ranks[0].profile
    assert profile.calls()["gloo:all_reduce"] == 3
    assert max(profile.split.parts(), key=profile.split.parts().__getitem__) == "all_reduce exposed"


@pytest.mark.nightly
def test_profiled_launch_ends_and_leaves_traces(tmp_path: Path) -> None:
    case = make_case(model="llama-tiny", framework=DDP(), steps=1000, max_warmup_steps=3, timeout_s=300)
    taken = profile_once(case, detect_cpu("cpu"), tmp_path, Launching(inject="host-read"))
    assert taken.why_none is None
    assert taken.profile is not None
    (entry,) = taken.profile.ranks
    assert entry.ranks == (0, 1)
    assert not entry.profile.unsteady
    assert entry.profile.calls()["Optimizer.step#AdamW.step"] == 1
    assert sum(entry.profile.split.parts().values()) == pytest.approx(entry.profile.split.step_us, rel=0.01)
    traces = [json.loads(gzip.decompress(Path(trace).read_bytes())) for trace in taken.traces]
    assert [trace["distributedInfo"]["rank"] for trace in traces] == [0, 1]
    assert documents.read(RunDir(tmp_path).rank(0), RankReport).step_s == (), (
        "the launch has no times to judge"
    )
