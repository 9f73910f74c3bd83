"""The interface of a session's modes. The modes are in `against_baseline`, `against_arm` and `dry`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from perfsuite.analysis.health import is_shared
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import error_text
from perfsuite.launch.arm import Arm
from perfsuite.results import count_baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.outcome import Check, Excuse, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionReference
from perfsuite.results.store import BaselineStore
from perfsuite.session.setup import Options, Setup
from perfsuite.verdict.evidence import counted
from perfsuite.verdict.overall import excuse
from perfsuite.verdict.policy import waives_nothing
from perfsuite.verdict.profiled import explained


@dataclass(frozen=True, kw_only=True)
class Task:
    """A case to measure, the machine to measure it on, the directory for its launches, and its waivers."""

    case: Case
    machine: Machine
    directory: Path
    # Whether waivers cover every regression among the checks of the case.
    waives: Callable[[Sequence[Check]], bool] = waives_nothing


@dataclass
class Launches:
    """The launches of a case so far. A mode adds each launch that ends, so an interrupt loses no launch."""

    runs: list[Run] = field(default_factory=list)
    before: list[Run] = field(default_factory=list)  # arm A's runs in a comparison; `runs` has arm B's

    def add_pair(self, a: Run, b: Run) -> None:
        """Add a launch of each arm."""
        self.before.append(a)
        self.runs.append(b)

    @property
    def all(self) -> list[Run]:
        """All launches. The launches of arm A come first."""
        return [*self.before, *self.runs]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The launches of a case, and the verdict on them."""

    verdict: Verdict
    runs: tuple[Run, ...] = ()
    before: tuple[Run, ...] = ()  # arm A's runs in a comparison; `runs` has arm B's
    # File of the baseline of times with which the case was compared, or that was written from its launches.
    baseline_file: Path | None = None
    judged_by: str | None = None  # digest of the baselines that the case was judged against
    excused: Excuse | None = None  # why the failure of the case is excused; None: it is not

    @classmethod
    def of(cls, launches: Launches, verdict: Verdict, excused: Excuse | None = None) -> "Trial":
        """Return the trial of a case that was not judged against a baseline of times."""
        runs = tuple(launches.runs)
        return cls(verdict=verdict, runs=runs, before=tuple(launches.before), excused=excused)


@dataclass
class Mode(ABC):
    """A mode in which a session measures its cases."""

    setup: Setup
    arms: tuple[Arm, ...] = ()  # the two arms of a comparison; empty if cases are judged against baselines
    dry: ClassVar[bool] = False  # whether cases only run dry: no machine is locked or checked
    has_waivers: ClassVar[bool] = True  # whether `perf-waivers.toml` applies

    @property
    def options(self) -> Options:
        """The user's choices."""
        return self.setup.options

    @property
    def baselines(self) -> BaselineStore:
        """The reviewed baselines, and the baselines recorded on this machine."""
        return self.setup.baselines

    @property
    def reference_facts(self) -> SessionReference | None:
        """The recorded facts about the session's reference; None if the session has no reference."""
        return None

    def begin(self, tasks: Sequence[Task]) -> int:
        """Begin tasks before `judge` is called with them. Return how many run at the same time.

        By default, no task is begun here: launches run one after another, because each needs the whole
        machine.
        """
        return 0

    def end(self) -> None:  # noqa: B027  only modes that override `begin` have something to end
        """End what `begin` has begun."""

    def refused(self, task: Task) -> Verdict | None:
        """Return the verdict on a case that must not be launched, or None if the case may be launched."""
        return None

    @abstractmethod
    def judge(self, task: Task, launches: Launches) -> Trial:
        """Launch a case, or run it dry, until its verdict is decided. Adds each launch to `launches`."""

    def predict(self, result: Measurement, task: Task) -> DryFacts | None:
        """Predict the time of a step, or return why this is impossible. None if no prediction is needed."""
        return None

    def predicted(self, result: Measurement, task: Task) -> DryFacts | None:
        """Call `predict`. If it fails, keep the verdict and return the reason."""
        try:
            return self.predict(result, task)
        except Exception as error:
            return DryFacts(no_expected=error_text(error))

    def profile(self, result: Measurement, task: Task) -> Measurement | None:
        """Return the result with a profile, or with the reason why there is none.

        Returns None if no profile is needed.
        """
        return None

    def profiled(self, result: Measurement, task: Task) -> Measurement | None:
        """Call `profile`. If it fails, keep the verdict and add the reason to the result."""
        try:
            return self.profile(result, task)
        except Exception as error:
            why = TakenProfile(why_none=error_text(error))
            return result.replace(
                profile=why, verdict=result.verdict.replace(profiled=explained(None, why, ""))
            )

    def write_baselines(self, result: Measurement) -> None:
        """Write local baselines from the launches of a case that has none."""
        counts = result.verdict.counts
        if counts is not None and counts.outcome == "recorded":  # never in a comparison
            self.baselines.counts.write_local(count_baseline.from_runs(counted(result.runs)))

    def reviewed_file(self, case: Case) -> Path:
        """Return the path of the reviewed baseline of a case, whether or not it exists."""
        machine = self.setup.host.machine_for(case)
        return self.baselines.reviewed_file(machine.hardware_class, case.id)

    def reviewed_files(self, case: Case) -> tuple[Path, ...]:
        """Return the paths of all reviewed baselines that would judge a case, whether or not they exist."""
        target = count_baseline.target_of(self.setup.host.machine_for(case), dry=self.dry)
        counts = self.baselines.counts.reviewed_file(target, case.id)
        return tuple(dict.fromkeys([self.reviewed_file(case), counts]))  # a dry run is judged by counts only


def excuse_for(
    case: Case, runs: Sequence[Run], verdict: Verdict, baseline: Baseline | None = None
) -> Excuse | None:
    """Return the excuse for a failed case; None if it has none, or if the case did not fail."""
    shared = any(
        run.failure and run.machine.device == "cuda" and is_shared(run.health, run.machine) for run in runs
    )
    return excuse(case, verdict, baseline, shared=shared)
