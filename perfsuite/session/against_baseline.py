"""Launch cases and judge them against their baselines, or record a baseline if there is none."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.dry.driver import dry_run
from perfsuite.errors import AllocationOverError, FileError
from perfsuite.frameworks.base import framework_of
from perfsuite.measure import measure, profile_once
from perfsuite.report.text import plural
from perfsuite.results import baseline
from perfsuite.results.count_baseline import target_of
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.outcome import UNMEASURED, Verdict
from perfsuite.results.profile import TakenProfile, of_baseline
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Measurement, SessionReference
from perfsuite.results.store import FoundBaseline, SessionDir, digest_of
from perfsuite.session.mode import Launches, Mode, Task, Trial, excuse_for
from perfsuite.session.past_nights import noise_of_class
from perfsuite.session.prediction import predicted
from perfsuite.session.reference import ReferenceArm
from perfsuite.session.setup import MISSING_FAILS
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.overall import Reference, with_counts, with_unseen
from perfsuite.verdict.profiled import explained
from perfsuite.verdict.tonight import Tonight, looks_slower

MIN_RECORDED = 3  # minimum launches of a usable local baseline: smaller baselines are recorded again


@dataclass
class AgainstBaseline(Mode):
    """Judge cases against accepted or recorded baselines."""

    reference: ReferenceArm | None = None  # the session's reference; None: cases are judged without one
    # The functions that launch a case until its verdict is decided, launch it for a profile, and run it dry.
    measure: Callable[..., tuple[list[Run], Verdict]] = measure
    profile_once: Callable[..., TakenProfile] = profile_once
    dry_run: Callable[..., Run] = dry_run
    _noise: dict[str, ClassNoise] = field(default_factory=dict)

    @property
    def reference_facts(self) -> SessionReference | None:
        """The recorded facts about the session's reference; None if the session has no reference."""
        return None if self.reference is None else self.reference.facts(self.noise)

    def refused(self, task: Task) -> Verdict | None:
        """Return a failed verdict if a required baseline is missing, unless the case is allowed to fail."""
        _, required = self._baseline_of(task)
        may_fail = task.case.known_issue is not None or task.case.may_run_out_of_memory
        return None if may_fail and self.options.inject is None else required

    def judge(self, task: Task, launches: Launches) -> Trial:
        """Launch a case until its verdict is decided, and judge its counts."""
        case = task.case
        options = self.options
        # Look again: the last session that held the lock might have recorded a baseline.
        stored, required = self._baseline_of(task)
        target = target_of(task.machine, dry=False)
        counts = self.baselines.counts.find(target, case) if options.counts else None
        counts_file = counts.file if counts else self.baselines.counts.local_file(target, case.id)
        reference = Reference(
            baseline=stored.baseline if stored else None,
            counts=counts.baseline if counts else None,
            noise=self.noise(task.machine.hardware_class),
            policy=replace(options.policy, waives=task.waives),
            tonight=self._tonight(task),
        )
        runs = launches.runs
        how = self.setup.launching
        _, verdict = self.measure(case, task.machine, task.directory, reference, how, runs=runs)
        is_open = verdict.outcome in ("regressed", "inconclusive")
        if reference.tonight is not None and is_open and any(map(looks_slower, verdict.checks)):
            reference = replace(reference, tonight=self._confirming(task, len(runs)))
            _, verdict = self.measure(case, task.machine, task.directory, reference, how, runs=runs)
        if self.reference is not None:
            self.reference.launches_of_cases += len(runs)
        if required is not None and verdict.outcome == "recorded":
            seen = {"launches": verdict.launches, "unhealthy_launches": verdict.unhealthy_launches}
            verdict = required.replace(**seen)
        verdict = with_counts(verdict, runs, reference.counts, str(counts_file), times=reference.baseline)
        baseline_file = stored.file if stored else None
        if verdict.is_recorded:
            baseline_file = self.baselines.local_file(runs[-1].machine.hardware_class, case.id)
        return Trial(
            verdict=verdict,
            runs=tuple(runs),
            baseline_file=baseline_file,
            judged_by=digest_of((stored, counts)),
            excused=excuse_for(case, runs, verdict, reference.baseline),
        )

    def _tonight(self, task: Task) -> Tonight | None:
        """Launch canaries with the session's reference if that is due.

        Return all launches with the reference so far.
        """
        if self.reference is None:
            return None
        self.reference.keep_up(SessionDir(task.directory.parent))
        return self.reference.tonight(task.machine.hardware_class)

    def _confirming(self, task: Task, launches: int) -> Tonight | None:
        """Launch a case with the session's reference, because the case looks slower.

        Return all launches with the reference so far.
        """
        assert self.reference is not None
        # If the allocation ends during this call, ignore the error, so that the case keeps its verdict. The
        # next launch raises the error again.
        with suppress(AllocationOverError):
            self.reference.confirm(task.case, launches, SessionDir(task.directory.parent))
        return self.reference.tonight(task.machine.hardware_class)

    def noise(self, hardware_class: str) -> ClassNoise:
        """Return the noise, estimated from the baselines and sessions that existed at the first call."""
        if hardware_class not in self._noise:
            self._noise[hardware_class] = noise_of_class(hardware_class, self.baselines, self.setup.store)
        return self._noise[hardware_class]

    def write_baselines(self, result: Measurement) -> None:
        """Write the local baselines of times (with the profile, if one was taken) and of counts."""
        runs = result.healthy_runs
        verdict = result.verdict
        if verdict.is_recorded:
            recorded = baseline.from_runs(runs, sessions=[Path(result.directory).parent.name] * len(runs))
            if result.prediction is not None:
                recorded = recorded.replace(expected=result.prediction.expected)
            self.baselines.write_local(recorded)
            if result.profile is not None and result.profile.profile is not None:
                self.baselines.profiles.write_local(of_baseline(recorded, result.profile.profile))
        super().write_baselines(result)

    def predict(self, result: Measurement, task: Task) -> DryFacts | None:
        """Return the expected time of a step, or the reason why it is unknown.

        If the step does the same work as in the baseline, its expected time is taken from the baseline. If
        not, the time is predicted with a dry run, but only if the launches can become a baseline or if
        `--perf-explain` was given. In all other cases, None is returned.
        """
        verdict = result.verdict
        if not result.runs or task.machine.device == "cpu" or verdict.outcome in UNMEASURED:
            return None
        stored = self.baselines.find(task.machine.hardware_class, task.case)
        if stored is not None and stored.baseline.expected is not None and verdict.is_same_work:
            return DryFacts(expected=stored.baseline.expected)
        if not (self.options.explain or self._can_be_accepted(verdict)):
            return None
        if self.options.inject is not None or not self.setup.has_time_for(task.case, 1):
            return None
        self.setup.progress.say(f"running {task.case.id} dry, to predict its speed")
        directory = RunDir.of_prediction(task.directory).path
        facts = predicted(result.healthy_runs[-1], directory, dry_run=self.dry_run)
        forecasts = self.setup.forecasts(task.machine.device_name, task.directory.parent)
        return facts.replace(forecast=forecasts.of(task.case.id))

    def _can_be_accepted(self, verdict: Verdict) -> bool:
        return verdict.is_recorded or self.options.policy.min_launches >= baseline.MIN_ACCEPTED

    def profile(self, result: Measurement, task: Task) -> Measurement | None:
        """Return the result with a profile, or None if no profile is wanted.

        If the case regressed, the result also has the differences from the baseline's profile.
        """
        if not self._wants_profile(result, task.case):
            return None
        self.setup.progress.say(f"launching {task.case.id} once more, for a profile")
        directory = RunDir.of_profile(task.directory).path
        taken = self.profile_once(task.case, task.machine, directory, self.setup.launching)
        verdict = with_unseen(result.verdict, {"": taken})
        if not _is_worse(verdict):
            return result.replace(profile=taken, verdict=verdict)
        before: TakenProfile | None = None
        case_baseline = self.baselines.find(task.machine.hardware_class, task.case)
        if case_baseline is not None:
            try:
                profile = self.baselines.profile_of(case_baseline)
                before = None if profile is None else TakenProfile(profile=profile)
            except FileError as error:
                before = TakenProfile(why_none=str(error))
        verdict = verdict.replace(profiled=explained(before, taken, "the baseline"))
        return result.replace(profile=taken, profile_before=before, verdict=verdict)

    def _wants_profile(self, result: Measurement, case: Case) -> bool:
        """Return whether to profile a case, because it regressed or because it can become a baseline."""
        verdict = result.verdict
        options = self.options
        if not options.explain or verdict.outcome in UNMEASURED:
            return False
        is_wanted = _is_worse(verdict) or self._can_be_accepted(verdict)
        return framework_of(case).plan(case).needs_torch and is_wanted

    def _baseline_of(self, task: Task) -> tuple[FoundBaseline | None, Verdict | None]:
        """Return the baseline to compare with, or a failed verdict if a required baseline is missing.

        A local baseline with too few launches is used only if the session has no time to record it again with
        enough launches.
        """
        stored = self.baselines.find(task.machine.hardware_class, task.case)
        options = self.options
        fewest = min(MIN_RECORDED, options.policy.record_launches)
        if stored and (stored.baseline.accepted is not None or len(stored.baseline.launches) >= fewest):
            return stored, None
        if options.inject is not None:
            why = "--perf-inject needs one to compare with: first run once without --perf-inject"
        elif options.fail_without_baseline:
            why = MISSING_FAILS
        else:
            return (None if self.setup.has_time_for(task.case, fewest) else stored), None
        of = "" if stored is None else f" of {plural(fewest, 'launch')} or more"
        reason = f"no baseline{of} on {task.machine.hardware_class} in {self.baselines} ({why})"
        return None, Verdict(outcome="failed", launches=0, failure="no_baseline", reasons=(reason,))


def _is_worse(verdict: Verdict) -> bool:
    """Return whether a metric regressed. Counts are excluded, because they need no explanation."""
    return any(check.outcome == "regressed" for check in verdict.checks)
