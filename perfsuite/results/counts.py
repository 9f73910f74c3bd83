"""The counts of one optimizer step: collectives, FLOPs, kernels, host reads, memory. Pure data.

Counts have no noise: the same code does the same work in every launch. `perfsuite.worker.counting.counter`
counts the work, and `perfsuite.verdict.exact` judges the counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

from pydantic import Field

from perfsuite.documents import Data

T = TypeVar("T")
Phase = Literal["forward", "recompute", "backward", "optimizer"]
"""`forward` includes everything between backward and the optimizer step, such as the gradient norm.
`recompute` is the forward that activation checkpointing repeats during backward."""
OutsideOfSteps = Literal["outside of steps"]
OUTSIDE_OF_STEPS: OutsideOfSteps = "outside of steps"
PHASES: tuple[Phase, ...] = get_args(Phase)

Event = Literal["save checkpoint", "load checkpoint", "evaluate"]
"""A kind of work between steps that perfsuite recognises in every training."""
EVENTS: frozenset[Event] = frozenset(get_args(Event))

METHOD = "dispatch-2"  # the counting method. Counts from other methods are compared only if they `are_alike`
READS_OF_THE_HOST = "dispatch-1"
"""The previous counting method. Its host reads also include reads of tensors in host memory, although the
host does not have to wait for such reads. All other counts are the same with both methods, so everything
except host reads is compared."""
FIRST_COUNTED = 3
COUNTED_STEP = 4
"""The first two steps that are counted. Steps are numbered from 1. The counts of `COUNTED_STEP` are reported.
The step before it shows which storages exist. If `COUNTED_STEP` uses a storage that was not seen before, the
storage must have been created by work that is not counted."""

CONSECUTIVE = 12
"""Number of steps to count if nothing is timed, starting at `COUNTED_STEP`: enough to include work that is
done every 10th step."""
FEWEST_TIMED = 10  # minimum number of steps that must remain for timing
FEWEST_OF_GROWTH = 4
"""Minimum number of steps after the counted steps. With fewer steps, kept objects are not counted. In the
first of these steps, the counter frees its own data. The other steps are divided into two halves: the first
half needs one step, and the second half needs two, so that holders can be found (see `Growth`)."""


class StepsToCount(NamedTuple):
    """The steps of a launch that are counted, from `FIRST_COUNTED` on."""

    until: int  # the last consecutive step
    late: int | None  # an additional step after the measured steps; None: no such step

    @classmethod
    def of_timed(cls, max_warmup: int, total: int) -> StepsToCount:
        """Return the steps to count in a timed launch: some before the measured steps, and the last step.

        The last step is counted only if enough other steps remain to be measured.
        """
        return cls(until=COUNTED_STEP, late=total if total - max_warmup > FEWEST_TIMED else None)

    @classmethod
    def consecutive(cls, number: int, total: int, left: int = FEWEST_OF_GROWTH) -> StepsToCount:
        """Return `number` consecutive steps, or fewer, so that at least `left` of `total` steps remain."""
        until = COUNTED_STEP - 1 + number
        return cls(until=max(COUNTED_STEP, min(until, total - left)), late=None)


class Collective(Data):
    """The calls of one kind of collective in one group, with one dtype, and in one phase.

    Calls that send nothing have an entry of their own.
    """

    kind: str  # `all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `all_to_all`, `send`, `barrier`
    ranks: int  # number of ranks in the group
    apart: int  # stride of the ranks: 1 for ranks 0 to 7, 8 for ranks 0, 8 and 16; 0 for a single rank
    dtype: str  # such as `bfloat16`; empty for a barrier
    phase: Phase
    count: int
    bytes: int  # size of the whole message (gathered, scattered, reduced or sent), summed over all calls


def are_alike(first_method: str, second_method: str) -> bool:
    """Return whether counts from two methods can be compared, apart from host reads."""
    return first_method == second_method or {first_method, second_method} == {METHOD, READS_OF_THE_HOST}


def group_name(ranks: int, apart: int) -> str:
    """Describe the ranks of a group, such as `8 ranks` or `8 ranks, 4 apart`."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f", {apart} apart" if apart > 1 else "")


def collective_name(kind: str, ranks: int, apart: int) -> str:
    """Describe the collectives of a kind in groups of one shape, such as `all_gather of 8 ranks`."""
    return f"{kind} of {group_name(ranks, apart)}"


class InCycles(Data):
    """Tensors of a step that only Python's garbage collector frees, because they are in reference cycles."""

    bytes: int  # of their storages
    holders: tuple[str, ...] = ()  # what holds some of them, such as an attribute; empty: unknown


class StepMemory(Data):
    """Live tensors of one rank in the step, in bytes. Each storage counts once, without rounding."""

    peak: int
    peak_in: Phase | Literal["start"]
    # Live bytes at the peak by part: `parameter`, `gradient`, `optimizer state`, `unsharded`,
    # `communication`; other tensors by the phase that created them, or as `kept` if they are older than the
    # step.
    at_peak: dict[str, int]
    # Bytes that were allocated in forward and are live when backward begins. If backward begins several times
    # in the step, this is the highest number.
    saved_for_backward: int
    growth: int  # live bytes at the end of the step minus live bytes at its beginning
    allocations: int
    # Tensors of the previous step that are in reference cycles and become garbage in this step. Known only
    # for the reported step. None: unknown.
    in_cycles: InCycles | None = None


class Compiled(Data):
    """Results of torch.compile over the whole launch, from the counters of dynamo and inductor."""

    graphs: int
    breaks: dict[str, int] = Field(default_factory=dict)  # number of graph breaks by reason
    recompilations: int
    # Number of kernels that inductor generated; None: unknown, because a dry run generates no kernels.
    kernels: int | None
    # Number of calls of kernels that inductor did not generate, such as matmuls; None: unknown.
    extern_calls: int | None


class PythonCalls(Data):
    """Calls of Python functions in the training thread, or in all threads."""

    all_threads: bool = False  # True since Python 3.12
    version: str  # Python version, such as `3.11`. The same code makes different calls in other versions
    calls: dict[Phase | OutsideOfSteps, int]
    functions: dict[str, int]  # calls by name, such as `torch.nn.Module.__call__`; only the most frequent

    @property
    def total(self) -> int:
        """The number of calls of all functions."""
        return sum(self.calls.values())


class KeptObjects(Data):
    """Objects, tracked by Python's garbage collector, that each step of a launch leaves behind."""

    by_type: dict[str, int] = Field(default_factory=dict)  # objects per step, for types that grow
    holders: tuple[str, ...] = ()  # containers that hold some of these objects, such as `dispatch._cache`
    # Number of kept tensors with an autograd graph, per step. The nodes of the graph are not counted
    # themselves, because the garbage collector does not track them. None: unknown.
    graphs: int | None = None
    graph_holders: tuple[str, ...] = ()  # containers that hold some of these tensors
    # The lowest number of tensors with an autograd graph that were alive after a step. It also shows a leak
    # into a buffer that is emptied regularly, for example whenever the training logs.
    # None: unknown, or each step keeps such tensors (`graphs`).
    graphs_left: int | None = None
    graphs_after: tuple[int, ...] = ()  # the steps after which these tensors were counted

    @property
    def total(self) -> int:
        """Number of kept objects of all types, per step."""
        return sum(self.by_type.values())


class WorkerBatch(Data):
    """Counts of one batch of a data loader, or the sum of one batch from each data loader of a rank.

    Only the first worker process of a data loader is counted.
    """

    python: PythonCalls  # counted in the third batch
    ops: dict[str, int]  # calls of operators that do work, by name, counted in the second batch
    # Objects that each batch leaves behind; None: not counted, for example because the launch was timed.
    kept: KeptObjects | None = None


class Counts(Data):
    """The counts of one optimizer step of one rank."""

    method: str = METHOD
    step: int = COUNTED_STEP
    collectives: tuple[Collective, ...] = ()
    # The input of the forward passes: number of embedding lookups by dtype and shape of the tokens, such as
    # `int64[4, 1024]`. In a model without embeddings, the input of the first convolution. None: unknown.
    inputs: dict[str, int] | None = None
    # FLOPs of matmuls, convolutions and attention, from torch's formulas.
    flops: dict[Phase, int] = Field(default_factory=dict)
    # Calls of operators that do work on the device. For a compiled model: only calls outside compiled code.
    # None: unknown, because the model was compiled in a dry run.
    kernels: dict[Phase, int] | None = Field(default_factory=dict)
    # Reads of device values for which the host waits. Without a GPU, reads of all tensors are counted, except
    # for reads of the step counters of torch's optimizers. These counters are on the host even with a GPU.
    host_reads: dict[Phase, int] = Field(default_factory=dict)
    device_copies: dict[str, int] = Field(default_factory=dict)  # number of copies, such as `cpu to cuda`
    # The copies in `device_copies` for which the host waits, because they lack `non_blocking`; None: unknown.
    blocking_copies: dict[str, int] | None = None
    # Calls of functions that stall the host, such as `torch.cuda.synchronize`, by name; None: not counted.
    stalls: dict[str, int] | None = None
    # None in a launch of a compiled model, because the buffers of compiled code cannot be observed. In a dry
    # run of a compiled model, the peak is that of the operators before they are fused.
    memory: StepMemory | None = None
    # The calls in `kernels` by operator, such as `aten.mm`, without views and allocations. If `kernels` is
    # unknown, these are the operators before fusion.
    ops: dict[str, int] = Field(default_factory=dict)
    # Operators in `ops` that are named like matmul, convolution or attention but have no formula. Their FLOPs
    # are missing from `flops`.
    without_flops: dict[str, int] = Field(default_factory=dict)
    compiled: Compiled | None = None  # None if nothing was compiled
    python: PythonCalls | None = None  # None: not counted, for example in a dry run or under a profiler
    worker_batch: WorkerBatch | None = None  # None: no worker processes, or not counted
    modules: dict[str, int] | None = None  # number of imported modules by package; None: not counted
    kept: KeptObjects | None = None  # counted over many steps; None: unknown
    # Number of occurrences of an event or phase in the launch, on one rank; None: unknown.
    occurrences: int | None = None
    # The next three fields are counted only for spans that are not steps, on one rank. They cover the first
    # step in which the span occurs, with all occurrences of the span in that step.
    # Bytes written to files by the saving functions that perfsuite knows; None: no such write was detected.
    bytes_written: int | None = None
    # Collectives in groups of several ranks, counted in the backends; None: unknown.
    collectives_begun: int | None = None
    # Peak of the GPU's caching allocator in bytes. None: the span did not raise the peak, or the peak is
    # unknown.
    allocator_peak: int | None = None
    also_counted: tuple[int, ...] = ()  # numbers of the other counted steps, ascending
    # Counts of other spans, by name of the span. These spans are the events, the phases, the parts of the
    # start-up, and each counted step whose counts differ from those of `step`.
    spans: dict[str, Counts] = Field(default_factory=dict)

    def in_step(self, step: int) -> Counts | None:
        """Return the counts of a step; None if it was not counted.

        For any step except `self.step`, launch-wide counts are left out. Memory is known only if the previous
        step was also counted, because that step shows which storages are alive.
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
        """Return these counts without launch-wide counts and without other spans."""
        return self.replace(compiled=None, worker_batch=None, kept=None, also_counted=(), spans={})

    def with_step(self, counts: Counts) -> Counts:
        """Return these counts with the counts of a later step added."""
        counted = self.replace(also_counted=(*self.also_counted, counts.step))
        if counted.in_step(counts.step) == counts:
            return counted
        return counted.replace(spans={**self.spans, step_name(counts.step): counts})


MOST_INPUTS = 4  # maximum number of inputs in a sentence


def other_inputs(before: Counts, now: Counts) -> str:
    """Describe the different inputs of two steps: `2 x int64[4, 64] instead of 2 x int64[4, 128]`.

    Returns an empty text if the inputs are equal or unknown.
    """
    if before.inputs is None or now.inputs is None or before.inputs == now.inputs:
        return ""
    new = dict(now.inputs.items() - before.inputs.items())
    old = dict(before.inputs.items() - now.inputs.items())
    return f"{_joined(new)} instead of {_joined(old)}"


def _joined(inputs: Mapping[str, int]) -> str:
    """Name at most `MOST_INPUTS` inputs."""
    named = inputs_in_words(dict(sorted(inputs.items())[:MOST_INPUTS])) or "none"
    more = len(inputs) - MOST_INPUTS
    return f"{named} and {more} more" if more > 0 else named


def inputs_in_words(inputs: Mapping[str, int]) -> str:
    """Describe inputs in words: `2 x int64[4, 128] and 1 x int64[1, 128]`; empty without inputs."""
    return " and ".join(f"{number} x {shape}" for shape, number in inputs.items())


def has_smaller_input(before: Counts, now: Counts) -> bool:
    """Return whether the largest input of `now` is smaller than that of `before`. False if one is unknown."""
    if before.inputs is None or now.inputs is None:
        return False
    return _largest(now.inputs) < _largest(before.inputs)


def _largest(inputs: Mapping[str, int]) -> int:
    """Return the number of elements of the largest input, times the number of its lookups."""
    shapes = {name: map(int, re.findall(r"\d+", name.partition("[")[2])) for name in inputs}
    return max((inputs[name] * math.prod(sizes) for name, sizes in shapes.items()), default=0)


def step_name(step: int) -> str:
    """Return the name of a step's span."""
    return f"step {step}"


class OfRanks(Data):
    """A fact about one or more ranks."""

    ranks: tuple[int, ...] = Field(min_length=1)

    @property
    def name(self) -> str:
        """The ranks as text, such as `0-3,6`."""
        return spans(self.ranks)


class RankCounts(OfRanks):
    """The counts of one rank, or of several ranks with equal counts."""

    counts: Counts


def merged(counts: Mapping[int, Counts]) -> tuple[RankCounts, ...]:
    """Merge the counts of all ranks. Ranks with equal counts share an entry; entries are in rank order."""
    groups = grouped(counts, lambda one, other: one == other)
    # pragma: no mutate min: the counts of a group are equal
    return tuple(RankCounts(ranks=tuple(group), counts=group[min(group)]) for group in groups)


def grouped(by_number: Mapping[int, T], is_alike: Callable[[T, T], bool]) -> list[dict[int, T]]:
    """Group the values of ranks or steps that are alike, in ascending order of rank or step.

    All values of a group are like the first value of the group.
    """
    groups: list[dict[int, T]] = []
    for number, its in sorted(by_number.items()):
        group = next((group for group in groups if is_alike(group[min(group)], its)), None)
        if group is None:
            group = {}
            groups.append(group)
        group[number] = its
    return groups


def of_rank(entries: Iterable[RankCounts], rank: int) -> Counts | None:
    """Return the counts of one rank; None if no entry has that rank."""
    return next((entry.counts for entry in entries if rank in entry.ranks), None)


def spans(numbers: Sequence[int]) -> str:
    """Format ascending integers as ranges, such as `0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, dict.fromkeys(part))) for part in parts)


def named_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, which are in ascending order: `rank 0` or `ranks 0-3,6`."""
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def numbers(spanned: str) -> list[int]:
    """Parse the integers in a text that `spans` formatted."""
    ends = [part.partition("-") for part in spanned.split(",")]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]
