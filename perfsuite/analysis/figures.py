"""Find the measured steps of one launch, and compute its figures from the reports of its ranks. Pure."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import NamedTuple

from perfsuite.analysis import agreement
from perfsuite.analysis.health import UNKNOWN, over_known
from perfsuite.errors import ReportError
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.dry_facts import roofline
from perfsuite.results.metric import Metric
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Figures, Health, Run

# Number of steps in the rolling median: few, but enough that a single slow step hardly affects the median.
ROLL = 5
FLAT = 0.05  # relative difference allowed between a rolling median and the level at the end

UNMEASURED_STEPS = 2
"""Number of steps at the beginning of a launch that are never measured. In the second step, the worker
observes what runs (`perfsuite.worker.observation.observe`). If the work of a step is counted, no step up to
`COUNTED_STEP` is measured."""
SETTLED_WARMUP_S = 10
SETTLED_WINDOW_S = 20
"""Minimum seconds of warm-up (after the steps that are never measured) and of the measured window on a GPU.
If the warm-up or the window is shorter, the GPU's clock and temperature have not settled, and the results
depend on the machine and the day."""
NO_TF32_PEAK = "no MFU: matmuls in fp32 ran in TF32 here, but only the peak of fp32 is known"
NO_BF16_PEAK = "no MFU: this GPU has no tensor cores for bf16, and the peak of its emulation is unknown"
NO_FLOAT8_PEAK = "no MFU: matmuls ran in fewer than 16 bits, but the number of bits or the peak is unknown"


def job_steps(step_s: Sequence[Sequence[float]]) -> list[float]:
    """Compute how many seconds each step of the job took, from the step times of each rank.

    The job has finished a step when the last rank has finished it. C(i) is the maximum over ranks of the sum
    of their first i steps, and step i took C(i) - C(i-1). If a rank stalls after its last collective of a
    step, the other ranks wait in the next step. In C(i) - C(i-1), such a stall counts once. If the time of a
    step were the maximum over the ranks, the stall would count twice.
    """
    series = []
    behind = [0.0] * len(step_s)  # for each rank: C(i-1) minus the sum of the rank's first i-1 steps
    for steps in zip(*step_s, strict=True):
        # pragma: no mutate True: both have one entry for each rank
        took = max(step - lag for step, lag in zip(steps, behind, strict=True))
        # pragma: no mutate True: both have one entry for each rank
        behind = [lag - step + took for step, lag in zip(steps, behind, strict=True)]
        series.append(took)
    return series


class Window(NamedTuple):
    """The measured steps `series[start:]`. `steady` is False if the series never became flat."""

    start: int
    steady: bool


def settled(step_s: Sequence[float], first: int) -> int:
    """Return the first step that begins at least `SETTLED_WARMUP_S` after step `first` begins.

    Returns the number of steps if there is no such step.
    """
    passed = 0.0
    for step in range(first, len(step_s)):
        if passed >= SETTLED_WARMUP_S:
            return step
        passed += step_s[step]
    return len(step_s)


def find_window(step_s: Sequence[float], max_warmup: int, *, unmeasured: int = UNMEASURED_STEPS) -> Window:
    """Find the measured part of a launch's step times, given in seconds.

    The level is the median of the steps after `max_warmup`. The warm-up ends at the first step at which the
    median of `ROLL` steps (this step and the next ones) is close to the level: within `FLAT`, or, on a
    noisier machine, within the noise of the series. The window begins after `unmeasured` steps at the
    earliest, and after `max_warmup` at the latest. The launch is steady if both halves of the window agree
    within the same bound.
    """
    count = len(step_s)
    if not 0 <= max_warmup <= count - 2 * ROLL:
        needed = f"a warm-up of up to {max_warmup} steps and the {2 * ROLL} steps that must follow it"
        raise ValueError(f"{count} steps are too few for {needed}")
    tail = step_s[max_warmup:]
    level = median(tail)
    # Use deviations from step to step, not from the level, so that a drift does not look like noise.
    deviation = median(abs(after - before) for before, after in pairwise(tail)) / 2**0.5
    bound = max(FLAT * level, 2 * deviation)
    start = next(
        (i for i in range(unmeasured, max_warmup) if abs(median(step_s[i : i + ROLL]) - level) <= bound),
        max_warmup,
    )
    # A rolling median can be near the level although up to two of its first steps are not. Skip these steps.
    while start < max_warmup and abs(step_s[start] - level) > bound:
        start += 1
    middle = (start + count) // 2  # pragma: no mutate +: the same step, counted from the end
    drift = abs(median(step_s[start:middle]) - median(step_s[middle:]))
    return Window(start, drift <= bound)


def lowest_device_probe(reports: list[RankReport]) -> dict[str, float]:
    """For each rate that the device probe measures, return the lowest value of all ranks."""
    names = sorted({name for report in reports for name in report.device_probe})
    return {name: min(r.device_probe[name] for r in reports if name in r.device_probe) for name in names}


def is_in_tf32(run: Run) -> bool:
    """Return whether a run in fp32 computes matmuls in TF32, whose peak is not known."""
    settings = run.observed.settings if run.observed is not None else {}
    is_lower = run.case.precision == "fp32" and settings.get("fp32_matmul", "ieee") != "ieee"
    return is_lower and run.machine.device == "cuda"


def peak_for_mfu(run: Run, peak_flops: float | None) -> tuple[float | None, str | None]:
    """Return the maximum FLOP/s of a device for a run, or None and the reason why there is no MFU.

    FLOPs in float8 run at the peak of float8, and all other FLOPs run at `peak_flops`.
    """
    settings = run.observed.settings if run.observed is not None else {}
    if is_in_tf32(run):
        return None, NO_TF32_PEAK
    if run.machine.emulates(run.case.precision):
        return None, NO_BF16_PEAK
    if settings.get("low_precision_modules", "none") == "none":
        return peak_flops, None
    of_float8 = run.machine.peak_flops("float8")
    flops = run.flops
    if peak_flops is None or of_float8 is None or flops is None or flops.per_token_float8 is None:
        return None, NO_FLOAT8_PEAK
    rest = flops.per_token - flops.per_token_float8
    return flops.per_token / (flops.per_token_float8 / of_float8 + rest / peak_flops), None


def figures_of(run: Run, reports: list[RankReport], peak_flops: float | None) -> Figures:
    """Compute the figures of a run whose steps are known. MFU and roofline need a device's `peak_flops`."""
    steps = run.measured_steps
    tokens_per_step = reports[0].tokens_per_step
    ranks = run.case.topology.world_size
    p50 = median(steps)
    mean = fmean(steps)
    p95 = quantiles(steps, n=20, method="inclusive")[-1]
    tokens_per_s = tokens_per_step / p50
    achieved = run.flops.per_token * tokens_per_s / ranks if run.flops is not None else None
    limit = None if peak_flops is None else roofline(run.counts, run.case, run.machine, tokens_per_step)
    tail = max(1, len(run.loss) // 10)
    health = run.health or UNKNOWN
    first, end = run.window
    is_waiting = any(run.data_wait_s[first:end])  # if not, no loader was detected, and the wait is unknown
    return Figures(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / ranks,
        tokens_per_s_mean=tokens_per_step / mean,
        own_tokens_per_s=over_known(median, (report.own_tokens_per_s for report in reports)),
        step_s_p50=p50,
        step_s_p95=p95,
        step_s_mean=mean,
        step_jitter=p95 / p50,
        probe_s_p50=over_known(median, run.probe_s[first:end]),
        cpu_s_per_step=over_known(median, run.cpu_s[first:end]),
        data_wait_s=fmean(run.data_wait_s[first:end]) if is_waiting else None,
        data_wait=sum(run.data_wait_s[first:end]) / sum(steps) if is_waiting else None,
        gc_s_per_step=over_known(max, (fmean(report.gc_s[first:end]) for report in reports if report.gc_s)),
        peak_memory_bytes=max(memory.peak for memory in run.memory) if len(run.memory) == ranks else None,
        reserved_memory_bytes=over_known(max, (memory.reserved for memory in run.memory)),
        alloc_retries=over_known(max, (memory.alloc_retries for memory in run.memory)),
        tflops_per_device=achieved / 1e12 if achieved is not None else None,
        mfu=achieved / peak_flops if achieved is not None and peak_flops is not None else None,
        roofline_share=limit.share(tokens_per_s) if limit is not None else None,
        gpu_utilisation=over_known(fmean, (device.utilisation for device in health.devices)),
        sm_clock_mhz=over_known(
            median, (clock for step, clock in health.sm_clocks_mhz if first < step <= end)
        ),
        device_memory_bytes=over_known(max, (device.job_memory_bytes for device in health.devices)),
        energy_per_token_j=_energy_per_token_j(health, tokens_per_step),
        gradient_norm=_gradient_norm([report.gradient_squares for report in reports]),
        unclipped_norm=_gradient_norm([report.unclipped_squares for report in reports]),
        tokens_given=agreement.tokens_given(reports, run.case),
        loss_first=run.loss[0] if run.loss else None,
        loss_last=over_known(fmean, run.loss[-tail:]),
        spans_s={name: span.mean_s for name, span in run.spans.items() if sum(span.seconds) > 0},
    )


def extra_figures(run: Run, reports: Sequence[RankReport], metrics: Sequence[Metric]) -> dict[str, float]:
    """Return the values of other packages' metrics for a run. Raises `ReportError` if one cannot be read."""
    values = {metric.name: _value(metric, run, reports) for metric in metrics}
    return {name: value for name, value in values.items() if value is not None}


def _value(metric: Metric, run: Run, reports: Sequence[RankReport]) -> float | None:
    if metric.read is not None:
        try:
            value = metric.read(run)
            return None if value is None else float(value)
        except Exception as error:
            what = f"metric {metric.name!r} could not be read from the launch"
            advice = "Fix the package that provides it, or uninstall it"
            raise ReportError(f"{what}: {type(error).__name__}: {error}. {advice}") from error
    choose = _ACROSS_RANKS[metric.across_ranks]
    return over_known(choose, (report.extra.get(metric.name) for report in reports))


_ACROSS_RANKS: dict[str, Callable[[Sequence[float]], float]]
_ACROSS_RANKS = {"max": max, "min": min, "sum": sum, "mean": fmean}


def settling_notes(run: Run) -> list[str]:
    """Return advice if a GPU was measured before its clock and temperature had settled."""
    measured_s = sum(run.measured_steps)
    warmup_s = sum(run.step_s[COUNTED_STEP if run.counts else UNMEASURED_STEPS : run.window[0]])
    is_settled = measured_s >= SETTLED_WINDOW_S and warmup_s >= SETTLED_WARMUP_S
    if run.machine.device == "cpu" or is_settled:
        return []
    return [
        f"the measured window is {measured_s:.0f} s, after {warmup_s:.0f} s of warm-up, but a GPU's clock "
        f"and temperature settle in 30 to 60 s: raise steps until the window takes {SETTLED_WINDOW_S} s or "
        f"more, and max_warmup_steps until the warm-up takes {SETTLED_WARMUP_S} s or more"
    ]


def _gradient_norm(squares: Sequence[float | None]) -> float | None:
    measured = [square for square in squares if square is not None and math.isfinite(square)]
    if len(measured) < len(squares):
        return None
    # pragma: no mutate <=: no difference is exactly the bound
    is_replicated = max(measured) - min(measured) <= 1e-6 * max(measured)
    return math.sqrt(measured[0] if is_replicated else sum(measured))


def _energy_per_token_j(health: Health, tokens_per_step: int) -> float | None:
    energies = [device.energy_j for device in health.devices if device.energy_j is not None]
    tokens = health.steps * tokens_per_step
    return sum(energies) / tokens if tokens and energies and len(energies) == len(health.devices) else None
