"""A session: measure cases one after another and keep the results."""

import traceback
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path

from perfsuite import __version__, documents, errors
from perfsuite.analysis.health import all_shared
from perfsuite.case.case import Case
from perfsuite.inputs import git
from perfsuite.report.text import plural
from perfsuite.results import environment, waivers
from perfsuite.results.outcome import UNJUDGED, UNMEASURED, Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import drop_compile_caches
from perfsuite.results.session_file import (
    ArmFacts,
    CaseChange,
    Conditions,
    JudgeChanges,
    Measurement,
    PytestRun,
    SessionFile,
    Skipped,
    Status,
    lost_cases,
)
from perfsuite.results.store import SessionDir, is_there
from perfsuite.session import resume
from perfsuite.session.judge_changes import judge_changes
from perfsuite.session.option_table import of_verdicts
from perfsuite.session.plan import Budget
from perfsuite.session.setup import MISSING_FAILS, Preflights, Setup
from perfsuite.session.way import Trial, Way
from perfsuite.verdict.waivers import remarks, waive


@dataclass
class Session:
    """Measure cases one after another, in one way."""

    setup: Setup
    way: Way
    saves: bool = True  # whether to write `results.json` when a case begins and when it is judged
    results: list[Measurement] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    budget: Budget | None = None
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    earlier: SessionFile | None = None  # the earlier parts of a resumed session; None: this one is new
    measured: int = 0  # number of cases that this part of the session measured, or failed to measure
    trial: Trial | None = None  # the case being measured, or the last one
    running: str | None = None  # id of the running case; after an interrupt, the one that was lost
    collected: frozenset[str] = frozenset()  # ids of all cases, selected or not; empty: unknown
    case_changes: tuple[CaseChange, ...] = ()  # in a comparison: cases that arm B lacks or has changed
    cases_unknown: str | None = None  # why the case changes are unknown
    unclaimed: tuple[str, ...] = ()  # reviewed baselines that no case claims, each with the reason
    # Baselines whose cases `-m` of the settings deselects by a mark, each with the reason.
    deselected: tuple[str, ...] = ()
    _begun: set[str] = field(default_factory=set)  # ids of the cases that this part began to measure
    # Results of earlier parts that are still in `results`, by test and case.
    _earlier: dict[tuple[str, str], Measurement] = field(default_factory=dict)
    _unsaved: str | None = None  # why the last attempt to write `results.json` failed, if it did

    def __post_init__(self) -> None:
        """Read the waivers; a comparison of two arms has none. Raises `FileError` for a bad file."""
        self.waivers = () if self.way.arms else waivers.read(self.setup.options.root / waivers.FILE)

    @property
    def today(self) -> date:
        """The day on which waivers are checked for expiry."""
        return datetime.fromisoformat(self.started_at).date()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on waivers that match nothing, or that no case needs any more."""
        return remarks(self.waivers, self.results, self.collected, self.today)

    @cached_property
    def directory(self) -> SessionDir:
        """The directory of this session, with its launches and its `results.json`."""
        store = self.setup.store
        return store.new_comparison() if self.way.arms else store.new_session()

    @property
    def arm_facts(self) -> tuple[ArmFacts, ...]:
        """The facts about the arms that are reported."""
        return tuple(ArmFacts(text=arm.text, facts=arm.facts) for arm in self.way.arms)

    @cached_property
    def nodes(self) -> Preflights:
        """The preflights of nodes in this part of the session."""
        return Preflights(self.setup, lambda: self.directory.new_preflight(), self.save)

    @cached_property
    def noted(self) -> tuple[git.Revision, Conditions]:
        """The revision and the conditions of the verdicts, as they were at first access."""
        revision = git.revision(self.setup.options.root)
        if revision.problem is not None:
            self.setup.progress.say(f"the commit of the cases is not known: {revision.problem}")
        versions = {"perfsuite": __version__, **environment.of_this_process()}
        changes = git.changes(self.setup.options.root)
        chosen = of_verdicts(self.setup.options)
        return revision, Conditions(changes=changes, options=chosen, environment=versions)

    @cached_property
    def judge_changes(self) -> JudgeChanges | None:
        """How this branch changes its own checks, as it was at first access."""
        return judge_changes(self.setup.options, self.way.arms)

    def resume(self) -> None:
        """Continue the newest session if its verdicts hold, after waiting for other sessions to end."""
        self.setup.lock.take(self.setup.progress.say)
        say = self.setup.progress.say
        try:
            self.directory, earlier = resume.newest(self.setup.store, session_file(self, "running"))
        except errors.FileError as error:
            say(f"--perf-resume: a new session begins: {error}")
            return
        self.earlier = earlier
        self.results = [*earlier.results]
        self.skipped = [*earlier.skipped]
        self._earlier = {(result.nodeid, result.case_id): result for result in earlier.results}
        decided = sum(map(resume.is_decided, earlier.results))
        say(f"--perf-resume: goes on with {self.directory.path}: {plural(decided, 'case')} measured there")

    def earlier_result(self, case: Case, nodeid: str) -> Measurement | None:
        """Return the result of a case in an earlier part of this session; None if it has to be measured."""
        result = self._earlier.get((nodeid, case.id))
        if result is None:
            return None
        machine = self.setup.host.machine_for(case)
        return result if resume.holds(result, case, machine, self.setup.baselines) else None

    def skip_reason(self, case: Case) -> str | None:
        """Return why this machine cannot run `case`, or None.

        Raises `CaseError` if the installed torch cannot use the GPUs. It also does so if baselines are
        required and this hardware class has a reviewed one: the case ran here once, so a package or a GPU is
        missing.
        """
        reason = self.setup.host.why_not(case)
        if reason is None:
            return None
        missing = self.why_required(case)
        if missing is not None:
            raise errors.CaseError(f"{reason}; but {missing}")
        return reason

    def why_required(self, case: Case) -> str | None:
        """Return why a case must be measured here (baselines are required and it has one), or None."""
        file = self.way.reviewed_file(case)
        if not self.setup.options.fail_without_baseline or not is_there(file):
            return None
        return f"there is {file}, and {MISSING_FAILS}"

    def record_skip(
        self, case: Case, nodeid: str, reason: str, *, not_reached: bool = False, by_test: bool = False
    ) -> None:
        """Record a case that this machine cannot run, the budget does not reach, or its own test skips."""
        names = {"nodeid": nodeid, "case_id": case.id, "framework": case.framework.name}
        skip = Skipped(**names, reason=reason, not_reached=not_reached, by_test=by_test)
        if skip not in self.skipped:  # an earlier part of this session may have skipped it
            self.skipped.append(skip)

    def has_time(self, case: Case, nodeid: str) -> bool:
        """Return whether there is time to begin a case. If not, record it as not reached."""
        if self.budget is None or self.budget.allows(case) or self.earlier_result(case, nodeid) is not None:
            return True
        self.record_skip(case, nodeid, self.budget.told(case), not_reached=True)
        return False

    def record_error(self, case: Case, nodeid: str, error: Exception) -> None:
        """Record a case that could not be measured as failed, with the launches that it had."""
        trial = self.trial if self.trial is not None and self.trial.case is case else None
        trial = trial or Trial(case, self.setup.host.machine, self.directory.case(case.id))
        where = "" if isinstance(error, errors.PerfsuiteError) else f" ({_traceback(error, trial.directory)})"
        reasons = (f"{errors.told(error)}{where}",)
        verdict = Verdict(outcome="failed", launches=len(trial.runs), failure="error", reasons=reasons)
        self.keep(self._result(trial, nodeid, verdict))

    def measure(self, case: Case, nodeid: str) -> Measurement:
        """Launch a case until it is decided, and record a baseline if there is none.

        If an earlier part of this session decided the case, return that result. A case that cannot be
        launched becomes a failed result, and its error is raised. `AllocationOverError` leaves no result: it
        is not about the case, and no other case can be launched either. A case that this part measured before
        is refused with `CaseError`, without a new result, so that nobody can repeat it until it passes.
        """
        _ = self.noted, self.judge_changes  # read now, as the files can change during the session
        earlier = self.earlier_result(case, nodeid)
        if earlier is not None:
            return earlier
        if case.id in self._begun:
            raise errors.CaseError(
                f"{case.id} was measured in this session already, and its first verdict stays. "
                "--perf-min-launches=N launches each case N times"
            )
        self._begun.add(case.id)
        self.trial = None
        try:
            return self._measure(case, nodeid)
        finally:
            if self.trial is not None:
                drop_compile_caches(self.trial.directory)

    def _measure(self, case: Case, nodeid: str) -> Measurement:
        try:
            directory = self.directory.new_case(case.id)
            self.trial = trial = Trial(case, self.setup.host.machine_for(case), directory)
            verdict = self.way.refused(trial) or self._judge(trial)
        except errors.AllocationOverError:
            raise
        except Exception as error:
            self.running = None
            self.record_error(case, nodeid, error)
            raise
        self.running = None
        self.keep(self._result(trial, nodeid, verdict))
        try:
            profiled = self.way.profiled(self.results[-1], trial)
            if profiled is not None:
                self.results[-1] = profiled
                self.save()
        finally:  # a profile may be interrupted
            self.way.record(self.results[-1])
        return self.results[-1]

    def _judge(self, trial: Trial) -> Verdict:
        if not self.way.dry:
            self.setup.lock.take(self.setup.progress.say)
        self.running = trial.case.id
        if not self.way.dry:
            reasons = self.nodes.problems(trial.case, trial.machine)
            if reasons:
                return Verdict(outcome="unhealthy", launches=0, reasons=reasons)
        self.save()
        verdict = self.way.judge(trial)
        self.setup.progress.end(verdict.outcome)
        return verdict

    def _result(self, trial: Trial, nodeid: str, verdict: Verdict) -> Measurement:
        """Return the result of a case: its verdict, with waivers and shadow mode applied."""
        runs = tuple(trial.runs)
        result = Measurement(
            nodeid=nodeid,
            case_id=trial.case.id,
            framework=trial.case.framework.name,
            runs=runs,
            before=tuple(trial.before[: len(runs)]),
            verdict=verdict,
            baseline_file=None if trial.baseline_file is None else str(trial.baseline_file),
            judged_by=trial.judged_by,
            directory=str(trial.directory),
            excused=trial.excused,
            shared=all_shared(verdict, runs),
        )
        is_waived, told = waive(result, self.waivers, self.today)
        result = result.replace(excused="waived" if is_waived else result.excused, waivers=told)
        return result.replace(shadow=self.setup.options.shadow and self.fails(result))

    def fails(self, result: Measurement) -> bool:
        """Return whether a result fails its session, or would without shadow mode."""
        return self.setup.options.is_failing(result) or (result.excused is None and result.is_empty)

    @property
    def failing(self) -> list[Measurement]:
        """The results that fail this session, whatever the outcome of their tests."""
        return [result for result in self.results if not result.shadow and self.fails(result)]

    @property
    def has_all_cases(self) -> bool:
        """Whether the comparison is known to have lost no case of arm A."""
        return self.cases_unknown is None and not lost_cases(self.case_changes, self.results)

    @property
    def misses_baselines(self) -> bool:
        """Whether the session fails because reviewed baselines have no case: cases may have been lost."""
        options = self.setup.options
        return bool(self.unclaimed) and options.fail_without_baseline and not options.shadow

    def keep(self, measurement: Measurement) -> None:
        """Add and save a result. It replaces that of an earlier part of this session."""
        key = (measurement.nodeid, measurement.case_id)
        replaced = self._earlier.pop(key, None)
        self.results = [*(each for each in self.results if each is not replaced), measurement]
        self.skipped = [each for each in self.skipped if (each.nodeid, each.case_id) != key]
        self.measured += 1
        self.save()

    def save(self) -> None:
        """Write `results.json` as a SIGKILL would leave it, with the status `running`. Report a failure."""
        if not self.saves:
            return
        try:
            documents.write(self.directory.results, session_file(self, "running"))
            problem = None
        except Exception as error:  # whatever the error, other cases can still be measured
            problem = f"{errors.told(error)} The session goes on; what it measures is shown at its end"
            if problem != self._unsaved:
                self.setup.progress.say(problem)
        self._unsaved = problem

    @property
    def launches(self) -> list[Run]:
        """The launches so far of the case being measured, or of the last one. Those of arm A come first."""
        return [] if self.trial is None else [*self.trial.before, *self.trial.runs]

    @property
    def only_shown(self) -> list[Measurement]:
        """Measurements that `allow_shared` only shows: they are not judged, and do not fail the session."""
        shown = self.results if self.setup.options.allow_shared else []
        return [each for each in shown if each.outcome == "unhealthy" and each.shared and each.measured_steps]

    @property
    def nothing_measured(self) -> bool:
        """Whether no result says anything about the code, although it should."""
        return not self.only_shown and all(
            result.outcome in UNMEASURED and result.excused != "known issue" for result in self.results
        )

    @property
    def judged(self) -> int:
        """The number of results that are a verdict on the code."""
        judged = [
            each for each in self.results if each.outcome not in UNJUDGED and not resume.is_of_machine(each)
        ]
        return sum(each.excused in (None, "waived") for each in judged)

    @property
    def asked(self) -> int:
        """The number of cases to judge: those measured, and those that a budget or a test left out."""
        return len(self.results) + sum(each.not_reached or each.by_test for each in self.skipped)

    @property
    def too_few_judged(self) -> bool:
        """Whether the share of judged cases is below the user's minimum."""
        return bool(self.asked) and self.judged / self.asked < self.setup.options.min_judged


def session_file(session: Session, status: Status) -> SessionFile:
    """Return the results of all parts of a session, as they are saved."""
    earlier = session.earlier
    part = PytestRun(started_at=session.started_at, status=status, cases=session.measured)
    revision, conditions = session.noted
    return SessionFile(
        perfsuite=__version__,
        status=status,
        started_at=session.started_at if earlier is None else earlier.started_at,
        parts=(part,) if earlier is None else (*resume.ended(earlier.parts), part),
        dry=session.way.dry,
        conditions=conditions,
        commit=revision.commit,
        dirty=revision.dirty,
        arms=session.arm_facts,
        case_changes=session.case_changes,
        cases_unknown=session.cases_unknown,
        machine=session.setup.host.machine,
        preflights=(*(() if earlier is None else earlier.preflights), *session.nodes.made),
        results=tuple(session.results),
        skipped=tuple(session.skipped),
        unclaimed=session.unclaimed,
        waivers=session.remarks,
        judge_changes=session.judge_changes,
        interrupted_case=session.running,
        interrupted_launches=tuple(session.launches) if session.running is not None else (),
    )


def _traceback(error: Exception, directory: Path) -> str:
    """Write the traceback of an unexpected error, and return where it is."""
    file = directory / "traceback.txt"
    try:
        documents.write_text(file, errors.readable("".join(traceback.format_exception(error))))
    except Exception as unwritten:  # the attributes of an error can raise, too
        return f"its traceback was not kept: {errors.told(unwritten)}"
    return f"its traceback: {file}"
