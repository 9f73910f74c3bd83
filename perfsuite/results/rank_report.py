"""What one rank reports, as a versioned file."""

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
"""How many elements have each dtype, by what they are: `parameters`, `stepped weights`, `gradients`,
`optimizer state`; and weights of `linear layers` by the dtype that they compute in."""


def summed_dtypes(of_ranks: Iterable[Dtypes]) -> Dtypes:
    """Return the elements of all ranks."""
    sums: Dtypes = {}
    for dtypes in of_ranks:
        for what, elements in dtypes.items():
            for dtype, count in elements.items():
                kind = sums.setdefault(what, {})
                kind[dtype] = kind.get(dtype, 0) + count
    return sums


class Failure(Data):
    """Why a launch gave no measurement."""

    kind: FailureKind
    message: str  # one line: what happened
    rank: int | None = None
    traceback: str | None = None  # the traceback of that rank, or what it wrote last
    at: float = 0  # when it happened, in seconds since the epoch


class Memory(Data):
    """Memory of one rank, in bytes. On a GPU by the caching allocator's counters; on CPU only `peak`."""

    peak: int  # peak allocated. On CPU: peak resident set above its level before the model was built
    reserved: int | None = None
    alloc_retries: int | None = None  # how often the allocator freed its cache for a request: a step stalls
    method: str  # how it was read


class Flops(Data):
    """Model FLOPs of one token, by a versioned formula (see `perfsuite.worker.counting.flops`)."""

    formula: str
    per_token: float
    parameters: int
    matmul_parameters: int
    trained_parameters: int | None = None  # parameters that are trained; None: all of them
    per_token_float8: float | None = None  # of `per_token`, in float8; None where it is not known


class Observed(Data):
    """What a worker found to be running, as opposed to what was asked for."""

    settings: dict[str, str]  # as world size, wrapper; `verdict.comparability` says which must be equal
    environment: dict[str, str]  # versions and variables: differences are listed with a verdict


class Evidence(Data):
    """What one rank observed for questions that need all ranks (`perfsuite.analysis.agreement`)."""

    data_parallel: int = Field(ge=1)  # ranks that see different data
    tokens: int | None = None  # elements of the model's first integer input, second step; None: no integers
    padding: int = 0  # how many of these tokens the attention mask takes out
    forwards: int = 0  # how many calls of the model these tokens came with
    samples: int | None = None  # first dimension of its first input then, summed over calls; None: unknown
    collectives: int | None = None  # in groups of several ranks, first optimizer step to last; None: unknown
    # L1 norms before and after all optimizer steps, by trained parameter that data-parallel ranks hold whole.
    replicated: dict[str, tuple[float, float]] = Field(default_factory=dict)
    replicated_bytes: int = 0  # bytes of these parameters


START_UP = "start-up"
"""The span from the start of a process to the end of its first step. Its parts are as `start-up: imports`."""
COLD = "cold "
"""Begins the names of these spans where a graph was compiled that later launches find in a cache."""


START_UPS = frozenset({START_UP, f"{COLD}{START_UP}"})
"""The names of whole start-ups, without those of their parts."""


def is_of_start_up(name: str) -> bool:
    """Whether a span is a start-up, or a part of one."""
    return name.removeprefix(COLD).startswith(START_UP)


class SpanTimes(Data):
    """When the training thread of one rank was in a span of the run that is no step, and for how long."""

    seconds: tuple[float, ...]  # of each time, in order
    steps: tuple[int, ...] = ()  # how many steps had ended when each began; empty before the first step


RESIDENT_MEMORY = "resident memory"
LIVE_MEMORY = "live tensors"
PINNED_MEMORY = "pinned memory"
"""Kinds of memory whose level is read between steps; the last two on a GPU."""
SIMULATED_CLOCK = "simulated"  # the `clock` of ranks that trained nothing


class RankReport(Sealed):
    """`rank-N.json`: everything that one process measured."""

    schema_version: Literal[1] = 1
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    host: str
    clock: str  # which one stamped the steps: `cuda events`, `perf_counter`, `simulated`
    tokens_per_step: int = 0  # of all ranks together
    step_s: tuple[float, ...] = ()  # every optimizer step from the first, warm-up included
    timed_steps: int | None = (
        None  # steps that were not lengthened by counting the last one; None: all of them
    )
    probe_s: tuple[float, ...] = ()  # on CPU: seconds of the fixed work after each step, timed apart from it
    cpu_s: tuple[float, ...] = ()  # CPU seconds in each step, of all threads; empty on a simulated clock
    # Host seconds in each step that the training's thread waited for batches; empty if no loader was seen.
    data_wait_s: tuple[float, ...] = ()
    gc_s: tuple[float, ...] = ()  # seconds of Python's garbage collector in each step; empty: unknown
    # How much of each kind of memory was held, in bytes, by the number of steps that had ended.
    levels: dict[str, dict[int, int]] = Field(default_factory=dict)
    # The parts of start-up, events such as a checkpoint, and phases that a script names. What each of them
    # did is in `counts.spans`, under the same name.
    spans: dict[str, SpanTimes] = Field(default_factory=dict)
    compiled_anew: bool = False  # whether torch.compile compiled a graph that its cache did not have
    # What autotuning by torch.compile chose, by the name of the kernel: in this launch, or in an earlier one
    # of the same cache. Of rank 0 alone.
    autotuned: dict[str, str] = Field(default_factory=dict)
    wall_s: float = 0  # of all steps by the host clock, without what was between: should be their sum
    elapsed_s: float = 0  # from the first step's start to the end by the host clock, all included
    uptime_s: float | None = None  # the same by the kernel's uptime, in hundredths; None if unknown
    loss: tuple[float, ...] = ()
    own_tokens_per_s: float | None = None  # of all ranks, as the framework reports it; None if it does not
    memory: Memory | None = None
    flops: Flops | None = None
    observed: Observed | None = None
    evidence: Evidence | None = None
    # Of the device, before the workload was built or after a script was measured
    # (`perfsuite.worker.probes.node_probe`).
    device_probe: dict[str, float] = Field(default_factory=dict)
    # What the recorders of other packages' metrics returned in this rank, by the metric's name.
    extra: dict[str, float] = Field(default_factory=dict)
    counts: Counts | None = None  # what a step did, counted; None where it was not
    # Sum of squares of the rank's gradients, just before its clock's step `COUNTED_STEP`; None: not known.
    gradient_squares: float | None = None
    unclipped_squares: float | None = None  # the same before they were clipped in that step; None: not known
    dtypes: Dtypes = Field(default_factory=dict)  # of what trains, by this rank's elements
    hidden: tuple[str, ...] = ()  # why the counted step did more than `counts` tells; empty: nothing shows it
    fit: Fit | None = None  # the memory that it is predicted to need; None but in a dry run
    notes: tuple[str, ...] = ()  # what a reader of the figures should know
    failure: Failure | None = None
    steps: int | None = None  # steps that had ended when a script's rank failed; None: it has not, or unknown


class WorkerBatchFile(Document):
    """What the first worker of a data loader did for a batch, for the rank that it loads for."""

    schema_version: Literal[1] = 1
    batch: WorkerBatch
