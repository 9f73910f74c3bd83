"""A session: measures one case after another, and keeps what it found. Imports neither torch nor pytest.

For each case it finds the baseline, lets `perfsuite.measure` launch and judge, and records a baseline where
there is none.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from perfsuite import __version__, documents, git
from perfsuite.analysis.health import all_shared, is_shared
from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.dry import limits
from perfsuite.dry.driver import dry_run
from perfsuite.dry.machine import Device, pretended
from perfsuite.errors import (
    AllocationOverError,
    BusyError,
    CaseError,
    FileError,
    MachineError,
    PerfsuiteError,
    readable,
    told,
)
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.arm import HERE, Arm
from perfsuite.launch.base import Launcher, Listener
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.lock import MachineLock
from perfsuite.launch.preflight import preflight
from perfsuite.launch.quiet import WAIT_S, Neighbours
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.measure import Reference, WhenShared, measure, profile_once
from perfsuite.node.machine import detect_cpu
from perfsuite.report import preflight as report
from perfsuite.report.text import plural
from perfsuite.results import baseline, count_baseline, environment, resume
from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import target_of
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.outcome import UNJUDGED, UNMEASURED, Verdict
from perfsuite.results.preflight import Preflight
from perfsuite.results.profile import TakenProfile, of_baseline
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import (
    ArmFacts,
    Conditions,
    Measurement,
    PytestRun,
    SessionFile,
    Skipped,
    Status,
)
from perfsuite.results.store import (
    STORE,
    BaselineStore,
    FoundBaseline,
    FoundCounts,
    SessionDir,
    Store,
    is_there,
)
from perfsuite.verdict.exact import counted
from perfsuite.verdict.excuse import excuse
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.noise import ClassNoise, class_noise
from perfsuite.verdict.overall import with_counts, with_unseen
from perfsuite.verdict.profiled import explained

MIN_RECORDED = 3
"""Fewest launches of a usable local baseline; one with fewer is recorded again."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose."""

    root: Path
    """The directory of the repository that holds the cases."""
    store: Path
    """The directory of the local store."""
    baselines: Path
    """The directory of reviewed baselines."""
    policy: Policy
    inject: str | None = None
    """A fault to inject into every launch: such launches are judged and never recorded."""
    counts: bool = True
    """Count what a step does, in every launch."""
    explain: bool = False
    """Have a slower case profiled in one more launch, and one whose launches may become a baseline."""
    fail_without_baseline: bool = False
    strict_improved: bool = False
    strict_inconclusive: bool = False
    min_judged: float = 0
    """Share of the cases, from 0 to 1, that must be judged: else the session fails."""
    wait_quiet_s: float = WAIT_S
    """Most seconds to wait until others stop using the machine; 0: launch again at once."""
    allow_shared: bool = False
    """Show what was measured beside others instead of waiting; nothing of it is judged or recorded."""
    no_wait: bool = False
    """Fail where another session measures on this machine, instead of waiting until it ends."""
    preflight: bool = True
    """Look at several nodes before the first launch on them, and launch nothing on bad ones."""

    @property
    def of_verdicts(self) -> dict[str, str]:
        """Those that a verdict depends on, with their values as text, by the names that users give them."""
        return {
            "--perf-max-launches": str(self.policy.max_launches),
            "--perf-min-launches": str(self.policy.min_launches),
            "--perf-record-launches": str(self.policy.record_launches),
            "--perf-no-baseline": "fail" if self.fail_without_baseline else "record",
            "--perf-no-counts": "no" if self.counts else "yes",
            "--perf-inject": self.inject or "nothing",
            "--perf-baselines": str(self.baselines),
        }

    @property
    def when_shared(self) -> WhenShared:
        """What to do after a launch during which others used the machine."""
        if self.allow_shared:
            return "stop"
        return "wait" if self.wait_quiet_s else "again"

    def is_failing(self, measurement: Measurement) -> bool:
        """Whether a test fails with this measurement."""
        outcome = measurement.outcome
        return (
            outcome == "regressed"
            or (outcome == "failed" and measurement.excused is None)
            or (outcome == "improved" and self.strict_improved)
            or (outcome == "inconclusive" and self.strict_inconclusive)
        )


class Host:
    """The machine or nodes that cases are launched on, and which cases they can run.

    Every node must see the directory `shared`.
    """

    def __init__(self, launcher: Launcher | None = None, shared: Path = STORE) -> None:
        self.launcher = launcher or LocalLauncher()
        self._shared = shared

    @cached_property
    def machine(self) -> Machine:
        """Each node with its GPUs, if it has any. Looked at once, and only if something is measured."""
        return self.launcher.machine(self._shared)

    @cached_property
    def _without_gpus(self) -> Machine:
        return detect_cpu("a case meant for cpu")

    def machine_for(self, case: Case) -> Machine:
        """The machine that `case` runs on: one with GPUs is a CPU machine, too, for a case meant for that."""
        if "cpu" in case.hardware and all(self.machine.why_not(hardware) for hardware in case.hardware):
            return self._without_gpus
        return self.machine.for_nodes(case.topology.nodes)

    def why_not(self, case: Case) -> str | None:
        """Why this machine cannot run `case`, or None.

        Raises `CaseError` where the machine could, but the installed torch cannot use its GPUs.
        """
        machine = self.machine_for(case)
        reason = unsupported(case, machine)
        if reason is None and (problem := wrong_torch(case, machine)) is not None:
            raise CaseError(problem)
        return reason


@dataclass
class Session:
    """Measures one case after another on this machine."""

    options: Options
    listener: Listener
    host: Host = field(default_factory=Host)
    results: list[Measurement] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    saves: bool = True
    """Write `results.json` when a case begins, and when it has its verdict."""
    earlier: SessionFile | None = None
    """The session that this one goes on with, as its earlier parts left it; None: it is a new one."""
    measured: int = 0
    """How many cases this part of the session has measured, or could not measure."""
    running: str | None = None
    """The id of the case that is being measured: at the end of an interrupted session, the lost one."""
    launches: list[Run] = field(default_factory=list)
    """The launches so far of the case that is being measured, or was measured last."""
    arms: tuple[Arm, ...] = ()
    """The two arms of a comparison; none of a session that judges by baselines."""
    preflights: list[Preflight] = field(default_factory=list)
    """What was found out about nodes in this part of the session."""
    _bad_nodes: dict[int, str] = field(default_factory=dict)
    """What is wrong with each node that two preflights in a row found bad, by its number from 0 on."""
    _noise: dict[str, ClassNoise] = field(default_factory=dict)
    _cases: dict[str, Case] = field(default_factory=dict)
    """The cases measured so far, by id."""
    _directories: dict[str, Path] = field(default_factory=dict)
    """The directories of their launches."""
    _earlier: dict[tuple[str, str], Measurement] = field(default_factory=dict)
    """The results of earlier parts that are still in `results`, by test and case."""
    _unsaved: str | None = None
    """Why `results.json` could not be written last."""

    @cached_property
    def directory(self) -> SessionDir:
        """The directory of this session: its launches, and its `results.json`."""
        return Store(self.options.store).new_session()

    @property
    def arm_facts(self) -> tuple[ArmFacts, ...]:
        """What is told of the arms."""
        return tuple(ArmFacts(text=arm.text, facts=arm.facts) for arm in self.arms)

    @cached_property
    def baselines(self) -> BaselineStore:
        """Reviewed baselines, and those that this machine has recorded."""
        return BaselineStore(self.options.baselines, Store(self.options.store).baselines)

    @cached_property
    def lock(self) -> MachineLock:
        """Lets one session at a time measure on these nodes."""
        return MachineLock(self.host.launcher.lock)

    @cached_property
    def neighbours(self) -> Neighbours | None:
        """Who else uses this machine; None where launches are on others."""
        if self.host.launcher.name != LocalLauncher.name:
            return None
        say, show = self.listener.say, self.listener.waiting
        return Neighbours(say=say, show=show, most_s=self.options.wait_quiet_s)

    @cached_property
    def revision(self) -> git.Revision:
        """What is checked out in the repository that holds the cases, as it was when first asked for."""
        now = git.revision(self.options.root)
        if now.problem is not None:
            self.listener.say(f"the commit of the cases is not known: {now.problem}")
        return now

    @cached_property
    def conditions(self) -> Conditions:
        """What the verdicts of this session hold for, as it was when first asked for."""
        return Conditions(
            changes=git.changes(self.options.root),
            options=self.options.of_verdicts,
            environment={"perfsuite": __version__, **environment.of_this_process()},
        )

    def noise(self, hardware_class: str) -> ClassNoise:
        """The noise pooled over all baselines of a class, as they were when it was first asked for."""
        if hardware_class not in self._noise:
            self._noise[hardware_class] = class_noise(self.baselines.of_class(hardware_class))
        return self._noise[hardware_class]

    def resume(self) -> None:
        """Go on with the newest session of the store if its verdicts hold here; say so, or why not.

        Takes the machine's lock first, as that session may still be running. Raises `BusyError`.
        """
        self.lock.take(self.listener.say, wait=not self.options.no_wait)
        try:
            directory, earlier = resume.newest(Store(self.options.store), session_file(self, "running"))
        except FileError as error:
            self.listener.say(f"--perf-resume: a new session begins: {error}")
            return
        self.directory, self.earlier = directory, earlier
        self.results, self.skipped = list(earlier.results), list(earlier.skipped)
        self._earlier = {(result.nodeid, result.case_id): result for result in earlier.results}
        decided = sum(map(resume.is_decided, earlier.results))
        self.listener.say(
            f"--perf-resume: goes on with {directory.path}: {plural(decided, 'case')} measured there"
        )

    def earlier_result(self, case: Case, nodeid: str) -> Measurement | None:
        """The result of a case in an earlier part of this session; None if it has to be measured.

        That is also where nothing was decided about the code (`resume.is_decided`), and where another
        baseline counts now than it was judged by, or one that cannot be read.
        """
        result = self._earlier.get((nodeid, case.id))
        if result is None or not resume.is_decided(result) or not _is_of(result, case):
            return None
        machine, counts = self.host.machine_for(case), result.verdict.counts
        counts_file = None if counts is None else counts.baseline_file
        with contextlib.suppress(FileError):
            found = self.baselines.find(machine.hardware_class, case)
            counted = self.baselines.counts.find(target_of(machine, dry=False), case)
            if _is_judged_by(result.baseline_file, found) and _is_judged_by(counts_file, counted):
                return result
        return None

    def skip_reason(self, case: Case) -> str | None:
        """Why this machine cannot run `case`, or None.

        Raises `CaseError` where the installed torch cannot use its GPUs, and where baselines are required and
        this hardware class has a reviewed one: it could run there once, and a package or a GPU is missing.
        """
        reason = self.host.why_not(case)
        file = self._reviewed_file(case)
        if reason is not None and self.options.fail_without_baseline and is_there(file):
            raise CaseError(f"{reason}; but there is {file}, and --perf-no-baseline=fail")
        return reason

    def _reviewed_file(self, case: Case) -> Path:
        """Where the reviewed baseline of a case stands, or would."""
        return self.baselines.reviewed_file(self.host.machine_for(case).hardware_class, case.id)

    def record_skip(self, case: Case, nodeid: str, reason: str) -> None:
        """Keep a case that this machine cannot run."""
        skip = Skipped(nodeid=nodeid, case_id=case.id, framework=case.framework.name, reason=reason)
        if skip not in self.skipped:  # as it is where an earlier part of this session skipped it
            self.skipped.append(skip)

    def record_error(self, case: Case, nodeid: str, error: Exception, runs: Sequence[Run] = ()) -> None:
        """Keep a case that could not be measured as a failed one, with the launches that it had."""
        where = "" if isinstance(error, PerfsuiteError) else f" ({self._traceback(error, case)})"
        reason = f"{told(error)}{where}"
        verdict = Verdict(outcome="failed", launches=len(runs), failure="error", reasons=(reason,))
        self.keep(self._measurement(case, nodeid, runs, verdict))

    def _traceback(self, error: Exception, case: Case) -> str:
        """Keep the traceback of an error that perfsuite did not raise on purpose. Returns where it is."""
        file = self._case_directory(case) / "traceback.txt"
        try:
            documents.write_text(file, readable("".join(traceback.format_exception(error))))
        except FileError as unwritten:
            return f"its traceback was not kept: {unwritten}"
        return f"its traceback: {file}"

    def measure(self, case: Case, nodeid: str) -> Measurement:
        """Launch a case and judge it until decided; record a baseline where there is none.

        A case that an earlier part of this session decided has that result. One that cannot be launched is a
        failed result, and its error is raised. `BusyError` and `AllocationOverError` leave none: they say
        nothing of the case, and no other can be launched either.
        """
        self.revision, self.conditions  # noqa: B018  as they are now, and not after hours
        if (known := self.earlier_result(case, nodeid)) is not None:
            return known
        self.launches = []
        try:
            self._directories[case.id] = self.directory.new_case(case.id)
            measurement = self._measure(case, nodeid)
        except (BusyError, AllocationOverError):
            raise
        except Exception as error:
            self.running = None
            self.record_error(case, nodeid, error, self.launches)
            raise
        self.keep(measurement)  # first of all: what comes now may be interrupted, or fail
        recorded = self._record(measurement)
        try:
            measurement = self._with_profile(measurement, case)
        finally:
            self._record_counts(self.results[-1])
        profile = None if measurement.profile is None else measurement.profile.profile
        if recorded is not None and profile is not None:
            self.baselines.profiles.write_local(of_baseline(recorded, profile))
        return measurement

    def keep(self, measurement: Measurement) -> None:
        """Take a result in, in place of what an earlier part of this session had for it, and save it."""
        replaced = self._earlier.pop((measurement.nodeid, measurement.case_id), None)
        self.results = [*(each for each in self.results if each is not replaced), measurement]
        self.measured += 1
        self.save()

    @property
    def unjudged(self) -> list[Run]:
        """The launches of the case that is being measured."""
        return self.launches

    def save(self) -> None:
        """Write `results.json` as it would be left by a SIGKILL now. If it cannot be written, say why."""
        if not self.saves:
            return
        try:
            documents.write(self.directory.results, session_file(self, "running"))
            self._unsaved = None
        except FileError as error:
            if str(error) != self._unsaved:
                self.listener.say(f"{error} The session goes on; what it measures is shown at its end")
            self._unsaved = str(error)

    def _record(self, measurement: Measurement) -> Baseline | None:
        """Write and return the local baseline of times, if a case turned out to need one."""
        runs = measurement.healthy_runs
        if not measurement.verdict.is_recorded:
            return None
        recorded = baseline.from_runs(runs, sessions=[self.directory.name] * len(runs))
        self.baselines.write_local(recorded)
        return recorded

    def _record_counts(self, measurement: Measurement) -> None:
        """Write the local baseline of counts, if a case turned out to need one and no profile doubts them."""
        counts = measurement.verdict.counts
        if counts is not None and counts.outcome == "recorded":
            self.baselines.counts.write_local(count_baseline.from_runs(counted(measurement.runs)))

    def _with_profile(self, measurement: Measurement, case: Case) -> Measurement:
        """Return the result that was kept with what a profile says of it, and keep that in its place.

        Whatever goes wrong meanwhile, the verdict stays.
        """
        if not self.wants_profile(measurement, case):
            return measurement
        try:
            profiled = self._explained(measurement, case)
        except Exception as error:
            why = TakenProfile(why_none=f"{type(error).__name__}: {error}")
            told = measurement.verdict.replace(profiled=explained(None, why, ""))
            profiled = measurement.replace(profile=why, verdict=told)
        self.results[-1] = profiled
        self.save()
        return profiled

    def _measure(self, case: Case, nodeid: str) -> Measurement:
        check_same(self._cases.setdefault(case.id, case), case)
        machine = self.host.machine_for(case)
        known, required = self._baseline_of(case, machine)
        may_fail = case.known_issue is not None or case.may_run_out_of_memory
        if required is not None and (self.options.inject is not None or not may_fail):
            return self._measurement(case, nodeid, (), required)
        if reasons := self._unfit_nodes(case, machine):
            verdict = Verdict(outcome="unhealthy", launches=0, reasons=reasons)
            return self._measurement(case, nodeid, (), verdict, known)
        self.lock.take(self.listener.say, wait=not self.options.no_wait)
        known, required = self._baseline_of(case, machine)  # whoever had the lock may have recorded one
        target = target_of(machine, dry=False)
        counts = self.baselines.counts.find(target, case)
        verdict = self._launch(case, machine, known, counts)
        if required is not None and verdict.outcome == "recorded":
            verdict = required.replace(
                launches=verdict.launches, unhealthy_launches=verdict.unhealthy_launches
            )
        verdict = self._with_counts(verdict, case, target, counts)
        return self._measurement(case, nodeid, self.launches, verdict, known)

    def _baseline_of(self, case: Case, machine: Machine) -> tuple[FoundBaseline | None, Verdict | None]:
        """The baseline to compare with; and without one its failure, where the options require one."""
        found = self.baselines.find(machine.hardware_class, case)
        if found is None or not _is_too_small(found.baseline, self.options.policy):
            return found, None if found else self._required(machine, None)
        return None, self._required(machine, found)

    def wants_profile(self, result: Measurement, case: Case) -> bool:
        """Whether to profile a case with that result: it is worse, or its launches may become a baseline."""
        verdict = result.verdict
        if not self.options.explain or verdict.outcome in UNMEASURED:
            return False
        may_be_accepted = verdict.is_recorded or self.options.policy.min_launches >= baseline.MIN_ACCEPTED
        return framework_of(case).plan(case).needs_torch and (_is_worse(verdict) or may_be_accepted)

    def _explained(self, result: Measurement, case: Case) -> Measurement:
        """Return the result with a profile and, of a worse one, with what differs from the baseline's."""
        machine = self.host.machine_for(case)
        taken = self._profile(case, machine, self._case_directory(case), inject=self.options.inject)
        verdict = with_unseen(result.verdict, {"": taken})
        if not _is_worse(verdict):
            return result.replace(profile=taken, verdict=verdict)
        known = self.baselines.find(machine.hardware_class, case)
        before = None if known is None else self._profile_of(known)
        verdict = verdict.replace(profiled=explained(before, taken, "the baseline"))
        return result.replace(profile=taken, profile_before=before, verdict=verdict)

    def _profile_of(self, known: FoundBaseline) -> TakenProfile | None:
        """The profile that belongs to a baseline; None without one."""
        try:
            profile = self.baselines.profile_of(known)
        except FileError as error:
            return TakenProfile(why_none=str(error))
        return None if profile is None else TakenProfile(profile=profile)

    def _profile(
        self,
        case: Case,
        machine: Machine,
        directory: Path,
        *,
        inject: str | None,
        arm: Arm = HERE,
        name: str = "",
    ) -> TakenProfile:
        """Launch a case whose verdict is known once more, for a profile. An error is part of the result.

        `name` tells the arm, where there are two.
        """
        which = f"{name} of {case.id}" if name else case.id
        self.listener.say(f"{which} is launched once more, for a profile")
        try:
            return profile_once(
                case,
                machine,
                RunDir.of_profile(directory).path,
                inject=inject,
                arm=arm,
                launcher=self.host.launcher,
            )
        except PerfsuiteError as error:
            return TakenProfile(why_none=str(error))

    def _unfit_nodes(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Return what is wrong with the nodes that a case would use; empty if it may be launched.

        The first case on a set of nodes has them looked at, by the torch of this environment. A case that
        trains nothing takes any node.
        """
        nodes = case.topology.nodes
        if nodes == 1 or not self.options.preflight or not torch_build.installed():
            return ()
        if not framework_of(case).plan(case).needs_torch:
            return ()
        known = {(len(each.nodes), each.machine.device) for each in self.preflights}
        if min(self._bad_nodes, default=nodes) >= nodes and (nodes, machine.device) not in known:
            self.running = case.id
            self._look_at_nodes(nodes, machine)
            self.running = None
        return tuple(self._bad_nodes[node] for node in sorted(self._bad_nodes) if node < nodes)

    def _look_at_nodes(self, nodes: int, machine: Machine) -> None:
        """Have a preflight of the first nodes, and another if it finds a bad node: others may disturb it."""
        first = self._preflight(nodes, machine)
        if not first.problems:
            return
        self.listener.say("what a preflight finds wrong counts if a second one finds that node bad, too")
        second = self._preflight(nodes, machine)
        for number, (before, now) in enumerate(zip(first.nodes, second.nodes, strict=True)):
            if before.problems and now.problems:
                self._bad_nodes[number] = f"{now.name}, by two preflights: {'; '.join(now.problems)}"

    def _preflight(self, nodes: int, machine: Machine) -> Preflight:
        self.lock.take(self.listener.say, wait=not self.options.no_wait)
        self.save()
        self.listener.waiting(f"preflight of {nodes} nodes")
        allocation = self.host.machine.allocation
        names = [] if allocation is None else [node.name for node in allocation.nodes[:nodes]]
        directory = self.directory.new_preflight()
        found = preflight(self.host.launcher, machine, nodes, directory, names=names)
        self.preflights.append(found)
        self.save()
        self.listener.say(report.as_text(found))
        return found

    def _with_counts(self, verdict: Verdict, case: Case, target: str, known: FoundCounts | None) -> Verdict:
        """Return the final verdict on the case that was just launched: what it counted is judged, too."""
        file = known.file if known else self.baselines.counts.local_file(target, case.id)
        verdict = with_counts(verdict, self.launches, known.baseline if known else None, str(file))
        self.listener.end(verdict.outcome)
        return verdict

    def _launch(
        self, case: Case, machine: Machine, known: FoundBaseline | None, counts: FoundCounts | None
    ) -> Verdict:
        """Launch a case until it is decided; its launches are then in `self.launches`."""
        self.running = case.id
        self.save()
        self.launches, verdict = measure(
            case,
            machine,
            self._case_directory(case),
            Reference(
                baseline=known.baseline if known else None,
                counts=counts.baseline if counts else None,
                noise=self.noise(machine.hardware_class),
                policy=self.options.policy,
            ),
            runs=self.launches,
            inject=self.options.inject,
            counts=self.options.counts,
            launcher=self.host.launcher,
            neighbours=self.neighbours,
            when_shared=self.options.when_shared,
            on_launch=lambda number: self.listener.begin(case.id, case.total_steps, number, case.unit),
            on_progress=self.listener.step,
        )
        self.running = None
        return verdict

    def _measurement(
        self,
        case: Case,
        nodeid: str,
        runs: Sequence[Run],
        verdict: Verdict,
        known: FoundBaseline | None = None,
    ) -> Measurement:
        file = known.file if known else None
        if verdict.is_recorded:
            file = self.baselines.local_file(runs[-1].machine.hardware_class, case.id)
        return Measurement(
            nodeid=nodeid,
            case_id=case.id,
            framework=case.framework.name,
            runs=tuple(runs),
            verdict=verdict,
            baseline_file=str(file) if file else None,
            directory=str(self._case_directory(case)),
            shared=all_shared(verdict, runs),
            excused=excuse(
                case,
                verdict,
                known.baseline if known else None,
                shared=any(
                    run.failure and run.machine.device == "cuda" and is_shared(run.health, run.machine)
                    for run in runs
                ),
            ),
        )

    def _case_directory(self, case: Case) -> Path:
        """The directory for the launches of a case that is measured now, or was measured last."""
        return self._directories.get(case.id) or self.directory.case(case.id)

    def _required(self, machine: Machine, too_small: FoundBaseline | None) -> Verdict | None:
        """The failure of a case without a baseline, where the options require one; None where they do not.

        `too_small` is a baseline that there is, of too few launches.
        """
        if self.options.inject is not None:
            option, why = "--perf-inject", "--perf-inject needs one to compare with: run once without it"
        elif self.options.fail_without_baseline:
            option = why = "--perf-no-baseline=fail"
        else:
            return None
        reason = f"no baseline on {machine.hardware_class} in {self.baselines}, and {why}"
        if too_small is not None:
            launches = plural(len(too_small.baseline.launches), "launch")
            reason = (
                f"the baseline in {too_small.file} is of {launches}, and {option} asks for "
                f"{_fewest(self.options.policy)} or more: run once without it, which records it anew, or add "
                "--perf-record-launches=1 to compare with it as it is"
            )
        return Verdict(outcome="failed", launches=0, failure="no_baseline", reasons=(reason,))

    @property
    def shown_only(self) -> list[Measurement]:
        """Measurements that only show figures, as `allow_shared` asks: not judged, and no reason to fail."""
        results = self.results if self.options.allow_shared else []
        return [
            each for each in results if each.outcome == "unhealthy" and each.shared and each.measured_steps
        ]

    @property
    def nothing_measured(self) -> bool:
        """Whether no result says anything about the code, where that was asked for."""
        return not self.shown_only and all(
            result.outcome in UNMEASURED and result.excused != "known issue" for result in self.results
        )

    @property
    def judged(self) -> int:
        """How many of the results are a verdict on the code."""
        return sum(result.outcome not in UNJUDGED for result in self.results)

    @property
    def too_few_judged(self) -> bool:
        """Whether fewer of the cases were judged than the user wants."""
        return bool(self.results) and self.judged / len(self.results) < self.options.min_judged


ONE_RANK = "not recorded: --rank looks at one rank, and a baseline has all that differ"


class DryHost(Host):
    """The machines that dry runs pretend, and which cases can be run dry on them."""

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        self.device = device

    @cached_property
    def machine(self) -> Machine:
        """This machine, of which nothing is needed: one that could not be measured on will do."""
        try:
            return self.launcher.machine(self._shared)
        except MachineError as error:
            return detect_cpu(str(error))

    def machine_for(self, case: Case) -> Machine:
        """The machine that is pretended for `case`."""
        return pretended(case, self.device)[0]

    def why_not(self, case: Case) -> str | None:
        """Why `case` cannot be run dry, or None."""
        return limits.why_not(case, self.machine_for(case))


@dataclass
class DrySession(Session):
    """Runs one case after another dry, whatever this machine is: nothing is timed, counts are judged."""

    host: DryHost = field(default_factory=DryHost)
    ranks: tuple[int, ...] | None = None
    """The ranks to run. None: those that tell what all do; only these are recorded."""

    def _reviewed_file(self, case: Case) -> Path:
        return self.baselines.counts.reviewed_file(self._target(case), case.id)

    def _target(self, case: Case) -> str:
        return target_of(self.host.machine_for(case), dry=True)

    def _record(self, measurement: Measurement) -> None:
        """Nothing is timed."""

    def _record_counts(self, measurement: Measurement) -> None:
        counts = measurement.verdict.counts
        if counts is not None and counts.outcome == "recorded" and self.ranks is None:
            self.baselines.counts.write_local(count_baseline.from_runs(measurement.runs))

    def _measure(self, case: Case, nodeid: str) -> Measurement:
        check_same(self._cases.setdefault(case.id, case), case)
        target = self._target(case)
        known = self.baselines.counts.find(target, case)
        self.running = case.id
        self.listener.begin(case.id, COUNTED_STEP, 1, case.unit)
        directory = RunDir.of_launch(self._case_directory(case), 1).path
        run = dry_run(case, directory, ranks=self.ranks, device=self.host.device)
        self.launches, self.running = [run], None
        verdict = self._with_counts(self._uncounted(run, target, known), case, target, known)
        if known is None and self.ranks is not None and verdict.counts is not None:
            looked_at = verdict.counts.replace(outcome="passed", baseline_file=None, notes=(ONE_RANK,))
            verdict = verdict.replace(counts=looked_at)
        # No baseline of times is judged by, and nothing that a dry run does shows a known issue of launches.
        return self._measurement(case, nodeid, [run], verdict).replace(baseline_file=None, excused=None)

    def _uncounted(self, run: Run, target: str, known: FoundCounts | None) -> Verdict:
        """What a dry run says before its counts are looked at."""
        if run.failure is not None:
            reason = f"{run.failure.kind}: {run.failure.message}"
            return Verdict(outcome="failed", launches=1, failure=run.failure.kind, reasons=(reason,))
        if known is None and self.options.fail_without_baseline:
            reason = f"no baseline of counts for {target} in {self.baselines}, and --perf-no-baseline=fail"
            return Verdict(outcome="failed", launches=1, failure="no_baseline", reasons=(reason,))
        is_recorded = known is None and self.ranks is None
        return Verdict(outcome="recorded" if is_recorded else "passed", launches=1)

    def wants_profile(self, result: Measurement, case: Case) -> bool:
        """Never: a profile takes a launch."""
        return False


def session_file(session: Session, status: Status) -> SessionFile:
    """Everything that a session found out, in all its parts."""
    earlier = session.earlier
    part = PytestRun(started_at=session.started_at, status=status, cases=session.measured)
    return SessionFile(
        perfsuite=__version__,
        status=status,
        started_at=session.started_at if earlier is None else earlier.started_at,
        parts=(part,) if earlier is None else (*resume.ended(earlier.parts), part),
        dry=isinstance(session, DrySession),
        conditions=session.conditions,
        commit=session.revision.commit,
        dirty=session.revision.dirty,
        arms=session.arm_facts,
        machine=session.host.machine,
        preflights=(*(() if earlier is None else earlier.preflights), *session.preflights),
        results=tuple(session.results),
        skipped=tuple(session.skipped),
        interrupted_case=session.running,
        interrupted_launches=tuple(session.unjudged) if session.running is not None else (),
    )


def _is_worse(verdict: Verdict) -> bool:
    """Whether a metric regressed. Counts say themselves what they found."""
    return any(check.outcome == "regressed" for check in verdict.checks)


def _is_too_small(known: Baseline, policy: Policy) -> bool:
    """Whether a local baseline has fewer launches than are needed to estimate their noise."""
    return known.accepted is None and len(known.launches) < _fewest(policy)


def _fewest(policy: Policy) -> int:
    """Fewest launches of a local baseline: as many as tell their noise, or as the user asks for."""
    return min(MIN_RECORDED, policy.record_launches)


def _is_judged_by(file: str | None, found: FoundBaseline | FoundCounts | None) -> bool:
    """Whether a result that was judged by this file, or by none, would be judged by the same one today."""
    return file in (None, None if found is None else str(found.file))


def _is_of(result: Measurement, case: Case) -> bool:
    """Whether a result from a file is of this case, as far as a file can tell."""
    return all(documents.plain(run.case) == documents.plain(case) for run in result.runs)


def check_same(first: Case, case: Case) -> None:
    """Raise `CaseError` for two different cases of one id, which would share a baseline."""
    if first != case:
        names = [name for name in Case.model_fields if getattr(first, name) != getattr(case, name)]
        raise CaseError(
            f"two different cases have the id {case.id}: they differ in {', '.join(names)}, "
            "which the id does not show. Make these equal, or give their models different names"
        )
