"""The metrics: label, unit, direction, format and tolerance of each figure of a launch.

perfsuite's own metrics are fields of `Figures`; those of other packages (`perfsuite.metrics`) are in `extra`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import median
from typing import Any, Literal, Protocol

from perfsuite import extensions
from perfsuite.case.case import Unit
from perfsuite.results.rank_report import COLD, START_UP
from perfsuite.results.run import SECONDS_OF, Figures, Run, timed_span

Device = Literal["cpu", "cuda"]
Judged = Literal["sequential", "exact", "shown"]


def in_unit(text: str, unit: Unit) -> str:
    """Replace tokens in a text with the unit that a case counts: tokens, or samples."""
    return text.replace("token", unit.removesuffix("s"))


class MetricRecorder(Protocol):
    """Measures one metric in one rank. It may import torch; what it does is not part of any step's time."""

    def begin(self, model: Any, rank: int, world_size: int) -> None:
        """Start: called once, after the first step. `model` is what trains (None where nobody knows it)."""

    def boundary(self, step: int) -> None:
        """Look at the model between two steps: called after each later step; `step` have ended, from 2 on."""

    def result(self) -> float | None:
        """Return this rank's value, after the last step; None if there is none."""


@dataclass(frozen=True)
class Metric:
    """One figure of a launch. Unit, direction and how it is judged have no default: nobody shall guess them.

    Raises `ValueError` if a judged metric lacks a tolerance.
    """

    name: str
    """The field of `Figures` that holds the value; for a metric of another package, its key in `extra`."""
    label: str  #: What sentences call it.
    unit: str  #: Also says how a value is written: see `perfsuite.results.amounts.amount`.
    better: Literal["higher", "lower"]
    judged: Judged
    """`sequential`: by the statistics of several launches. `exact`: one launch is enough, every change beyond
    the tolerance counts. `shown`: never judged."""
    _: KW_ONLY
    judged_on_cpu: Judged | None = None
    """How it is judged on a machine without accelerator; None: as `judged` says."""
    tolerances: Mapping[Device, float] = field(default_factory=dict)
    """Largest growth of the cost (see `cost`) that passes, relative, by device. A CPU is noisier, so it is
    given more."""
    heading: str = ""  #: What tables call it; empty: `label`.
    across_ranks: Literal["max", "min", "sum", "mean"] = "max"
    """Makes the value of a launch from those of its ranks."""
    recorder: Callable[[], MetricRecorder] | None = None  #: Makes what measures the metric in each rank.
    read: Callable[[Run], float | None] | None = None
    """Reads the value out of a launch after it, on the driver's side, in place of a recorder."""

    def __post_init__(self) -> None:
        ways = {str(way) for way in (self.judged, self.judged_on_cpu) if way in ("sequential", "exact")}
        if ways and set(self.tolerances) != {"cpu", "cuda"}:
            raise ValueError(
                f"metric {self.name!r} is judged ({', '.join(sorted(ways))}) and needs tolerances for 'cpu' "
                f"and 'cuda', got {dict(self.tolerances)}: give tolerances={{'cpu': 0.15, 'cuda': 0.03}}, "
                "or judged='shown' without judged_on_cpu"
            )

    def of(self, figures: Figures) -> float | None:
        """Return its value among the figures of a launch, of a baseline's launch or of a case, or None."""
        return figures.get(self.name)

    def counting(self, unit: Unit) -> Metric:
        """Return the same metric for a case that counts `unit`: in its label, heading and unit."""
        texts: dict[str, Any] = {
            name: in_unit(getattr(self, name), unit) for name in ("label", "unit", "heading")
        }
        return replace(self, **texts)

    def judging(self, device: str) -> Judged:
        """Return how it is judged on a device."""
        return self.judged_on_cpu or self.judged if device == "cpu" else self.judged

    def tolerance(self, device: str) -> float:
        """Return the largest growth of the cost that passes on a device, relative."""
        return self.tolerances["cpu" if device == "cpu" else "cuda"]

    def cost(self, value: float) -> float:
        """Return the figure as a cost, for which lower is better: what the sequential test judges."""
        return value if self.better == "lower" else 1 / value

    def worsening(self, now: float, before: float) -> float:
        """Return the relative growth of the cost: +0.05 is 5% slower, or larger."""
        return self.cost(now) / self.cost(before) - 1

    def change(self, of_cost: float) -> float:
        """Convert the relative change of a cost into that of the figure, which reports show.

        15% more seconds per token (+0.15) are 13% fewer tokens/s (-0.13). -1 and infinity belong together.
        """
        if self.better == "lower":
            return of_cost
        return math.inf if of_cost == -1 else 1 / (1 + of_cost) - 1

    def cost_change(self, of_figure: float, before: float) -> float:
        """Return the relative change of the cost for that of the figure, which was `before`."""
        return self.change(of_figure)

    def against(self, reference: Iterable[Figures]) -> Metric:
        """Return the metric as it judges launches that are compared with these."""
        return self

    @property
    def floor(self) -> float:
        """The largest change of the cost, relative, that is no change, however sure it is."""
        return 0.0

    def bound(self, of_cost: float) -> float:
        """Return a growth of the cost as the size of the figure's change: 0.15 is 0.13 of tokens/s."""
        return abs(self.change(of_cost))

    def interval(self, of_cost: tuple[float, float]) -> tuple[float, float]:
        """Return the interval of the figure's change, lower end first, for that of its cost."""
        low, high = sorted(map(self.change, of_cost))
        return low, high


PART_SHARE = 0.02  # share of a step by which a part of it may change without being judged
PART_S = 1e-3  # seconds, likewise: waking up a thread takes some tenths of a millisecond


@dataclass(frozen=True)
class PartOfStep(Metric):
    """A metric of seconds within a step that can be close to 0, or unknown.

    Relative growth is meaningless for a part near 0, so the test judges `rest_s` plus the part: the step of
    the reference with that part. Changes are therefore shares of a step. Those up to `floor` do not count.
    """

    _: KW_ONLY
    step_s: float = 0.0  # mean step of the reference (median over its launches); 0: no reference
    rest_s: float = 0.0  # the same step without the part

    def against(self, reference: Iterable[Figures]) -> PartOfStep:
        """Return the metric with the step of these launches, or itself if none of them has the part."""
        both = ((figures.step_s_mean, self.of(figures)) for figures in reference)
        parts = [(step_s, step_s - part) for step_s, part in both if step_s is not None and part is not None]
        if not parts:
            return self
        step_s, rest_s = map(median, zip(*parts, strict=True))
        return replace(self, step_s=step_s, rest_s=rest_s)

    @property
    def floor(self) -> float:
        """The largest change of the cost that does not count: `PART_SHARE`, or `PART_S` for a short step."""
        return max(PART_SHARE, PART_S / self.step_s) if self.step_s else PART_SHARE

    def cost(self, value: float) -> float:
        """Return the seconds of the reference's step with a part of this length."""
        return self.rest_s + value


SPAN_S = 0.25  # seconds by which a span may change without being judged
SPAN_TOLERANCE = 0.25


@dataclass(frozen=True)
class SpanSeconds(Metric):
    """Seconds of a span that is not a step, such as a part of the start-up, or a checkpoint.

    A span can take almost no time, and its relative growth would be huge. So the test judges the span's
    seconds plus `SPAN_S / SPAN_TOLERANCE`: this allows a share of the span, and `SPAN_S` in any case. Changes
    are reported as shares of the reference's span.
    """

    _: KW_ONLY
    reference_s: float | None = None  # median over the reference's launches; None: no reference

    def against(self, reference: Iterable[Figures]) -> SpanSeconds:
        """Return the metric with the span of these launches, or itself if none of them has it."""
        seconds = [value for value in map(self.of, reference) if value is not None]
        return replace(self, reference_s=median(seconds)) if seconds else self

    def cost(self, value: float) -> float:
        """Return the seconds plus the constant that damps relative growth."""
        return value + SPAN_S / SPAN_TOLERANCE

    @property
    def floor(self) -> float:
        """The change of the cost that `SPAN_S` makes."""
        return 0.0 if self.reference_s is None else SPAN_S / self.cost(self.reference_s)

    def change(self, of_cost: float) -> float:
        """Return the change as a share of the reference's span."""
        if not self.reference_s:
            return of_cost
        return max(-1.0, of_cost * self.cost(self.reference_s) / self.reference_s)

    def cost_change(self, of_figure: float, before: float) -> float:
        """Return the relative change of the cost for that of a span that took `before` seconds."""
        return of_figure * before / self.cost(before)


def span_seconds(span: str) -> SpanSeconds:
    """Return the metric of a span's seconds."""
    name = f"{SECONDS_OF}{span}"
    tolerances: Mapping[Device, float] = {"cpu": SPAN_TOLERANCE, "cuda": SPAN_TOLERANCE}
    return SpanSeconds(name, span, "s", "lower", "sequential", tolerances=tolerances)


def span_metrics(launches: Iterable[Figures]) -> tuple[SpanSeconds, ...]:
    """Return the metrics of the spans that any of these launches has.

    The start-up as a whole has no metric, as its parts are judged. Cold start-ups have none either: a session
    has only one such launch.
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
"""Based on the mean step, so that rare long steps count: only this metric judges stalls. It is noisier than
the median, hence the wider tolerance. Any measure of the slowest steps (p95/p50) jumps by more than the
change to detect."""
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
"""Based on the mean: with n workers, most batches are ready at once, and the step waits for each n-th one."""
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
"""Summed over all ranks. Other users of the cores hardly change it, but neither does anything that a rank
waits for: it complements the speed, and never replaces it. On a GPU it is the work of the host, and is only
shown.

Against a baseline, the probe does not correct it, because the probe measures wall-clock seconds. A comparison
of two arms estimates from its own launches how CPU time follows the probe."""
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
"""Names that metrics of other packages cannot have: fields of `Figures`, properties of a case in reports."""


def recorded() -> tuple[Metric, ...]:
    """Return the installed metrics of other packages, sorted by name: every launch records all of them.

    Raises `ExtensionError` for a duplicate name, and for one that cannot be imported or is not a `Metric`.
    """
    metrics = map(_of_another_package, extensions.names(extensions.METRICS))
    return tuple(metric for metric in metrics if metric is not None)


def find_metric(name: str) -> Metric | None:
    """Return the metric of that name; None if its package is gone. Raises `ExtensionError` as `recorded`."""
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
        f"it is {metric!r}: an entry point of {extensions.METRICS} names a perfsuite.results.Metric of the "
        "same name that has a recorder or read"
    )


def described(name: str) -> Metric:
    """Return the metric of that name, or a placeholder if it is no longer installed."""
    return find_metric(name) or Metric(name, f"{name} (its package is not installed)", "", "lower", "shown")


def extra_metrics(launches: Iterable[Figures]) -> tuple[Metric, ...]:
    """Return the metrics of other packages that any of these launches has, sorted by name."""
    return tuple(map(described, sorted({name for figures in launches for name in figures.extra})))


def metrics_of(launches: Iterable[Figures]) -> tuple[Metric, ...]:
    """Return `GATED`, and those other metrics that any of these launches has."""
    launches = tuple(launches)
    measured = [
        metric
        for metric in (CPU_S_PER_STEP, DATA_WAIT)
        if any(metric.of(figures) is not None for figures in launches)
    ]
    return (*GATED, *measured, *span_metrics(launches), *extra_metrics(launches))


def judged_metrics(launches: Iterable[Figures], device: str | None = None) -> tuple[Metric, ...]:
    """Return the `metrics_of` that are judged on a device; with None, on any device."""
    devices = ("cpu", "cuda") if device is None else (device,)
    return tuple(
        metric for metric in metrics_of(launches) if any(metric.judging(each) != "shown" for each in devices)
    )
