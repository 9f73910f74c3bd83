"""Profiles of a few steps: where the time of a step goes, and every call that a step makes. Pure data.

A profile is computed from the trace of a launch that is not judged. Times are in microseconds per step.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from perfsuite.documents import Data, Document, lines, plain
from perfsuite.results.baseline import Baseline, BaselineDocument
from perfsuite.results.counts import OfRanks, grouped

METHOD = "profile-2"  # method of reducing a trace. Profiles of different methods are not compared
PROFILED_STEPS = 3
UNSEEN = 0.1
"""Maximum share of the GPU's computing time that may be spent in kernels that no operator launched. In eager
and compiled training, operators and autograd nodes launch all kernels; the limit leaves room for kernels of
other packages."""


class Work(Data):
    """All calls with the same name."""

    name: str
    calls: float  # number of calls per step
    us: float  # time per step: for an operator, without its callees; for a kernel, on the GPU


class StepSplit(Data):
    """The time of a step in parts. All parts except `hidden_us` and `unseen_us` add up to `step_us`."""

    step_us: float
    compute_us: float  # kernels on a GPU, operators on a CPU; without the optimizer
    optimizer_us: float
    exposed_us: dict[str, float] = Field(default_factory=dict)  # communication not overlapped, by kind
    hidden_us: dict[str, float] = Field(default_factory=dict)  # communication overlapped by compute, by kind
    data_wait_us: float = 0  # waiting for the data loader; on a GPU, only while the GPU is idle
    idle_us: float = 0  # on a GPU: idle without waiting for data
    other_us: float = 0  # on a CPU: everything else
    unseen_us: float = 0  # on a GPU: the part of computation in kernels that no operator of torch launched

    @property
    def busy_us(self) -> float:
        """Time of computation, including the optimizer."""
        return self.compute_us + self.optimizer_us

    @property
    def unseen(self) -> float:
        """Share, 0 to 1, of the computing time spent in kernels that no operator launched."""
        return self.unseen_us / self.busy_us if self.busy_us else 0.0

    def parts(self) -> dict[str, float]:
        """Return the parts that add up to the step time, by name, without parts that take no time."""
        named = {
            "compute": self.compute_us,
            "optimizer": self.optimizer_us,
            **{f"{kind} exposed": us for kind, us in self.exposed_us.items()},
            "wait for data": self.data_wait_us,
            "idle": self.idle_us,
            "the rest": self.other_us,
        }
        return {name: us for name, us in named.items() if us}


class Profile(Data):
    """The means of `PROFILED_STEPS` steps on one rank."""

    device: Literal["cpu", "cuda"]
    steps: int
    split: StepSplit
    operators: tuple[Work, ...]  # all operators, longest first
    kernels: tuple[Work, ...] = ()  # all kernels and copies of the GPU, longest first; empty on a CPU
    host_syncs: tuple[Work, ...] = ()  # calls in which the host waits for the device: reads, syncs, copies
    unsteady: tuple[str, ...] = ()  # names whose number of calls varies between steps; they are not compared

    @property
    def all_work(self) -> tuple[Work, ...]:
        """All work. A name can occur twice: in `host_syncs`, and again in `operators` or `kernels`."""
        return (*self.host_syncs, *self.operators, *self.kernels)

    def calls(self) -> dict[str, float]:
        """Return the calls per step by name, without unsteady names."""
        return {work.name: work.calls for work in self.all_work if work.name not in self.unsteady}


class RankProfile(OfRanks):
    """The profile of one rank, or of the first of several ranks that make the same calls."""

    profile: Profile


class LaunchProfile(Data):
    """The profiles of all ranks of a launch."""

    method: str = METHOD
    ranks: tuple[RankProfile, ...] = Field(min_length=1)

    @property
    def unseen(self) -> str | None:
        """Why counts lack kernels that were not launched by operators. None if these take little time."""
        share = max(entry.profile.split.unseen for entry in self.ranks)
        if share < UNSEEN:
            return None
        return (
            f"according to the profile, {share:.0%} of the GPU's computing time is spent in kernels that no "
            f"operator launched, such as those of a replayed CUDA graph: the counts do not contain them"
        )

    def of_rank(self, rank: int) -> Profile | None:
        """Return the profile of one rank; None if the launch has no such rank."""
        return next((entry.profile for entry in self.ranks if rank in entry.ranks), None)


class TakenProfile(Data):
    """The result of a launch that was made for a profile."""

    profile: LaunchProfile | None = None
    why_none: str | None = None  # why there is no profile
    traces: tuple[str, ...] = ()  # the trace file of each rank, in rank order; it opens in Perfetto


class RankProfileFile(Document):
    """`profile-N.json`: the profile that one rank computed from its trace."""

    schema_version: Literal[1] = 1
    method: str = METHOD  # the method used by the perfsuite that ran the launch
    profile: Profile


class ProfileBaseline(BaselineDocument):
    """`profiles/<hardware class>/<case id>.json`: the profile that belongs to a baseline of times."""

    schema_version: Literal[1] = 1
    hardware_class: str
    profile: LaunchProfile
    # `recorded_at` of the baseline of times. If a newer baseline has replaced it, the profile is not used.
    of_baseline: str

    def as_json(self) -> str:
        """Return the JSON, with each operator on one line."""
        return lines(plain(self)) + "\n"


def of_baseline(baseline: Baseline, profile: LaunchProfile) -> ProfileBaseline:
    """Return the document for a profile that was taken together with the launches of a baseline."""
    return ProfileBaseline(
        hardware_class=baseline.hardware_class,
        case=baseline.case,
        profile=profile,
        of_baseline=baseline.recorded_at,
    )


def merged(profiles: Mapping[int, Profile], method: str = METHOD) -> LaunchProfile:
    """Merge the profiles of all ranks. Ranks with the same calls share the profile of the first of them.

    A name that is unsteady on one rank is not compared on any rank.
    """
    unsteady = tuple(sorted({name for profile in profiles.values() for name in profile.unsteady}))
    shared = {rank: profile.replace(unsteady=unsteady) for rank, profile in profiles.items()}
    groups = grouped(shared, lambda one, other: (one.device, one.calls()) == (other.device, other.calls()))
    ranks = tuple(RankProfile(ranks=tuple(group), profile=group[min(group)]) for group in groups)
    return LaunchProfile(method=method, ranks=ranks)


def longest_first(works: Iterable[Work]) -> tuple[Work, ...]:
    """Sort `Work` entries by time, longest first, and then by name."""
    return tuple(sorted(works, key=lambda work: (-work.us, work.name)))
