"""Predictions of a dry run besides the counts: whether the case fits into memory, and its step time. Pure."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data
from perfsuite.results.counts import Collective, RankCounts

FitWord = Literal["fits", "tight", "does not fit"]
Parallelism = Literal["none", "replicated", "sharded", "within layers"]
"""How the ranks share the work, according to what their collectives send: nothing (`none`), only gradients
(`replicated`, as in DDP), also parameters (`sharded`, as in FSDP), or also activations within the layers
(`within layers`, as in tensor parallelism)."""
OF_OTHERS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
"""Collectives in which a rank sends (n - 1) / n of the whole message, where n is the number of ranks."""
OF_ALL = frozenset({"broadcast", "reduce", "send"})
"""Collectives in which a rank sends the whole message. `all_reduce` is in neither set: a rank sends twice as
much as in `OF_OTHERS`. All other collectives that are in neither set take no time: a barrier has no bytes,
and a receive uses the other direction of the link, so it overlaps with a send."""


LAUNCHES_S = 1e-4
"""Minimum time to launch the kernels of a training step, in seconds: dozens of launches, a few µs each."""
SCALED = ("aten._scaled_mm", "aten._scaled_grouped_mm")  # prefixes of operators on float8 or smaller dtypes


class MemoryPart(Data):
    """Device memory that is not used for tensors of the step, as a range in bytes."""

    name: str
    low: int
    high: int
    source: str  # where the range comes from


class Fit(Data):
    """The predicted memory of a rank and the memory of its device, in bytes."""

    rank: int
    live: int  # peak of live tensors
    allocated: int  # peak of the caching allocator's used blocks, including rounding and cuBLAS's workspaces
    reserved: int  # estimated peak of the memory that the caching allocator reserves
    # Upper bound of `reserved`. It is reached if each block that several streams use can be reused only after
    # the step that frees it.
    reserved_upper: int
    reserved_expandable: int  # `reserved` with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`
    built: int = 0  # parameters of the whole model, if a rank has them on its device before sharding
    # `allocated` up to the end of the first step, which includes building the model. The value is
    # unknown (0) if perfsuite builds the model, because a dry run does not build the model as a launch does.
    start: int = 0
    # The highest peak of live tensors in the counted steps after the reported step, and the number of the
    # step with this peak. None: no later step was counted, or its memory is unknown.
    later: int = 0
    later_step: int | None = None
    outside: tuple[MemoryPart, ...]  # memory of the process outside the caching allocator
    card: int  # total memory of the device
    # True if the total that CUDA reports is unknown, so that `card` is the nominal size, which is larger.
    card_is_nominal: bool = False
    verdict: FitWord

    @property
    def least(self) -> int:
        """The minimum memory, in bytes, that a device needs to hold everything that is live at once."""
        return max(self.allocated, self.built, self.start, self.later) + sum(
            part.low for part in self.outside
        )

    @property
    def most(self) -> int:
        """The memory, in bytes, that a device needs to keep the allocator's cache even in the worst case."""
        return max(self.reserved_upper, self.built, self.start, self.later) + sum(
            part.high for part in self.outside
        )


class Roofline(Data):
    """The minimum time of one step, for the slowest rank. Bytes and FLOPs are those of that rank."""

    flops: int  # including recomputation
    peak_flops: float  # dense peak in FLOP/s, at the case's precision or at float8
    wire_bytes: float  # sent between GPUs of one machine, in one direction
    # One-way rate of the link between GPUs of one machine. None: no data sheet gives the rate. Sending then
    # counts as taking no time.
    link_bytes_per_s: float | None
    between_machines_bytes: float  # sent in groups that span machines; counts as taking no time
    tokens: int  # tokens of all ranks in one step, or samples if the case has no tokens

    @property
    def compute_s(self) -> float:
        """Seconds of computation at peak speed."""
        return self.flops / self.peak_flops

    @property
    def wire_s(self) -> float:
        """Seconds of communication between the GPUs of one machine."""
        return self.wire_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0

    @property
    def step_s(self) -> float:
        """The minimum time of a step, in seconds."""
        return max(self.compute_s, self.wire_s)

    @property
    def bound_by(self) -> Literal["computation", "communication"]:
        """The limit that determines the time of the step."""
        return "computation" if self.compute_s >= self.wire_s else "communication"

    @property
    def is_bound(self) -> bool:
        """Whether a step is limited by this minimum, and not by the time to launch the step's kernels."""
        return self.step_s >= LAUNCHES_S

    @property
    def tokens_per_s(self) -> float:
        """The maximum tokens/s of all ranks together."""
        return self.tokens / self.step_s

    def share(self, tokens_per_s: float) -> float:
        """Return `tokens_per_s` (of all ranks together) as a share of the maximum: 1 is the roofline."""
        return tokens_per_s / self.tokens_per_s


def roofline(counts: Iterable[RankCounts], case: Case, machine: Machine, tokens: int) -> Roofline | None:
    """Return the minimum time of a step. `tokens` has the same meaning as in `Roofline`.

    The minimum is the larger of two limits, because communication can overlap computation:

    - Computation: FLOPs divided by the dense peak at the case's precision, or at float8 if any matmul was in
      float8.
    - Communication: bytes divided by the rate of the link between the GPUs of one machine. The bytes are
      scaled by the bus bandwidth factor of each kind of collective (doc/PERFORMANCE.md of nccl-tests), which
      gives the minimum number of bytes that a rank sends in one direction. With switches that reduce in
      transit (NVLink SHARP, `NCCL_ALGO=NVLS`), an all-reduce can take less time.

    Groups that span machines count as taking no time, because their link is unknown. Memory bandwidth and
    work without FLOPs are ignored.

    Returns None if the accelerator's peak is unknown, or if nothing was counted. Also returns None for a
    launch of a compiled model, because most of its FLOPs are not counted. A dry run counts the FLOPs of
    compiled code.
    """
    of_ranks = []
    for its in (entry.counts for entry in counts):
        has_float8 = any(operator.startswith(SCALED) for operator in its.ops)
        peak = machine.peak_flops("float8" if has_float8 else case.precision)
        flops = sum(its.flops.values())
        has_unseen = its.compiled is not None and its.kernels is not None
        if peak is None or has_unseen or not flops:
            return None
        passed = {True: 0.0, False: 0.0}  # bytes sent; the key is True within one machine
        for collective in its.collectives:
            # A group spans machines unless its width divides the number of processes on one machine.
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


class Expected(Data):
    """The predicted time of a step in which nothing is wrong, for the slowest rank.

    This time is not a bound: it is the sum of the parts (`perfsuite.analysis.step_time`).
    """

    matmul_s: float
    attention_s: float
    memory_s: float  # kernels without FLOPs
    slowed_s: float  # additional time of kernels that run at the same time as collectives
    exposed_s: float  # time during which the GPU waits for communication
    host_s: float  # time during which the GPU waits for the host
    tokens: int  # tokens of all ranks in one step, or samples if the case has no tokens
    # Lowest and highest ratio of a published speed on this accelerator to its predicted speed. None: too few
    # measurements are published.
    published: tuple[float, float] | None = None
    parallelism: Parallelism
    # Pairs (factor, seconds) in ascending order: the seconds that a step takes if the host takes `factor`
    # times as long as assumed.
    by_host: tuple[tuple[float, float], ...] = Field(min_length=2)

    @property
    def step_s(self) -> float:
        """The time of a step, in seconds."""
        kernels_s = self.matmul_s + self.attention_s + self.memory_s
        return kernels_s + self.slowed_s + self.exposed_s + self.host_s

    @property
    def tokens_per_s(self) -> float:
        """The expected tokens/s of all ranks together."""
        return self.tokens / self.step_s

    def share(self, tokens_per_s: float) -> float:
        """Return `tokens_per_s` (of all ranks together) as a share of the expected tokens/s."""
        return tokens_per_s / self.tokens_per_s


class Forecast(Data):
    """The predicted time of a step, as an interval, on a machine on which other cases were measured.

    Nine of ten measurements should be in the interval.
    """

    low_s: float
    high_s: float
    cases: tuple[str, ...]  # ids of the measured cases with the same parallelism and the same `host_pace`
    gpu_factor: float  # measured times of the GPU relative to the expected times
    host_factor: float | None  # the same for the host; None: no measured case shows this factor
    host_pace: bool = False  # whether the host can set the pace of the step. Otherwise the GPU sets it
    held: int = 0  # number of earlier forecasts on this kind of GPU whose interval contained the measurement
    checked: int = 0  # number of earlier forecasts whose case was measured later

    def holds(self, step_s: float) -> bool:
        """Return whether a measured time is in the interval."""
        return self.low_s <= step_s <= self.high_s


class DryFacts(Data):
    """The predictions of a dry run for a case, made from the ranks that were run."""

    fit: Fit | None = None  # for the rank that needs most memory; None on a CPU (no caching allocator)
    roofline: Roofline | None = None  # None for any of the reasons that the function `roofline` lists
    expected: Expected | None = None
    no_expected: str | None = None  # why `expected` is None; on a CPU, both are None
    forecast: Forecast | None = None
    # Why `forecast` is None. Both are None if there is no expected time, or if no case was measured.
    no_forecast: str | None = None
