"""The counts of one optimizer step: collectives, FLOPs, kernels, host reads, memory. Pure data.

Counts have no noise: the same code does the same work in every launch. `perfsuite.worker.counting.counter`
counts, `perfsuite.verdict.exact` judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

from pydantic import Field

from perfsuite.documents import Data

T = TypeVar("T")
Phase = Literal["forward", "recompute", "backward", "optimizer"]
"""`forward` includes everything between backward and the optimizer's step, such as the gradient norm.
`recompute` is the forward that activation checkpointing repeats in backward."""
OutsideOfSteps = Literal["outside of steps"]
OUTSIDE_OF_STEPS: OutsideOfSteps = "outside of steps"
PHASES: tuple[Phase, ...] = get_args(Phase)

METHOD = "dispatch-2"  # the method of counting. Counts of different methods are not compared
READS_OF_THE_HOST = "dispatch-1"
"""The previous method. It differs only in host reads: it also counted reads of the host's own tensors, which
wait for nothing. So everything except host reads is compared."""
FIRST_COUNTED = 3
COUNTED_STEP = 4
"""The first two counted steps, numbered from 1; the counts of the second are reported. The first shows which
storages exist, so that one first seen in the second was made out of sight."""

CONSECUTIVE = 12
"""Number of steps to count if nothing is timed, from `COUNTED_STEP` on: enough to include work in every 10th
step."""
FEWEST_TIMED = 10  # fewest steps that must be left to measure
FEWEST_OF_GROWTH = 3  # fewest steps that must be left to count objects between


class StepsToCount(NamedTuple):
    """The steps of a launch that are counted, from `FIRST_COUNTED` on."""

    until: int  # the last consecutive step
    late: int | None  # one more step after the measured ones; None: there is none

    @classmethod
    def of_timed(cls, max_warmup: int, total: int) -> StepsToCount:
        """Return the steps to count in a timed launch: one before the measured steps, and the last of all.

        The last is counted only if enough others are left to measure.
        """
        return cls(until=COUNTED_STEP, late=total if total - max_warmup > FEWEST_TIMED else None)

    @classmethod
    def consecutive(cls, number: int, total: int) -> StepsToCount:
        """Return `number` consecutive steps, or as many as a launch of `total` steps can count."""
        until = COUNTED_STEP - 1 + number
        return cls(until=max(COUNTED_STEP, min(until, total - FEWEST_OF_GROWTH)), late=None)


class Collective(Data):
    """The calls of one kind in one group, dtype and phase. Calls that move nothing have their own entry."""

    kind: str  # `all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `all_to_all`, `send`, `barrier`
    ranks: int  # number of ranks in the group
    apart: int  # distance of neighbouring ranks in the group: 1 for 0 to 7, 8 for 0, 8, 16; 0 for one rank
    dtype: str  # for example `bfloat16`; empty for a barrier
    phase: Phase
    count: int
    bytes: int  # size of the whole message that is gathered, scattered, reduced or sent, over all calls


def are_alike(first_method: str, second_method: str) -> bool:
    """Return whether counts of two methods are compared (without host reads, if one is the previous one)."""
    return first_method == second_method or {first_method, second_method} == {METHOD, READS_OF_THE_HOST}


def group_name(ranks: int, apart: int) -> str:
    """Describe the ranks of a group: `8 ranks`, `8 ranks, 4 apart`."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f", {apart} apart" if apart > 1 else "")


class StepMemory(Data):
    """Live tensors of one rank in the step, in bytes: each storage once, without the allocator's rounding."""

    peak: int
    peak_in: Phase | Literal["start"]
    # Live bytes at the peak by part: `parameter`, `gradient`, `optimizer state`, `unsharded`,
    # `communication`, the phase that made other tensors, and `kept` for those from before the step.
    at_peak: dict[str, int]
    saved_for_backward: int  # most bytes that a forward left alive at the beginning of a backward
    growth: int  # live bytes at the end of the step minus those at its beginning
    allocations: int


class MemoryChange(NamedTuple):
    """The birth, death or resize of a storage."""

    storage: int  # its number, in the order of first sight
    bytes: int  # growth; negative if it shrinks or dies
    phase: Phase


class MemoryLog(NamedTuple):
    """The storages of one rank on its device over one or more consecutive steps, which a dry run replays."""

    at_start: tuple[int, ...]  # bytes alive at the beginning of the first step, by number; 0 for others
    steps: tuple[tuple[MemoryChange, ...], ...]  # the changes in each step, in order

    @property
    def changes(self) -> Iterator[MemoryChange]:
        """The changes in all steps."""
        return (change for step in self.steps for change in step)

    @property
    def peak(self) -> int:
        """The most bytes alive at once: each storage once, without the allocator's rounding."""
        live = peak = sum(self.at_start)
        for change in self.changes:
            live += change.bytes
            peak = max(peak, live)
        return peak


class Compiled(Data):
    """Results of torch.compile over the whole launch: the counters of dynamo and inductor."""

    graphs: int
    breaks: dict[str, int] = Field(default_factory=dict)  # graph breaks by reason
    recompilations: int
    kernels: int  # kernels that inductor generated
    extern_calls: int  # calls of kernels that inductor did not generate, such as matrix products


class PythonCalls(Data):
    """Calls of Python functions in the training thread, or in all threads."""

    all_threads: bool = False  # True since Python 3.12
    version: str  # Python version, such as `3.11`: the same code makes other calls in another version
    calls: dict[Phase | OutsideOfSteps, int]
    functions: dict[str, int]  # calls of those called most: `torch.nn.modules.module.Module.__getattr__`

    @property
    def total(self) -> int:
        """The number of calls of all functions."""
        return sum(self.calls.values())


class WorkerBatch(Data):
    """Counts of one batch in the first worker process of each data loader of a rank."""

    python: PythonCalls  # counted in its third batch
    ops: dict[str, int]  # operators that do work, by name, counted in its second batch


class KeptObjects(Data):
    """Objects, tracked by Python's garbage collector, that each step of a launch leaves behind."""

    by_type: dict[str, int] = Field(default_factory=dict)  # objects per step; only types that grow
    holders: tuple[str, ...] = ()  # names of containers that hold some of them: `dispatch._cache`

    @property
    def total(self) -> int:
        """The number of objects of all types."""
        return sum(self.by_type.values())


class Counts(Data):
    """The counts of one optimizer step of one rank."""

    method: str = METHOD
    step: int = COUNTED_STEP
    collectives: tuple[Collective, ...] = ()
    flops: dict[Phase, int] = Field(default_factory=dict)  # matmul, convolution, attention: torch's formulas
    # Calls of operators that do work on the device. For a compiled model: only those outside of it.
    kernels: dict[Phase, int] = Field(default_factory=dict)
    # Reads by the host of a value on the device, for which it waits. Without a GPU: of any tensor except the
    # step counters of torch's optimizers, which are on the host also if there is a GPU.
    host_reads: dict[Phase, int] = Field(default_factory=dict)
    device_copies: dict[str, int] = Field(default_factory=dict)  # between devices: `cpu to cuda`
    blocking_copies: dict[str, int] | None = None  # those without `non_blocking`, which wait; None: unknown
    # Calls of functions that stall the host, such as `torch.cuda.synchronize`, by name; None: not counted.
    stalls: dict[str, int] | None = None
    memory: StepMemory | None = None  # None for a compiled model, whose buffers are not seen
    # The calls in `kernels` by operator, such as `aten.mm`, without views and allocations.
    ops: dict[str, int] = Field(default_factory=dict)
    # The part of `ops` that is named like matrix products, convolutions or attention but has no formula, so
    # that its FLOPs are missing in `flops`.
    without_flops: dict[str, int] = Field(default_factory=dict)
    compiled: Compiled | None = None  # None if nothing was compiled
    python: PythonCalls | None = None  # None in a dry run, next to a user's profiler, and if not counted
    worker_batch: WorkerBatch | None = None  # None without worker processes, and if not counted
    modules: dict[str, int] | None = None  # imported modules by package; None: not counted
    kept: KeptObjects | None = None  # counted over many steps; None: unknown
    # The next three are counted in one rank the first time that it is in a span that is not a step.
    bytes_written: int | None = None  # written into files by known savers; None: nothing was seen
    collectives_begun: int | None = None  # counted in backends, in groups of several ranks; None: unknown
    allocator_peak: int | None = None  # of a GPU, in bytes, if higher than before the span; None: unknown
    also_counted: tuple[int, ...] = ()  # numbers of the other counted steps, ascending
    # Counts of other spans of the run, by name: steps, except those equal to this one, and the first
    # occurrence of events and phases.
    spans: dict[str, Counts] = Field(default_factory=dict)

    def in_step(self, step: int) -> Counts | None:
        """Return the counts of a step; None if it was not counted. A later one lacks launch-wide counts.

        Memory is known only for a step that follows another counted one, which shows what is alive.
        """
        if step == self.step:
            return self
        if step not in self.also_counted:
            return None
        same = self.of_a_step_alone().replace(step=step)
        if step - 1 not in (self.step, *self.also_counted):
            same = same.replace(memory=None)
        return self.spans.get(step_name(step), same)

    def of_a_step_alone(self) -> Counts:
        """Return these counts without launch-wide counts and other spans."""
        return self.replace(compiled=None, worker_batch=None, kept=None, also_counted=(), spans={})

    def with_step(self, counts: Counts) -> Counts:
        """Return these counts with those of a later step added."""
        counted = self.replace(also_counted=(*self.also_counted, counts.step))
        if counted.in_step(counts.step) == counts:
            return counted
        return counted.replace(spans={**self.spans, step_name(counts.step): counts})


def step_name(step: int) -> str:
    """Return the name of a step as a span of a run."""
    return f"step {step}"


class OfRanks(Data):
    """A fact about one rank, or several."""

    ranks: tuple[int, ...] = Field(min_length=1)

    @property
    def name(self) -> str:
        """The ranks as text: `0-3,6`."""
        return spans(self.ranks)


class RankCounts(OfRanks):
    """The counts of one rank, or of several with equal counts."""

    counts: Counts


def merged(counts: Mapping[int, Counts]) -> tuple[RankCounts, ...]:
    """Merge the counts of all ranks: ranks with equal counts share an entry, in the order of ranks."""
    groups = grouped(counts, lambda one, other: one == other)
    # pragma: no mutate min: the counts of a group are equal
    return tuple(RankCounts(ranks=tuple(group), counts=group[min(group)]) for group in groups)


def grouped(by_number: Mapping[int, T], is_alike: Callable[[T, T], bool]) -> list[dict[int, T]]:
    """Group values by rank or step: each group holds those that are like its first, in ascending order."""
    groups: list[dict[int, T]] = []
    for number, its in sorted(by_number.items()):
        group = next((each for each in groups if is_alike(each[min(each)], its)), None)
        if group is None:
            group = {}
            groups.append(group)
        group[number] = its
    return groups


def of_rank(entries: Iterable[RankCounts], rank: int) -> Counts | None:
    """Return the counts of one rank; None if no entry has it."""
    return next((entry.counts for entry in entries if rank in entry.ranks), None)


def spans(numbers: Sequence[int]) -> str:
    """Format ascending whole numbers: `0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, dict.fromkeys(part))) for part in parts)


def numbers(spanned: str) -> list[int]:
    """Parse the numbers in a text that `spans` made."""
    ends = [part.partition("-") for part in spanned.split(",")]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]
