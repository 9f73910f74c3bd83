"""The report of one rank, as a versioned file."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from perfsuite.documents import Data, Document, Sealed
from perfsuite.results.counts import Counts, WorkerBatch
from perfsuite.results.dry_facts import Fit

FailureKind = Literal[
    "out_of_memory",
    "crash",
    "cancelled",
    "timeout",
    "loss",
    "mismatch",
    "missing_report",
    "ranks_disagree",
    "missing_metric",
    "unlike",
    "no_baseline",
    "not_dry",
    "error",
]


Dtypes = dict[str, dict[str, int]]
"""Number of elements of each dtype, by their role: `parameters`, `stepped weights`, `gradients`,
`optimizer state`; and weights of `linear layers`, by the dtype that they compute in."""


def summed_dtypes(of_ranks: Iterable[Dtypes]) -> Dtypes:
    """Return the number of elements over all ranks."""
    sums: Dtypes = {}
    for dtypes in of_ranks:
        for what, elements in dtypes.items():
            for dtype, count in elements.items():
                kind = sums.setdefault(what, {})
                kind[dtype] = kind.get(dtype, 0) + count
    return sums


class Failure(Data):
    """The reason why a launch gave no measurement."""

    kind: FailureKind
    message: str  # one line: what happened
    rank: int | None = None
    traceback: str | None = None  # the traceback of that rank, or its last output
    at: float = 0  # time of the failure, in seconds since the epoch


class Memory(Data):
    """Memory of one rank, in bytes: on a GPU, the caching allocator's counters; on a CPU, only `peak`."""

    peak: int  # peak allocated; on a CPU, peak resident set above its level before the model was built
    reserved: int | None = None
    alloc_retries: int | None = None  # times that the allocator freed its cache, which stalls a step
    method: str  # how the memory was read


class Flops(Data):
    """Model FLOPs of one token from a versioned formula (see `perfsuite.worker.counting.flops`)."""

    formula: str
    per_token: float
    parameters: int
    matmul_parameters: int
    trained_parameters: int | None = None  # parameters that are trained; None: all
    per_token_float8: float | None = None  # the part of `per_token` in float8; None: unknown


class Observed(Data):
    """What a worker found to be running, as opposed to what was requested."""

    settings: dict[str, str]  # world size, wrapper, ...; `verdict.comparability` has those that must be equal
    environment: dict[str, str]  # versions and variables: verdicts list the differences


class Evidence(Data):
    """Observations of one rank for questions that need all ranks (`perfsuite.analysis.agreement`)."""

    data_parallel: int = Field(ge=1)  # ranks that see different data
    tokens: int | None = None  # elements of the model's first integer input in step 2; None: no integers
    padding: int = 0  # number of these tokens that the attention mask removes
    forwards: int = 0  # number of calls of the model with these tokens
    samples: int | None = None  # first dimension of its first input, summed over these calls; None: unknown
    collectives: int | None = None  # in groups of several ranks, first to last optimizer step; None: unknown
    # L1 norms before and after all optimizer steps, by trained parameter that data-parallel ranks hold whole.
    replicated: dict[str, tuple[float, float]] = Field(default_factory=dict)
    replicated_bytes: int = 0  # size of these parameters


START_UP = "start-up"
"""The span from the start of a process to the end of its first step. Parts are named `start-up: imports`."""
COLD = "cold "
"""Prefix of the names of these spans if a graph was compiled that later launches find in a cache."""


START_UPS = frozenset({START_UP, f"{COLD}{START_UP}"})
"""Names of whole start-ups, without those of their parts."""


def is_of_start_up(name: str) -> bool:
    """Return whether a span is a start-up, or a part of one."""
    return name.removeprefix(COLD).startswith(START_UP)


class SpanTimes(Data):
    """The times that the training thread of one rank was in a span of the run that is not a step."""

    seconds: tuple[float, ...]  # duration of each time, in order
    steps: tuple[int, ...] = ()  # number of ended steps when each began; empty before the first step


RESIDENT_MEMORY = "resident memory"
LIVE_MEMORY = "live tensors"
PINNED_MEMORY = "pinned memory"
"""Kinds of memory whose level is read between steps; the last two only on a GPU."""
SIMULATED_CLOCK = "simulated"  # the `clock` of ranks that trained nothing


class RankReport(Sealed):
    """`rank-N.json`: everything that one process measured."""

    schema_version: Literal[1] = 1
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    host: str
    clock: str  # the clock that timed the steps: `cuda events`, `perf_counter`, `simulated`
    tokens_per_step: int = 0  # of all ranks together
    step_s: tuple[float, ...] = ()  # seconds of every optimizer step, including warm-up
    timed_steps: int | None = (
        None  # steps that were not lengthened by counting the last one; None: all of them
    )
    probe_s: tuple[float, ...] = ()  # on a CPU: seconds of the fixed work after each step, timed separately
    cpu_s: tuple[float, ...] = ()  # CPU seconds of all threads in each step; empty with a simulated clock
    # Host seconds in each step that the training thread waited for batches; empty if no loader was seen.
    data_wait_s: tuple[float, ...] = ()
    gc_s: tuple[float, ...] = ()  # seconds of Python's garbage collector in each step; empty: unknown
    # Bytes of each kind of memory in use, by the number of ended steps.
    levels: dict[str, dict[int, int]] = Field(default_factory=dict)
    # The parts of start-up, events such as a checkpoint, and phases that a script names. Their counts are in
    # `counts.spans`, under the same name.
    spans: dict[str, SpanTimes] = Field(default_factory=dict)
    compiled_anew: bool = False  # whether torch.compile compiled a graph that its cache did not have
    # Choices of torch.compile's autotuning by name of the kernel, in this launch or in an earlier one with
    # the same cache. Only of rank 0.
    autotuned: dict[str, str] = Field(default_factory=dict)
    wall_s: float = 0  # host time of all steps, without the time between them: should be their sum
    elapsed_s: float = 0  # host time from the start of the first step to the end, everything included
    uptime_s: float | None = None  # the same from the kernel's uptime, in hundredths; None: unknown
    loss: tuple[float, ...] = ()
    own_tokens_per_s: float | None = None  # of all ranks, as the framework reports it; None: not reported
    memory: Memory | None = None
    flops: Flops | None = None
    observed: Observed | None = None
    evidence: Evidence | None = None
    # Rates of the device, before the workload was built or after a script was measured
    # (`perfsuite.worker.probes.node_probe`).
    device_probe: dict[str, float] = Field(default_factory=dict)
    # Values that the recorders of other packages' metrics returned in this rank, by the metric's name.
    extra: dict[str, float] = Field(default_factory=dict)
    counts: Counts | None = None  # the counts of a step; None: not counted
    # Sum of squares of the rank's gradients, just before its clock's step `COUNTED_STEP`; None: unknown.
    gradient_squares: float | None = None
    unclipped_squares: float | None = None  # the same before clipping in that step; None: unknown
    dtypes: Dtypes = Field(default_factory=dict)  # of the trained model, for this rank's elements
    hidden: tuple[str, ...] = ()  # why the counted step did more than `counts` shows; empty: no sign of it
    fit: Fit | None = None  # its predicted memory; None except in a dry run
    notes: tuple[str, ...] = ()  # remarks for readers of the figures
    failure: Failure | None = None
    steps: int | None = None  # ended steps when a script's rank failed; None: it did not fail, or unknown


class WorkerBatchFile(Document):
    """Counts of a batch in the first worker of a data loader, written for the rank that it serves."""

    schema_version: Literal[1] = 1
    batch: WorkerBatch
