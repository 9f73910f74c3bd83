"""One launch as one document: measurements of its ranks, and the state of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal, Self

from pydantic import Field, model_validator

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data, Document, Sealed
from perfsuite.results.counts import RankCounts
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.rank_report import Dtypes, Failure, Flops, Memory, Observed, SpanTimes


class DeviceHealth(Data):
    """One GPU during the steps. A field is None if NVML does not know it."""

    index: int = Field(ge=0)  # its number among the GPUs that are visible to the job
    node: str | None = None  # its node; None on a single machine
    pci_bus_id: str | None = None  # as `nvidia-smi` prints it; this, `uuid` and `serial` identify a card
    uuid: str | None = None
    serial: str | None = None
    power_limit_w: float | None = None  # the limit that the driver enforces
    power_limit_default_w: float | None = None
    sm_clock_limit_mhz: float | None = None  # the highest; `sm_clock_set_mhz`: set by `nvidia-smi -ac`
    sm_clock_set_mhz: float | None = None
    ecc: bool | None = None
    persistence: bool | None = None
    memory_faults: tuple[str, ...] = ()  # from NVML: errors that ECC did not correct, a row not remapped
    memory_pending: tuple[str, ...] = ()  # rows or pages of its memory that are to be replaced
    nvlinks: int | None = None  # links that are up; `nvlinks_down`: links that should be. None without any
    nvlinks_down: int | None = None
    held_before_bytes: int | None = None  # memory that others held just before the launch
    held_before_by: tuple[int, ...] = ()  # the processes that NVML listed at that time
    sm_clock_mhz: float | None = None  # median; `sm_clock_mhz_min` the lowest
    sm_clock_mhz_min: float | None = None
    utilisation: float | None = None  # mean percent of time with any kernel, from NVML, however small
    power_w: float | None = None  # the mean of the samples
    energy_j: float | None = None  # joules over `Health.seconds`
    temperature_c: float | None = None  # the highest sample
    throttled: dict[str, float] | None = None  # share of samples, 0 to 1, by NVML's name of the reason
    foreign_memory_bytes: int | None = None  # most that others held; also None if indistinguishable
    # Most memory beyond `held_before_bytes`: that of the allocator, NCCL, the CUDA context and libraries.
    job_memory_bytes: int | None = None

    @property
    def name(self) -> str:
        """The name for messages: `GPU 3 (00000000:5B:00.0)`, with `of n2` if there are several nodes."""
        bus_id = f" ({self.pci_bus_id})" if self.pci_bus_id else ""
        return f"GPU {self.index}{bus_id}" + (f" of {self.node}" if self.node else "")


class Health(Data):
    """The machine during the steps, including warm-up (`perfsuite.node.health_sampler`)."""

    node: str | None = None  # of several nodes, the one with most use by others (`foreign_cpu` and `steal`)
    samples: int = Field(ge=0)  # 0: only readings before the launch are known, and on a CPU nothing
    seconds: float  # from the first sample to the last
    steps: int  # steps that ended in these seconds
    devices: tuple[DeviceHealth, ...] = ()  # the job's GPUs; empty on a CPU
    sm_clocks_mhz: tuple[tuple[int, float], ...] = ()  # of the slowest GPU: steps ended so far, and the clock
    cores: int | None = None  # cores of `node` that the job may use
    job_cpu: float | None = None  # share, 0 to 1, of the time of these cores; likewise the next two
    foreign_cpu: float | None = None  # share of processes that are not the job's
    steal: float | None = None  # share of the hypervisor
    notes: tuple[str, ...] = ()  # readings that failed, and why


class Node(Data):
    """One node of a launch on several."""

    name: str
    health: Health | None = None


SECONDS_OF = "seconds of "  # prefix of a span's name in the name of its figure
SlopeUnit = Literal["bytes", "s"]


def timed_span(figure: str) -> str | None:
    """Return the span whose seconds a figure of this name holds; None for other figures."""
    return figure.removeprefix(SECONDS_OF) if figure.startswith(SECONDS_OF) else None


class Slope(Data):
    """The trend of a value over the measured steps. Shown, never judged."""

    name: str  # `step time`, `resident memory`, ...
    unit: SlopeUnit
    per_step: float
    interval: tuple[float, float]  # 95% interval of `per_step`, as if the values were independent
    rank: int | None = None  # of several ranks, the one that grows most; None: all ranks together


class Figures(Data):
    """The figures of one run. None where this machine or framework does not give it.

    Tokens are what the case counts: samples, where it has no tokens (`Case.unit`).
    """

    tokens_per_s: float | None = None  #: Global tokens per step over the median step time.
    tokens_per_s_per_device: float | None = None
    tokens_per_s_mean: float | None = None  #: By the mean step time: stalls show here.
    own_tokens_per_s: float | None = None
    """As reported by the framework, which may count warm-up: never judged, shown next to the clock's."""
    step_s_p50: float | None = None
    step_s_p95: float | None = None
    step_s_mean: float | None = None
    step_jitter: float | None = None
    """p95 over p50 of the step times: 1 is perfectly even. Shown, never judged."""
    probe_s_p50: float | None = None
    cpu_s_per_step: float | None = None
    """CPU seconds of all ranks together in a step, median: what is computed, without any waiting."""
    data_wait_s: float | None = None
    """Host seconds of a step, mean, that the training waits for batches, of the rank that waits longest. None
    if no loader was seen in the measured steps."""
    data_wait: float | None = None  #: The same as a share of all measured steps, 0 to 1.
    gc_s_per_step: float | None = None
    """Seconds of Python's garbage collector in a step, mean, on the rank where it takes most. Shown."""
    peak_memory_bytes: float | None = None  #: Memory of the rank that used most, as all memory figures.
    reserved_memory_bytes: float | None = None
    alloc_retries: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    roofline_share: float | None = None
    """Share of the most tokens/s that the accelerator can do (`perfsuite.results.dry_facts`), 0 to 1."""
    gpu_utilisation: float | None = None  #: Percent, mean over devices.
    sm_clock_mhz: float | None = None  #: Median over the window, of the GPU with the slowest clock.
    device_memory_bytes: float | None = None
    """Memory in use on the GPU where the job used most, by NVML: also what the allocator does not count.
    Never judged."""
    energy_per_token_j: float | None = None
    """Joules of all GPUs together, per token of the steps that were made while energy was measured."""
    gradient_norm: float | None = None
    """Of the gradients just before step 4: the root of the sum of their squares over all ranks, or over one
    where all have the same. Judged with the loss."""
    unclipped_norm: float | None = None
    """The same norm before the gradients were clipped, without fp16's loss scale. Judged with the loss."""
    tokens_given: float | None = None
    """Tokens that the model was given in the second step, of all ranks together. None where they vary."""
    loss_first: float | None = None
    loss_last: float | None = None
    spans_s: dict[str, float] = Field(default_factory=dict)
    """Seconds of each span that is no step, by its name: the mean of the times that it happened."""
    extra: dict[str, float] = Field(default_factory=dict)
    """Metrics of other packages by name (`perfsuite.results.metric`)."""

    def get(self, name: str) -> float | None:
        """Return a figure by its name, or a metric of another package; None if it was not measured."""
        span = timed_span(name)
        if span is not None:
            return self.spans_s.get(span)
        return getattr(self, name) if name in _FIELDS else self.extra.get(name)

    def by_name(self) -> dict[str, float]:
        """Return what was measured, by name: perfsuite's own figures, then metrics of other packages."""
        of_spans = (f"{SECONDS_OF}{name}" for name in sorted(self.spans_s))
        values = {name: self.get(name) for name in (*_FIELDS, *of_spans, *sorted(self.extra))}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Figures:
        """Make figures from values by name: the inverse of `by_name`."""
        own = {name: value for name, value in values.items() if name in _FIELDS}
        others = {name: value for name, value in values.items() if name not in _FIELDS}
        spans = {name: timed_span(name) for name in others}
        spans_s = {span: others[name] for name, span in spans.items() if span is not None}
        extra = {name: value for name, value in others.items() if spans[name] is None}
        return cls(**own, spans_s=spans_s, extra=extra)

    @classmethod
    def median_of(cls, launches: Iterable[Figures]) -> Figures:
        """Return the median of each figure over the launches that have it."""
        values: dict[str, list[float]] = {}
        for figures in launches:
            for name, value in figures.by_name().items():
                values.setdefault(name, []).append(value)
        return cls.of({name: median(each) for name, each in values.items()})


# perfsuite's own figures that are a single number
_FIELDS = tuple(name for name in Figures.model_fields if name not in ("spans_s", "extra"))


class Run(Document):
    """`run.json`: one launch of one case, all its ranks in one."""

    schema_version: Literal[1] = 1
    case: Case
    machine: Machine
    started_at: str
    duration_s: float
    inject: str | None = None  #: The fault that was injected; such a run can never become a baseline.
    dry: bool = False
    """Whether nothing ran: `machine` and every rank were pretended, and there is nothing but counts."""
    figures: Figures = Figures()
    step_s: tuple[float, ...] = ()
    """Seconds of each step, warm-up included: from the moment when every rank had finished the step before
    until every rank had finished this one."""
    probe_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()  #: CPU seconds of all ranks together in each step.
    data_wait_s: tuple[float, ...] = ()
    """Host seconds of each step that the rank which waited longest waited for batches; empty if unknown."""
    spans: dict[str, SpanTimes] = Field(default_factory=dict)
    """Spans of the run that are no steps, by name: of each time the rank that was in it longest."""
    loss: tuple[float, ...] = ()  #: Mean over ranks.
    window: tuple[int, int] = (0, 0)  #: The measured steps are `step_s[window[0]:window[1]]`.
    slopes: tuple[Slope, ...] = ()  #: How step time and memory change over the window.
    memory: tuple[Memory, ...] = ()
    flops: Flops | None = None
    observed: Observed | None = None
    autotuned: dict[str, str] = Field(default_factory=dict)
    """What autotuning by torch.compile chose on rank 0, by the name of the kernel."""
    dtypes: Dtypes = Field(default_factory=dict)  #: Elements of all ranks of each dtype, of what trains.
    health: Health | None = None  #: The worst of the nodes. None where nothing was computed.
    nodes: tuple[Node, ...] = ()  #: The nodes in the order of their ranks; empty for a launch on one machine.
    device_probe: dict[str, float] = Field(default_factory=dict)
    """What the device could do before the workload was built: the slowest rank's, figure by figure."""
    rank_probes: tuple[dict[str, float], ...] = ()  #: The same of each rank, in their order.
    counts: tuple[RankCounts, ...] = ()
    """What a step did, counted (`perfsuite.results.counts`); empty where it was not counted."""
    hidden: tuple[str, ...] = ()  #: Why the step was not counted: a rank did work that counting did not see.
    dry_facts: DryFacts | None = None  #: What a dry run predicts; None for a launch.
    notes: tuple[str, ...] = ()  #: What a reader of the figures should know.
    failure: Failure | None = None

    @model_validator(mode="after")
    def _window_is_of_its_steps(self) -> Self:
        start, stop = self.window
        if not 0 <= start <= stop <= len(self.step_s):
            raise ValueError(f"window: {start} to {stop} is not within its {len(self.step_s)} steps")
        return self

    @property
    def measured_steps(self) -> tuple[float, ...]:
        """Step times in the window, in seconds."""
        return self.step_s[self.window[0] : self.window[1]]


class LaunchFile(Sealed):
    """`launch-NODE.json`: how the processes of one node ended, and the node's health, as its agent saw it."""

    schema_version: Literal[2] = 2
    node: int = Field(ge=0)  # the node's number, from 0
    host: str = ""  # the node's name
    is_over: bool = True  # False in a file that is written while ranks of the node still run
    failures: tuple[Failure, ...] = ()
    health: Health | None = None
    oom_kills: int = 0  # processes in the agent's control group that the kernel's OOM killer ended
