"""What is measured, as versioned files: rank reports, runs, measurements.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perfsuite.case import Case
from perfsuite.data import Data, Document
from perfsuite.hardware import Machine

FailureKind = Literal[
    "out_of_memory",
    "crash",
    "timeout",
    "loss",
    "mismatch",
    "missing_report",
    "ranks_disagree",
    "missing_metric",
    "unlike",
    "no_baseline",
]


class Failure(Data):
    """Why a launch gave no measurement."""

    kind: FailureKind
    message: str
    """One line: what happened."""
    rank: int | None = None
    traceback: str | None = None
    """Of the first failing rank, or what it last wrote."""
    at: float = 0
    """Seconds since the epoch."""


class Memory(Data):
    """Of one rank, in bytes. On a GPU the caching allocator's counters; on CPU only `peak`."""

    peak: int
    """Peak allocated. On CPU: peak resident set above its level before the model was built."""
    reserved: int | None = None
    alloc_retries: int | None = None
    """Times that the allocator had to free its cache to serve a request: each one stalls a step."""
    method: str
    """How it was read."""


class Flops(Data):
    """Model FLOPs of one token, by a versioned formula (see `perfsuite.flops`)."""

    formula: str
    per_token: float
    parameters: int
    matmul_parameters: int


class Observed(Data):
    """What a worker found to be running, as opposed to what was asked for."""

    settings: dict[str, str]
    """World size, wrapper, sharding, dtypes, attention ...: runs that differ here cannot be compared."""
    environment: dict[str, str]
    """Versions and the like: differences are listed beside a verdict."""


class RankReport(Document):
    """`rank-N.json`: everything that one process measured."""

    schema_version: Literal[1] = 1
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    host: str
    clock: str
    """Which clock stamped the steps: `cuda events`, `perf_counter`, `simulated`."""
    tokens_per_step: int = 0
    """Of all ranks together."""
    step_s: tuple[float, ...] = ()
    """Every optimizer step from the first, warm-up included."""
    probe_s: tuple[float, ...] = ()
    """On CPU: the fixed piece of work done after each step, timed apart from it."""
    wall_s: float = 0
    """Host clock over all steps, less what was done between them; agrees with the sum of `step_s`."""
    loss: tuple[float, ...] = ()
    memory: Memory | None = None
    flops: Flops | None = None
    observed: Observed | None = None
    failure: Failure | None = None


class Figures(Data):
    """The figures of one run. None where this machine or framework does not give it."""

    tokens_per_s: float | None = None
    """Global tokens per step over the median step time."""
    tokens_per_s_per_device: float | None = None
    tokens_per_s_mean: float | None = None
    """By the mean step time: stalls show here."""
    step_s_p50: float | None = None
    step_s_p95: float | None = None
    step_s_mean: float | None = None
    step_jitter: float | None = None
    """p95 over p50 of the step times: 1 is perfectly even."""
    probe_s_p50: float | None = None
    peak_memory_bytes: float | None = None
    """Of the rank that used most, as all memory figures."""
    reserved_memory_bytes: float | None = None
    alloc_retries: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None


class Run(Document):
    """`run.json`: one launch of one case, all its ranks in one."""

    schema_version: Literal[1] = 1
    case: Case
    machine: Machine
    started_at: str
    duration_s: float
    inject: str | None = None
    """The fault that was injected; such a run can never become a baseline."""
    figures: Figures = Figures()
    step_s: tuple[float, ...] = ()
    """Of the slowest rank at each step, warm-up included."""
    probe_s: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    """Mean over ranks."""
    window: tuple[int, int] = (0, 0)
    """The measured steps are `step_s[window[0]:window[1]]`."""
    slowest_rank: int | None = None
    """The rank that was slowest most often in the window."""
    memory: tuple[Memory, ...] = ()
    flops: Flops | None = None
    observed: Observed | None = None
    notes: tuple[str, ...] = ()
    """What a reader of the figures should know."""
    failure: Failure | None = None

    @property
    def measured_steps(self) -> tuple[float, ...]:
        """Step times in the window, in seconds."""
        return self.step_s[self.window[0] : self.window[1]]


class LaunchFile(Document):
    """`launch.json`: how the processes ended, as the launcher saw it."""

    schema_version: Literal[1] = 1
    failures: tuple[Failure, ...] = ()
