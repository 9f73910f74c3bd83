"""The report of one rank, as a versioned file."""

from collections.abc import Iterable
from math import fsum
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
"""Number of elements of each dtype, by role. Roles are `parameters`, `stepped weights`, `gradients`,
`optimizer state` and `linear layers`. For `linear layers`, weights are counted by the dtype in which the
layers compute."""


def summed_dtypes(of_ranks: Iterable[Dtypes]) -> Dtypes:
    """Return the number of elements of each dtype, by role, summed over all ranks."""
    sums: Dtypes = {}
    for dtypes in of_ranks:
        for what, elements in dtypes.items():
            for dtype, count in elements.items():
                kind = sums.setdefault(what, {})
                kind[dtype] = kind.get(dtype, 0) + count
    return sums


REPLAYED = "a CUDA graph was replayed, and its operators are not seen"
"""The reason why a step that replayed a CUDA graph was not counted."""


class Failure(Data):
    """The reason why a launch yielded no measurement."""

    kind: FailureKind
    message: str  # one line that says what happened
    rank: int | None = None
    traceback: str | None = None  # traceback of that rank, or its last output
    at: float = 0  # time of the failure, in seconds since the epoch


class Memory(Data):
    """Memory of one rank, in bytes.

    On a GPU, the values come from the counters of the caching allocator. On a CPU, only `peak` is known.
    """

    peak: int  # peak allocated memory; on a CPU, peak RSS minus the RSS before the model was built
    reserved: int | None = None
    alloc_retries: int | None = None  # how often the allocator freed its cache. This stalls a step
    method: str  # the method by which the memory was read


class Flops(Data):
    """Model FLOPs per token, from a versioned formula (see `perfsuite.worker.counting.flops`)."""

    formula: str
    per_token: float
    parameters: int
    matmul_parameters: int
    trained_parameters: int | None = None  # number of trained parameters; None: all
    per_token_float8: float | None = None  # the part of `per_token` in float8; None: unknown


LOADER = "loader"  # key of the `DataLoader` settings in `Observed.environment`
UNSET = "unset"  # how the value of a missing version or variable is shown


class Observed(Data):
    """The settings and environment that a worker observed, as opposed to what was requested."""

    settings: dict[str, str]  # world size, wrapper, ...; `verdict.comparability` chooses what is compared
    environment: dict[str, str]  # versions and variables: verdicts list the differences
    # Digest of the code that ran. In a `Run`, this is a digest of the code of all ranks. None: unknown.
    code: str | None = None


class RankEvidence(Data):
    """Observations of one rank. `analysis.agreement` compares the observations of all ranks."""

    data_parallel: int = Field(ge=1)  # number of ranks that get different data
    # Number of elements of the model's first integer input in step 2. None: there is no such input.
    tokens: int | None = None
    padding: int = 0  # number of these tokens that the attention mask removes
    forwards: int = 0  # number of forward calls with these tokens
    # Size of the first dimension of the model's first input, summed over these calls; None: unknown.
    samples: int | None = None
    # Number of collectives between the first and the last optimizer step, without those in groups of a single
    # rank. None: unknown.
    collectives: int | None = None
    # Two L1 norms of each trained parameter, by name: before the first optimizer step, and after the last.
    # A parameter is included only if every data-parallel rank has a full copy of it.
    replicated: dict[str, tuple[float, float]] = Field(default_factory=dict)
    replicated_bytes: int = 0  # size of these parameters, in bytes


START_UP = "start-up"
"""Span from the start of a process to the end of its first step. Its parts have names such as `start-up:
imports`."""
COLD = "cold "
"""Prefix of a start-up's name if a graph was compiled during the start-up. Later launches find this graph in
a cache."""


START_UPS = frozenset({START_UP, f"{COLD}{START_UP}"})
"""Names of whole start-ups, as opposed to their parts."""


def is_of_start_up(name: str) -> bool:
    """Return whether a span is a start-up or a part of a start-up."""
    return name.removeprefix(COLD).startswith(START_UP)


class SpanTimes(Data):
    """The times that the training thread of one rank spent in a span that is not a step."""

    # Duration of each occurrence, in order. If an occurrence handed work over to other threads, each later
    # wait for this work is an entry of its own.
    seconds: tuple[float, ...]
    # Number of completed steps at the beginning of each entry of `seconds`. If this is empty, the span was
    # before the first step.
    steps: tuple[int, ...] = ()
    waits: int = 0  # number of waits in `seconds`

    @property
    def occurrences(self) -> int:
        """The number of occurrences."""
        return max(len(self.seconds) - self.waits, 1)

    @property
    def mean_s(self) -> float:
        """The mean seconds of an occurrence, including later waits for its work."""
        return fsum(self.seconds) / self.occurrences


RESIDENT_MEMORY = "resident memory"
LIVE_MEMORY = "live tensors"
PINNED_MEMORY = "pinned memory"
"""Kinds of memory whose level is read between steps. `LIVE_MEMORY` and `PINNED_MEMORY` are read only on a
GPU."""
SIMULATED_CLOCK = "simulated"  # value of `clock` for ranks that trained nothing


class RankReport(Sealed):
    """`rank-N.json`: everything that one process measured."""

    schema_version: Literal[1] = 1
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    host: str
    clock: str  # the clock that timed the steps: `cuda events`, `perf_counter`, `simulated`
    tokens_per_step: int = 0  # of all ranks together
    step_s: tuple[float, ...] = ()  # seconds of every optimizer step, including warm-up
    # Number of timed steps. If counting made the last step longer, the last step is not timed. None: all
    # steps are timed.
    timed_steps: int | None = None
    probe_s: tuple[float, ...] = ()  # on a CPU: seconds of the probe after each step, not part of the step
    cpu_s: tuple[float, ...] = ()  # CPU seconds of all threads in each step; empty with a simulated clock
    # Host seconds that the training thread waited for batches in each step; empty if no loader was detected.
    data_wait_s: tuple[float, ...] = ()
    # Whether the training might have waited for batches that a loader gave to other threads.
    data_wait_is_unknown: bool = False
    gc_s: tuple[float, ...] = ()  # seconds of Python's garbage collector in each step; empty: unknown
    # Bytes in use of each kind of memory, by number of completed steps.
    levels: dict[str, dict[int, int]] = Field(default_factory=dict)
    # Parts of the start-up, events such as a checkpoint, and phases that a script names. Their counts are in
    # `counts.spans`, under the same name.
    spans: dict[str, SpanTimes] = Field(default_factory=dict)
    compiled_anew: bool = False  # whether torch.compile compiled a graph that was not in its cache
    # Choices of torch.compile's autotuning by kernel name, from this launch or an earlier launch with the
    # same cache. Only in the report of rank 0.
    autotuned: dict[str, str] = Field(default_factory=dict)
    wall_s: float = 0  # host seconds of all steps, without the time between them; should equal sum(step_s)
    # Host seconds from the start of the first step to the end of the last step, including the time between
    # steps.
    elapsed_s: float = 0
    # The same time, measured with the machine's uptime (`/proc/uptime`), whose resolution is 0.01 s. None:
    # unknown.
    uptime_s: float | None = None
    loss: tuple[float, ...] = ()
    # Whether `loss` is empty because the factor that scales the losses is unknown. A note gives the reason.
    loss_is_unknown: bool = False
    own_tokens_per_s: float | None = None  # of all ranks, reported by the framework; None: not reported
    memory: Memory | None = None
    flops: Flops | None = None
    observed: Observed | None = None
    evidence: RankEvidence | None = None
    # Rates of the device, measured before the workload was built, or after a script ended
    # (`perfsuite.worker.probes.node_probe`).
    device_probe: dict[str, float] = Field(default_factory=dict)
    # Metrics from other packages: the value that the recorder of each metric returned on this rank, by name.
    extra: dict[str, float] = Field(default_factory=dict)
    counts: Counts | None = None  # the counts of a step; None: not counted
    # Sum of squares of the rank's gradients just before optimizer step `COUNTED_STEP`; None: unknown.
    gradient_squares: float | None = None
    unclipped_squares: float | None = None  # sum of squares before clipping in that step; None: unknown
    dtypes: Dtypes = Field(default_factory=dict)  # dtypes of the trained model's elements on this rank
    # Number of Python threads, except the training thread, that started in a counted step, or used CPU time
    # in it. If several steps were counted, this is the highest number in any of them.
    other_threads: int = 0
    hidden: tuple[str, ...] = ()  # reasons why `counts` might lack work of the counted step; empty: none
    fit: Fit | None = None  # predicted memory of the rank; None except in a dry run
    notes: tuple[str, ...] = ()  # remarks for readers of the figures
    failure: Failure | None = None
    steps: int | None = None  # completed steps when a script's rank failed; None: no failure, or unknown


class WorkerBatchFile(Document):
    """Counts of one batch in a data loader's first worker, written for the rank that the worker serves."""

    schema_version: Literal[1] = 1
    batch: WorkerBatch
    notes: tuple[str, ...] = ()  # what is unknown about the worker, and why
    # Whether the worker is still counting its objects. If so, it will write the file again.
    is_counting: bool = False
