"""What a session measured, as one versioned file: `results.json`."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, computed_field, model_validator

from perfsuite.case.case import Unit
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data, Sealed
from perfsuite.results.counts import RankCounts
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.outcome import UNMEASURED, Excuse, Outcome, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.run import Figures, Health, Run


class Measurement(Data):
    """One case of a session: what was measured and what it means."""

    nodeid: str
    case_id: str
    framework: str
    runs: tuple[Run, ...]  # its launches, in the order they were made
    verdict: Verdict
    baseline_file: str | None
    judged_by: str | None = None  # a digest of the baselines of times and of counts; None without any
    directory: str  # with the files of its launches
    before: tuple[Run, ...] = ()  # of arm A where two arms were compared: `runs` are arm B's, pair by pair
    profile: TakenProfile | None = None  # of a launch that was made for it, and is none of `runs`
    profile_before: TakenProfile | None = None  # what it was compared with: of the baseline, or of arm A
    excused: Excuse | None = None
    waivers: tuple[str, ...] = ()  # what `perf-waivers.toml` says of each of its regressions
    shadow: bool = False  # whether its test would have failed, were it not for `--perf-shadow`
    shared: bool = False  # whether others used the machine in the launches shown: figures prove nothing

    @property
    def hardware_class(self) -> str | None:
        """The hardware class it was measured on; None if nothing was launched."""
        return self.runs[0].machine.hardware_class if self.runs else None

    @property
    def healthy_runs(self) -> list[Run]:
        """The launches that count; all of them if none does."""
        return self.verdict.healthy(self.runs) or list(self.runs)

    @property
    def no_evidence(self) -> str | None:
        """Why its figures say nothing about the speed of the code; None if they do."""
        if any(run.inject is not None for run in self.runs):
            return "a fault was injected"
        if self.runs and not self.verdict.healthy(self.runs):
            return "no launch on a healthy machine"
        if self.outcome in UNMEASURED:
            return f"{self.outcome}, which measures nothing"
        return None

    @property
    def dry(self) -> bool:
        """Whether nothing was computed: its runs are dry runs."""
        return any(run.dry for run in self.runs)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured, no step and no dry run."""
        return not (self.measured_steps or self.dry)

    @property
    def by_counts(self) -> bool:
        """Whether two arms were compared by what a step does, and by no time."""
        return bool(self.before) and self.verdict.counts is not None and not self.verdict.checks

    @property
    def counts(self) -> tuple[RankCounts, ...]:
        """What a step did, counted: of the newest healthy launch that was counted; empty if none was."""
        return next((run.counts for run in reversed(self.healthy_runs) if run.counts), ())

    @property
    def dry_facts(self) -> DryFacts:
        """What its newest dry run predicts; nothing of a case that was launched."""
        return next((run.dry_facts for run in reversed(self.runs) if run.dry_facts is not None), DryFacts())

    @property
    def measured_steps(self) -> list[float]:
        """Step times in the windows of all healthy launches, in seconds."""
        return [step for run in self.healthy_runs for step in run.measured_steps]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def unit(self) -> Unit:
        """What its speeds count. `figures.tokens_per_s` of a case without tokens is in samples/s."""
        return self.runs[0].case.unit if self.runs else "tokens"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> Outcome:
        """The verdict in a word."""
        return self.verdict.outcome

    @computed_field  # type: ignore[prop-decorator]
    @property
    def figures(self) -> Figures:
        """The median of each figure over the healthy launches that have it."""
        return Figures.median_of(run.figures for run in self.healthy_runs)

    @model_validator(mode="before")
    @classmethod
    def _computed_again(cls, values: Any) -> Any:
        """The computed fields stand in the file for its readers; they follow from the rest."""
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if key not in cls.model_computed_fields}
        return values


Status = Literal["complete", "interrupted", "running"]
"""How a session ended. `running`: not yet, or it was killed (SIGKILL, a power cut) and could not say so."""


class PytestRun(Data):
    """One run of pytest. A session has several where `--perf-resume` went on with it."""

    started_at: str  # ISO 8601, with time zone
    status: Status
    cases: int  # how many cases it measured


class Conditions(Data):
    """What the verdicts of a session hold for, in addition to its commit and its machine: `--perf-resume`."""

    changes: str | None  # a digest of the uncommitted changes; None without any
    options: dict[str, str]  # the options that a verdict depends on, with their values
    environment: dict[str, str]  # versions and variables, as pytest saw them


class ArmFacts(Data):
    """One of the two arms of a comparison."""

    text: str  # as it was given: `main NCCL_ALGO=Ring`
    facts: dict[str, str]  # what tells it from another: its interpreter, commit, perfsuite and variables


class JudgeChanges(Data):
    """How what judges a session, such as its baselines, differs from the commit that it is compared with."""

    base: str | None  # that commit; None if it could not be found, which the sentence then says
    sentences: tuple[str, ...]


class NodePreflight(Data):
    """One node in a preflight."""

    name: str
    # Those of its slowest rank (`perfsuite.worker.probes.node_probe`). Empty if a rank did not report.
    rates: dict[str, float] = Field(default_factory=dict)
    health: Health | None = None  # its GPUs by NVML meanwhile
    problems: tuple[str, ...] = ()  # what is wrong with it, with the readings


class Preflight(Data):
    """One preflight: what the first nodes of a session could do before they were used."""

    started_at: str  # ISO 8601, with time zone
    duration_s: float
    machine: Machine  # what each of the nodes is
    nodes: tuple[NodePreflight, ...]  # in the order of their ranks
    failure: str | None = None  # why it failed alike on every node, which speaks against none; else None
    directory: str  # the directory with its files

    @property
    def problems(self) -> list[str]:
        """What is wrong with each node, behind its name."""
        return [f"{node.name}: {problem}" for node in self.nodes for problem in node.problems]


class Skipped(Data):
    """A case that this machine cannot run, for which a budget had no time, or that its own test skipped."""

    nodeid: str
    case_id: str
    framework: str
    reason: str
    not_reached: bool = False  # by the budget: it counts as not judged
    by_test: bool = False  # its test skipped it, and not this machine: it counts as not judged


class CaseChange(Data):
    """A case of arm A that arm B does not have, or has otherwise. Only arms with files of cases differ so."""

    case_id: str  # in arm A
    nodeid: str  # of its test in arm A
    # `new`: arm A's branch has it only since the branches parted, so that arm B has not lost it.
    kind: Literal["deleted", "changed", "re-marked", "deselected", "skipped", "new"]
    told: str = ""  # what is otherwise in arm B: `micro_batch 2 -> 1`
    asked: bool = True  # whether arm A has it among the cases that were selected; not where ids were given


def lost_cases(changes: Iterable[CaseChange], results: Iterable[Measurement]) -> tuple[CaseChange, ...]:
    """Return the cases of arm A that were asked for and that no result is of: they vanished in arm B."""
    measured = {result.case_id for result in results}
    lost = (each for each in changes if each.asked and each.kind != "new")
    return tuple(each for each in lost if each.case_id not in measured)


class SessionFile(Sealed):
    """`results.json` of a session, and what `--perf-json` writes: every verdict, figure and step."""

    schema_version: Literal[1] = 1
    perfsuite: str  # the version that measured
    status: Status  # of its newest part
    started_at: str  # ISO 8601, with time zone: when its first part began
    parts: tuple[PytestRun, ...] = Field(min_length=1)  # the oldest first
    dry: bool = False  # whether it launches nothing: all of its runs are dry
    conditions: Conditions
    commit: str | None = None  # the commit of the repository that holds the cases; None outside of git
    dirty: bool = False  # whether that repository had uncommitted changes to tracked files
    arms: tuple[ArmFacts, ...] = ()  # arms A and B if two were compared; else it judges by baselines
    case_changes: tuple[CaseChange, ...] = ()  # cases of arm A that arm B lacks or has otherwise
    cases_unknown: str | None = None  # why the cases of the arms could not be compared; None: they were
    machine: Machine
    preflights: tuple[Preflight, ...] = ()  # of several nodes before the first launches, oldest first
    results: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...]
    unclaimed: tuple[str, ...] = ()  # reviewed baselines that no case of a whole night claims, each with why
    waivers: tuple[str, ...] = ()  # what is to be said of waivers that match nothing, or are not needed
    judge_changes: JudgeChanges | None = None  # None: there was no commit to compare with
    interrupted_case: str | None = None  # the case that an interrupt cut short
    interrupted_launches: tuple[Run, ...] = ()  # the launches of that case that had ended by then

    @property
    def not_compared(self) -> tuple[CaseChange, ...]:
        """The cases of arm A that were asked for and that no result is of: they vanished in arm B."""
        return lost_cases(self.case_changes, self.results)

    @property
    def has_all_cases(self) -> bool:
        """Whether no case that was asked for vanished between the arms, as far as that is known."""
        return not self.not_compared and self.cases_unknown is None
