"""A session: measure cases one after another."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
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
from perfsuite.session.record import Record
from perfsuite.session.setup import MISSING_FAILS, Preflights, Setup


class Session:
    """Measure cases one after another, in one mode, and keep a record of them.

    `measure` takes a case through these states, from the top:

        new       An earlier part of a resumed session judged the case: its result is returned.
                  This part began the case before: `CaseError`, and no second result.
        begun     The case has a directory. A required baseline is missing: it is recorded as `failed`.
        running   The lock of the machine is held, and `results.json` names the case. Its nodes are bad: it is
                  recorded as `unhealthy`. Otherwise the mode launches it until it is decided.
                  An interrupt, or the end of an allocation: there is no result. The case stays in
                  `results.json` as the interrupted one, with its launches so far.
        judged    Waivers and shadow mode are applied, and `results.json` has the result.
        profiled  The result has a profile, if one is wanted, and the baselines to be recorded are written,
                  even if the profile is interrupted.

    Any other error in `begun` or `running` is recorded as `failed`, with the launches so far, and raised.
    """

    def __init__(self, mode: Mode) -> None:
        """Begin a record. Raises `FileError` for bad waivers."""
        self.record = Record(mode)
        self._begun = set[str]()  # ids of the cases that this part began to measure

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
        """The preflights of nodes in this part of the session."""
        record = self.record
        return Preflights(self.setup, record.directory.new_preflight, record.save, record.preflights)

    def resume(self) -> None:
        """Continue the newest session if its verdicts hold, after waiting for other sessions to end."""
        say = self.setup.progress.say
        self.setup.lock.take(say)
        try:
            directory, earlier = resume.newest(self.setup.store, self.record.session_file("running"))
        except errors.FileError as error:
            say(f"--perf-resume: a new session begins: {error}")
            return
        self.record.go_on(directory, earlier)
        decided = sum(map(resume.is_decided, earlier.results))
        say(f"--perf-resume: goes on with {directory.path}: {plural(decided, 'case')} measured there")

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
        file = self.mode.reviewed_file(case)
        if not self.mode.options.fail_without_baseline or not is_there(file):
            return None
        return f"there is {file}, and {MISSING_FAILS}"

    def has_time(self, case: Case, nodeid: str) -> bool:
        """Return whether there is time to begin a case. If not, record it as not reached."""
        budget = self.setup.budget
        if budget is None or budget.allows(case):
            return True
        if self.record.earlier_result(case, nodeid) is not None:
            return True
        self.record.skip(case, nodeid, budget.why_not_reached(case), not_reached=True)
        return False

    def measure(self, case: Case, nodeid: str) -> Measurement:
        """Launch a case until it is decided, and record a baseline if there is none.

        If an earlier part of this session decided the case, return that result. A case that cannot be
        launched becomes a failed result, and its error is raised. `AllocationOverError` leaves no result: it
        is not about the case, and no other case can be launched either. A case that this part measured before
        is refused with `CaseError`, without a new result, so that nobody can repeat it until it passes.
        """
        self.record.note_conditions()
        earlier = self.record.earlier_result(case, nodeid)
        if earlier is not None:
            return earlier
        if case.id in self._begun:
            raise errors.CaseError(
                f"{case.id} was measured in this session already, and its first verdict stays. "
                "--perf-min-launches=N launches each case N times"
            )
        self._begun.add(case.id)
        with self._recorded_errors(case, nodeid):
            directory = self.record.directory.new_case(case.id)
            task = Task(case=case, machine=self.setup.host.machine_for(case), directory=directory)
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
        self.setup.progress.end(trial.verdict.outcome, is_same_work=trial.verdict.is_same_work)
        return trial

    def _profile(self, task: Task, result: Measurement) -> Measurement:
        """Return the result, with a profile if one is wanted. Write the baselines to be recorded."""
        try:
            profiled = self.mode.profiled(result, task)
            if profiled is not None:
                result = profiled
                self.record.replace_last(result)
        finally:  # a profile may be interrupted
            self.mode.write_baselines(result)
        return result

    def record_error(
        self, case: Case, nodeid: str, error: Exception, directory: Path | None = None
    ) -> Measurement:
        """Record a case that could not be measured as failed, with the launches that it had."""
        directory = directory or self.record.directory.case(case.id)
        launches = self.record.launches_of(case)
        where = "" if isinstance(error, errors.PerfsuiteError) else f" ({_traceback(error, directory)})"
        reasons = (f"{errors.error_text(error)}{where}",)
        count = len(launches.runs)
        verdict = Verdict(outcome="failed", launches=count, failure="error", reasons=reasons)
        return self.record.add(case, nodeid, directory, Trial.of(launches, verdict))

    @contextmanager
    def _recorded_errors(self, case: Case, nodeid: str, directory: Path | None = None) -> Iterator[None]:
        """Record an error about a case before it is raised."""
        try:
            yield
        except errors.AllocationOverError:
            raise
        except Exception as error:
            self.record_error(case, nodeid, error, directory)
            raise


def _traceback(error: Exception, directory: Path) -> str:
    """Write the traceback of an unexpected error, and return where it is."""
    file = directory / "traceback.txt"
    try:
        documents.write_text(file, errors.readable("".join(traceback.format_exception(error))))
    except Exception as unwritten:  # the attributes of an error can raise, too
        return f"its traceback was not kept: {errors.error_text(unwritten)}"
    return f"its traceback: {file}"
