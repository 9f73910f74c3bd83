"""The metrics: label, unit, direction, format and tolerance of each figure of a launch.

perfsuite's own metrics are fields of `Figures`. Metrics of other packages (`perfsuite.metrics`) are in the
field `extra` of `Figures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

from perfsuite import extensions
from perfsuite.case.case import Unit
from perfsuite.errors import ExtensionError
from perfsuite.results.rank_report import COLD, START_UP
from perfsuite.results.run import SECONDS_OF, Figures, Run, timed_span

Device = Literal["cpu", "cuda"]
Judged = Literal["sequential", "exact", "shown"]


def in_unit(text: str, unit: Unit) -> str:
    """Replace "token" in a text with the unit that a case counts (tokens or samples)."""
    return text.replace("token", unit.removesuffix("s"))


class MetricRecorder(Protocol):
    """Measures one metric on one rank. A recorder may import torch. Its work is not part of a step's time."""

    def begin(self, model: Any, rank: int, world_size: int) -> None:
        """Start measuring. Called once, after the first step, with the trained model (None if unknown)."""

    def boundary(self, step: int) -> None:
        """Read the model between two steps. Called after each step from the second on, with its number."""

    def result(self) -> float | None:
        """Return the value for this rank; None if there is none. Called after the last step."""


@dataclass(frozen=True)
class Metric:
    """One figure of a launch. `unit`, `better` and `judged` have no defaults, so each metric must give them.

    Raises `ValueError` if a judged metric lacks a tolerance.
    """

    name: str
    """The field of `Figures` that holds the value or, for a metric of another package, its key in `extra`."""
    label: str  #: The name used in sentences.
    unit: str  #: Also determines the format of values (see `perfsuite.results.amounts.amount`).
    better: Literal["higher", "lower"]
    judged: Judged
    """`sequential`: judged with the statistics of several launches. `exact`: any change beyond the tolerance
    decides the outcome, even in a single launch. `shown`: never judged."""
    _: KW_ONLY
    judged_on_cpu: Judged | None = None
    """How the metric is judged on a machine without an accelerator. None: in the same way as `judged`."""
    tolerances: Mapping[Device, float] = field(default_factory=dict)
    """Largest relative growth of the cost (see `cost`) with which a check still passes, by device. CPUs are
    noisier, so they need a larger tolerance."""
    heading: str = ""  #: The name used in tables; empty: `label`.
    across_ranks: Literal["max", "min", "sum", "mean"] = "max"
    """How the values of the ranks are combined into the value of a launch."""
    recorder: Callable[[], MetricRecorder] | None = None  #: Makes the recorder for each rank.
    read: Callable[[Run], float | None] | None = None
    """Reads the value from a launch after it has ended, in the driver's process. Used instead of a
    recorder."""

    def __post_init__(self) -> None:
        ways = {str(way) for way in (self.judged, self.judged_on_cpu) if way in ("sequential", "exact")}
        if ways and set(self.tolerances) != {"cpu", "cuda"}:
            raise ValueError(
                f"metric {self.name!r} is judged ({', '.join(sorted(ways))}) and needs tolerances for 'cpu' "
                f"and 'cuda', got {dict(self.tolerances)}: give tolerances={{'cpu': 0.15, 'cuda': 0.03}}, "
                "or judged='shown' without judged_on_cpu"
            )

    def of(self, figures: Figures) -> float | None:
        """Return the value of the metric in the figures of a launch or a case; None if it is unknown."""
        return figures.get(self.name)

    def counting(self, unit: Unit) -> Metric:
        """Return the metric for a case that counts `unit`, with adapted label, heading and unit."""
        texts: dict[str, Any] = {
            name: in_unit(getattr(self, name), unit) for name in ("label", "unit", "heading")
        }
        return replace(self, **texts)

    def judging(self, device: str) -> Judged:
        """Return how the metric is judged on a device."""
        return self.judged_on_cpu or self.judged if device == "cpu" else self.judged

    def tolerance(self, device: str) -> float:
        """Return the largest relative growth of the cost with which a check on this device still passes."""
        return self.tolerances["cpu" if device == "cpu" else "cuda"]

    def cost(self, value: float) -> float:
        """Return the figure as a cost, for which lower is better. The sequential test judges costs."""
        return value if self.better == "lower" else 1 / value

    def worsening(self, now: float, before: float) -> float:
        """Return the relative growth of the cost: +0.05 is 5% slower, or 5% larger."""
        return self.cost(now) / self.cost(before) - 1

    def change(self, of_cost: float) -> float:
        """Convert a relative change of the cost into a relative change of the figure, as shown in reports.

        For example, 15% more seconds per token (+0.15) are 13% fewer tokens/s (-0.13). If one of the two
        changes is -1, the other is infinite.
        """
        if self.better == "lower":
            return of_cost
        return math.inf if of_cost == -1 else 1 / (1 + of_cost) - 1

    def cost_change(self, of_figure: float, before: float) -> float:
        """Convert a relative change of the figure, whose value was `before`, into a change of the cost."""
        return self.change(of_figure)

    def against(self, reference: Iterable[Figures]) -> Metric:
        """Return the metric, adapted to judge launches that are compared with `reference`."""
        return self

    @property
    def floor(self) -> float:
        """The largest relative change of the cost that is ignored, even if it is significant."""
        return 0.0

    def bound(self, of_cost: float) -> float:
        """Convert growth of the cost to the size of the figure's change: for tokens/s, 0.15 becomes 0.13."""
        return abs(self.change(of_cost))

    def interval(self, of_cost: tuple[float, float]) -> tuple[float, float]:
        """Convert an interval for the change of the cost to one for the change of the figure: (low, high)."""
        low, high = sorted(map(self.change, of_cost))
        return low, high


PART_SHARE = 0.02  # a change of a part is not judged if it is less than this share of the step
# A change of a part is not judged if it is less than this many seconds: waking up a thread takes tenths of a
# millisecond.
PART_S = 1e-3


@dataclass(frozen=True)
class PartOfStep(Metric):
    """A metric for the seconds of a part of the step. The part can be close to 0 or unknown.

    Relative growth is meaningless for a part near 0. The test therefore judges the part plus `rest_s`.
    This is the step time without the part in the reference, which is the baseline or arm A. A change of the
    part is given as a share of the step time. Changes up to `floor` are ignored.
    """

    _: KW_ONLY
    step_s: float = 0.0  # mean step time of the reference (median over its launches); 0: no reference
    rest_s: float = 0.0  # the same step time without the part

    def against(self, reference: Iterable[Figures]) -> PartOfStep:
        """Return the metric with the step time of `reference`; unchanged if no launch has the part."""
        both = ((figures.step_s_mean, self.of(figures)) for figures in reference)
        parts = [(step_s, step_s - part) for step_s, part in both if step_s is not None and part is not None]
        if not parts:
            return self
        step_s, rest_s = map(median, zip(*parts, strict=True))
        return replace(self, step_s=step_s, rest_s=rest_s)

    @property
    def floor(self) -> float:
        """The largest change of the cost that is ignored: `PART_S / step_s`, but at least `PART_SHARE`."""
        return max(PART_SHARE, PART_S / self.step_s) if self.step_s else PART_SHARE

    def cost(self, value: float) -> float:
        """Return the seconds that the reference's step would take with a part of this length."""
        return self.rest_s + value


SPAN_S = 0.25  # a change of a span is not judged if it is less than this many seconds
SPAN_TOLERANCE = 0.25


@dataclass(frozen=True)
class SpanSeconds(Metric):
    """Seconds of a span that is not a step, such as a part of the start-up or a checkpoint.

    A span can take almost no time, so its relative growth can be huge. The test therefore judges the span's
    seconds plus `SPAN_S / SPAN_TOLERANCE`. So a span is allowed to grow by `SPAN_TOLERANCE` of its seconds
    plus `SPAN_S`. Changes are reported as shares of the reference's span.
    """

    _: KW_ONLY
    reference_s: float | None = None  # median over the reference's launches; None: no reference

    def against(self, reference: Iterable[Figures]) -> SpanSeconds:
        """Return the metric with the span's seconds in `reference`; unchanged if no launch has the span."""
        seconds = [value for value in map(self.of, reference) if value is not None]
        return replace(self, reference_s=median(seconds)) if seconds else self

    def cost(self, value: float) -> float:
        """Return the seconds plus the constant that damps relative growth."""
        return value + SPAN_S / SPAN_TOLERANCE

    @property
    def floor(self) -> float:
        """The relative change of the cost if the span changes by `SPAN_S`."""
        return 0.0 if self.reference_s is None else SPAN_S / self.cost(self.reference_s)

    def change(self, of_cost: float) -> float:
        """Return the change as a share of the reference's span."""
        if not self.reference_s:
            return of_cost
        return max(-1.0, of_cost * self.cost(self.reference_s) / self.reference_s)

    def cost_change(self, of_figure: float, before: float) -> float:
        """Convert a relative change of the span, which took `before` seconds, into a change of the cost."""
        return of_figure * before / self.cost(before)


def span_seconds(span: str) -> SpanSeconds:
    """Return the metric for the seconds of a span."""
    name = f"{SECONDS_OF}{span}"
    tolerances: Mapping[Device, float] = {"cpu": SPAN_TOLERANCE, "cuda": SPAN_TOLERANCE}
    return SpanSeconds(name, span, "s", "lower", "sequential", tolerances=tolerances)


def span_metrics(launches: Iterable[Figures]) -> tuple[SpanSeconds, ...]:
    """Return the metric of each span that occurs in at least one of these launches.

    The start-up as a whole has no metric, because its parts are judged. A cold start-up has no metric either,
    because only one launch of a session has a cold start-up.
    """
    names = {name for figures in launches for name in figures.spans_s if name != START_UP}
    return tuple(span_seconds(name) for name in sorted(names) if not name.startswith(COLD))


TOKENS_PER_S = Metric(
    "tokens_per_s", "tokens/s", "tokens/s", "higher", "sequential", tolerances={"cpu": 0.15, "cuda": 0.03}
)
TOKENS_PER_S_MEAN = replace(
    TOKENS_PER_S,
    name="tokens_per_s_mean",
    label="tokens/s with stalls",
    tolerances={"cpu": 0.20, "cuda": 0.05},
)
"""Based on the mean step time, because rare long steps raise the mean but not the median. No other metric
judges stalls. The mean is noisier than the median, so this tolerance is wider. p95/p50 is not used, because
it varies by more than the change that must be detected."""
PEAK_MEMORY = Metric(
    "peak_memory_bytes",
    "peak memory",
    "bytes",
    "lower",
    "exact",
    heading="memory",
    judged_on_cpu="sequential",
    tolerances={"cpu": 0.20, "cuda": 0.01},
)
DATA_WAIT = PartOfStep(
    "data_wait_s", "data wait", "s", "lower", "sequential", tolerances={"cpu": 0.05, "cuda": 0.05}
)
"""Based on the mean, because the median hides the wait: with n workers, most steps find their batch ready,
and only every n-th step waits."""
GATED = (TOKENS_PER_S, TOKENS_PER_S_MEAN, PEAK_MEMORY)  # metrics that every verdict judges
CPU_S_PER_STEP = Metric(
    "cpu_s_per_step",
    "CPU time per step",
    "s",
    "lower",
    "shown",
    heading="CPU time",
    judged_on_cpu="sequential",
    tolerances={"cpu": 0.15, "cuda": 0.15},
)
"""The CPU time is summed over all ranks. Other users of the cores hardly affect it. The CPU time does
not include waiting, so it complements the speed but never replaces it. In training on GPUs, the CPU time is
the work of the host, and is only shown.

In a comparison with a baseline, the CPU time is not corrected with the probe, because the probe measures
wall-clock seconds. A comparison of two arms estimates from its own launches how the CPU time depends on
the probe's seconds, and can therefore correct it."""
TOKENS_PER_S_PER_DEVICE = Metric(
    "tokens_per_s_per_device", "tokens/s per device", "tokens/s", "higher", "shown", heading="per device"
)
STEP_S_P50 = Metric("step_s_p50", "median step", "s", "lower", "shown", heading="p50")
STEP_S_P95 = Metric("step_s_p95", "95th percentile of a step", "s", "lower", "shown", heading="p95")
STEP_JITTER = Metric("step_jitter", "p95/p50 of a step", "ratio", "lower", "shown", heading="p95/p50")
GC_S_PER_STEP = Metric(
    "gc_s_per_step", "garbage collector per step", "s", "lower", "shown", heading="collector"
)
RESERVED_MEMORY = Metric(
    "reserved_memory_bytes", "reserved memory", "bytes", "lower", "shown", heading="reserved"
)
TFLOPS_PER_DEVICE = Metric("tflops_per_device", "TFLOP/s/GPU", "TFLOP/s", "higher", "shown")
MFU = Metric("mfu", "MFU", "share", "higher", "shown")
ROOFLINE_SHARE = Metric(
    "roofline_share", "share of the roofline", "share", "higher", "shown", heading="of roofline"
)
GPU_UTILISATION = Metric("gpu_utilisation", "GPU utilisation", "%", "higher", "shown")
ENERGY_PER_TOKEN = Metric("energy_per_token_j", "energy", "J per token", "lower", "shown")

_BUILT_IN = {metric.name: metric for metric in [*vars().values()] if isinstance(metric, Metric)}
_TAKEN = frozenset(Figures.model_fields) | {
    *("case_id", "framework", "outcome", "launches", "hardware_class", "reason", "shared", "blind"),
    *("excused", "waivers", "shadow"),
}
"""Names that metrics of other packages cannot have: fields of `Figures`, and properties of cases in
reports."""


class Recorded(NamedTuple):
    """The installed metrics of other packages."""

    metrics: tuple[Metric, ...]  # sorted by name. Every launch records all of them
    problems: tuple[str, ...]  # for each metric that cannot be used, a message that says why


def recorded() -> Recorded:
    """Return the installed metrics of other packages.

    A metric cannot be used if its name is not unique, or if it cannot be imported or is not a `Metric`.
    """
    metrics = []
    problems = []
    for name in extensions.names(extensions.METRICS):
        try:
            metric = _of_another_package(name)
        except ExtensionError as error:
            problems.append(str(error))
        else:
            metrics += [] if metric is None else [metric]
    return Recorded(tuple(metrics), tuple(problems))


def find_metric(name: str) -> Metric | None:
    """Return the metric with this name; None if no installed package has it.

    Raises `ExtensionError` if the metric cannot be used (see `recorded`).
    """
    span = timed_span(name)
    if span is not None:
        return span_seconds(span)
    return _BUILT_IN.get(name) or _of_another_package(name)


def _of_another_package(name: str) -> Metric | None:
    extension = extensions.find(extensions.METRICS, name, reserved=_TAKEN)
    if extension is None:
        return None
    metric = extension.load()
    if isinstance(metric, Metric) and metric.name == name and (metric.recorder or metric.read):
        return metric
    raise extension.error(
        f"it is {metric!r}: an entry point of {extensions.METRICS} must name a perfsuite.results.Metric "
        "that has the same name, and either a recorder or a read function"
    )


def usable_metric(name: str) -> Metric | None:
    """Return the metric with this name; None if no installed package has it, or if it cannot be used."""
    try:
        return find_metric(name)
    except ExtensionError:
        return None


def described(name: str) -> Metric:
    """Return the metric with this name, or a placeholder if it is not installed or cannot be used."""
    return usable_metric(name) or Metric(name, f"{name} (its package cannot be used)", "", "lower", "shown")


def extra_metrics(launches: Iterable[Figures]) -> tuple[Metric, ...]:
    """Return other packages' metrics that have a value in at least one of these launches, sorted by name."""
    return tuple(map(described, sorted({name for figures in launches for name in figures.extra})))


def metrics_of(launches: Iterable[Figures]) -> tuple[Metric, ...]:
    """Return `GATED`, and all other metrics that have a value in at least one of these launches."""
    launches = tuple(launches)
    measured = [
        metric
        for metric in (CPU_S_PER_STEP, DATA_WAIT)
        if any(metric.of(figures) is not None for figures in launches)
    ]
    return (*GATED, *measured, *span_metrics(launches), *extra_metrics(launches))


def judged_metrics(launches: Iterable[Figures], device: str | None = None) -> tuple[Metric, ...]:
    """Return the metrics of these launches that are judged on `device` (None: on any device)."""
    devices = ("cpu", "cuda") if device is None else (device,)
    return tuple(
        metric
        for metric in metrics_of(launches)
        if any(metric.judging(device_type) != "shown" for device_type in devices)
    )
