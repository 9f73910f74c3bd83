"""The record of a session: its results so far, and the file that contains them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path

from perfsuite import __version__, documents, errors
from perfsuite.analysis.health import all_shared
from perfsuite.case.case import Case
from perfsuite.inputs import git
from perfsuite.results import environment, waivers
from perfsuite.results.outcome import Check
from perfsuite.results.run import Run
from perfsuite.results.session_file import (
    ArmFacts,
    CaseChange,
    Conditions,
    JudgeChanges,
    Measurement,
    Preflight,
    PytestRun,
    SessionFile,
    Skipped,
    Status,
    lost_cases,
)
from perfsuite.results.store import NIGHT, SessionDir
from perfsuite.session import resume
from perfsuite.session.judge_changes import judge_changes
from perfsuite.session.mode import Launches, Mode, Trial
from perfsuite.session.option_table import of_verdicts
from perfsuite.session.setup import Options
from perfsuite.session.tally import Tally
from perfsuite.verdict.waivers import are_waived, remarks, waive


@dataclass
class Record:
    """The content of `results.json`: a session's results and more. Each new result rewrites the file."""

    mode: Mode
    saves: bool = True  # whether to write `results.json` when a case begins and when it is judged
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    results: list[Measurement] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    preflights: list[Preflight] = field(default_factory=list)  # preflights of this part of the session
    measured: int = 0  # number of cases that this part of the session measured, or failed to measure
    running: str | None = None  # id of the running case; after an interrupt, of the interrupted case
    launches: Launches = field(default_factory=Launches)  # launches of the running or the last case
    earlier: SessionFile | None = None  # the earlier parts of a resumed session; None: the session is new
    collected: frozenset[str] = frozenset()  # ids of all cases, selected or not; empty: unknown
    case_changes: tuple[CaseChange, ...] = ()  # in a comparison: cases that arm B lacks or has changed
    cases_unknown: str | None = None  # why the case changes are unknown
    unclaimed: tuple[str, ...] = ()  # reviewed baselines that belong to no case, each with the reason
    # Baselines of cases that are deselected by the -m in pytest's settings, each with the reason.
    deselected: tuple[str, ...] = ()
    # Launches of the cases that were interrupted in earlier parts, by case id, oldest first. A case is
    # removed when it has a result.
    _interrupted: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    # Results of earlier parts that are still in `results`, by test and case.
    _earlier: dict[tuple[str, str], Measurement] = field(default_factory=dict)
    _unsaved: str | None = None  # why `results.json` could not be written the last time; None: it was written

    def __post_init__(self) -> None:
        """Read the waivers. Raises `FileError` if their file is invalid."""
        file = self.options.root / waivers.FILE
        self.waivers = waivers.read(file) if self.mode.has_waivers else ()

    @property
    def options(self) -> Options:
        """The user's choices."""
        return self.mode.options

    @cached_property
    def directory(self) -> SessionDir:
        """The directory of the session, with its launches and its `results.json`."""
        store = self.mode.setup.store
        return store.new_comparison() if self.mode.arms else store.new_session()

    @property
    def today(self) -> date:
        """The day with which the expiry dates of waivers are compared."""
        return datetime.fromisoformat(self.started_at).date()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on waivers that match nothing or that no case needs any more."""
        return remarks(self.waivers, self.results, self.collected, self.today)

    @property
    def arm_facts(self) -> tuple[ArmFacts, ...]:
        """The reported facts about the arms."""
        return tuple(ArmFacts(text=arm.text, facts=arm.facts) for arm in self.mode.arms)

    @cached_property
    def revision(self) -> git.Revision:
        """The commit of the cases, read at first access."""
        revision = git.revision(self.options.root)
        if revision.problem is not None:
            self.mode.setup.progress.say(f"the commit of the cases is unknown: {revision.problem}")
        return revision

    @cached_property
    def conditions(self) -> Conditions:
        """The conditions of the verdicts, read at first access."""
        versions = {"perfsuite": __version__, **environment.of_this_process()}
        changes = git.changes(self.options.root)
        return Conditions(changes=changes, options=of_verdicts(self.options), environment=versions)

    @cached_property
    def judge_changes(self) -> JudgeChanges | None:
        """The changes of this branch to the files that affect its verdicts, read at first access.

        These files are baselines, waivers, settings and cases.
        """
        return judge_changes(self.options, self.mode.arms)

    def note_conditions(self) -> None:
        """Read the conditions of the verdicts now, because the files can change during the session."""
        _ = self.revision, self.conditions, self.judge_changes

    @property
    def interrupted(self) -> dict[str, tuple[Run, ...]]:
        """Launches of the cases that were cut short by an interrupt, by case id, oldest first.

        The case that is running, or that was running when this part was interrupted, comes last.
        """
        if self.running is None:
            return self._interrupted
        earlier = {case_id: runs for case_id, runs in self._interrupted.items() if case_id != self.running}
        return {**earlier, self.running: tuple(self.launches.all)}

    def go_on(self, directory: SessionDir, earlier: SessionFile) -> None:
        """Continue an earlier session in its directory, with the waivers of today."""
        self.directory = directory
        self.earlier = earlier
        self.results = [self._excused(result) for result in earlier.results]
        now = [skip for skip in self.skipped if skip not in earlier.skipped]  # files, during collection
        self.skipped = [*earlier.skipped, *now]
        case_ids = [*earlier.interrupted_before, *filter(None, [earlier.interrupted_case])]
        launches = earlier.interrupted_launches
        self._interrupted = {
            case_id: tuple(run for run in launches if run.case.id == case_id) for case_id in case_ids
        }
        self._earlier = {(result.nodeid, result.case_id): result for result in self.results}

    def earlier_result(self, case: Case, nodeid: str) -> Measurement | None:
        """Return the result of a case from an earlier part of the session; None if it must be measured."""
        result = self._earlier.get((nodeid, case.id))
        if result is None:
            return None
        setup = self.mode.setup
        machine = setup.host.machine_for(case)
        return result if resume.holds(result, case, machine, setup.baselines) else None

    def begin(self, case: Case) -> Launches:
        """Begin to run a case, and return the empty record of its launches."""
        self.running = case.id
        self.launches = Launches()
        return self.launches

    def launches_of(self, case: Case) -> Launches:
        """Return the launches of a running case so far; empty if the case is not running."""
        return self.launches if self.running == case.id else Launches()

    def add(self, case: Case, nodeid: str, directory: Path, trial: Trial) -> Measurement:
        """Apply waivers and shadow mode to the trial of a case, and keep the result."""
        result = Measurement(
            nodeid=nodeid,
            case_id=case.id,
            framework=case.framework.name,
            runs=trial.runs,
            before=trial.before,
            verdict=trial.verdict,
            baseline_file=None if trial.baseline_file is None else str(trial.baseline_file),
            judged_by=trial.judged_by,
            directory=str(directory),
            planned_class=None if trial.runs else self._planned_class(case),
            excused=trial.excused,
            shared=all_shared(trial.verdict, trial.runs),
        )
        result = self._excused(result)
        self.keep(result)
        return result

    def _planned_class(self, case: Case) -> str | None:
        """Return the hardware class on which a case was to run; None if the machine cannot be detected."""
        try:
            return self.mode.setup.host.machine_for(case).hardware_class
        except Exception:  # the case might have failed with the same error, which is then in its result
            return None

    def waives(self, case: Case, checks: Sequence[Check]) -> bool:
        """Return whether the waivers cover every regression among these checks of a case."""
        return are_waived(checks, case, self.waivers, self.today)

    def _excused(self, result: Measurement) -> Measurement:
        """Apply the waivers of today and shadow mode to a result."""
        is_waived, sentences = waive(result, self.waivers, self.today, self.options.strict)
        other = None if result.excused == "waived" else result.excused  # the waiver might have ended
        result = result.replace(excused="waived" if is_waived else other, waivers=sentences)
        return result.replace(shadow=self.options.shadow and self.options.fails_session(result))

    def keep(self, result: Measurement) -> None:
        """Keep and save a result. It replaces the case's result from an earlier part of this session."""
        key = (result.nodeid, result.case_id)
        replaced = self._earlier.pop(key, None)
        self.results = [*(kept for kept in self.results if kept is not replaced), result]
        # This file has a result now, so an entry that says that it skipped itself is removed.
        file = result.nodeid.partition("::")[0]
        replaced_skips = (key, (file, file))
        self.skipped = [skip for skip in self.skipped if (skip.nodeid, skip.case_id) not in replaced_skips]
        self.measured += 1
        self._interrupted.pop(result.case_id, None)
        if self.running == result.case_id:
            self.running = None
        self.save()

    def replace_last(self, result: Measurement) -> None:
        """Replace the last result, which now has a profile or a prediction, and save it."""
        self.results[-1] = result
        self.save()

    def skip(
        self, case: Case, nodeid: str, reason: str, *, not_reached: bool = False, by_test: bool = False
    ) -> None:
        """Record a skipped case: this machine cannot run it, the budget is used up, or its test skips it."""
        names = {"nodeid": nodeid, "case_id": case.id, "framework": case.framework.name}
        self._skip(Skipped(**names, reason=reason, not_reached=not_reached, by_test=by_test))

    def skip_file(self, path: str, reason: str) -> None:
        """Record a file of cases that skipped itself. Its cases are unknown, and none of them is judged."""
        self._skip(Skipped(nodeid=path, case_id=path, framework="", reason=reason, by_test=True))

    def _skip(self, skip: Skipped) -> None:
        if skip not in self.skipped:  # an earlier part of this session might have recorded it
            self.skipped.append(skip)

    def save(self) -> None:
        """Write `results.json` with the status `running`, so that a SIGKILL does not lose the results.

        If the file cannot be written, this is reported, and the session continues.
        """
        if not self.saves:
            return
        try:
            documents.write(self.directory.results, self.session_file("running"))
            if NIGHT in os.environ:
                documents.write_text(self.directory.night, os.environ[NIGHT])
            problem = None
        except Exception as error:  # whatever the error, other cases can still be measured
            problem = f"{errors.error_text(error)}. The session continues, and shows its results when it ends"
            if problem != self._unsaved:
                self.mode.setup.progress.say(problem)
        self._unsaved = problem

    def session_file(self, status: Status) -> SessionFile:
        """Return the content of `results.json`: the results of all parts of the session."""
        earlier = self.earlier
        interrupted = self.interrupted
        case_ids = [*interrupted]
        part = PytestRun(started_at=self.started_at, status=status, cases=self.measured)
        return SessionFile(
            perfsuite=__version__,
            status=status,
            started_at=self.started_at if earlier is None else earlier.started_at,
            parts=(part,) if earlier is None else (*resume.ended(earlier.parts), part),
            dry=self.mode.dry,
            conditions=self.conditions,
            commit=self.revision.commit,
            dirty=self.revision.dirty,
            arms=self.arm_facts,
            reference=self.mode.reference_facts,
            case_changes=self.case_changes,
            cases_unknown=self.cases_unknown,
            machine=self.mode.setup.host.machine,
            preflights=(*(() if earlier is None else earlier.preflights), *self.preflights),
            results=tuple(self.results),
            skipped=tuple(self.skipped),
            unclaimed=self.unclaimed,
            waivers=self.remarks,
            judge_changes=self.judge_changes,
            interrupted_case=case_ids[-1] if case_ids else None,
            interrupted_before=tuple(case_ids[:-1]),
            interrupted_launches=tuple(run for runs in interrupted.values() for run in runs),
        )

    @property
    def tally(self) -> Tally:
        """The number of cases judged so far, and the cases that fail the session."""
        return Tally(tuple(self.results), tuple(self.skipped), self.options)

    @property
    def has_all_cases(self) -> bool:
        """Whether it is certain that the comparison lost no case of arm A."""
        return self.cases_unknown is None and not lost_cases(self.case_changes, self.results)

    @property
    def misses_baselines(self) -> bool:
        """Whether the session fails because reviewed baselines have no case: cases might have been lost."""
        options = self.options
        return bool(self.unclaimed) and options.fail_without_baseline and not options.shadow
