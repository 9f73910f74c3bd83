"""The results of a session as one versioned file, `results.json`."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, computed_field, model_validator

from perfsuite import documents
from perfsuite.case.case import Unit
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data, Sealed
from perfsuite.results.counts import RankCounts
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.outcome import UNMEASURED, Excuse, Outcome, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.run import Figures, Health, Run


class Measurement(Data):
    """One case of a session: its measurements and its verdict."""

    nodeid: str
    case_id: str
    framework: str
    runs: tuple[Run, ...]  # its launches, in order
    verdict: Verdict
    baseline_file: str | None
    judged_by: str | None = None  # digest of its baselines of times and of counts; None without baselines
    directory: str  # the directory with the files of its launches
    # The hardware class on which the case was to run, if nothing was launched; None: launched, or unknown
    planned_class: str | None = None
    # In a comparison of two arms, the runs of arm A. The runs of arm B are in `runs`. Runs at the same
    # position in both fields form a pair.
    before: tuple[Run, ...] = ()
    profile: TakenProfile | None = None  # profile from a separate launch, which is not in `runs`
    profile_before: TakenProfile | None = None  # the baseline's or arm A's profile to compare with
    excused: Excuse | None = None
    # A sentence about each regression: which waiver of `perf-waivers.toml` tolerates it, or why none does.
    # Empty if no waiver matches any regression.
    waivers: tuple[str, ...] = ()
    shadow: bool = False  # whether its test would have failed without `--perf-shadow`
    # The expected time of a step, from the baseline or from a dry run after the launches; None: not predicted
    prediction: DryFacts | None = None
    # Whether others used the machine during these launches. The figures then prove nothing.
    shared: bool = False

    @property
    def hardware_class(self) -> str | None:
        """The hardware class on which the case was measured, or was to be measured; None if it is unknown."""
        return self.runs[0].machine.hardware_class if self.runs else self.planned_class

    @property
    def healthy_runs(self) -> list[Run]:
        """The healthy launches, or all launches if none is healthy."""
        return self.verdict.healthy(self.runs) or list(self.runs)

    @property
    def no_evidence(self) -> str | None:
        """Why the figures are not evidence of the code's speed, or None."""
        if any(run.inject is not None for run in self.runs):
            return "a fault was injected"
        if self.runs and not self.verdict.healthy(self.runs):
            return "no launch on a healthy machine"
        if self.outcome in UNMEASURED and not self.verdict.moved_by_machine:
            return f"{self.outcome}, which measures nothing"
        return None

    @property
    def dry(self) -> bool:
        """Whether the runs are dry runs, in which nothing was computed."""
        return any(run.dry for run in self.runs)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured: there are neither measured steps nor dry runs."""
        return not (self.measured_steps or self.dry)

    @property
    def by_counts(self) -> bool:
        """Whether two arms were compared on counts only, without times."""
        return bool(self.before) and self.verdict.counts is not None and not self.verdict.checks

    @property
    def counts(self) -> tuple[RankCounts, ...]:
        """The counts of the newest healthy launch that has counts; empty if no launch has."""
        return next((run.counts for run in reversed(self.healthy_runs) if run.counts), ())

    @property
    def dry_facts(self) -> DryFacts:
        """The predictions of the newest dry run; empty for a case that was launched."""
        return next((run.dry_facts for run in reversed(self.runs) if run.dry_facts is not None), DryFacts())

    @property
    def expected_share(self) -> float | None:
        """The share, 0 to 1, of the expected speed that the launches reached; None if it is unknown."""
        expected = None if self.prediction is None else self.prediction.expected
        speed = self.figures.tokens_per_s
        return None if expected is None or speed is None else expected.share(speed)

    @property
    def measured_steps(self) -> list[float]:
        """Step times in the windows of all healthy launches, in seconds."""
        return [step for run in self.healthy_runs for step in run.measured_steps]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def unit(self) -> Unit:
        """The unit of speeds. In a case without tokens, `figures.tokens_per_s` is in samples/s."""
        return self.runs[0].case.unit if self.runs else "tokens"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> Outcome:
        """The outcome of the verdict."""
        return self.verdict.outcome

    @computed_field  # type: ignore[prop-decorator]
    @property
    def figures(self) -> Figures:
        """The median of each figure over the healthy launches that have it."""
        return Figures.median_of(run.figures for run in self.healthy_runs)

    @model_validator(mode="before")
    @classmethod
    def _computed_again(cls, values: Any) -> Any:
        """Drop the computed fields. They are in the file only for readers, and follow from other fields."""
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if key not in cls.model_computed_fields}
        return values


Status = Literal["complete", "interrupted", "running"]
"""How a session ended. `running`: it has not ended yet, or it was killed (SIGKILL, a power cut)."""


class PytestRun(Data):
    """One run of pytest. A session that was continued with `--perf-resume` has several of these runs."""

    started_at: str  # ISO 8601, with time zone
    status: Status
    cases: int  # number of cases that this run measured


class Conditions(Data):
    """The conditions, besides commit and machine, that `--perf-resume` requires to be unchanged."""

    changes: str | None  # digest of the uncommitted changes; None if there are none
    options: dict[str, str]  # values of the options that affect verdicts
    environment: dict[str, str]  # versions and variables, as pytest saw them


class ArmFacts(Data):
    """One of the two arms of a comparison."""

    text: str  # the arm as the user gave it: `main NCCL_ALGO=Ring`
    facts: dict[str, str]  # facts that identify it: interpreter, commit, perfsuite and variables


class Canary(Data):
    """A case that a session launches not only as usual, but also with the session's reference.

    These launches show how fast the machine is. If the case was chosen only because it looked slower, they
    show only how fast the reference runs this case tonight.
    """

    case_id: str
    baseline_file: str
    runs: tuple[Run, ...] = ()  # the launches with the reference, in order
    # Whether the case was chosen only because it looked slower. Its launches then say nothing about other
    # cases.
    looked_slower: bool = False
    unused: str | None = None  # why these launches do not show how fast the machine is; None: they do


class MachineChange(Data):
    """The common change of a reference's canaries in one metric."""

    metric: str
    hardware_class: str
    change: float  # relative change of the figure since the baselines: -0.01 is 1% fewer tokens/s
    interval: tuple[float, float]  # 99% interval of `change`
    # Upper limit of the standard deviation, within a session, of the logarithm of a case's cost.
    case_sigma: float
    canaries: tuple[str, ...]  # ids of the canaries that agree
    apart: tuple[str, ...] = ()  # ids of the canaries that are left out, because their changes differ

    @property
    def is_certain(self) -> bool:
        """Whether the machine is certainly faster or slower: the 99% interval does not include 0."""
        low, high = self.interval
        return low > 0 or high < 0


class SessionReference(Data):
    """The reference of a session, and the results of the launches with it.

    The reference is the environment and commit of the baselines.
    """

    arm: ArmFacts
    canaries: tuple[Canary, ...] = ()
    changes: tuple[MachineChange, ...] = ()  # for each metric that follows the machine's speed
    problems: tuple[str, ...] = ()  # what the reference cannot show, and why, each as a sentence


class JudgeChanges(Data):
    """The changes to files that affect verdicts, such as baselines, since a base commit."""

    base: str | None  # the base commit. None if it was not found: a sentence then gives the reason
    sentences: tuple[str, ...]


class NodePreflight(Data):
    """The result of a preflight for one node."""

    name: str
    # Rates of its slowest rank (`perfsuite.worker.probes.node_probe`). Empty if a rank did not report.
    rates: dict[str, float] = Field(default_factory=dict)
    health: Health | None = None  # health of its GPUs during the preflight, from NVML
    problems: tuple[str, ...] = ()  # its problems, with the readings


class Preflight(Data):
    """One preflight: a check of a session's nodes before their first use."""

    started_at: str  # ISO 8601, with time zone
    duration_s: float
    machine: Machine  # each node is a machine like this
    nodes: tuple[NodePreflight, ...]  # in rank order
    failure: str | None = None  # a failure that is the same on every node, so that no node is to blame
    directory: str  # the directory with its files

    @property
    def problems(self) -> list[str]:
        """The problems of all nodes, each prefixed with the name of the node."""
        return [f"{node.name}: {problem}" for node in self.nodes for problem in node.problems]


class Skipped(Data):
    """A case that this machine cannot run, that the budget did not reach, or that its own test skipped.

    It can also be a file of cases that skipped itself when it was imported. The number of its cases is
    unknown, so it counts as one case.
    """

    nodeid: str
    case_id: str  # of a file: its path
    framework: str  # of a file: empty
    reason: str
    not_reached: bool = False  # whether the budget did not reach it; it then counts as not judged
    by_test: bool = False  # whether its own test skipped it; it then counts as not judged


class CaseChange(Data):
    """A case of arm A that arm B lacks or has changed.

    Such cases can exist only if each arm has its own case files.
    """

    case_id: str  # id of the case in arm A
    nodeid: str  # node id of its test in arm A
    # `new`: arm A's branch added the case after the branches diverged, so arm B has not lost it.
    kind: Literal["deleted", "changed", "re-marked", "deselected", "skipped", "new"]
    difference: str = ""  # between the arms: `micro_batch 2 -> 1`
    # Whether it is certain that the user requested this case. False if the user gave ids of cases, because
    # this case might not be one of them.
    asked: bool = True
    does_other_work: bool = False
    """Whether the case has the same id in both arms but does different work, for example because of another
    configuration file. Both arms then ran the case of arm B."""

    @model_validator(mode="before")
    @classmethod
    def _with_new_name(cls, values: Any) -> Any:
        """Accept the earlier name of `difference`, so that older results can be read."""
        if isinstance(values, dict) and "told" in values:
            return {"difference" if name == "told" else name: value for name, value in values.items()}
        return values


def lost_cases(changes: Iterable[CaseChange], results: Iterable[Measurement]) -> tuple[CaseChange, ...]:
    """Return the cases of arm A that were not compared.

    There are two kinds: selected cases that vanished in arm B, so that they have no result, and cases that
    have a result but do other work in arm B.
    """
    measured = {result.case_id for result in results}

    def is_lost(change: CaseChange) -> bool:
        if change.case_id in measured:
            return change.does_other_work
        return change.asked and change.kind != "new"

    return tuple(filter(is_lost, changes))


class SessionFile(Sealed):
    """`results.json` of a session, also written by `--perf-json`: every verdict, figure and step."""

    schema_version: Literal[1] = 1
    perfsuite: str  # the version of perfsuite that measured
    status: Status  # status of its newest part
    started_at: str  # start of its first part: ISO 8601, with time zone
    parts: tuple[PytestRun, ...] = Field(min_length=1)  # oldest first
    dry: bool = False  # whether all of its runs are dry runs
    conditions: Conditions
    commit: str | None = None  # commit of the repository that holds the cases; None outside git
    dirty: bool = False  # whether that repository had uncommitted changes to tracked files
    arms: tuple[ArmFacts, ...] = ()  # arms A and B of a comparison; empty if baselines are used
    reference: SessionReference | None = None  # None: the session ran without `--perf-reference`
    case_changes: tuple[CaseChange, ...] = ()  # cases of arm A that arm B lacks or has changed
    cases_unknown: str | None = None  # why the arms' cases could not be compared; None: no problem
    machine: Machine
    preflights: tuple[Preflight, ...] = ()  # checks of several nodes before launches, oldest first
    results: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...]
    unclaimed: tuple[str, ...] = ()  # reviewed baselines that belong to no case of a nightly run, and why
    waivers: tuple[str, ...] = ()  # remarks on waivers that match nothing or are not needed
    judge_changes: JudgeChanges | None = None  # None if there was no commit to compare with
    interrupted_case: str | None = None  # the newest case that was interrupted and has no result yet
    # Such cases of earlier parts, if the session was interrupted several times, oldest first.
    interrupted_before: tuple[str, ...] = ()
    # Launches of all interrupted cases. Each launch had ended when its case was interrupted.
    interrupted_launches: tuple[Run, ...] = ()

    @property
    def not_compared(self) -> tuple[CaseChange, ...]:
        """The cases of arm A that were not compared (`lost_cases`)."""
        return lost_cases(self.case_changes, self.results)

    @property
    def has_all_cases(self) -> bool:
        """Whether it is certain that no case of arm A was left out of the comparison."""
        return not self.not_compared and self.cases_unknown is None


def readable(files: Iterable[Path]) -> Iterator[SessionFile]:
    """Yield the sessions of these results files.

    A file of another version, or one that was cut off, is left out.
    """
    for file in files:
        session = documents.read_or_none(file, SessionFile)
        if session is not None:
            yield session
