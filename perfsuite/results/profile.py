"""What a profile of a few steps comes to: where a step's time goes, and every call that it makes. Pure data.

It is reduced from the trace of a launch that is not judged. Times are in microseconds a step.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from perfsuite.documents import Data, Document, lines, plain
from perfsuite.results.baseline import Baseline, BaselineDocument
from perfsuite.results.counts import OfRanks, grouped

METHOD = "profile-2"  # the way of reducing a trace. Profiles of another method are not compared
PROFILED_STEPS = 3
UNSEEN = 0.1
"""Share of what the GPU computes that kernels may compute that no operator launched. In eager and in compiled
training operators and nodes of autograd launch all of them; this leaves room for a package's own kernels."""


class Work(Data):
    """All calls of one name."""

    name: str
    calls: float  # a step
    us: float  # time a step: of an operator without what it calls, of a kernel on the GPU


class StepSplit(Data):
    """Where the time of a step goes. All but `hidden_us` and `unseen_us` add up to `step_us`."""

    step_us: float
    compute_us: float  # kernels, on a GPU; operators, on a CPU. Without the optimizer's
    optimizer_us: float
    exposed_us: dict[str, float] = Field(default_factory=dict)  # communication alone, by kind: `all_gather`
    hidden_us: dict[str, float] = Field(default_factory=dict)  # communication behind computation
    data_wait_us: float = 0  # waiting for the data loader; on a GPU, that meanwhile does nothing
    idle_us: float = 0  # on a GPU: it does nothing, and no data are waited for
    other_us: float = 0  # on a CPU: everything else
    unseen_us: float = 0  # on a GPU: of what is computed, that by kernels that no operator of torch launched

    @property
    def busy_us(self) -> float:
        """What is computed, the optimizer's included."""
        return self.compute_us + self.optimizer_us

    @property
    def unseen(self) -> float:
        """The share of what is computed, 0 to 1, that kernels compute that no operator launched."""
        return self.unseen_us / self.busy_us if self.busy_us else 0.0

    def parts(self) -> dict[str, float]:
        """What adds up to the step, by its name in words; what takes no time is left out."""
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
    """`PROFILED_STEPS` steps of one rank, as means."""

    device: Literal["cpu", "cuda"]
    steps: int
    split: StepSplit
    operators: tuple[Work, ...]  # all of them, the longest first
    kernels: tuple[Work, ...] = ()  # all kernels and copies of the GPU, the longest first; none on a CPU
    host_syncs: tuple[Work, ...] = ()  # where the host waits for the device: reads, synchronisations, copies
    unsteady: tuple[str, ...] = ()  # names whose calls are not the same in each step: they are not compared

    @property
    def every(self) -> tuple[Work, ...]:
        """All work. A name may stand in it twice: first of the calls that the host waits for, last of all."""
        return (*self.host_syncs, *self.operators, *self.kernels)

    def calls(self) -> dict[str, float]:
        """The steady calls a step, by name."""
        return {each.name: each.calls for each in self.every if each.name not in self.unsteady}


class RankProfile(OfRanks):
    """The profile of one rank, or of the first of several that make the same calls."""

    profile: Profile


class LaunchProfile(Data):
    """The profiles of all ranks of a launch."""

    method: str = METHOD
    ranks: tuple[RankProfile, ...] = Field(min_length=1)

    @property
    def unseen(self) -> str | None:
        """That counts lack what kernels compute that no operator launched; None if those take little time."""
        share = max(entry.profile.split.unseen for entry in self.ranks)
        if share < UNSEEN:
            return None
        return (
            f"by the profile, {share:.0%} of the GPU's computing time is of kernels that no operator "
            f"launched, as those of a replayed CUDA graph: the counts do not contain them"
        )

    def of_rank(self, rank: int) -> Profile | None:
        """The profile of one rank; None if there is no such rank."""
        return next((entry.profile for entry in self.ranks if rank in entry.ranks), None)


class TakenProfile(Data):
    """What came of a launch that was made for a profile."""

    profile: LaunchProfile | None = None
    why_none: str | None = None  # why there is no profile
    traces: tuple[str, ...] = ()  # the trace of each rank, by its number: a file that opens in Perfetto


class RankProfileFile(Document):
    """`profile-N.json`: what one rank made of its trace."""

    schema_version: Literal[1] = 1
    method: str = METHOD  # the way in which it was reduced, by the perfsuite that launched it
    profile: Profile


class ProfileBaseline(BaselineDocument):
    """`profiles/<hardware class>/<case id>.json`: the profile that belongs to a baseline of times."""

    schema_version: Literal[1] = 1
    hardware_class: str
    profile: LaunchProfile
    of_baseline: str  # when that baseline was recorded, as it says: a newer one has another profile

    def as_json(self) -> str:
        """As other documents, but each operator in one line."""
        return lines(plain(self)) + "\n"


def of_baseline(known: Baseline, profile: LaunchProfile) -> ProfileBaseline:
    """What is kept of the profile that was taken with the launches of a baseline."""
    return ProfileBaseline(
        hardware_class=known.hardware_class, case=known.case, profile=profile, of_baseline=known.recorded_at
    )


def merged(profiles: Mapping[int, Profile], method: str = METHOD) -> LaunchProfile:
    """The profiles of all ranks, alike ones as that of the first; what is unsteady in one is not compared."""
    unsteady = tuple(sorted({name for profile in profiles.values() for name in profile.unsteady}))
    shared = {rank: profile.replace(unsteady=unsteady) for rank, profile in profiles.items()}
    groups = grouped(shared, lambda one, other: (one.device, one.calls()) == (other.device, other.calls()))
    ranks = tuple(RankProfile(ranks=tuple(group), profile=group[min(group)]) for group in groups)
    return LaunchProfile(method=method, ranks=ranks)


def longest_first(works: Iterable[Work]) -> tuple[Work, ...]:
    """Works by their time, the longest first; equal ones by name."""
    return tuple(sorted(works, key=lambda work: (-work.us, work.name)))
