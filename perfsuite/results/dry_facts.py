"""What a dry run says beyond the counts: will the case fit, and how fast can it be at best. Pure."""

from collections.abc import Iterable
from typing import Literal

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data
from perfsuite.results.counts import Collective, RankCounts

FitWord = Literal["fits", "tight", "does not fit"]
OF_OTHERS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
"""Kinds of which a rank passes the share of the message that is not its own; of `all_reduce`, twice."""
OF_ALL = frozenset({"broadcast", "reduce", "send"})
"""Kinds of which a rank passes the whole message. What is not named takes no time: a barrier has no bytes,
and what is received comes in the other direction, while as much is sent."""


LAUNCHES_S = 1e-4
"""Seconds that the launches of the kernels of a training step take at least: dozens, of some µs each."""
SCALED = ("aten._scaled_mm", "aten._scaled_grouped_mm")  # so begin operators on float8, or fewer bits


class MemoryPart(Data):
    """Memory of the device that no tensor of the step holds, as a range in bytes."""

    name: str
    low: int
    high: int
    source: str  # where the range comes from


class Fit(Data):
    """The memory that a rank is predicted to need, and what it has, in bytes."""

    rank: int
    live: int  # peak of live tensors
    allocated: int  # peak of the caching allocator's blocks in use, with rounding and cuBLAS's workspaces
    reserved: int  # peak of what the caching allocator holds
    reserved_expandable: int  # the same with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`
    built: int = 0  # the whole model's parameters, where a rank has them on its device before sharding
    outside: tuple[MemoryPart, ...]  # what the process holds outside of the caching allocator
    card: int  # the memory of the device
    verdict: FitWord

    @property
    def least(self) -> int:
        """Bytes that the device must have in any case: less cannot hold what lives at once."""
        return max(self.allocated, self.built) + sum(part.low for part in self.outside)

    @property
    def most(self) -> int:
        """Bytes with which the allocator never has to give back its cache, all ranges at their upper end."""
        return max(self.reserved, self.built) + sum(part.high for part in self.outside)


class Roofline(Data):
    """What one step takes at least, on the rank that needs most; bytes and FLOPs are that rank's."""

    flops: int  # recomputation included
    peak_flops: float  # dense, per second, at the case's precision or that of float8
    wire_bytes: float  # over the link between GPUs of one machine, in one direction
    link_bytes_per_s: float | None  # of that link, one direction; None (no datasheet): the wire takes no time
    between_machines_bytes: float  # of groups that span machines, by a link unknown: they take no time here
    tokens: int  # of all ranks in one step; samples where the case has no tokens

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
        """Seconds that a step takes at least."""
        return max(self.compute_s, self.wire_s)

    @property
    def bound_by(self) -> Literal["computation", "communication"]:
        """Which of the two limits is the larger."""
        return "computation" if self.compute_s >= self.wire_s else "communication"

    @property
    def is_bound(self) -> bool:
        """Whether this is what limits a step, and not the launches of its kernels."""
        return self.step_s >= LAUNCHES_S

    @property
    def tokens_per_s(self) -> float:
        """The most tokens/s of all ranks together."""
        return self.tokens / self.step_s

    def share(self, tokens_per_s: float) -> float:
        """Return which share of the most a speed of all ranks together is: 1 is the roofline."""
        return tokens_per_s / self.tokens_per_s


def roofline(counts: Iterable[RankCounts], case: Case, machine: Machine, tokens: int) -> Roofline | None:
    """Return what a step takes at least, `tokens` as in `Roofline`.

    The larger of two limits, because communication may run during computation. Computation: FLOPs over the
    dense peak at the case's precision; over that of float8 if any product was in float8. Communication:
    bytes over the link between the GPUs of one machine, each kind by the factor of its bus bandwidth
    (doc/PERFORMANCE.md of nccl-tests): what a rank has at least to pass in one direction. Switches that
    reduce on their way (NVLink SHARP, `NCCL_ALGO=NVLS`) let an all-reduce take less. Groups that span
    machines, whose link is unknown, take no time here, nor do memory bandwidth and what has no FLOPs.

    None where the accelerator's peak is unknown, nothing was counted, or most FLOPs are not seen: compiled.
    """
    of_ranks = []
    for its in (entry.counts for entry in counts):
        has_float8 = any(operator.startswith(SCALED) for operator in its.ops)
        peak = machine.peak_flops("float8" if has_float8 else case.precision)
        flops = sum(its.flops.values())
        if peak is None or its.compiled is not None or not flops:
            return None
        passed = {True: 0.0, False: 0.0}  # by whether it stays in one machine
        for each in its.collectives:
            # No group of this size and distance has ranks on two machines.
            is_inside = each.ranks == 1 or case.topology.processes_per_node % (each.ranks * each.apart) == 0
            passed[is_inside] += _passed(each)
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


def _passed(each: Collective) -> float:
    if each.kind in OF_ALL:
        return each.bytes if each.ranks > 1 else 0
    times = 2 if each.kind == "all_reduce" else int(each.kind in OF_OTHERS)
    return times * (each.ranks - 1) / each.ranks * each.bytes


class DryFacts(Data):
    """What a dry run says of a case, by the ranks that were run."""

    fit: Fit | None = None  # of the rank that needs most. None on a CPU, which has no caching allocator
    roofline: Roofline | None = None  # none where the accelerator's peak is unknown
