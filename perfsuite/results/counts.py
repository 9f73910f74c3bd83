"""What one optimizer step does, counted: collectives, FLOPs, kernels, host reads, memory. Pure data.

A count has no noise: the same code does the same work in every launch. `perfsuite.worker.counting.counter`
counts, `perfsuite.verdict.exact` judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

from pydantic import Field

from perfsuite.documents import Data

T = TypeVar("T")
Phase = Literal["forward", "recompute", "backward", "optimizer"]
"""`forward` holds also what lies between backward and the optimizer's step, such as the gradient norm.
`recompute` is the forward that activation checkpointing makes again in backward."""
OutsideOfSteps = Literal["outside of steps"]
OUTSIDE_OF_STEPS: OutsideOfSteps = "outside of steps"
PHASES: tuple[Phase, ...] = get_args(Phase)

METHOD = "dispatch-2"  # the way of counting. Counts of another method are not compared
READS_OF_THE_HOST = "dispatch-1"
"""The method before. It is the same but for host reads: those of the host's own tensors counted, too, which
wait for nothing. So all but host reads is compared."""
FIRST_COUNTED = 3
COUNTED_STEP = 4
"""The steps, from 1 on, that are counted; the counts of the second are reported. A storage that is first seen
there was made out of sight: what is there before the first counted step is not known."""

CONSECUTIVE = 12
"""Steps that are counted where nothing is timed, from `COUNTED_STEP` on: enough to see what comes in every
10th step."""
FEWEST_TIMED = 10  # steps that must be left to be measured
FEWEST_OF_GROWTH = 3  # steps that must be left, between which objects are counted


class StepsToCount(NamedTuple):
    """Which steps of a launch are counted, from `FIRST_COUNTED` on."""

    until: int  # the last of the consecutive ones
    late: int | None  # another one after those that are measured; None: there is none

    @classmethod
    def of_timed(cls, max_warmup: int, total: int) -> StepsToCount:
        """Return those of a launch that is timed: one before the measured steps, and the last of all.

        The last is only counted where enough others are left to be measured.
        """
        return cls(until=COUNTED_STEP, late=total if total - max_warmup > FEWEST_TIMED else None)

    @classmethod
    def consecutive(cls, number: int, total: int) -> StepsToCount:
        """Return `number` steps in a row, or as many as a launch of so many steps can count."""
        until = COUNTED_STEP - 1 + number
        return cls(until=max(COUNTED_STEP, min(until, total - FEWEST_OF_GROWTH)), late=None)


class Collective(Data):
    """The calls of one kind in one group, dtype and phase; those that move nothing apart from the others."""

    kind: str  # as `all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `all_to_all`, `send`, `barrier`
    ranks: int  # of the group
    apart: int  # between neighbouring ranks of the group: 1 for ranks 0 to 7, 8 for 0, 8, 16; 0 for one rank
    dtype: str  # as `bfloat16`; empty for a barrier
    phase: Phase
    count: int
    bytes: int  # of the whole message in all calls together: what is gathered, scattered, reduced, travels


def are_alike(method: str, other: str) -> bool:
    """Whether counts of two methods are compared: host reads aside, if one of them is the method before."""
    return method == other or {method, other} == {METHOD, READS_OF_THE_HOST}


def group_name(ranks: int, apart: int) -> str:
    """Return the ranks of a group as text: `8 ranks`, `8 ranks, 4 apart`."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f", {apart} apart" if apart > 1 else "")


class StepMemory(Data):
    """Live tensors of one rank in the step, in bytes: each storage once, no allocator's rounding."""

    peak: int
    peak_in: Phase | Literal["start"]
    # What lived at the peak, by part: `parameter`, `gradient`, `optimizer state`, `unsharded`,
    # `communication`, the phase in which other tensors were made, `kept` for those from before the step.
    at_peak: dict[str, int]
    saved_for_backward: int  # the most that forward left alive when a backward began
    growth: int  # bytes alive at the end of the step beyond those at its beginning
    allocations: int


class MemoryChange(NamedTuple):
    """A storage is born, dies, or takes another size."""

    storage: int  # its number, in the order in which storages were first seen
    bytes: int  # growth, or less than 0
    phase: Phase


class MemoryLog(NamedTuple):
    """The storages of one rank on its device over one step, or several in a row: a dry run replays it."""

    at_start: tuple[int, ...]  # bytes of those alive when the first step began, by number; 0 for others
    steps: tuple[tuple[MemoryChange, ...], ...]  # what happened in each step, in this order

    @property
    def changes(self) -> Iterator[MemoryChange]:
        """What happened in all steps."""
        return (change for step in self.steps for change in step)

    @property
    def peak(self) -> int:
        """The most bytes alive at once: each storage once, no allocator's rounding."""
        live = peak = sum(self.at_start)
        for change in self.changes:
            live += change.bytes
            peak = max(peak, live)
        return peak


class Compiled(Data):
    """What torch.compile made of the model, over the whole launch: dynamo's and inductor's counters."""

    graphs: int
    breaks: dict[str, int] = Field(default_factory=dict)  # graph breaks by reason
    recompilations: int
    kernels: int  # kernels that inductor generated
    extern_calls: int  # calls of kernels that inductor did not generate, such as matrix products


class PythonCalls(Data):
    """Calls of Python functions, by the thread that trains, or by all threads."""

    all_threads: bool = False  # since Python 3.12
    version: str  # of Python, as `3.11`: another one calls otherwise for the same code
    calls: dict[Phase | OutsideOfSteps, int]
    functions: dict[str, int]  # of those called most, as `torch.nn.modules.module.Module.__getattr__`

    @property
    def total(self) -> int:
        """The calls of all functions."""
        return sum(self.calls.values())


class WorkerBatch(Data):
    """What the first worker process of each data loader of a rank does for one batch."""

    python: PythonCalls  # in its third batch
    ops: dict[str, int]  # operators that do work, by name, in its second batch


class KeptObjects(Data):
    """The objects that Python's garbage collector tracks, and that each step of a launch leaves behind."""

    by_type: dict[str, int] = Field(default_factory=dict)  # per step; only the types that grow
    holders: tuple[str, ...] = ()  # what holds some of them, as `dispatch._cache`

    @property
    def total(self) -> int:
        """The objects of all types."""
        return sum(self.by_type.values())


class Counts(Data):
    """One optimizer step of one rank."""

    method: str = METHOD
    step: int = COUNTED_STEP
    collectives: tuple[Collective, ...] = ()
    flops: dict[Phase, int] = Field(default_factory=dict)  # matmul, convolution, attention: torch's formulas
    # Calls of operators that do work on the device. Of a compiled model: of what runs outside of it.
    kernels: dict[Phase, int] = Field(default_factory=dict)
    # Times the host reads a value of a tensor of the device, and waits for it. Where there is no GPU: of any
    # tensor but the step counters of torch's optimizers, which are the host's own on a GPU, too.
    host_reads: dict[Phase, int] = Field(default_factory=dict)
    device_copies: dict[str, int] = Field(default_factory=dict)  # between devices, as `cpu to cuda`
    blocking_copies: dict[str, int] | None = None  # without `non_blocking`: the host waits; None: unknown
    # Calls of functions that stall the host, by name as `torch.cuda.synchronize`; None where not counted.
    stalls: dict[str, int] | None = None
    memory: StepMemory | None = None  # none for a compiled model, whose buffers are not seen
    # The calls in `kernels` by operator, as `aten.mm`: neither views nor allocations.
    ops: dict[str, int] = Field(default_factory=dict)
    # Those of `ops` that are matrix products, convolutions or attention by their names, and have no formula:
    # their FLOPs are missing in `flops`.
    without_flops: dict[str, int] = Field(default_factory=dict)
    compiled: Compiled | None = None  # none where nothing was compiled
    python: PythonCalls | None = None  # none in a dry run, next to a user's profiler, and where not counted
    worker_batch: WorkerBatch | None = None  # none without worker processes, and where not counted
    modules: dict[str, int] | None = None  # modules that were imported, by package; None: not counted
    kept: KeptObjects | None = None  # counted over many steps; None: unknown
    # Of a span that is no step, the first time, by one rank:
    bytes_written: int | None = None  # into files, by savers that are known; None: nothing was seen
    collectives_begun: int | None = None  # by backends, in groups of several ranks; None: unknown
    allocator_peak: int | None = None  # of a GPU, in bytes, if higher than before the span; None: unknown
    also_counted: tuple[int, ...] = ()  # numbers of the other steps that were counted, ascending
    # What other spans of the run did, by name: steps, without those that did the same as this one; and events
    # and phases the first time.
    spans: dict[str, Counts] = Field(default_factory=dict)

    def in_step(self, step: int) -> Counts | None:
        """Return what a step did, without what is counted over the whole launch; None: not counted.

        Memory is known only of a step that follows another counted one, in which it is seen what lives.
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
        """Return these counts without what is of the whole launch, and without other spans."""
        return self.replace(compiled=None, worker_batch=None, kept=None, also_counted=(), spans={})

    def with_step(self, counts: Counts) -> Counts:
        """Return these counts with those of a later step."""
        counted = self.replace(also_counted=(*self.also_counted, counts.step))
        if counted.in_step(counts.step) == counts:
            return counted
        return counted.replace(spans={**self.spans, step_name(counts.step): counts})


def step_name(step: int) -> str:
    """Return the name of a step as a span of a run."""
    return f"step {step}"


class OfRanks(Data):
    """What is true of one rank, or of several."""

    ranks: tuple[int, ...] = Field(min_length=1)

    @property
    def name(self) -> str:
        """The ranks as text: `0-3,6`."""
        return spans(self.ranks)


class RankCounts(OfRanks):
    """The counts of one rank, or of several that are equal."""

    counts: Counts


def merged(counts: Mapping[int, Counts]) -> tuple[RankCounts, ...]:
    """The counts of every rank as few entries: ranks with equal counts share one, in the order of ranks."""
    groups = grouped(counts, lambda one, other: one == other)
    return tuple(RankCounts(ranks=tuple(group), counts=group[min(group)]) for group in groups)


def grouped(by_number: Mapping[int, T], is_alike: Callable[[T, T], bool]) -> list[dict[int, T]]:
    """What is known of each rank or step, in groups of those that are like the first, in ascending order."""
    groups: list[dict[int, T]] = []
    for number, its in sorted(by_number.items()):
        group = next((each for each in groups if is_alike(each[min(each)], its)), None)
        if group is None:
            group = {}
            groups.append(group)
        group[number] = its
    return groups


def of_rank(entries: Iterable[RankCounts], rank: int) -> Counts | None:
    """The counts of one rank; None if no entry holds it."""
    return next((entry.counts for entry in entries if rank in entry.ranks), None)


def spans(numbers: Sequence[int]) -> str:
    """Ascending whole numbers as text: `0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, dict.fromkeys(part))) for part in parts)


def numbers(spanned: str) -> list[int]:
    """The numbers of a text that `spans` made."""
    ends = [part.partition("-") for part in spanned.split(",")]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]
