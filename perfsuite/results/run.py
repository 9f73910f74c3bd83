"""One launch as one document: the measurements of its ranks and the state of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal, Self

from pydantic import Field, model_validator

from perfsuite.case.case import Case
from perfsuite.case.hardware import AND, Machine
from perfsuite.documents import Data, Document, Sealed
from perfsuite.results.counts import RankCounts
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.rank_report import Dtypes, Failure, Flops, Memory, Observed, SpanTimes


class DeviceHealth(Data):
    """The state of one GPU during the steps. A field is None if NVML does not report it."""

    index: int = Field(ge=0)  # number of the GPU among those visible to the job
    node: str | None = None  # name of its node; None on a single machine
    pci_bus_id: str | None = None  # as `nvidia-smi` prints it
    power_limit_w: float | None = None  # the limit that NVIDIA's driver enforces
    power_limit_default_w: float | None = None
    sm_clock_limit_mhz: float | None = None  # maximum SM clock
    sm_clock_set_mhz: float | None = None  # SM clock set with `nvidia-smi -ac`
    ecc: bool | None = None
    persistence: bool | None = None
    # Memory faults that NVML reports: errors that ECC did not correct, rows that could not be remapped.
    memory_faults: tuple[str, ...] = ()
    memory_pending: tuple[str, ...] = ()  # memory rows or pages that are due to be replaced
    near_cores: str = ""  # the cores on its socket or NUMA node, such as `0-47,96-143`; empty if unknown
    nvlinks: int | None = None  # number of NVLinks that are up; None: the GPU has no NVLinks
    nvlinks_down: int | None = None  # number of NVLinks that should be up but are not; None: no NVLinks
    pcie_lanes: int | None = None  # width of the PCIe link
    pcie_lanes_most: int | None = None  # maximum width that the card and its slot allow
    held_before_bytes: int | None = None  # memory that other processes held just before the launch
    held_before_by: tuple[int, ...] = ()  # ids of the processes that NVML listed at that time
    sm_clock_mhz: float | None = None  # median SM clock
    sm_clock_mhz_min: float | None = None  # lowest SM clock
    utilisation: float | None = None  # mean percentage of time in which any kernel ran, from NVML
    power_w: float | None = None  # mean of the samples
    energy_j: float | None = None  # energy in joules over `Health.seconds`
    temperature_c: float | None = None  # highest sample
    throttled: dict[str, float] | None = None  # share of samples, 0 to 1, with each reason for a low clock
    # Maximum memory that other processes held; also None if it cannot be distinguished from the job's memory.
    foreign_memory_bytes: int | None = None
    # Maximum memory in use beyond `held_before_bytes`: the allocator, NCCL, the CUDA context and libraries.
    job_memory_bytes: int | None = None

    @property
    def name(self) -> str:
        """The name of the GPU in messages: `GPU 3 (00000000:5B:00.0)`, with ` of n2` on several nodes."""
        bus_id = f" ({self.pci_bus_id})" if self.pci_bus_id else ""
        return f"GPU {self.index}{bus_id}" + (f" of {self.node}" if self.node else "")


class Health(Data):
    """The state of the machine during the steps, including warm-up (`perfsuite.node.health_sampler`)."""

    # Name of the node. In a launch on several nodes: the node on which `foreign_cpu` plus `steal` is highest.
    node: str | None = None
    # Number of samples. If it is 0, only the GPUs have readings, and these are from before the launch. On
    # a CPU, there are then no readings.
    samples: int = Field(ge=0)
    seconds: float  # time from the first sample to the last
    steps: int  # number of steps that ended in this time
    devices: tuple[DeviceHealth, ...] = ()  # the job's GPUs; empty on a CPU
    sm_clocks_mhz: tuple[tuple[int, float], ...] = ()  # (completed steps, SM clock) of the slowest GPU
    cores: int | None = None  # number of cores of `node` that the job may use
    cores_of_machine: int | None = None  # number of all cores of `node`
    # The next three are shares, 0 to 1, of the time of the cores that the job may use.
    job_cpu: float | None = None  # used by the job
    foreign_cpu: float | None = None  # used by processes that do not belong to the job
    steal: float | None = None  # taken by the hypervisor
    notes: tuple[str, ...] = ()  # readings that failed, and why


class Node(Data):
    """One node of a launch on several nodes."""

    name: str
    health: Health | None = None


SECONDS_OF = "seconds of "  # a span's figure is named "seconds of " and the name of the span
SlopeUnit = Literal["bytes", "s"]


def timed_span(figure: str) -> str | None:
    """Return the name of the span whose time a figure gives; None if it is not the time of a span."""
    return figure.removeprefix(SECONDS_OF) if figure.startswith(SECONDS_OF) else None


class Slope(Data):
    """The trend of a value over the measured steps. It is shown, but never judged."""

    name: str  # `step time`, `resident memory`, ...
    unit: SlopeUnit
    per_step: float
    interval: tuple[float, float]  # 95% interval of `per_step`, as if the values were independent
    rank: int | None = None  # the rank on which the value grows most; None: all ranks together


class Figures(Data):
    """The figures of one run. A field is None if this machine or framework does not provide it.

    Fields about tokens refer to samples if the case counts samples (`Case.unit`).
    """

    tokens_per_s: float | None = None  #: Global tokens per step, divided by the median step time.
    tokens_per_s_per_device: float | None = None
    tokens_per_s_mean: float | None = None
    """Global tokens per step, divided by the mean step time. Unlike `tokens_per_s`, it shows stalls."""
    own_tokens_per_s: float | None = None
    """Speed that the framework reports, possibly including warm-up. Shown for comparison, never judged."""
    step_s_p50: float | None = None
    step_s_p95: float | None = None
    step_s_mean: float | None = None
    step_jitter: float | None = None
    """95th percentile of the step times divided by their median (1: perfectly even). Shown, never judged."""
    probe_s_p50: float | None = None
    cpu_s_per_step: float | None = None
    """CPU seconds of all ranks together per step, median. Unlike step time, it excludes waiting."""
    data_wait_s: float | None = None
    """Mean host seconds per step that the training waits for batches, on the rank that waits longest. None if
    no loader was detected in the measured steps."""
    data_wait: float | None = None  #: The same wait as a share of all measured steps, 0 to 1.
    gc_s_per_step: float | None = None
    """Mean seconds of Python's garbage collector per step, on the rank where it takes longest. Never
    judged."""
    peak_memory_bytes: float | None = None  #: The highest value of all ranks, like all memory figures.
    reserved_memory_bytes: float | None = None
    alloc_retries: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    roofline_share: float | None = None
    """Share, 0 to 1, of the maximum tokens/s that the accelerator allows (`perfsuite.results.dry_facts`)."""
    gpu_utilisation: float | None = None  #: Percentage of time, mean over all GPUs.
    sm_clock_mhz: float | None = None  #: Median over the window, of the GPU with the slowest clock.
    device_memory_bytes: float | None = None
    """Memory of the job on the GPU on which the job used most memory, as NVML reports it. This includes
    memory outside torch's allocator. Never judged."""
    energy_per_token_j: float | None = None
    """Joules of all GPUs together per token, over the steps during which energy was measured."""
    gradient_norm: float | None = None
    """Norm of the gradients just before the optimizer runs in step 4: the root of the sum of their squares
    over all ranks, or over one rank if all ranks have the same gradients. Judged together with the loss."""
    unclipped_norm: float | None = None
    """The same norm before clipping, without fp16's loss scale. Judged together with the loss."""
    tokens_given: float | None = None
    """Number of tokens that the model received in the second step, on all ranks. None if it varies."""
    loss_first: float | None = None
    loss_last: float | None = None
    spans_s: dict[str, float] = Field(default_factory=dict)
    """Mean seconds of the occurrences of each span that is not a step, by name of the span."""
    extra: dict[str, float] = Field(default_factory=dict)
    """Metrics of other packages, by name (`perfsuite.results.metric`)."""

    def get(self, name: str) -> float | None:
        """Return a figure, or a metric of another package, by name; None if it was not measured."""
        span = timed_span(name)
        if span is not None:
            return self.spans_s.get(span)
        return getattr(self, name) if name in _FIELDS else self.extra.get(name)

    def by_name(self) -> dict[str, float]:
        """Return the measured values by name: perfsuite's own figures, then metrics of other packages."""
        of_spans = (f"{SECONDS_OF}{name}" for name in sorted(self.spans_s))
        values = {name: self.get(name) for name in (*_FIELDS, *of_spans, *sorted(self.extra))}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Figures:
        """Make figures from values by name. This is the inverse of `by_name`."""
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
        return cls.of({name: median(of_launches) for name, of_launches in values.items()})


# names of perfsuite's own figures that are a single number
_FIELDS = tuple(name for name in Figures.model_fields if name not in ("spans_s", "extra"))


class Run(Document):
    """`run.json`: one launch of one case, with all its ranks merged."""

    schema_version: Literal[1] = 1
    case: Case
    machine: Machine
    started_at: str
    duration_s: float
    inject: str | None = None  #: The injected fault. A run with a fault can never become a baseline.
    dry: bool = False
    """Whether this was a dry run: machine and ranks were simulated, and only counts are known."""
    figures: Figures = Figures()
    step_s: tuple[float, ...] = ()
    """Seconds of each step, including warm-up. A step lasts from the moment when every rank has finished the
    previous step until every rank has finished this one."""
    probe_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()  #: CPU seconds of all ranks together in each step.
    data_wait_s: tuple[float, ...] = ()
    """Host seconds of waiting for batches in each step, on the rank that waited longest. Empty if unknown."""
    spans: dict[str, SpanTimes] = Field(default_factory=dict)
    """Spans that are not steps, by name. Each occurrence has the time of the rank that took longest."""
    loss: tuple[float, ...] = ()  #: Loss in each step, mean over ranks.
    window: tuple[int, int] = (0, 0)  #: The measured steps are `step_s[window[0]:window[1]]`.
    slopes: tuple[Slope, ...] = ()  #: Trends of step time and memory over the window.
    memory: tuple[Memory, ...] = ()
    flops: Flops | None = None
    observed: Observed | None = None
    autotuned: dict[str, str] = Field(default_factory=dict)
    """Choices of torch.compile's autotuning on rank 0, by name of the kernel."""
    dtypes: Dtypes = Field(default_factory=dict)  #: Elements of the trained model by dtype, over all ranks.
    health: Health | None = None  #: The worst values of all nodes. None if nothing was computed.
    nodes: tuple[Node, ...] = ()  #: The nodes in rank order; empty for a launch on one machine.
    device_probe: dict[str, float] = Field(default_factory=dict)
    """Rates of the device before the workload was built, by name. Each is the rate of the slowest rank."""
    rank_probes: tuple[dict[str, float], ...] = ()  #: The same rates for each rank, in rank order.
    counts: tuple[RankCounts, ...] = ()
    """The counts of a step (`perfsuite.results.counts`); empty if it was not counted."""
    other_threads: int = 0
    """Number of Python threads, except the training thread, that started in a counted step, or used CPU time
    in it. The number is the highest over all ranks and counted steps. The kernels of the threads are not
    counted. Before Python 3.12, their calls are not counted either."""
    hidden: tuple[str, ...] = ()  #: Why a step was not counted: ranks did work that counting cannot observe.
    dry_facts: DryFacts | None = None  #: The predictions of a dry run; None for a launch.
    notes: tuple[str, ...] = ()  #: Remarks for readers of the figures.
    failure: Failure | None = None

    @model_validator(mode="after")
    def _window_is_of_its_steps(self) -> Self:
        start, stop = self.window
        if not 0 <= start <= stop <= len(self.step_s):
            raise ValueError(f"window: {start} to {stop} is not within its {len(self.step_s)} steps")
        return self

    @property
    def measured_steps(self) -> tuple[float, ...]:
        """Times of the steps in the window, in seconds."""
        return self.step_s[self.window[0] : self.window[1]]

    def slowest_shares(self) -> dict[str, float]:
        """Return, for each rate by name, the slowest rank's rate as a share of the fastest rank's rate.

        Empty if the ranks run on a CPU, because they share its cores. Also empty if the GPUs are of different
        models.
        """
        if self.machine.device == "cpu" or AND in self.machine.device_name:
            return {}
        rates: dict[str, list[float]] = {}
        for probe in self.rank_probes:
            for name, rate in probe.items():
                rates.setdefault(name, []).append(rate)
        return {name: min(values) / max(values) for name, values in sorted(rates.items()) if max(values) > 0}


class LaunchFile(Sealed):
    """`launch-NODE.json`, written by a node's agent: how the processes ended, and the node's health."""

    schema_version: Literal[2] = 2
    node: int = Field(ge=0)  # number of the node, from 0
    host: str = ""  # name of the node
    is_over: bool = True  # False in a file that is written while ranks of the node are still running
    failures: tuple[Failure, ...] = ()
    health: Health | None = None
    oom_kills: int = 0  # number of processes in the agent's cgroup that the kernel's OOM killer ended
