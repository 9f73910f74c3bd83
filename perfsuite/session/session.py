"""A session: measure cases one after another."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from perfsuite import documents, errors
from perfsuite.case.case import Case
from perfsuite.report.text import plural
from perfsuite.results.outcome import Verdict
from perfsuite.results.run_dir import drop_compile_caches
from perfsuite.results.session_file import Measurement
from perfsuite.results.store import is_there
from perfsuite.session import resume
from perfsuite.session.mode import Mode, Task, Trial
from perfsuite.session.priced import priced_launches
from perfsuite.session.record import Record
from perfsuite.session.setup import MISSING_FAILS, Preflights, Setup


class Session:
    """Measure cases one after another, in one mode, and keep a record of them.

    `measure` takes a case through these states, from top to bottom:

        new       If an earlier part of a resumed session judged the case, its result is returned.
                  If this part has begun the case before, `CaseError` is raised, without a second result.
        begun     The case has a directory. If a required baseline is missing, the case is recorded as
                  `failed`.
        running   The lock of the machine is held, and `results.json` names the case. If the preflight finds
                  bad nodes, the case is recorded as `unhealthy`. If not, the mode launches the case until its
                  verdict is decided. After an interrupt, or the end of an allocation, there is no result. In
                  `results.json`, the case is then the interrupted case, with its launches so far.
        judged    Waivers and shadow mode are applied, and `results.json` has the result.
        profiled  The result has a profile and a prediction of its speed, if they are wanted. Baselines to be
                  recorded are written, even if the profile or the prediction is interrupted.

    Errors in `begun` or `running`, except an interrupt and the end of an allocation, are recorded as
    `failed`, with the launches so far, and raised.
    """

    def __init__(self, mode: Mode) -> None:
        """Begin a record. Raises `FileError` if the waivers are invalid."""
        self.record = Record(mode)
        self._begun = set[str]()  # ids of the cases that this part began to measure
        self._tasks: dict[str, Task] = {}  # tasks that have begun before `measure` is called, by case id

    @property
    def mode(self) -> Mode:
        """The mode in which cases are measured."""
        return self.record.mode

    @property
    def setup(self) -> Setup:
        """The options, the machine and the baselines."""
        return self.record.mode.setup

    @cached_property
    def preflights(self) -> Preflights:
        """The node preflights in this part of the session."""
        record = self.record
        return Preflights(self.setup, record.directory.new_preflight, record.save, record.preflights)

    def resume(self) -> None:
        """Wait for other sessions to end. Then continue the newest session if its verdicts still apply."""
        say = self.setup.progress.say
        self.setup.lock.take(say)
        try:
            directory, earlier = resume.newest(self.setup.store, self.record.session_file("running"))
        except errors.FileError as error:
            say(f"--perf-resume begins a new session: {error}")
            return
        self.record.go_on(directory, earlier)
        decided = sum(map(resume.is_decided, earlier.results))
        say(f"--perf-resume continues {directory.path}, with {plural(decided, 'case')} already measured")

    def skip_reason(self, case: Case) -> str | None:
        """Return why this machine cannot run `case`, or None.

        Raises `CaseError` if the installed torch cannot use the GPUs. Also raises `CaseError` if baselines
        are required and the case has a reviewed baseline on this hardware class: the case has run here
        before, so a package or a GPU must be missing.
        """
        reason = self.setup.host.why_not(case)
        if reason is None:
            return None
        missing = self.why_required(case)
        if missing is not None:
            raise errors.CaseError(f"{reason}, but {missing}")
        return reason

    def why_required(self, case: Case) -> str | None:
        """Return why a case must be measured here, or None if its baseline is not required here."""
        file = self.mode.reviewed_file(case)
        if not self.mode.options.fail_without_baseline or not is_there(file):
            return None
        return f"the case has a reviewed baseline ({file}) and {MISSING_FAILS} is set"

    def has_time(self, case: Case, nodeid: str) -> bool:
        """Return whether there is time to begin a case. If not, record it as not reached."""
        budget = self.setup.budget
        if budget is None or budget.allows(case):
            return True
        if self.record.earlier_result(case, nodeid) is not None:
            return True
        self.record.skip(case, nodeid, budget.why_not_reached(case), not_reached=True)
        return False

    def begin(self, cases: Iterable[Case]) -> None:
        """Begin dry runs of these cases, several at a time. Launches begin only in `measure`."""
        if not self.mode.dry:
            return
        for case in cases:
            with suppress(errors.PerfsuiteError):  # `measure` raises it again
                self._tasks[case.id] = self._task(case)
        at_the_same_time = self.mode.begin([*self._tasks.values()])
        if at_the_same_time > 1:
            cases_run = f"{plural(len(self._tasks), 'case')} run dry, {at_the_same_time} at a time"
            self.setup.progress.say(cases_run)

    def end(self) -> None:
        """Release the machine, and end what `begin` has begun."""
        self.setup.lock.release()
        self.mode.end()

    def _task(self, case: Case) -> Task:
        directory = self.record.directory.new_case(case.id)
        machine = self.setup.host.machine_for(case)
        return Task(case=case, machine=machine, directory=directory, waives=partial(self.record.waives, case))

    def measure(self, case: Case, nodeid: str) -> Measurement:
        """Launch a case until it is decided, and record a baseline if there is none.

        If an earlier part of this session decided the case, return its result. If the case cannot be
        launched, record a failed result and raise the error. `AllocationOverError` leaves no result: the case
        did not cause it, and no other case can be launched either. If this part has measured the case before,
        raise `CaseError` without a new result: repeating a case until it passes must not be possible.
        """
        self.record.note_conditions()
        earlier = self.record.earlier_result(case, nodeid)
        if earlier is not None:
            return earlier
        if case.id in self._begun:
            raise errors.CaseError(
                f"{case.id} was already measured in this session, and its first verdict is kept. "
                "To launch each case at least N times, give --perf-min-launches=N"
            )
        self._begun.add(case.id)
        with self._recorded_errors(case, nodeid):
            task = self._tasks.pop(case.id, None) or self._task(case)
        directory = task.directory
        try:
            with self._recorded_errors(case, nodeid, directory):
                trial = self._judge(task)
            result = self.record.add(case, nodeid, directory, trial)
            return self._profile(task, result)
        finally:
            drop_compile_caches(directory)

    def _judge(self, task: Task) -> Trial:
        refused = self.mode.refused(task)
        if refused is not None:
            return Trial(verdict=refused)
        if not self.mode.dry:
            self.setup.lock.take(self.setup.progress.say)
        launches = self.record.begin(task.case)
        if not self.mode.dry:
            problems = self.preflights.problems(task.case, task.machine)
            if problems:
                return Trial(verdict=Verdict(outcome="unhealthy", launches=0, reasons=problems))
        self.record.save()
        trial = self.mode.judge(task, launches)
        if self.setup.budget is not None and trial.runs:
            self.setup.budget.note(task.case, max(run.duration_s for run in trial.runs))
        if trial.runs and not self.mode.dry:
            trial = replace(trial, verdict=priced_launches(trial.verdict, trial.runs[-1]))
        self.setup.progress.end(trial.verdict.outcome, is_same_work=trial.verdict.is_same_work)
        return trial

    def _profile(self, task: Task, result: Measurement) -> Measurement:
        """Add a profile and a prediction to the result if they are wanted. Then write local baselines."""
        try:
            profiled = self.mode.profiled(result, task)
            if profiled is not None:
                result = profiled
                self.record.replace_last(result)
            prediction = self.mode.predicted(result, task)
            if prediction is not None:
                result = result.replace(prediction=prediction)
                self.record.replace_last(result)
        finally:  # even if the profile is interrupted
            self.mode.write_baselines(result)
        return result

    def record_error(
        self, case: Case, nodeid: str, error: Exception, directory: Path | None = None
    ) -> Measurement:
        """Record the failure of a case that could not be measured, with its launches so far."""
        directory = directory or self.record.directory.case(case.id)
        launches = self.record.launches_of(case)
        where = "" if isinstance(error, errors.PerfsuiteError) else f" ({_traceback(error, directory)})"
        reasons = (f"{errors.error_text(error)}{where}",)
        count = len(launches.runs)
        verdict = Verdict(outcome="failed", launches=count, failure="error", reasons=reasons)
        return self.record.add(case, nodeid, directory, Trial.of(launches, verdict))

    @contextmanager
    def _recorded_errors(self, case: Case, nodeid: str, directory: Path | None = None) -> Iterator[None]:
        """Record an error about a case before raising it."""
        try:
            yield
        except errors.AllocationOverError:
            raise
        except Exception as error:
            self.record_error(case, nodeid, error, directory)
            raise


def _traceback(error: Exception, directory: Path) -> str:
    """Write the traceback of an unexpected error to a file, and return a note that names the file."""
    file = directory / "traceback.txt"
    try:
        documents.write_text(file, errors.readable("".join(traceback.format_exception(error))))
    except Exception as unwritten:  # the attributes of an error can also raise errors
        return f"its traceback could not be written: {errors.error_text(unwritten)}"
    return f"its traceback: {file}"
