"""Launch cases and judge them against their baselines; record a baseline where there is none."""

from dataclasses import dataclass, field
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.errors import FileError
from perfsuite.frameworks.base import framework_of
from perfsuite.measure import measure, profile_once
from perfsuite.report.text import plural
from perfsuite.results import baseline
from perfsuite.results.count_baseline import target_of
from perfsuite.results.outcome import UNMEASURED, Verdict
from perfsuite.results.profile import TakenProfile, of_baseline
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Measurement
from perfsuite.results.store import FoundBaseline
from perfsuite.session.setup import MISSING_FAILS
from perfsuite.session.way import Trial, Way, excused
from perfsuite.verdict.noise import ClassNoise, class_noise
from perfsuite.verdict.overall import Reference, with_counts, with_unseen
from perfsuite.verdict.profiled import explained

MIN_RECORDED = 3  # fewest launches of a usable local baseline; one with fewer is recorded again


@dataclass
class AgainstBaseline(Way):
    """Judge cases against accepted or recorded baselines."""

    _noise: dict[str, ClassNoise] = field(default_factory=dict)

    def refused(self, trial: Trial) -> Verdict | None:
        """Return the failure of a case without a required baseline, unless it has another reason to fail."""
        _, required = self._baseline_of(trial)
        may_fail = trial.case.known_issue is not None or trial.case.may_run_out_of_memory
        return None if may_fail and self.setup.options.inject is None else required

    def judge(self, trial: Trial) -> Verdict:
        """Launch a case until its launches decide, and judge their counts."""
        known, required = self._baseline_of(trial)  # again: the last holder of the lock may have recorded one
        target = target_of(trial.machine, dry=False)
        is_counted = self.setup.options.counts
        counts = self.setup.baselines.counts.find(target, trial.case) if is_counted else None
        file = counts.file if counts else self.setup.baselines.counts.local_file(target, trial.case.id)
        reference = Reference(
            baseline=known.baseline if known else None,
            counts=counts.baseline if counts else None,
            noise=self.noise(trial.machine.hardware_class),
            policy=self.setup.options.policy,
        )
        verdict = measure(
            trial.case, trial.machine, trial.directory, reference, self.setup.launching, runs=trial.runs
        )[1]
        if required is not None and verdict.outcome == "recorded":
            seen = {"launches": verdict.launches, "unhealthy_launches": verdict.unhealthy_launches}
            verdict = required.replace(**seen)
        verdict = with_counts(verdict, trial.runs, reference.counts, str(file), times=reference.baseline)
        trial.baseline_file = known.file if known else None
        found = [documents.plain(each.baseline) for each in (known, counts) if each is not None]
        trial.judged_by = documents.digest(found) if found else None
        if verdict.is_recorded:
            hardware_class = trial.runs[-1].machine.hardware_class
            trial.baseline_file = self.setup.baselines.local_file(hardware_class, trial.case.id)
        trial.excused = excused(trial, verdict, reference.baseline)
        return verdict

    def noise(self, hardware_class: str) -> ClassNoise:
        """Return the noise pooled over all baselines of a class, as they were at the first call."""
        if hardware_class not in self._noise:
            self._noise[hardware_class] = class_noise(self.setup.baselines.of_class(hardware_class))
        return self._noise[hardware_class]

    def record(self, result: Measurement) -> None:
        """Write the local baselines of times (with the profile, if one was taken) and of counts."""
        runs = result.healthy_runs
        verdict = result.verdict
        if verdict.is_recorded:
            recorded = baseline.from_runs(runs, sessions=[Path(result.directory).parent.name] * len(runs))
            self.setup.baselines.write_local(recorded)
            if result.profile is not None and result.profile.profile is not None:
                self.setup.baselines.profiles.write_local(of_baseline(recorded, result.profile.profile))
        super().record(result)

    def profile(self, result: Measurement, trial: Trial) -> Measurement | None:
        """Return the result with a profile; if it is worse, also its differences from the baseline's."""
        if not self._wants_profile(result, trial.case):
            return None
        self.setup.progress.say(f"{trial.case.id} is launched once more, for a profile")
        directory = RunDir.of_profile(trial.directory).path
        taken = profile_once(trial.case, trial.machine, directory, self.setup.launching)
        verdict = with_unseen(result.verdict, {"": taken})
        if not _is_worse(verdict):
            return result.replace(profile=taken, verdict=verdict)
        before: TakenProfile | None = None
        case_baseline = self.setup.baselines.find(trial.machine.hardware_class, trial.case)
        if case_baseline is not None:
            try:
                profile = self.setup.baselines.profile_of(case_baseline)
                before = None if profile is None else TakenProfile(profile=profile)
            except FileError as error:
                before = TakenProfile(why_none=str(error))
        verdict = verdict.replace(profiled=explained(before, taken, "the baseline"))
        return result.replace(profile=taken, profile_before=before, verdict=verdict)

    def _wants_profile(self, result: Measurement, case: Case) -> bool:
        """Return whether to profile a case: it is worse, or its launches can become a baseline."""
        verdict = result.verdict
        options = self.setup.options
        if not options.explain or verdict.outcome in UNMEASURED:
            return False
        may_be_accepted = verdict.is_recorded or options.policy.min_launches >= baseline.MIN_ACCEPTED
        return framework_of(case).plan(case).needs_torch and (_is_worse(verdict) or may_be_accepted)

    def _baseline_of(self, trial: Trial) -> tuple[FoundBaseline | None, Verdict | None]:
        """Return the baseline to compare with, or the failure if one is required.

        A local baseline with too few launches does not count.
        """
        found = self.setup.baselines.find(trial.machine.hardware_class, trial.case)
        options = self.setup.options
        fewest = min(MIN_RECORDED, options.policy.record_launches)
        if found and (found.baseline.accepted is not None or len(found.baseline.launches) >= fewest):
            return found, None
        if options.inject is not None:
            why = "--perf-inject needs one to compare with: run once without it"
        elif options.fail_without_baseline:
            why = MISSING_FAILS
        else:
            return None, None
        of = "" if found is None else f" of {plural(fewest, 'launch')} or more"
        reason = f"no baseline{of} on {trial.machine.hardware_class} in {self.setup.baselines}, and {why}"
        return None, Verdict(outcome="failed", launches=0, failure="no_baseline", reasons=(reason,))


def _is_worse(verdict: Verdict) -> bool:
    """Return whether a metric regressed. Counts are excluded, as they explain themselves."""
    return any(check.outcome == "regressed" for check in verdict.checks)
