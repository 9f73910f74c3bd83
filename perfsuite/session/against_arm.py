"""Compare arm A with arm B, which might be slower. Neither arm needs a baseline, and no baseline is written.

AgainstArm   compares times. It launches the arms alternately (A B, B A, ...) until `judge_pairs` has decided.
ByCounts     compares the counts of a step, which have no noise. It launches each arm once.
ByDryRuns    compares the counts of a step in one dry run of each arm, which needs no hardware.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from perfsuite.case.case import Case
from perfsuite.dry.driver import dry_run, why_no_cuda
from perfsuite.dry.machine import Device
from perfsuite.errors import CaseError, PackageError
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.arm import RELEASE, Arm, resolve
from perfsuite.launch.base import Launcher
from perfsuite.launch.download import Consent, Plan, ask_for, check_driver, check_space, refuse_large
from perfsuite.measure import Launching, is_free, launch_once, launch_watched, profile_once, until_decided
from perfsuite.report.progress import Progress
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Excuse, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.rank_report import is_of_start_up
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Measurement
from perfsuite.session.mode import Launches, Mode, Task, Trial, excuse_for
from perfsuite.session.priced import priced
from perfsuite.session.session import Session
from perfsuite.session.setup import DryHost, Host, Options, Setup
from perfsuite.session.side_by_side import SideBySide
from perfsuite.verdict.arms import (
    ARM_A,
    ARM_B,
    judge_counts,
    judge_pairs,
    needs_more,
    start_up_findings,
    unhealthy_pairs,
    unless_other,
    with_unconfirmed,
)
from perfsuite.verdict.counted_spans import without_start_up_calls
from perfsuite.verdict.overall import with_unseen
from perfsuite.verdict.paired_comparison import MAX_PAIRS, order
from perfsuite.verdict.profiled import explained

SAME_ARMS = "arms A and B are the same environment"
SAME_CODE = (
    "both arms ran the same code with the same versions, variables and settings: check that the arms differ "
    "as you intended"
)
COPIES = (
    "{} was installed from this repository without -e, so an arm might have run this copy instead of the "
    "code of its commit or of the working tree: install it with pip install -e, and compare again"
)
ORIGIN = {"pkg_resources": " (pkg_resources is a part of older releases of setuptools, such as 80.9.0)"}
"""Module -> its origin, for a module whose package has another name."""
FAILED_IMPORT = re.compile(r"(?:cannot import name '[^']*' from|No module named) '([^'.]+)")
"""Matches the message of a failed import. The group is the package from which something was imported."""


@dataclass
class TwoArms(Mode):
    """Run a case in arm A and in arm B. Faults are only injected into arm B."""

    has_waivers: ClassVar[bool] = False
    # End of the message about two equal arms: "..., so this comparison can only show noise".
    of_equals: ClassVar[str] = "only show noise"

    def refused(self, task: Task) -> None:
        """Accept every case, because a comparison of two arms does not need a baseline.

        Print a warning if both arms are the same.
        """
        if self._are_equal:
            self.setup.progress.say(f"{task.case.id}: {SAME_ARMS}, so this comparison can {self.of_equals}")

    def excuse(self, case: Case, launches: Launches, verdict: Verdict) -> Excuse | None:
        """Return the excuse for a failure; None without an excuse.

        A failure is excused only if arm A fails with the same kind of failure.
        """
        arms = launches.before, launches.runs
        before, now = ({run.failure.kind for run in arm if run.failure} for arm in arms)
        if before == {verdict.failure} and now <= before:
            return excuse_for(case, launches.runs, verdict)
        return None

    def advised(self, verdict: Verdict, launches: Launches) -> Verdict:
        """Return the verdict with remarks on the arms, and with advice if an import failed in one of them.

        If an arm did not run the releases that it names, the verdict becomes `failed`. An arm that names
        releases takes all other packages from this environment. If these do not fit the releases, an import
        can fail.
        """
        names = (ARM_A, ARM_B)
        runs = (launches.before[-1], launches.runs[-1])
        others = [
            f"{name} names {release}, but its launch used {used}, which comes first on its path"
            for name, arm, run in zip(names, self.arms, runs, strict=True)
            for release, used in other_releases(arm, run)
        ]
        if others:
            return verdict.replace(outcome="failed", failure="unlike", reasons=(*others, *verdict.reasons))
        if self._are_equal:
            verdict = verdict.replace(reasons=(*verdict.reasons, SAME_ARMS))
        elif self._ran_the_same(*runs):
            verdict = verdict.replace(reasons=(*verdict.reasons, SAME_CODE))
        copies = sorted({name for arm in self.arms for name in arm.copies})
        if copies:
            verdict = verdict.replace(reasons=(*verdict.reasons, COPIES.format(", ".join(copies))))
        if verdict.failure != "crash":
            return verdict
        advice = [
            _import_advice(name, run.failure.message)
            for name, arm, run in zip(names, self.arms, runs, strict=True)
            if arm.packages and run.failure is not None
        ]
        return verdict.replace(reasons=(*verdict.reasons, *filter(None, advice)))

    @property
    def _are_equal(self) -> bool:
        """Whether both arms are the same environment, and no fault is injected into one of them."""
        first, second = self.arms
        return self.options.inject is None and first.acts_as(second)

    def _ran_the_same(self, a: Run, b: Run) -> bool:
        """Return whether arms that the user specified differently ran the same code in the same environment.

        False if the user gave the arms different variables, because perfsuite does not record all variables.
        """
        first, second = self.arms
        if first.given != second.given or self.options.inject is not None:
            return False
        seen = a.observed
        return seen is not None and seen.code is not None and seen == b.observed

    def launching(self, arm: str) -> Launching:
        """Return how to launch arm `a` or `b`."""
        how = replace(self.setup.launching, arm=self.arms["ab".index(arm)])
        return how if arm == "b" else replace(how, inject=None)


@dataclass
class AgainstArm(TwoArms):
    """Compare times: launch pairs until the verdict is decided."""

    max_pairs: int = MAX_PAIRS
    # Tolerance for `metric`, or for tokens/s if `metric` is None, as a fraction. None: the tolerance
    # for comparisons with baselines. For tokens/s, this is `--perf-tolerance` if it was given.
    tolerance: float | None = None
    explains: bool = True  # whether to launch each arm once more for a profile if the arms differ
    # Launch pairs until this metric is decided. None: until all metrics are decided.
    metric: str | None = None
    # How a case is launched, and how it is launched once more for a profile.
    launch_watched: Callable[..., tuple[Run, bool]] = launch_watched
    profile_once: Callable[..., TakenProfile] = profile_once

    def judge(self, task: Task, launches: Launches) -> Trial:
        """Launch pairs until the verdict is decided.

        A pair during which the machine was unhealthy is repeated with its arms in the same order.
        """
        verdict = until_decided(
            launch=lambda: self._launch_pair(task, launches),
            judge=lambda **changes: self._verdict(launches, **changes),
            is_free=lambda: is_free(launches.runs[-1], self.setup.launching),
        )
        verdict = self.advised(verdict, launches)
        return Trial.of(launches, verdict, self.excuse(task.case, launches, verdict))

    def _launch_pair(self, task: Task, launches: Launches) -> bool:
        """Launch each arm once, and return whether other processes used the machine meanwhile."""
        pair = len(launches.before) + 1
        was_shared = False
        made = dict[str, Run]()
        for arm in order(len(launches.before) - len(unhealthy_pairs(launches.before, launches.runs))):
            directory = _directory(task, arm, pair)
            how = self.launching(arm)
            number = 2 * (pair - 1) + len(made) + 1
            run, beside_others = self.launch_watched(task.case, task.machine, directory, number, how)
            made[arm] = run
            was_shared = was_shared or beside_others
        launches.add_pair(made["a"], made["b"])
        return was_shared

    def _verdict(self, launches: Launches, **changes: int) -> Verdict:
        return judge_pairs(
            launches.before,
            launches.runs,
            tolerance=self._tolerance(),
            metric=self.metric,
            max_pairs=self.max_pairs,
            corrects=self.arms[0].has_packages_of(self.arms[1]),
            **changes,
        )

    def _tolerance(self) -> float | None:
        """Return the tolerance for `metric`. If `metric` is None, return the tolerance for tokens/s.

        A result of None means the usual tolerance.
        """
        is_of_speed = self.metric in (None, TOKENS_PER_S.name)
        return self.options.policy.tolerance if self.tolerance is None and is_of_speed else self.tolerance

    def profile(self, result: Measurement, task: Task) -> Measurement | None:
        """Return the result with a profile of each arm and their differences, or None without profiles."""
        differs = result.outcome in ("regressed", "improved")
        if not (self.explains and differs and framework_of(task.case).plan(task.case).needs_torch):
            return None
        taken = []
        for arm, name in (("a", ARM_A), ("b", ARM_B)):
            self.setup.progress.say(f"{name} of {task.case.id} is launched once more for a profile")
            directory = RunDir.of_profile(task.directory / arm).path
            taken.append(self.profile_once(task.case, task.machine, directory, self.launching(arm)))
        before, now = taken
        verdict = with_unseen(result.verdict, {ARM_A: before, ARM_B: now})
        verdict = verdict.replace(profiled=explained(before, now, ARM_A))
        return result.replace(profile=now, profile_before=before, verdict=verdict)


@dataclass
class ByCounts(TwoArms):
    """Compare counts: launch each arm once on the intended machine of the case, even if the machine is busy.

    If loss, gradients, tokens or the counts of start-ups differ between the arms, both arms are launched
    again to see whether these values differ again.
    """

    of_equals: ClassVar[str] = "only find differences between runs"
    known_a: Run | None = None  # the run of arm A, if arm A has already run
    metric: str | None = None  # the only count that matters (`Finding.name`); None: all counts
    launch_once: Callable[..., Run] = launch_once  # how a case is launched

    def refused(self, task: Task) -> None:
        """Raise `CaseError` if launches of the case have no step that can be counted."""
        super().refused(task)
        if not self.dry and task.case.max_warmup_steps < COUNTED_STEP:
            given = f"{task.case.id}: max_warmup_steps={task.case.max_warmup_steps}"
            needed = f"Give {COUNTED_STEP} or more"
            raise CaseError(f"{given} leaves no step to count before the measured steps. {needed}")

    def judge(self, task: Task, launches: Launches) -> Trial:
        """Run a case in both arms, and judge the counts of arm B against the counts of arm A."""
        made = self._made(task, "ab" if self.known_a is None else "b")
        a = self.known_a or made["a"]
        b = made["b"]
        launches.add_pair(a, b)
        verdict = self._judged(a, b).replace(launches=len(made))
        of_start_up = start_up_findings(verdict)
        if any(self.metric in (None, finding.name) for finding in of_start_up):
            a, b = self._launch_both_again(task, launches)
            verdict = with_unconfirmed(self._judged(a, b), of_start_up).replace(launches=len(made) + 2)
        if not self.dry and verdict.outcome not in ("regressed", "failed") and needs_more(a, b):
            made_before = verdict.launches
            self._launch_both_again(task, launches)
            verdict = unless_other(verdict, launches.before, launches.runs).replace(launches=made_before + 2)
        # A dry run cannot show a known issue.
        excuse = None if self.dry else self.excuse(task.case, launches, verdict)
        return Trial.of(launches, self.advised(verdict, launches), excuse)

    def _judged(self, a: Run, b: Run) -> Verdict:
        """Judge the counts of B against the counts of A.

        If `metric` is a count outside of the start-up, the counts of the start-up's parts are left out.
        """
        if self.metric is not None and not is_of_start_up(self.metric):
            a = without_start_up_calls(a)
            b = without_start_up_calls(b)
        return judge_counts(a, b)

    def _launch_both_again(self, task: Task, launches: Launches) -> tuple[Run, Run]:
        """Launch both arms once more."""
        again = self._made(task, "ab", len(launches.runs) + 1)
        launches.add_pair(again["a"], again["b"])
        return again["a"], again["b"]

    def _made(self, task: Task, arms: str, launch: int = 1) -> dict[str, Run]:
        runs = dict[str, Run]()
        for number, arm in enumerate(arms, 2 * launch - 1):
            how = replace(self.launching(arm), counted_steps=self.options.steps_to_count(task.case))
            how.on_launch(task.case, number)
            runs[arm] = self.launch_once(task.case, task.machine, _directory(task, arm, launch), how)
        return runs


@dataclass
class ByDryRuns(ByCounts):
    """Compare counts: run both arms dry at the same time. The host in `setup` must be a `DryHost`."""

    dry: ClassVar[bool] = True
    device: Device | None = None  # the device to simulate; None: the device that the case is meant for
    dry_run: Callable[..., Run] = dry_run  # how a case is run dry

    def __post_init__(self) -> None:
        """Prepare to run several cases at the same time."""
        self._arms_to_run = "ab" if self.known_a is None else "b"
        self._runs = SideBySide(self._run_arms, processes=len(self._arms_to_run))

    def begin(self, tasks: Sequence[Task]) -> int:
        """Begin to run several cases at the same time, in both arms."""
        return self._runs.begin(tasks)

    def end(self) -> None:
        """End the cases that still run."""
        self._runs.end()

    def judge(self, task: Task, launches: Launches) -> Trial:
        """Judge the counts, and predict how the changed counts affect the time of a step."""
        trial = super().judge(task, launches)
        check = trial.verdict.counts
        if check is None or self.known_a is not None or not check.findings:
            return trial
        arms = (launches.before[-1], launches.runs[-1])
        launch = len(launches.runs)
        directories = [RunDir(_directory(task, arm, launch)) for arm in "ab"]
        return replace(trial, verdict=priced(trial.verdict, arms, directories))

    def _made(self, task: Task, arms: str, launch: int = 1) -> dict[str, Run]:
        case = task.case
        steps = COUNTED_STEP - 1 + self.options.steps_to_count(case)
        self.setup.progress.begin(case.id, steps, 1, case.unit)
        return self._runs.result(task) if launch == 1 else self._run_arms(task, Event(), arms, launch)

    def _run_arms(self, task: Task, stop: Event, arms: str = "", launch: int = 1) -> dict[str, Run]:
        """Run a case dry in some arms at the same time; by default, in all arms that have not run yet."""
        arms = arms or self._arms_to_run

        def run(arm: str) -> Run:
            return self.dry_run(
                self.setup.host.meant(task.case),
                _directory(task, arm, launch),
                device=self.device,
                arm=self.arms["ab".index(arm)],
                stop=stop,
                counted_steps=self.options.steps_to_count(task.case),
                interconnect=self.options.interconnect,
            )

        with ThreadPoolExecutor(len(arms)) as threads:
            begun = {arm: threads.submit(run, arm) for arm in arms}
            try:
                wait(begun.values(), return_when=FIRST_EXCEPTION)
            finally:
                # After an interrupt, or if one arm cannot run the case, stop the other arm.
                stop.set()
        return {arm: future.result() for arm, future in begun.items()}


def other_releases(arm: Arm, run: Run) -> list[tuple[str, str]]:
    """Return each release that an arm names but its run did not use, with the version that the run used."""
    releases = [*filter(RELEASE.fullmatch, arm.text.split())] if run.failure is None else []
    others = []
    for release in releases:
        name, _, version = release.partition("==")
        used = used_version(run, name)
        if used is not None and _public(used) != _public(version):
            others.append((release, used))
    return others


def used_version(run: Run, package: str) -> str | None:
    """Return the version of a package that a run used. None if it did not use the package."""
    environment = {} if run.observed is None else run.observed.environment
    versions = {canonicalize_name(name): version for name, version in environment.items()}
    return versions.get(canonicalize_name(package))


def _public(version: str) -> str:
    """Return a version without the name of its build, such as `+cpu`."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version.partition("+")[0]


def _import_advice(arm: str, message: str) -> str:
    """Return advice on a failed import in an arm that names releases; empty if no import failed."""
    failed = FAILED_IMPORT.search(message)
    if failed is None:
        return ""
    package = failed[1]
    return (
        f"{arm} names only some packages and takes all others from your environment, and an import from "
        f"{package} failed. Check whether {package} and the package that imports it (see the traceback) fit "
        f"the releases of {arm}. If one of them does not, add a fitting release to {arm}"
        f"{ORIGIN.get(package, '')}"
    )


def _directory(task: Task, arm: str, launch: int) -> Path:
    return RunDir.of_launch(task.directory / arm, launch).path


def resolved(
    options: Options,
    arms: Sequence[tuple[str, str]],
    consent: Consent = refuse_large,
    *,
    driver: str | None = None,
    installs: bool = True,
) -> tuple[Arm, ...]:
    """Resolve both arms. `arms` has the option and its value for each arm.

    `consent` is called once, with the downloads for both arms. `driver` is the version of the GPU driver on
    the machine of the launches, or None if nothing is launched on a GPU. Without `installs`, no package is
    installed. Raises `CaseError` or `GitError` if an arm cannot be resolved.
    """
    root = options.root
    store = options.store
    planned = [resolve(option, text, root=root, store=store, installs=False) for option, text in arms]
    if not installs or all(arm.is_installed for arm in planned):
        return tuple(planned)
    plans: list[Plan | None] = []
    for (option, _), arm in zip(arms, planned, strict=True):
        try:
            plan = None if arm.plan is None else arm.plan()
            check_driver(plan, driver)
            plans.append(plan)
        except PackageError as error:
            raise CaseError(f"{option} {arm.text!r}: {error}") from None
    new = {
        f"{option} {arm.text!r}": plan
        for (option, _), arm, plan in zip(arms, planned, plans, strict=True)
        if plan
    }
    try:
        check_space([*new.values()], store)
        ask_for(consent, [*new.values()])
    except PackageError as error:
        raise CaseError(f"{' and '.join(new)}: {error}") from None
    return tuple(
        resolve(option, text, root=root, store=store, consent=consent, agreed=agreed)
        for (option, text), agreed in zip(arms, plans, strict=True)
    )


def by_times(
    options: Options, progress: Progress, launcher: Launcher, arms: tuple[Arm, ...], **how: Any
) -> Session:
    """Return a session that compares the times of two arms. `how` contains fields of `AgainstArm`."""
    setup = Setup(options, progress, Host(launcher, options.store))
    return Session(AgainstArm(setup, arms, **how))


def by_counts(
    options: Options,
    progress: Progress,
    launcher: Launcher | None,
    arms: tuple[Arm, ...],
    known_a: Run | None = None,
    metric: str | None = None,
    *,
    launch_once: Callable[..., Run] = launch_once,
    dry_run: Callable[..., Run] = dry_run,
    why_no_cuda: Callable[[Arm], str | None] = why_no_cuda,
) -> Session:
    """Return a session that compares the counts of two arms. Without a `launcher`, the arms run dry.

    `known_a`, `metric` and `launch_once` are fields of `ByCounts`, and `dry_run` is a field of `ByDryRuns`.
    Dry runs simulate a GPU in both arms or in neither. If CUDA cannot be faked in one of the arms
    (`why_no_cuda`), both arms simulate a CPU, and a message gives the reason.
    """
    if launcher is not None:
        setup = Setup(options, progress, Host(launcher, options.store))
        return Session(ByCounts(setup, arms, known_a=known_a, metric=metric, launch_once=launch_once))
    reasons = {name: why_no_cuda(arm) for name, arm in zip("AB", arms, strict=True)}
    why_not = {name: why for name, why in reasons.items() if why}
    for name, why in why_not.items():
        progress.say(f"both arms run dry as on a CPU, because CUDA cannot be faked in arm {name}: {why}")
    device: Device | None = "cpu" if why_not else None
    setup = Setup(options, progress, DryHost(device=device))
    return Session(ByDryRuns(setup, arms, known_a=known_a, device=device, dry_run=dry_run))
