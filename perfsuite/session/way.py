"""What every way to measure a case answers a session: those of `against_baseline` and `against_arm`."""

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
    """A case that is being measured, and what was found so far: an error or an interrupt leaves it."""

    case: Case
    machine: Machine
    directory: Path
    runs: list[Run] = field(default_factory=list)
    before: list[Run] = field(default_factory=list)  # of arm A where two are compared: `runs` are arm B's
    baseline_file: Path | None = None  # of times: what it was judged by, or its launches become
    judged_by: str | None = None  # a digest of the baselines that it was judged by
    excused: Excuse | None = None  # why its failure is no surprise


@dataclass
class Way(ABC):
    """A way to measure cases."""

    setup: Setup
    arms: tuple[Arm, ...] = ()  # the two arms of a comparison; none where cases are judged by baselines
    dry: ClassVar[bool] = False  # whether nothing is launched: no machine is locked or looked at

    def refused(self, trial: Trial) -> Verdict | None:
        """The verdict on a case for which nothing is to be launched; None for others."""
        return None

    @abstractmethod
    def judge(self, trial: Trial) -> Verdict:
        """Launch a case, or run it dry, until it is decided. Its launches are added to the trial's."""

    def profile(self, result: Measurement, trial: Trial) -> Measurement | None:
        """The result with a profile, or with why there is none; None where none is wanted."""
        return None

    def profiled(self, result: Measurement, trial: Trial) -> Measurement | None:
        """As `profile`; if that fails, the verdict stays, and the result says why there is no profile."""
        try:
            return self.profile(result, trial)
        except Exception as error:
            why = TakenProfile(why_none=told(error))
            return result.replace(
                profile=why, verdict=result.verdict.replace(profiled=explained(None, why, ""))
            )

    def record(self, result: Measurement) -> None:
        """Write the local baselines that the launches of a case become, if it turned out to need them."""
        counts = result.verdict.counts
        if counts is not None and counts.outcome == "recorded":  # never of a comparison
            self.setup.baselines.counts.write_local(count_baseline.from_runs(counted(result.runs)))

    def reviewed_file(self, case: Case) -> Path:
        """Where the reviewed baseline of a case stands, or would."""
        machine = self.setup.host.machine_for(case)
        return self.setup.baselines.reviewed_file(machine.hardware_class, case.id)


def excused(trial: Trial, verdict: Verdict, baseline: Baseline | None) -> Excuse | None:
    """Why the failure of a case is no surprise; None if it is one, or if the case did not fail."""
    shared = any(
        run.failure and run.machine.device == "cuda" and is_shared(run.health, run.machine)
        for run in trial.runs
    )
    return excuse(trial.case, verdict, baseline, shared=shared)
