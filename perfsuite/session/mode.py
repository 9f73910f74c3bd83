"""The interface of the ways to measure a case: see `against_baseline`, `against_arm` and `dry`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from perfsuite.analysis.health import is_shared
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import told
from perfsuite.launch.arm import Arm
from perfsuite.results import count_baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.outcome import Excuse, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.session.setup import Setup
from perfsuite.verdict.exact import counted
from perfsuite.verdict.overall import excuse
from perfsuite.verdict.profiled import explained


@dataclass
class Trial:
    """A case being measured, and its results so far, which outlive an error or an interrupt."""

    case: Case
    machine: Machine
    directory: Path
    runs: list[Run] = field(default_factory=list)
    before: list[Run] = field(default_factory=list)  # in a comparison, the runs of arm A; `runs` are arm B's
    baseline_file: Path | None = None  # the baseline of times that judged it, or that its launches become
    judged_by: str | None = None  # a digest of the baselines that judged it
    excused: Excuse | None = None  # why its failure is no surprise


@dataclass
class Way(ABC):
    """A way to measure cases."""

    setup: Setup
    arms: tuple[Arm, ...] = ()  # the two arms of a comparison; empty if cases are judged against baselines
    dry: ClassVar[bool] = False  # whether nothing is launched: no machine is locked or checked

    def refused(self, trial: Trial) -> Verdict | None:
        """Return the verdict on a case that must not be launched; None for all others."""
        return None

    @abstractmethod
    def judge(self, trial: Trial) -> Verdict:
        """Launch a case, or run it dry, until it is decided. Adds its launches to the trial."""

    def profile(self, result: Measurement, trial: Trial) -> Measurement | None:
        """Return the result with a profile, or with the reason why it failed; None if none is wanted."""
        return None

    def profiled(self, result: Measurement, trial: Trial) -> Measurement | None:
        """Call `profile`. If it fails, keep the verdict, and have the result say why there is no profile."""
        try:
            return self.profile(result, trial)
        except Exception as error:
            why = TakenProfile(why_none=told(error))
            return result.replace(
                profile=why, verdict=result.verdict.replace(profiled=explained(None, why, ""))
            )

    def record(self, result: Measurement) -> None:
        """Write the launches of a case as local baselines, if it turned out to need them."""
        counts = result.verdict.counts
        if counts is not None and counts.outcome == "recorded":  # never in a comparison
            self.setup.baselines.counts.write_local(count_baseline.from_runs(counted(result.runs)))

    def reviewed_file(self, case: Case) -> Path:
        """Return the path of the reviewed baseline of a case, whether or not it exists."""
        machine = self.setup.host.machine_for(case)
        return self.setup.baselines.reviewed_file(machine.hardware_class, case.id)


def excused(trial: Trial, verdict: Verdict, baseline: Baseline | None) -> Excuse | None:
    """Return the excuse for a failed case; None if it has none, or if the case did not fail."""
    shared = any(
        run.failure and run.machine.device == "cuda" and is_shared(run.health, run.machine)
        for run in trial.runs
    )
    return excuse(trial.case, verdict, baseline, shared=shared)
