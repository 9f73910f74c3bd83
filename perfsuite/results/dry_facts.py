"""Predictions of a dry run beyond the counts: whether the case fits, and its best possible speed. Pure."""

from collections.abc import Iterable
from typing import Literal

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data
from perfsuite.results.counts import Collective, RankCounts

FitWord = Literal["fits", "tight", "does not fit"]
OF_OTHERS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
"""Kinds in which a rank passes on the part of the message that is not its own; in `all_reduce`, twice."""
OF_ALL = frozenset({"broadcast", "reduce", "send"})
"""Kinds in which a rank passes on the whole message. Kinds that are not named take no time: a barrier has no
bytes, and a receive uses the other direction, at the same time as a send."""


LAUNCHES_S = 1e-4
"""Least seconds to launch the kernels of a training step: dozens of launches, a few µs each."""
SCALED = ("aten._scaled_mm", "aten._scaled_grouped_mm")  # prefixes of operators on float8, or fewer bits


class MemoryPart(Data):
    """Device memory that is not held by tensors of the step, as a range in bytes."""

    name: str
    low: int
    high: int
    source: str  # where the range comes from


class Fit(Data):
    """The predicted memory of a rank, and the memory that it has, in bytes."""

    rank: int
    live: int  # peak of live tensors
    allocated: int  # peak of the caching allocator's used blocks, with rounding and cuBLAS's workspaces
    reserved: int  # peak of the memory that the caching allocator holds
    reserved_expandable: int  # the same with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`
    built: int = 0  # parameters of the whole model, if a rank has them on its device before sharding
    outside: tuple[MemoryPart, ...]  # memory of the process outside of the caching allocator
    card: int  # the memory of the device
    verdict: FitWord

    @property
    def least(self) -> int:
        """The least bytes that the device must have to hold everything that is live at once."""
        return max(self.allocated, self.built) + sum(part.low for part in self.outside)

    @property
    def most(self) -> int:
        """The bytes with which the allocator never has to free its cache, with all ranges at their top."""
        return max(self.reserved, self.built) + sum(part.high for part in self.outside)


class Roofline(Data):
    """The least time of one step, for the rank that needs most; bytes and FLOPs are that rank's."""

    flops: int  # including recomputation
    peak_flops: float  # dense peak per second, at the case's precision or at float8
    wire_bytes: float  # sent over the link between GPUs of one machine, in one direction
    link_bytes_per_s: float | None  # rate of that link, one way; None (no datasheet): the wire takes no time
    between_machines_bytes: float  # in groups that span machines: their link is unknown, and takes no time
    tokens: int  # of all ranks in one step; samples if the case has no tokens

    @property
    def compute_s(self) -> float:
        """Seconds of computation at the peak."""
        return self.flops / self.peak_flops

    @property
    def wire_s(self) -> float:
        """Seconds of communication between the GPUs of one machine."""
        return self.wire_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0

    @property
    def step_s(self) -> float:
        """The least seconds of a step."""
        return max(self.compute_s, self.wire_s)

    @property
    def bound_by(self) -> Literal["computation", "communication"]:
        """The larger of the two limits."""
        return "computation" if self.compute_s >= self.wire_s else "communication"

    @property
    def is_bound(self) -> bool:
        """Whether this limits a step, rather than the launches of its kernels."""
        return self.step_s >= LAUNCHES_S

    @property
    def tokens_per_s(self) -> float:
        """The most tokens/s of all ranks together."""
        return self.tokens / self.step_s

    def share(self, tokens_per_s: float) -> float:
        """Return a speed of all ranks together as a share of the most: 1 is the roofline."""
        return tokens_per_s / self.tokens_per_s


def roofline(counts: Iterable[RankCounts], case: Case, machine: Machine, tokens: int) -> Roofline | None:
    """Return the least time of a step, with `tokens` as in `Roofline`.

    It is the larger of two limits, because communication can overlap computation. Computation: FLOPs over the
    dense peak at the case's precision, or at float8 if any product was in float8. Communication: bytes over
    the link between the GPUs of one machine, scaled for each kind by the factor of its bus bandwidth
    (doc/PERFORMANCE.md of nccl-tests), which gives the least bytes that a rank has to pass in one direction.
    With switches that reduce in transit (NVLink SHARP, `NCCL_ALGO=NVLS`) an all-reduce can take less. Groups
    that span machines, whose link is unknown, take no time here; nor does memory bandwidth, or work without
    FLOPs.

    Returns None if the accelerator's peak is unknown, nothing was counted, or the model is compiled, which
    hides most FLOPs.
    """
    of_ranks = []
    for its in (entry.counts for entry in counts):
        has_float8 = any(operator.startswith(SCALED) for operator in its.ops)
        peak = machine.peak_flops("float8" if has_float8 else case.precision)
        flops = sum(its.flops.values())
        if peak is None or its.compiled is not None or not flops:
            return None
        passed = {True: 0.0, False: 0.0}  # bytes by whether they stay in one machine
        for collective in its.collectives:
            # True if no group of this size and distance has ranks on two machines.
            width = collective.ranks * collective.apart
            is_inside = collective.ranks == 1 or case.topology.processes_per_node % width == 0
            passed[is_inside] += _passed(collective)
        limit = Roofline(
            flops=flops,
            peak_flops=peak,
            wire_bytes=passed[True],
            link_bytes_per_s=machine.link_bytes_per_s,
            between_machines_bytes=passed[False],
            tokens=tokens,
        )
        of_ranks.append(limit)
    return max(of_ranks, key=lambda of_rank: of_rank.step_s, default=None)


def _passed(collective: Collective) -> float:
    if collective.kind in OF_ALL:
        return collective.bytes if collective.ranks > 1 else 0
    times = 2 if collective.kind == "all_reduce" else int(collective.kind in OF_OTHERS)
    return times * (collective.ranks - 1) / collective.ranks * collective.bytes


class DryFacts(Data):
    """The predictions of a dry run for a case, from the ranks that were run."""

    fit: Fit | None = None  # of the rank that needs most; None on a CPU, which has no caching allocator
    roofline: Roofline | None = None  # None if the accelerator's peak is unknown
