"""What a session of cases shares: options, machine, noise, results. Imports neither torch nor pytest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import BusyError, CaseError, GitError, PerfsuiteError
from perfsuite.git import git
from perfsuite.launch.lock import MachineLock
from perfsuite.launch.machine import detect, detect_cpu
from perfsuite.launch.quiet import WAIT_S, Neighbours
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.measure import measure
from perfsuite.report.progress import Progress
from perfsuite.report.published import PublishedFile
from perfsuite.report.text import plural
from perfsuite.results import baseline, health
from perfsuite.results.baseline import Baseline
from perfsuite.results.health import is_shared
from perfsuite.results.outcome import UNMEASURED, Verdict
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.results.store import BaselineStore, SessionDir, Store
from perfsuite.verdict.judge import Policy, judge
from perfsuite.verdict.noise import ClassNoise, class_noise

MIN_RECORDED = 3
"""Launches of a local baseline: with fewer, as `--perf-record-launches=1` leaves it, it is recorded anew."""
NO_COMPARISONS = PublishedFile(comparisons=())


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose."""

    root: Path
    """Of the repository that holds the cases."""
    store: Path
    baselines: Path
    policy: Policy
    inject: str | None = None
    fail_without_baseline: bool = False
    strict_improved: bool = False
    strict_inconclusive: bool = False
    wait_quiet_s: float = WAIT_S
    """Seconds that a machine which others use is waited for at the most; 0: launch again at once."""
    allow_shared: bool = False
    """Show what was measured beside others instead of waiting; nothing of it is judged or recorded."""
    no_wait: bool = False
    """Fail where another session measures on this machine, instead of waiting until it ends."""
    published: PublishedFile = NO_COMPARISONS
    """Comparisons to show in a report."""


@dataclass
class Session:
    """Measures one case after another on this machine."""

    options: Options
    progress: Progress
    results: list[Measurement] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    selected: int = 0
    """Tests that asked for a measurement."""
    files_error: str | None = None
    """Why the results could not be written for machines."""
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    running: str | None = None
    """The id of the case that is being measured: at the end of an interrupted session, the lost one."""
    launches: list[Run] = field(default_factory=list)
    """Of that case, or the last one, so far."""
    lock: MachineLock = field(default_factory=MachineLock)
    _noise: dict[str, ClassNoise] = field(default_factory=dict)
    _cases: dict[str, Case] = field(default_factory=dict)
    """Measured so far, by id."""

    @cached_property
    def machine(self) -> Machine:
        """This machine with its GPUs, if it has any. Looked at once, and only if something is measured."""
        return detect()

    @cached_property
    def _without_gpus(self) -> Machine:
        return detect_cpu("a case meant for cpu")

    def machine_for(self, case: Case) -> Machine:
        """What `case` runs on: a machine with GPUs is a CPU machine, too, for a case meant for that."""
        if "cpu" in case.hardware and all(self.machine.why_not(hardware) for hardware in case.hardware):
            return self._without_gpus
        return self.machine

    @cached_property
    def neighbours(self) -> Neighbours:
        """The others on this machine."""
        progress = self.progress
        return Neighbours(say=progress.say, show=progress.waiting, most_s=self.options.wait_quiet_s)

    @cached_property
    def baselines(self) -> BaselineStore:
        """Reviewed ones, and those that this machine has recorded."""
        return BaselineStore(self.options.baselines, Store(self.options.store).baselines)

    def noise(self, hardware_class: str) -> ClassNoise:
        """Pooled over all baselines of a class, as they were when it was first asked for."""
        if hardware_class not in self._noise:
            baselines = self.baselines.of_class(hardware_class)
            self._noise[hardware_class] = class_noise(baselines)
        return self._noise[hardware_class]

    @cached_property
    def files(self) -> SessionDir:
        """The directory of this session: its launches, and its `results.json`."""
        return Store(self.options.store).new_session()

    def can_run(self, case: Case) -> bool:
        """Whether this machine can run `case`. Raises `CaseError` if only the installed torch cannot."""
        machine = self.machine_for(case)
        if unsupported(case, machine) is not None:
            return False
        if (problem := wrong_torch(case, machine)) is not None:
            raise CaseError(problem)
        return True

    def skip_reason(self, case: Case, nodeid: str) -> str | None:
        """Why this machine cannot run `case`, which is then kept as skipped, or None.

        Raises `CaseError` where the installed torch cannot use its GPUs, and where baselines are required and
        this hardware class has a reviewed one: it could run there once, and a package or a GPU is missing.
        """
        machine = self.machine_for(case)
        reason = unsupported(case, machine)
        problem = wrong_torch(case, machine) if reason is None else self._ran_once(case, machine, reason)
        if problem is not None:
            self._keep_error(case, nodeid, problem)
            raise CaseError(problem)
        if reason is not None:
            skipped = Skipped(nodeid=nodeid, case_id=case.id, framework=case.framework.name, reason=reason)
            self.skipped.append(skipped)
        return reason

    def _ran_once(self, case: Case, machine: Machine, reason: str) -> str | None:
        """Why `reason` is no reason to skip `case`: such a machine has measured what is required."""
        file = self.baselines.reviewed_file(machine.hardware_class, case.id)
        if self.options.fail_without_baseline and file.exists():
            return f"{reason}; but there is {file}, and --perf-no-baseline=fail"
        return None

    def measure(self, case: Case, nodeid: str) -> Measurement:
        """Launch, compare and judge until decided; record what has no baseline yet.

        A case that cannot be launched is a failed result, and its `PerfsuiteError` is raised. `BusyError`
        leaves none: nothing can be launched while another session measures.
        """
        self._revision  # noqa: B018  as it is now, and not after hours
        known = len(self.results)
        self.launches = []
        try:
            return self._measure(case, nodeid)
        except BusyError:
            raise
        except PerfsuiteError as error:
            self.running = None
            if len(self.results) == known:
                self._keep_error(case, nodeid, str(error), self.launches)
            raise

    def _keep_error(self, case: Case, nodeid: str, reason: str, launches: Sequence[Run] = ()) -> None:
        result = Measurement(
            nodeid=nodeid,
            case_id=case.id,
            framework=case.framework.name,
            runs=tuple(launches),
            verdict=Verdict(outcome="failed", launches=len(launches), failure="error", reasons=(reason,)),
            baseline_file=None,
            directory=str(self._directory(case)),
        )
        self.results.append(result)

    def _measure(self, case: Case, nodeid: str) -> Measurement:
        check_same(self._cases.setdefault(case.id, case), case)
        machine = self.machine_for(case)
        hardware_class = machine.hardware_class
        found = self.baselines.find(hardware_class, case)
        accepted, file = found or (None, None)
        too_little = file if accepted is not None and self._says_too_little(accepted) else None
        if too_little is not None:
            accepted, file = None, None
        directory = self._directory(case)
        refused = accepted is None and (self.options.fail_without_baseline or self.options.inject is not None)
        may_fail = case.known_issue is not None or case.may_run_out_of_memory
        if refused and (self.options.inject is not None or not may_fail):
            runs: list[Run] = []
            verdict = self._no_baseline(hardware_class, too_little)
        else:
            self.lock.take(self.progress.say, wait=not self.options.no_wait)
            self.running = case.id
            runs, verdict = measure(
                case,
                machine,
                directory,
                lambda runs: self._judge(runs, accepted),
                runs=self.launches,
                inject=self.options.inject,
                on_launch=lambda launch: self._begin(case, machine, launch),
                on_progress=self.progress.step,
            )
            self.running = None
            if refused and verdict.outcome == "recorded":
                verdict = self._no_baseline(hardware_class, too_little).replace(launches=len(runs))
            self.progress.end(verdict.outcome)
        recorded = verdict.outcome == "recorded"
        if recorded:
            file = self.baselines.local_file(runs[-1].machine.hardware_class, case.id)
        result = Measurement(
            nodeid=nodeid,
            case_id=case.id,
            framework=case.framework.name,
            runs=tuple(runs),
            verdict=verdict,
            baseline_file=str(file) if file else None,
            directory=str(directory),
            excused=_excuse(case, verdict, accepted),
        )
        self.results.append(result)
        if recorded:
            healthy = result.healthy_runs
            self.baselines.write_local(baseline.from_runs(healthy, sessions=[self.files.name] * len(healthy)))
        return result

    def _begin(self, case: Case, machine: Machine, launch: int) -> None:
        self.progress.begin(case.id, case.total_steps, launch, case.unit)
        self.neighbours.launch_begins(machine)

    def _judge(self, runs: list[Run], accepted: Baseline | None) -> Verdict:
        """The verdict so far. Others that used the machine are named at once, and waited for.

        While they stay, more launches would be in vain: then one is enough to be unhealthy.
        """
        run, policy, noise = runs[-1], self.options.policy, self.noise(runs[-1].machine.hardware_class)
        is_busy = run.failure is None and is_shared(run.health, run.machine)
        if is_busy:
            runs[-1] = run.replace(notes=(*run.notes, self._say_who(run, len(runs))))
        verdict = judge(runs, accepted, noise, policy)
        if not is_busy or verdict.outcome != "undecided":
            return verdict
        devices = run.case.topology.processes_per_node
        if self.options.allow_shared or (
            self.options.wait_quiet_s and not self.neighbours.wait(run.machine, devices)
        ):
            return judge(runs, accepted, noise, replace(policy, max_unhealthy=1))
        return verdict

    def _say_who(self, run: Run, launch: int) -> str:
        """Tell that others used the machine; returns who they are, as a note of that launch."""
        seen = self.neighbours.during_launch(run.machine, run.case.topology.processes_per_node)
        why = "; ".join(health.machine_problems(run.health, run.machine))
        self.progress.say(f"launch {launch} of {run.case.id} is no evidence: {why}; seen: {seen}")
        return f"seen beside launch {launch}: {seen}"

    def _says_too_little(self, known: Baseline) -> bool:
        """Whether a local baseline was recorded from fewer launches than tell their noise."""
        launches = len(known.launches)
        return known.accepted is None and launches < min(MIN_RECORDED, self.options.policy.record_launches)

    def _directory(self, case: Case) -> Path:
        """Of the launches of a case that has no result yet."""
        again = sum(result.case_id == case.id for result in self.results)
        return self.files.case(case.id, again)

    def _no_baseline(self, hardware_class: str, too_little: Path | None) -> Verdict:
        """The failure where one is required. `too_little` is one that there is, of too few launches."""
        why = "--perf-no-baseline=fail"
        if self.options.inject is not None:
            why = "--perf-inject needs one to compare with: run once without it"
        reason = f"no baseline on {hardware_class} in {self.baselines}, and {why}"
        if too_little is not None:
            option = "--perf-no-baseline=fail" if self.options.inject is None else "--perf-inject"
            launches = plural(len(documents.read(too_little, Baseline).launches), "launch")
            reason = (
                f"the baseline in {too_little} is of {launches}, and {option} asks for "
                f"{MIN_RECORDED} or more: run once without it, which records it anew, or add "
                "--perf-record-launches=1 to compare with it as it is"
            )
        return Verdict(outcome="failed", launches=0, failure="no_baseline", reasons=(reason,))

    @cached_property
    def _revision(self) -> tuple[str | None, bool]:
        """The commit of the repository that holds the cases, and whether it has changes."""
        try:
            commit = git("rev-parse", "HEAD", cwd=self.options.root).strip()
            return commit, bool(git("status", "--porcelain", "--untracked-files=no", cwd=self.options.root))
        except GitError:
            return None, False

    def to_file(self, status: Literal["complete", "interrupted"]) -> SessionFile:
        """Everything that this session found out."""
        commit, dirty = self._revision
        return SessionFile(
            perfsuite=version("perfsuite"),
            status=status,
            started_at=self.started_at,
            commit=commit,
            dirty=dirty,
            machine=self.machine,
            results=tuple(self.results),
            skipped=tuple(self.skipped),
            interrupted_case=self.running,
            interrupted_launches=tuple(self.launches) if self.running is not None else (),
        )

    def is_failing(self, result: Measurement) -> bool:
        """Whether a test fails with this result."""
        outcome = result.verdict.outcome
        return (
            outcome == "regressed"
            or (outcome == "failed" and result.excused is None)
            or (outcome == "improved" and self.options.strict_improved)
            or (outcome == "inconclusive" and self.options.strict_inconclusive)
        )

    @property
    def looked_at(self) -> list[Measurement]:
        """Results that only show figures, as the user asked: not judged, and no reason to fail either."""
        asked = self.results if self.options.allow_shared else []
        return [each for each in asked if each.outcome == "unhealthy" and each.shared and each.measured_steps]

    @property
    def nothing_measured(self) -> bool:
        """Whether no result says anything about the code, where that was asked for."""
        return not self.looked_at and all(
            result.verdict.outcome in UNMEASURED and result.excused != "known issue"
            for result in self.results
        )


def check_same(first: Case, case: Case) -> None:
    """Raises `CaseError` for two different cases of one id, which would share a baseline."""
    if first != case:
        differ = [name for name in Case.model_fields if getattr(first, name) != getattr(case, name)]
        raise CaseError(
            f"two different cases have the id {case.id}: they differ in {', '.join(differ)}, "
            "which the id does not show. Make these equal, or give their models different names"
        )


def _excuse(
    case: Case, verdict: Verdict, before: Baseline | None
) -> Literal["known issue", "out of memory"] | None:
    """A reviewed baseline says that an issue is gone, any baseline that it fits into memory."""
    is_issue = case.known_issue is not None and verdict.failure == case.known_issue.failure
    if is_issue and (before is None or before.accepted is None):
        return "known issue"
    if case.may_run_out_of_memory and verdict.failure == "out_of_memory" and before is None:
        return "out of memory"
    return None
