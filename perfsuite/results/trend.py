"""Changes of level in a history of results, as `perfsuite history trend` reports them."""

from collections.abc import Mapping
from datetime import date
from typing import Literal

from perfsuite.documents import Data, Sealed
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, Metric

MetricName = Literal["tokens/s", "samples/s", "peak memory"]
METRICS: Mapping[MetricName, Metric] = {
    "tokens/s": TOKENS_PER_S,
    "samples/s": TOKENS_PER_S,
    "peak memory": PEAK_MEMORY,
}


class ChangePoint(Data):
    """A change of level between two consecutive points of a series."""

    index: int  # index of the first point of the new level
    earliest: int  # smallest possible index of the change, at 99% confidence
    latest: int  # largest possible index of the change, at 99% confidence
    before: float  # level before the change, in the unit of the series
    after: float  # level after the change
    relative: float  # relative size of the change: +0.05 is 5% more
    interval: tuple[float, float]  # 99% confidence interval of `relative`


class Drift(Data):
    """A change of level in one metric of one case on one hardware class."""

    hardware_class: str
    case: str
    metric: MetricName
    change: ChangePoint  # its indices count the sessions of this series
    # The relative change as measured. `change` is corrected for the machine's own change, which the sessions'
    # reference shows. None: `change` is not corrected, because the machine did not change or no session has a
    # reference.
    measured: float | None = None
    first_day: date  # day of the last session before the change, at 99% confidence
    last_day: date  # day of the first session after the change, at 99% confidence
    first_commit: str  # commit of the last session before the change
    last_commit: str  # commit of the first session after the change
    commits_between: int | None  # number of commits that might have caused the change; None: no repository
    # What changed from the last session before the change to the first session after it, or in a session
    # between these two: versions, settings, the GPU driver, the case itself.
    environment: tuple[str, ...]
    worse: bool  # whether the cost increased
    accepted: bool  # whether the case's reviewed baseline was measured after the change, at the new level
    # Whether the change needs attention: it made the level worse, nobody accepted it, and the newest level is
    # still worse than the level before the change. A change is never open if its series was not measured for
    # 90 days.
    open: bool

    @property
    def state(self) -> str:
        """The state of the change in words: whether it needs attention."""
        if not self.worse:
            return "better"
        return "worse" if self.open else "worse, accepted" if self.accepted else "worse, but no longer"

    @property
    def worsening(self) -> float:
        """Relative growth of the cost: +0.05 is 5% more seconds per token, or 5% more bytes."""
        return METRICS[self.metric].change(self.change.relative)

    def sentences(self) -> list[str]:
        """Describe the size and time of the change, and what else changed at the same time."""
        low, high = self.change.interval
        count = "" if self.commits_between is None else f", commits: {self.commits_between}"
        beside = (
            "" if self.measured is None else f" relative to the reference, {self.measured:+.1%} as measured"
        )
        return [
            f"{self.metric}: {self.change.relative:+.1%} (99% interval {low:+.1%} to {high:+.1%}){beside}",
            f"between {self.first_day} and {self.last_day}, "
            f"{self.first_commit[:8]}..{self.last_commit[:8]}{count}",
            *(f"also changed: {difference}" for difference in self.environment),
        ]


class MachineStep(Data):
    """A change of a machine's speed, as the reference of the sessions shows it.

    The code of the reference is always the same, so a change of its speed is a change of the machine.
    """

    hardware_class: str
    # The levels of the change are relative to the reference's speed in the first session with a reference.
    change: ChangePoint
    first_day: date  # day of the last session before the change, at 99% confidence
    last_day: date  # day of the first session after the change, at 99% confidence
    environment: tuple[str, ...]  # what changed from `first_day` to `last_day`, such as the GPU driver

    def sentences(self) -> list[str]:
        """Describe the size and time of the change, and what else changed at the same time."""
        low, high = self.change.interval
        return [
            f"the reference on {self.hardware_class}: {self.change.relative:+.1%} tokens/s "
            f"(99% interval {low:+.1%} to {high:+.1%}): the machine, not the code",
            f"between {self.first_day} and {self.last_day}",
            *(f"also changed: {difference}" for difference in self.environment),
        ]


class Trend(Sealed):
    """The changes in a history, as `perfsuite history trend --json` prints them.

    `perfsuite github issue` reads this JSON to decide which issues it can close.
    """

    schema_version: Literal[1] = 1
    since: date  # the first day from which changes are reported
    sessions: int  # number of sessions that were read
    series: int  # number of series: metrics of cases on hardware classes
    # Changes since that day, the worst first. Without `--since`, older changes that are open are included.
    findings: tuple[Drift, ...]
    machine: tuple[MachineStep, ...] = ()  # changes of the sessions' reference since that day, oldest first
    unplaced: dict[str, str]  # reason why the sessions of a commit are left out, by commit

    @property
    def failing(self) -> list[Drift]:
        """Open regressions: they still exist, and nobody accepted them."""
        return [finding for finding in self.findings if finding.open]
