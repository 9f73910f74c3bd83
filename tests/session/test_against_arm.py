"""Tests of the order in which a comparison launches its arms, and of the files that it keeps."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case.case import Case, KnownIssue
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch.arm import Arm
from perfsuite.launch.download import Consent, Plan
from perfsuite.launch.installer import Package
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.overlay import Wanted
from perfsuite.measure import Launching
from perfsuite.results.counts import OUTSIDE_OF_STEPS, Counts, PythonCalls
from perfsuite.results.profile import TakenProfile
from perfsuite.results.rank_report import Failure, FailureKind, Observed
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.session.against_arm import (
    COPIES,
    SAME_ARMS,
    SAME_CODE,
    AgainstArm,
    ByDryRuns,
    by_counts,
    resolved,
)
from perfsuite.session.mode import Task
from perfsuite.session.session import Session
from perfsuite.session.setup import Preflights
from perfsuite.verdict.policy import Policy
from tests.samples import DISTURBED, known, make_case, make_figures, make_machine, make_run
from tests.session.making import make_setup
from tests.session.test_priced import GIB, directory_of, run_of
from tests.traces import EAGER, taken, unseen_profile
from tests.twin_counts import counts, launch

ARMS = A, B = (Arm(text="main", given={"X": "1"}), Arm(text="."))
SIMULATED = make_case()
TRAINS = make_case(model="llama-tiny", framework=DDP())
LESS, MORE = (counts(kernels={"forward": kernels}) for kernels in (100, 101))


class Launches:
    """Replaces launches and dry runs. Arm B takes `slower` times as long as arm A.

    Launches with a number in `disturbed` are disturbed, and arms in `failing` fail. In a launch for a
    profile, arm B has eager attention.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.arms = ARMS
        self.made: list[str] = []  # the directories of launches and dry runs
        self.numbers: list[int] = []  # the numbers of timed launches
        self.injected: list[str | None] = []
        self.slower = 1.0
        self.disturbed: set[int] = set()
        self.failing: dict[str, FailureKind] = {}
        self.message = "boom"  # of each failure
        self.end: tuple[int, BaseException] | None = None
        """A number of launches, and the error that the next launch raises."""
        # How slow the machine and its probe are in each launch of arm A, and backwards in those of arm B.
        self.drift: tuple[float, ...] = ()
        self.counts: dict[str, Counts] = {}
        self.first_counts: dict[str, Counts] = {}  # counts of an arm's first launch, if different
        self.norms: dict[str, float] = {}
        self.observed: dict[str, Observed] = {}
        self.profiled: list[tuple[str, str | None]] = []
        self.profile_of_b = taken(EAGER)
        self.begun = threading.Barrier(2)
        self.error: Exception | None = None  # raised by a dry run of arm B
        self.no_cuda: dict[str, str] = {}
        self.devices: set[str | None] = set()
        self.interconnects: set[str | None] = set()
        self.counted_steps: list[int | None] = []  # requested for each launch or dry run

    @property
    def order(self) -> str:
        """Return the arms in the order of their launches."""
        return "".join(arm[0] for arm in self.made).upper()

    def launch_watched(
        self, case: Case, machine: Machine, directory: Path, number: int, how: Launching
    ) -> tuple[Run, bool]:
        how.on_launch(case, number)
        self.numbers.append(number)
        run = self.launch_once(case, machine, directory, how)
        return run, run.health == DISTURBED

    def launch_once(self, case: Case, machine: Machine, directory: Path, how: Launching) -> Run:
        if self.end is not None and len(self.made) == self.end[0]:
            raise self.end[1]
        name = "AB"[self.arms.index(how.arm)]
        self.made.append("/".join(directory.parts[-2:]))
        self.injected.append(how.inject)
        self.counted_steps.append(how.counted_steps)
        kind = self.failing.get(name)
        failure = None if kind is None else Failure(kind=kind, message=self.message, at=0.0)
        speed = 1000.0 * (1 + 0.001 * (len(self.made) % 3)) / (self.slower if name == "B" else 1.0)
        norm = self.norms.get(name)
        figures = make_figures(tokens_per_s=speed, tokens_per_s_mean=0.99 * speed, gradient_norm=norm)
        if self.drift:
            of_arm = self.drift if name == "A" else self.drift[::-1]
            slow = of_arm[known(RunDir(directory).number) - 1]
            figures = make_figures(tokens_per_s=speed / slow, probe_s_p50=0.01 * slow)
        health = DISTURBED if len(self.made) in self.disturbed else None
        counts = self.first_counts.pop(name, self.counts.get(name))
        run = make_run() if counts is None else launch(counts)
        observed = self.observed.get(name, run.observed)
        return run.replace(case=case, figures=figures, health=health, failure=failure, observed=observed)

    def profile_once(self, case: Case, machine: Machine, directory: Path, how: Launching) -> TakenProfile:
        self.profiled.append(("/".join(directory.parts[-2:]), how.inject))
        return taken() if how.arm == A else self.profile_of_b

    def dry_run(
        self,
        case: Case,
        directory: Path,
        *,
        device: Any,
        arm: Arm,
        stop: threading.Event,
        counted_steps: int,
        interconnect: str | None,
    ) -> Run:
        self.counted_steps.append(counted_steps)
        self.interconnects.add(interconnect)
        self.made.append("/".join(directory.parts[-2:]))
        self.devices.add(device)
        self.begun.wait(30)
        if self.error is not None and arm == B:
            raise self.error
        if self.error is not None:
            assert stop.wait(30), "the other arm failed"
        name = "AB"[self.arms.index(arm)]
        run = launch(self.counts.get(name, LESS if arm == A else MORE), dry=True)
        return run.replace(observed=self.observed.get(name, run.observed))

    def session(self, *, arms: tuple[Arm, Arm] = ARMS, explains: bool = True, **options: Any) -> Session:
        self.arms = arms
        setup = make_setup(self.root, self.said, wait_quiet_s=0, **options)
        setup.host.machine = make_machine()
        mode = AgainstArm(
            setup,
            arms,
            explains=explains,
            launch_watched=self.launch_watched,
            profile_once=self.profile_once,
        )
        return Session(mode)

    def measure(self, case: Case = SIMULATED, **options: Any) -> Measurement:
        return self.session(**options).measure(case, "test")

    def compare_counts(
        self,
        case: Case = SIMULATED,
        *,
        dry: bool = False,
        known_a: Run | None = None,
        metric: str | None = None,
        dry_run: Callable[..., Run] | None = None,
        **options: Any,
    ) -> Measurement:
        """Compare the counts of the arms. By default, arm B has more work."""
        self.counts = self.counts or {"A": LESS, "B": MORE}
        setup = make_setup(self.root, self.said, **options)
        launcher = None if dry else LocalLauncher()
        ours = by_counts(
            setup.options,
            setup.progress,
            launcher,
            self.arms,
            known_a,
            metric,
            launch_once=self.launch_once,
            dry_run=dry_run or self.dry_run,
            why_no_cuda=lambda arm: self.no_cuda.get(arm.text),
        )
        ours.setup.lock = Mock()
        if not dry:
            ours.setup.host.machine = make_machine()
        return ours.measure(case, "test")


def task(directory: Path) -> Task:
    return Task(case=SIMULATED, machine=make_machine(), directory=directory)


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path)


def test_launches_alternate_until_they_decide(launches: Launches) -> None:
    launches.slower = 1.4
    result = launches.measure()
    assert launches.order == "ABBAABBAAB"
    assert launches.made == [
        f"{arm}/launch-{pair}" for arm, pair in zip("abbaabbaab", "1122334455", strict=True)
    ]
    assert result.outcome == "regressed"
    assert [len(runs) for runs in (result.before, result.runs)] == [5, 5]
    assert result.figures.tokens_per_s == pytest.approx(1000 / 1.4, rel=0.01)


@pytest.mark.parametrize(("variables", "corrects"), [({}, True), ({"X": "1"}, False)])
def test_probe_corrects_only_if_code_alone_differs(
    launches: Launches, variables: dict[str, str], corrects: bool
) -> None:
    launches.slower = 1.25
    launches.drift = (1.0, 1.3, 0.9, 1.2, 1.1, 0.8) * 2  # for at most twelve pairs
    arms = Arm(text="main", moved=("/top", "/worktree"), paths=("/worktree",)), Arm(given=variables)
    speed = launches.measure(arms=arms).verdict.checks[0]
    assert speed.metric == "tokens_per_s"
    assert (speed.probe_exponent is not None) == corrects


@pytest.mark.parametrize(
    ("a", "b", "inject", "is_same"),
    [
        (Arm(), Arm(), None, True),
        (Arm(commit="1" * 40, moved=("/top", "/tree"), paths=("/tree",)), Arm(commit="1" * 40), None, True),
        (Arm(), Arm(), "slowdown=30%", False),
        (Arm(given={"OMP_NUM_THREADS": "1000"}), Arm(), None, False),
        (Arm(commit="1" * 40), Arm(commit="1" * 40, dirty=True), None, False),
        (Arm(commit="1" * 40), Arm(commit="2" * 40), None, False),
        (Arm(packages="/packages"), Arm(), None, False),
        (Arm(python="/old/bin/python"), Arm(), None, False),
    ],
)
def test_reports_identical_arms_before_launching(
    launches: Launches, a: Arm, b: Arm, inject: str | None, is_same: bool
) -> None:
    ours = launches.session(arms=(a, b), inject=inject)
    ours.mode.refused(task(launches.root))
    remark = "arms A and B are the same environment, so this comparison can only show noise"
    assert [remark in line for line in launches.said] == [True] * is_same


def test_repeats_a_shared_pair_in_the_same_order(launches: Launches) -> None:
    launches.disturbed = {3}
    result = launches.measure()
    assert launches.order == "ABBABAAB"
    assert result.verdict.unhealthy_launches == (2,)
    assert result.outcome == "passed"
    assert launches.numbers == [1, 2, 3, 4, 5, 6, 7, 8]


def test_allow_shared_ends_at_one_shared_pair(launches: Launches) -> None:
    launches.disturbed = {1}
    assert launches.measure(allow_shared=True).outcome == "unhealthy"
    assert launches.order == "AB"


@pytest.mark.parametrize(
    ("failing", "excused"),
    [
        ({"A": "crash"}, None),
        ({"A": "out_of_memory", "B": "out_of_memory"}, "out of memory"),
        ({"A": "out_of_memory"}, "out of memory"),
        ({"B": "out_of_memory"}, None),
        ({"A": "out_of_memory", "B": "crash"}, None),
    ],
)
def test_tries_both_arms_before_blaming_one(
    launches: Launches, failing: dict[str, FailureKind], excused: str | None
) -> None:
    launches.failing = failing
    result = launches.measure(make_case(may_run_out_of_memory=True))
    assert result.verdict.reasons == tuple(f"arm {arm} failed: {failing[arm]}: boom" for arm in failing)
    assert (result.outcome, result.excused, launches.order) == ("failed", excused, "AB")


@pytest.mark.parametrize(
    ("kind", "message", "package"),
    [
        ("crash", "ImportError: cannot import name 'f' from 'torchao.quantization' (/x.py)", "torchao"),
        ("crash", "RuntimeError: no trainer: caused by ModuleNotFoundError: No module named 'six'", "six"),
        ("crash", "ValueError: boom", ""),
        ("timeout", "No module named 'six'", ""),
    ],
)
def test_failed_import_of_a_release_gets_advice(
    launches: Launches, kind: FailureKind, message: str, package: str
) -> None:
    launches.failing = {"A": kind, "B": kind}
    launches.message = message
    names_a_release = Arm(text="peft==0.17.1", packages="/packages")
    first, second, *advice = launches.measure(arms=(names_a_release, Arm())).verdict.reasons
    assert (first, second) == (f"arm A failed: {kind}: {message}", f"arm B failed: {kind}: {message}")
    assert bool(advice) == bool(package)
    if package:
        (sentence,) = advice
        assert f"an import from {package} failed" in sentence
        assert f"Check whether {package} and the package that imports it (see the traceback) fit" in sentence
        assert "add a fitting release to arm A" in sentence


def test_advice_on_imports_is_given_by_counts_as_well(launches: Launches) -> None:
    launches.arms = (Arm(text="peft==0.17.1", packages="/packages"), B)
    launches.failing = {"A": "crash"}
    launches.message = "No module named 'six'"
    result = launches.compare_counts()
    assert "an import from six failed" in result.verdict.reasons[-1]


def test_advice_names_the_package_of_a_module(launches: Launches) -> None:
    launches.arms = (Arm(text="torchmetrics==0.9.3", packages="/packages"), B)
    launches.failing = {"A": "crash"}
    launches.message = "No module named 'pkg_resources'"
    reason = launches.compare_counts().verdict.reasons[-1]
    assert reason.endswith(
        "to arm A (pkg_resources is a part of older releases of setuptools, such as 80.9.0)"
    )


SEEN = Observed(settings={}, environment={"torch": "2.13.0+cpu"}, code="c0de")


def test_a_release_that_was_not_used_is_not_compared(launches: Launches) -> None:
    launches.observed = {"A": SEEN, "B": SEEN}
    names_a_release = Arm(text="torch==2.12.0", python="/old/python")
    result = launches.measure(arms=(names_a_release, B))
    assert (result.outcome, result.verdict.failure) == ("failed", "unlike")
    assert result.verdict.reasons[0] == (
        "arm A names torch==2.12.0, but its launch used 2.13.0+cpu, which comes first on its path"
    )
    launches.observed = {"A": SEEN.replace(environment={"torch": "2.12.0+cu130"}), "B": SEEN}
    assert launches.measure(arms=(names_a_release, B)).outcome == "passed"
    launches.observed = {"A": SEEN.replace(environment={"torch": "a fork of 2.12"}), "B": SEEN}
    assert "its launch used a fork of 2.12" in launches.measure(arms=(names_a_release, B)).verdict.reasons[0]


@pytest.mark.parametrize(
    ("arm", "observed", "is_said"),
    [
        (Arm(text="main", commit="a"), SEEN, True),
        (Arm(text="main", commit="a"), SEEN.replace(code="other"), False),
        (Arm(text="main", commit="a"), SEEN.replace(code=None), False),
        (Arm(text="MORE=1", given={"MORE": "1"}), SEEN, False),
        (replace(B, text="."), SEEN, False),
    ],
    ids=["the same", "other code", "unknown code", "a variable", "the same words"],
)
def test_says_that_both_arms_ran_the_same(
    launches: Launches, arm: Arm, observed: Observed, is_said: bool
) -> None:
    launches.observed = {"A": observed, "B": SEEN.replace(code=observed.code and SEEN.code)}
    assert (SAME_CODE in launches.measure(arms=(arm, B)).verdict.reasons) == is_said


@pytest.mark.parametrize("code", ["c0de", "other"])
def test_dry_arms_that_ran_the_same_code_say_so(launches: Launches, code: str) -> None:
    launches.arms = (Arm(text="main", commit="a"), B)
    launches.counts = {"A": LESS, "B": LESS}
    launches.observed = {"A": SEEN, "B": SEEN.replace(code=code)}
    reasons = launches.compare_counts(dry=True).verdict.reasons
    assert (SAME_CODE in reasons) == (code == SEEN.code)


def test_names_an_installed_copy_of_the_repository(launches: Launches) -> None:
    arm = Arm(text="main", commit="a", copies=("mylib",))
    reasons = launches.measure(arms=(arm, B)).verdict.reasons
    assert COPIES.format("mylib") in reasons


@pytest.mark.parametrize(("tolerance", "outcome"), [(None, "passed"), (0.01, "regressed")])
def test_a_session_can_have_its_own_tolerance(
    launches: Launches, tolerance: float | None, outcome: str
) -> None:
    launches.slower = 1.05
    assert launches.measure(policy=Policy(tolerance=tolerance)).outcome == outcome


def test_nodes_found_bad_are_not_launched_on(launches: Launches) -> None:
    ours = launches.session()
    preflights = Mock(spec=Preflights)
    preflights.problems.return_value = ("n2: slow",)
    ours.preflights = preflights
    result = ours.measure(SIMULATED, "test")
    assert (result.outcome, result.verdict.reasons, launches.order) == ("unhealthy", ("n2: slow",), "")


def test_a_fault_is_injected_into_arm_b_alone(launches: Launches) -> None:
    launches.measure(inject="slowdown=30%")
    assert dict(zip(launches.order, launches.injected, strict=True)) == {"A": None, "B": "slowdown=30%"}


def test_comparison_leaves_no_session_or_baseline(launches: Launches) -> None:
    result = launches.measure()
    assert result.baseline_file is None
    assert not (launches.root / "store" / "baselines").exists()
    assert not (launches.root / "store" / "runs").exists()
    (file,) = launches.root.glob("store/compare/*/results.json")
    stored = documents.read(file, SessionFile)
    assert [arm.text for arm in stored.arms] == ["main", "."]
    assert stored.arms[0].facts["X"] == "1"
    assert stored.results == (result,)


def test_an_interrupt_leaves_what_was_measured(launches: Launches) -> None:
    launches.end = 3, KeyboardInterrupt()
    ours = launches.session()
    with pytest.raises(KeyboardInterrupt):
        ours.measure(SIMULATED, "test")
    stored = ours.record.session_file("interrupted")
    assert stored.interrupted_case == SIMULATED.id
    assert len(stored.interrupted_launches) == 2, "only the first pair was complete"


def test_error_keeps_the_launches_of_both_arms(launches: Launches) -> None:
    launches.end = 5, FileError("the disk is full")
    launches.disturbed = {1}
    ours = launches.session()
    with pytest.raises(FileError):
        ours.measure(SIMULATED, "test")
    (result,) = ours.record.results
    assert [len(runs) for runs in (result.before, result.runs)] == [2, 2]


def test_saves_no_launch_of_another_case(launches: Launches) -> None:
    ours = launches.session()
    ours.measure(SIMULATED, "first")
    launches.end = len(launches.made), KeyboardInterrupt()
    second = make_case(micro_batch=5)
    with pytest.raises(KeyboardInterrupt):
        ours.measure(second, "second")
    saved = documents.read(ours.record.directory.results, SessionFile)
    assert (saved.interrupted_case, saved.interrupted_launches) == (second.id, ())


def test_profiles_each_differing_arm_once(launches: Launches) -> None:
    launches.slower = 1.4
    result = launches.measure(TRAINS, inject="eager-attention")
    assert launches.profiled == [("a/profile", None), ("b/profile", "eager-attention")]
    assert result.verdict.profiled is not None
    assert result.verdict.profiled.calls == ("aten::bmm 0 -> 24 calls a step",)
    assert (result.profile_before, result.profile) == (taken(), taken(EAGER))
    assert len(result.runs) == 5, "launches for a profile are not in pairs"


def test_names_the_arm_with_uncounted_work(launches: Launches) -> None:
    launches.counts = {"A": LESS, "B": LESS}
    launches.profile_of_b = taken(unseen_profile(0.43))
    launches.slower = 1.4
    counts = launches.measure(TRAINS).verdict.counts
    assert counts is not None
    assert counts.outcome == "not counted"
    (why,) = counts.notes
    assert why.startswith("arm B: according to the profile, 43% of")


@pytest.mark.parametrize(
    ("slower", "explains", "case"), [(1.0, True, TRAINS), (1.4, False, TRAINS), (1.4, True, SIMULATED)]
)
def test_profiles_only_arms_worth_explaining(
    launches: Launches, slower: float, explains: bool, case: Case
) -> None:
    launches.slower = slower
    assert launches.measure(case, explains=explains).verdict.profiled is None
    assert not launches.profiled


def test_launches_each_arm_once_fault_in_arm_b(launches: Launches) -> None:
    result = launches.compare_counts(inject="slowdown=30%")
    assert (launches.made, launches.injected) == (["a/launch-1", "b/launch-1"], [None, "slowdown=30%"])
    assert (result.outcome, result.verdict.launches, result.by_counts) == ("regressed", 2, True)


def test_launches_nothing_without_a_step_to_count(launches: Launches) -> None:
    with pytest.raises(CaseError, match=r"max_warmup_steps=3 leaves no step to count .* Give 4 or more"):
        launches.compare_counts(make_case(max_warmup_steps=3))
    assert launches.made == []


def test_a_dry_run_counts_without_a_warm_up(launches: Launches) -> None:
    assert launches.compare_counts(make_case(max_warmup_steps=3), dry=True).outcome == "regressed"


def test_arm_a_that_has_run_is_not_launched_again(launches: Launches) -> None:
    result = launches.compare_counts(known_a=launch(MORE))
    assert (launches.made, result.outcome, result.verdict.launches) == (["b/launch-1"], "passed", 1)


@pytest.mark.parametrize(
    ("norm", "more", "outcome", "made"),
    [(1.0, LESS, "passed", 2), (0.5, LESS, "failed", 4), (0.5, MORE, "regressed", 2)],
)
def test_other_gradients_need_one_more_launch(
    launches: Launches, norm: float, more: Counts, outcome: str, made: int
) -> None:
    launches.norms = {"A": 1.0, "B": norm}
    launches.counts = {"A": LESS, "B": more}
    result = launches.compare_counts()
    assert launches.made == ["a/launch-1", "b/launch-1", "a/launch-2", "b/launch-2"][:made]
    assert (result.outcome, result.verdict.launches) == (outcome, made)
    assert len(result.runs) == len(result.before) == made // 2


def starting(calls: int) -> Counts:
    """Return the counts of a launch that made this many Python calls while it built the model."""
    python = PythonCalls(version="3.11", calls={OUTSIDE_OF_STEPS: calls}, functions={})
    return LESS.replace(spans={"start-up": Counts(), "start-up: build": Counts(python=python)})


def test_differing_start_ups_launch_once_more(launches: Launches) -> None:
    launches.counts = {"A": starting(10_000), "B": starting(20_000)}
    result = launches.compare_counts()
    assert launches.made == ["a/launch-1", "b/launch-1", "a/launch-2", "b/launch-2"]
    assert (result.outcome, result.verdict.launches) == ("regressed", 4)


@pytest.mark.parametrize(("metric", "launched"), [("start-up: build: Python 3.11 calls", 4), ("kernels", 2)])
def test_searching_a_count_relaunches_no_start_up(launches: Launches, metric: str, launched: int) -> None:
    launches.counts = {"A": starting(10_000), "B": starting(20_000)}
    result = launches.compare_counts(metric=metric)
    assert result.verdict.launches == launched
    assert result.outcome == ("regressed" if metric.startswith("start-up") else "passed")


@pytest.mark.parametrize("first", ["A", "B"])
def test_first_launch_builds_are_no_change(launches: Launches, first: str) -> None:
    launches.counts = {"A": starting(10_000), "B": starting(10_000)}
    launches.first_counts = {first: starting(20_000)}
    result = launches.compare_counts()
    assert result.outcome == "passed"
    assert result.verdict.reasons[-1].endswith("which the second launch of each arm did not confirm")


@pytest.mark.parametrize(("failing", "excused"), [("AB", "known issue"), ("A", "known issue"), ("B", None)])
def test_a_known_issue_of_arm_a_is_an_excuse(launches: Launches, failing: str, excused: str | None) -> None:
    issue = KnownIssue(failure="timeout", url="https://example.org/1")
    launches.failing = dict.fromkeys(failing, "timeout")
    result = launches.compare_counts(SIMULATED.replace(known_issue=issue))
    assert (result.outcome, result.excused) == ("failed", excused)


def test_arms_run_dry_in_parallel_without_quiet(launches: Launches) -> None:
    # If the arms did not run at the same time, the barrier in `Launches` would break.
    result = launches.compare_counts(dry=True)
    assert sorted(launches.made) == ["a/launch-1", "b/launch-1"]
    assert (result.outcome, result.dry, launches.devices) == ("regressed", True, {None})


@pytest.mark.parametrize("dry", [True, False])
def test_both_arms_count_the_requested_steps(launches: Launches, dry: bool) -> None:
    launches.compare_counts(dry=dry, counted_steps=7)

    assert launches.counted_steps == [7, 7]


def test_a_case_may_ask_for_more_counted_steps(launches: Launches) -> None:
    launches.compare_counts(SIMULATED.replace(counted_steps=30))

    assert launches.counted_steps == [30, 30]


def test_timed_launches_count_no_extra_steps(launches: Launches) -> None:
    launches.measure()

    assert set(launches.counted_steps) == {None}


def test_arm_that_cannot_run_dry_ends_the_other(launches: Launches) -> None:
    launches.error = CaseError("it cannot")
    with pytest.raises(CaseError, match="it cannot"):
        launches.compare_counts(dry=True)


def test_pretends_cuda_in_both_arms_or_neither(launches: Launches) -> None:
    launches.no_cuda["main"] = "torch 2.13.0 is built for CUDA 13.0"
    assert launches.compare_counts(dry=True).outcome == "regressed"
    assert launches.devices == {"cpu"}
    assert launches.said[0].endswith("CUDA cannot be faked in arm A: torch 2.13.0 is built for CUDA 13.0")


def test_changes_between_dry_arms_get_a_price(launches: Launches) -> None:
    def gather(case: Case, directory: Path, *, arm: Arm, **how: Any) -> Run:
        size = GIB if arm == A else 3 * GIB
        directory.parent.mkdir(parents=True)
        directory_of(directory, size)
        return run_of(size)

    counts = launches.compare_counts(dry=True, dry_run=gather).verdict.counts
    assert counts is not None
    assert "; predicted cost: " in counts.findings[0].in_words()


def test_dry_arms_have_the_given_network(launches: Launches) -> None:
    launches.compare_counts(dry=True, interconnect="8xib400")
    assert launches.interconnects == {"8xib400"}


def test_one_environment_twice_is_said_to_be(launches: Launches) -> None:
    setup = make_setup(launches.root, launches.said)
    ByDryRuns(setup, (B, replace(B))).refused(task(launches.root))
    assert SAME_ARMS in launches.measure(arms=(B, replace(B))).verdict.reasons
    assert launches.said[0].endswith(
        "are the same environment, so this comparison can only find differences between runs"
    )


@dataclass(frozen=True, kw_only=True)
class Download(Plan):
    """A plan whose files have known sizes."""

    @cached_property
    def sizes(self) -> Mapping[str, int | None]:
        known_sizes = {"2.13.0": 900_000_000, "2.14.1": 800_000_000, "runtime": 2_000_000}
        return {package.url: known_sizes[package.url] for package in self.changes}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace the download of torch's releases. Return a list to which each accepted plan is added."""
    agreed: list[Any] = []

    def plan(wanted: Wanted, store: Path) -> Plan:
        version = wanted.releases[0].partition("==")[2]
        runtime = Package(name="nvidia-cuda-runtime", version="13.0.1", url="runtime")
        return Download(changes=(Package(name="torch", version=version, url=version), runtime))

    def release(wanted: Wanted, store: Path, consent: Consent, plan: Plan | None) -> Path:
        agreed.append(plan)
        return tmp_path

    monkeypatch.setattr("perfsuite.launch.arm.plan", plan)
    monkeypatch.setattr("perfsuite.launch.arm.release", release)
    return agreed


RELEASES = (("--against", "torch==2.13.0"), ("--arm", "torch==2.14.1"))


def test_asks_once_for_both_arms(planned: list[Any], tmp_path: Path) -> None:
    asked: list[str] = []

    def consent(text: str, is_large: bool) -> bool:
        asked.append(text)
        return True

    resolved(make_setup(tmp_path, []).options, RELEASES, consent)
    listed = "torch 2.13.0 (0.9 GB), torch 2.14.1 (0.8 GB), nvidia-cuda-runtime 13.0.1"
    assert asked == [f"pip downloads 1.7 GB: {listed}"]
    assert [plan.changes[0].version for plan in planned] == ["2.13.0", "2.14.1"]


def test_installs_nothing_without_consent(planned: list[Any], tmp_path: Path) -> None:
    arms = r"^--against 'torch==2\.13\.0' and --arm 'torch==2\.14\.1': pip downloads 1\.7 GB: .* --yes"
    with pytest.raises(CaseError, match=arms):
        resolved(make_setup(tmp_path, []).options, RELEASES)
    assert planned == []


def test_an_old_driver_is_noticed_before_the_download(planned: list[Any], tmp_path: Path) -> None:
    with pytest.raises(
        CaseError, match=r"^--against 'torch==2\.13\.0': this torch is built for CUDA 13, which n"
    ):
        resolved(make_setup(tmp_path, []).options, RELEASES, lambda text, is_large: True, driver="550.54.15")
    assert planned == []


def test_a_full_disk_is_noticed_before_the_question(
    planned: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=10**6))
    with pytest.raises(
        CaseError, match=r"'torch==2\.14\.1': the packages need about 5\.\d GB on the disk, but"
    ):
        resolved(make_setup(tmp_path, []).options, RELEASES, lambda text, is_large: pytest.fail("asked"))
    assert planned == []
