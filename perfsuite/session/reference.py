"""Launch a few cases of a session with its reference. These cases are called canaries.

The reference is the environment and the commit of the reviewed baselines. Its code is unchanged, so if its
speed changes, the machine is the cause. If a case looks slower than its baseline, this case is also launched
with the reference. If the case is slow with the reference too, something other than the new code slows the
case tonight, even if the canaries are not slow. If the reference cannot be installed or used, the reason is
reported, and the session continues without a reference.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError, PerfsuiteError, error_text
from perfsuite.launch.arm import Arm
from perfsuite.launch.job import no_progress
from perfsuite.measure import launch_watched
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir, drop_compile_caches
from perfsuite.results.session_file import ArmFacts, Canary, SessionReference
from perfsuite.results.store import FoundBaseline, SessionDir
from perfsuite.session import plan
from perfsuite.session.canaries import CANARIES, Candidate, chosen, is_due
from perfsuite.session.setup import Setup
from perfsuite.verdict.comparability import launch_problems
from perfsuite.verdict.judge import why_failed
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.sequential import FEWEST_LAUNCHES
from perfsuite.verdict.tonight import (
    CanaryRuns,
    Tonight,
    machine_changes,
    machine_environment,
    other_than_baseline,
)

NOT_RESOLVED = "no case can be launched with the reference, so cases are judged without it: {why}"
NO_CANARY = (
    "no selected case has a baseline on this machine, so the reference has nothing to be compared with, and "
    "cases are judged without it: accept a baseline first"
)
NOT_A_CANARY = (
    "--perf-canaries names {names}, but a canary must be a selected case with a baseline on this "
    "machine: name such cases, or give the number of canaries"
)
OF_OTHER_CLASSES = (
    "cases are launched with the reference only on {largest}, which has the most cases. Cases on {others} "
    "are judged without it, unless --perf-canaries names some of them"
)
UNKNOWN_SHIFT = (
    "it is unknown how much a case varies within a session, so cases are judged without the reference: give "
    "three canaries or more (--perf-canaries), or accept a baseline of two sessions"
)


@dataclass
class LaunchedCanary:
    """A canary, and its launches with the reference."""

    candidate: Candidate
    machine: Machine
    runs: list[Run] = field(default_factory=list)
    healthy: list[Run] = field(default_factory=list)  # the runs during which the machine was healthy
    unused: str | None = None  # see `Canary`

    @property
    def facts(self) -> Canary:
        """The canary as it is recorded in the results."""
        return Canary(
            case_id=self.candidate.case.id,
            baseline_file=self.candidate.baseline_file,
            runs=tuple(self.runs),
            unused=self.unused,
        )


@dataclass
class ReferenceArm:
    """The reference of a session, and the launches with this reference so far."""

    setup: Setup
    resolve: Callable[[], Arm]  # finds the arm and installs its packages
    wanted: int | tuple[str, ...] = CANARIES  # number of the canaries, or their ids
    launch_watched: Callable[..., tuple[Run, bool]] = launch_watched  # how a case is launched
    arm: Arm | None = None  # None: not resolved yet, or impossible to resolve
    canaries: list[LaunchedCanary] = field(default_factory=list)
    confirming: dict[str, LaunchedCanary] = field(default_factory=dict)  # cases that looked slower, by id
    problems: list[str] = field(default_factory=list)
    launches_of_cases: int = 0  # number of launches of the session's cases so far

    def prepare(self, cases: Iterable[Case]) -> None:
        """Choose canaries among the cases, and resolve the arm. Report the canaries, or why none exist."""
        picked = self._picked(cases)
        if not picked:
            self._report(NO_CANARY)
            return
        try:
            self.arm = self.resolve()
        except Exception as error:  # whatever it is, the cases can still be judged
            self._report(NOT_RESOLVED.format(why=error_text(error)))
            return
        machine_for = self.setup.host.machine_for
        self.canaries = [LaunchedCanary(pick, machine_for(pick.case)) for pick in picked]
        names = ", ".join(pick.case.id for pick in picked)
        self.setup.progress.say(f"cases launched with the reference {self.arm.text}: {names}")

    def _picked(self, cases: Iterable[Case]) -> list[Candidate]:
        """Return the canaries that the user wants. Reports ids that cannot be canaries."""
        candidates = self._candidates(cases)
        if isinstance(self.wanted, int):
            return chosen(self._of_largest_class(candidates), self.wanted)
        by_id = {candidate.case.id: candidate for candidate in candidates}
        names = dict.fromkeys(self.wanted)
        unknown = [case_id for case_id in names if case_id not in by_id]
        if unknown:
            self._report(NOT_A_CANARY.format(names=", ".join(unknown)))
        return [by_id[case_id] for case_id in names if case_id in by_id]

    def keep_up(self, session: SessionDir) -> None:
        """Launch canaries with the reference until no such launch is due (`is_due`) or no time is left."""
        while is_due(len(self.canaries), self._launches, self.launches_of_cases):
            usable = [canary for canary in self.canaries if canary.unused is None]
            if not usable:
                return
            canary = min(usable, key=lambda canary: len(canary.runs))
            if not self.setup.has_time_for(canary.candidate.case, 1):
                return
            self._launch(canary, session)

    def confirm(self, case: Case, launches: int, session: SessionDir) -> None:
        """Launch a case with the reference, because the case looks slower after `launches` launches.

        The case is launched as often with the reference as without it, if there is time. If the case is a
        canary, its earlier launches with the reference count too. If `launches` is below `FEWEST_LAUNCHES`,
        the case is not launched with the reference.
        """
        canary = self._launched_on(case) if launches >= FEWEST_LAUNCHES else None
        if canary is None:
            return
        self.confirming[case.id] = canary
        for _ in range(launches - len(canary.healthy)):
            if canary.unused is not None or not self.setup.has_time_for(case, 1):
                return
            self._launch(canary, session)

    def _launched_on(self, case: Case) -> LaunchedCanary | None:
        """Return the canary for this case, a new one if necessary; None if the case has no baseline here."""
        for canary in self.canaries:
            if canary.candidate.case.id == case.id:
                return canary
        found = self._baseline_of(case)
        if found is None:
            return None
        candidate = Candidate(case=case, baseline=found.baseline, baseline_file=str(found.file))
        return LaunchedCanary(candidate, self.setup.host.machine_for(case))

    @property
    def _launches(self) -> int:
        """The number of launches of canaries with the reference so far."""
        return sum(len(canary.runs) for canary in self.canaries)

    def _launch(self, canary: LaunchedCanary, session: SessionDir) -> None:
        """Launch a canary with the reference. Errors are recorded; only `AllocationOverError` is raised."""
        case = canary.candidate.case
        number = len(canary.runs) + 1
        directory = session.reference(case.id)
        assert self.arm is not None
        how = replace(
            self.setup.launching,
            arm=self.arm,
            inject=None,
            on_launch=lambda case, number: None,  # the progress counts only the session's cases
            on_progress=no_progress,
        )
        self.setup.progress.say(f"launching {case.id} with the reference")
        try:
            launch_directory = RunDir.of_launch(directory, number).path
            run, _ = self.launch_watched(case, canary.machine, launch_directory, number, how)
        except AllocationOverError:
            raise
        except Exception as error:
            canary.unused = f"the case could not be launched: {error_text(error)}"
        else:
            canary.runs.append(run)
            self._judge(canary, run)
        finally:
            drop_compile_caches(directory)
        if canary.unused is not None:
            self._say(f"the launches of {case.id} with the reference are not used: {canary.unused}")

    def _judge(self, canary: LaunchedCanary, run: Run) -> None:
        """Decide whether a launch with the reference shows how fast the machine is."""
        baseline = canary.candidate.baseline
        if run.failure is not None:
            canary.unused = "; ".join(why_failed(run))
            return
        assert self.arm is not None
        others = other_than_baseline(run, baseline, None if self.arm.dirty else self.arm.commit)
        if others:
            canary.unused = f"the reference differs from what the baseline measured ({'; '.join(others)})"
        elif not launch_problems(run, baseline):
            canary.healthy.append(run)

    def tonight(self, hardware_class: str) -> Tonight | None:
        """Return the usable launches with the reference on a hardware class.

        Returns None if no launch of a canary is usable.
        """
        canaries = _usable(self.canaries, hardware_class, fewest=1)
        confirming = _usable(self.confirming.values(), hardware_class, fewest=FEWEST_LAUNCHES)
        return Tonight(canaries=canaries, confirming=confirming) if canaries else None

    def facts(self, noise: Callable[[str], ClassNoise]) -> SessionReference:
        """Return the facts about the reference for the results.

        `noise` returns the noise of a hardware class.
        """
        problems = [*self.problems]
        changes = []
        classes = {canary.candidate.baseline.hardware_class for canary in self.canaries}
        for hardware_class in sorted(classes):
            tonight = self.tonight(hardware_class)
            if tonight is not None:
                of_class = machine_changes(tonight, noise(hardware_class), hardware_class)
                changes += of_class
                problems += machine_environment(tonight)
                problems += [] if of_class else [UNKNOWN_SHIFT]
        arm = self.arm
        return SessionReference(
            arm=ArmFacts(text="not launched", facts={})
            if arm is None
            else ArmFacts(text=arm.text, facts=arm.facts),
            canaries=(*(canary.facts for canary in self.canaries), *self._only_confirming),
            changes=tuple(changes),
            problems=tuple(problems),
        )

    @property
    def _only_confirming(self) -> list[Canary]:
        """The cases that were launched with the reference only because they looked slower."""
        others = [canary for canary in self.confirming.values() if canary not in self.canaries]
        return [canary.facts.replace(looked_slower=True) for canary in others]

    def _candidates(self, cases: Iterable[Case]) -> list[Candidate]:
        """Return the cases that have a baseline here."""
        past = plan.past_of(self.setup.store.results())
        candidates = []
        for case in {case.id: case for case in cases}.values():
            found = self._baseline_of(case)
            if found is not None:
                last = past.get(case.id)
                candidates.append(
                    Candidate(
                        case=case,
                        baseline=found.baseline,
                        baseline_file=str(found.file),
                        launch_s=None if last is None else last.launch_s,
                    )
                )
        return candidates

    def _of_largest_class(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates of the hardware class with the most cases. Reports the other classes."""
        classes = Counter(candidate.baseline.hardware_class for candidate in candidates)
        largest = max(classes, key=lambda name: (classes[name], name), default="")
        others = sorted(classes.keys() - {largest})
        if others:
            self._report(OF_OTHER_CLASSES.format(largest=largest, others=" and ".join(others)))
        return [candidate for candidate in candidates if candidate.baseline.hardware_class == largest]

    def _baseline_of(self, case: Case) -> FoundBaseline | None:
        """Return the baseline of a case; None if it has none here, or if the case cannot run here."""
        host = self.setup.host
        try:
            if host.why_not(case) is not None:
                return None
            return self.setup.baselines.find(host.machine_for(case).hardware_class, case)
        except PerfsuiteError:  # the case's own test reports this error
            return None

    def _report(self, problem: str) -> None:
        """Keep a problem for the results, and print it now."""
        self.problems.append(problem)
        self._say(problem)

    def _say(self, text: str) -> None:
        self.setup.progress.say(text)


def _usable(canaries: Iterable[LaunchedCanary], hardware_class: str, *, fewest: int) -> dict[str, CanaryRuns]:
    """Return the canaries of a hardware class with at least `fewest` usable launches, by id of the case."""
    return {
        canary.candidate.case.id: CanaryRuns(baseline=canary.candidate.baseline, runs=canary.healthy)
        for canary in canaries
        if canary.unused is None
        and len(canary.healthy) >= fewest
        and canary.candidate.baseline.hardware_class == hardware_class
    }
