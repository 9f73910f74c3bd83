"""Make the tables of one case on the HTML page. The template escapes their text. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from perfsuite.analysis.health import BAD_REASONS
from perfsuite.report.html import charts
from perfsuite.report.text import NONE, Table, between, detectable, percent
from perfsuite.results import metric as metrics
from perfsuite.results.amounts import amount, duration
from perfsuite.results.metric import Metric, extra_metrics
from perfsuite.results.rank_report import Memory
from perfsuite.results.run import DeviceHealth, Health, Run
from perfsuite.results.session_file import Measurement

T = TypeVar("T")
TIMES = (metrics.TOKENS_PER_S, metrics.STEP_S_P50, metrics.STEP_S_P95, metrics.STEP_JITTER)


def _known(value: T | None, as_text: Callable[[T], str]) -> str:
    return NONE if value is None else as_text(value)


def checks(result: Measurement, anchor: str) -> Table:
    """Return the table of the judged metrics. `anchor` is the prefix of the charts' ids."""
    rows = [
        (
            check.label,
            check.outcome,
            _known(check.change, percent),
            amount(check.measured, check.unit),
            NONE if check.baseline is None else amount(check.baseline, check.unit),
            _known(check.interval, between),
            f"{check.allowed:.1%}",
            _known(detectable(check), str) + (" (blind)" if check.blind else ""),
            charts.interval(check, key=f"{anchor}:{check.metric}") or NONE,
        )
        for check in result.verdict.checks
    ]
    caption = (
        "A positive change means that the metric grew. So a negative change is worse for "
        f"{result.unit}/s, and a positive change is worse for bytes. "
        "In the chart, the dot is the estimate, the bar is its 99% interval, the solid line is no change, "
        "and the dashed line is the allowed change. The change of the data wait is given as a share of the "
        "step."
    )
    if any(check.probe_exponent is not None for check in result.verdict.checks):
        caption += (
            " Some changes are corrected for the machine's own speed, so they differ from the change between "
            "the two values in their row."
        )
    if any(check.against_reference is not None for check in result.verdict.checks):
        caption += (
            " Speeds are judged relative to tonight's reference: launches in the same session with the "
            "packages and the commit of the baseline. The explanation gives the changes relative to the "
            "reference."
        )
    against = result.verdict.against
    sides = ("measured", "baseline") if against is None else ("arm B", against)
    headers = ("metric", "verdict", "change", *sides, "99% interval", "allowed", "can find", "chart")
    return Table(caption=caption, headers=headers, rows=rows, text_columns=2, last_text_columns=1)


def launches(result: Measurement, runs: Sequence[Run]) -> Table:
    """Return a table of `runs`: the launches of the case, or the launches of arm A.

    The last column says whether the launch is judged.
    """
    extra = extra_metrics(run.figures for run in runs)
    set_aside = result.verdict.unhealthy_launches
    rows = [
        (
            str(number),
            *(_figure(metric, run) for metric in TIMES),
            _known(max(run.measured_steps, default=None), duration),
            _figure(metrics.CPU_S_PER_STEP, run),
            _figure(metrics.GC_S_PER_STEP, run),
            f"{run.window[0]} to {run.window[1] - 1}" if run.window[1] else NONE,
            *_memory(run.memory),
            *(_figure(metric, run) for metric in extra),
            f"{run.duration_s:,.0f} s",
            f"no: {run.failure.kind}" if run.failure else "no: set aside" if number in set_aside else "yes",
        )
        for number, run in enumerate(runs, 1)
    ]
    headers = (
        *(
            "launch",
            f"{result.unit}/s",
            "p50",
            "p95",
            "p95/p50",
            "longest",
            "CPU time",
            "collector",
            "window",
        ),
        *("peak memory", "least peak", "reserved", "retries"),
        *(metric.heading or metric.label for metric in extra),
        *("took", "counts"),
    )
    caption = (
        "Step times are those of the slowest rank in each step of the measured window. CPU time is the sum "
        "over all ranks in the median step. The time of Python's garbage collector is the mean per step on "
        "the rank where it takes longest. Peak memory is shown for the rank that used the most memory and "
        "for the rank that used the least. Retries are summed over ranks."
    )
    return Table(caption=caption, headers=headers, rows=rows, last_text_columns=1)


def _figure(metric: Metric, run: Run) -> str:
    return _known(metric.of(run.figures), lambda figure: amount(figure, metric.unit))


def _memory(ranks: Sequence[Memory]) -> tuple[str, str, str, str]:
    if not ranks:
        return NONE, NONE, NONE, NONE
    most = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
    reserved = [rank.reserved for rank in ranks if rank.reserved is not None]
    retries = [rank.alloc_retries for rank in ranks if rank.alloc_retries is not None]
    return (
        f"{amount(ranks[most].peak, 'bytes')} (rank {most})",
        amount(min(rank.peak for rank in ranks), "bytes"),
        amount(max(reserved), "bytes") if reserved else NONE,
        str(sum(retries)) if retries else NONE,
    )


def health(runs: Sequence[Run]) -> list[Table]:
    """Return the tables of GPUs and cores during the steps; empty if nothing was sampled."""
    healths: list[tuple[str, Health | None]] = []
    for number, run in enumerate(runs, 1):
        of_nodes = [(f"{number}, {node.name}", node.health) for node in run.nodes]
        healths += of_nodes or [(str(number), run.health)]
    seen = [(name, health) for name, health in healths if health is not None]
    cores = Table(
        caption="CPU use during the steps, as a share of all cores that the job may use.",
        headers=("launch", "job", "others", "steal", "samples", "over"),
        rows=[(number, *_cores(health)) for number, health in seen],
    )
    return [table for table in (gpus(seen, of="launch", when="during the steps"), cores) if table]


def gpus(seen: Sequence[tuple[str, Health]], *, of: str, when: str) -> Table:
    """Return a table of all GPUs, by launch or node."""
    caption = f"Measured on each GPU {when}: median clock, mean power, highest temperature."
    rows = [(name, *_device(device)) for name, health in seen for device in health.devices]
    headers = (
        *(of, "GPU", "SM clock", "lowest", "power", "energy", "temperature"),
        *("utilisation", "other processes", "throttled"),
    )
    return Table(caption=caption, headers=headers, rows=rows, last_text_columns=1)


def _device(device: DeviceHealth) -> tuple[str, ...]:
    return (
        str(device.index),
        _known(device.sm_clock_mhz, "{:,.0f} MHz".format),
        _known(device.sm_clock_mhz_min, "{:,.0f} MHz".format),
        _known(device.power_w, "{:,.0f} W".format),
        _known(device.energy_j, "{:,.0f} J".format),
        _known(device.temperature_c, "{:.0f} °C".format),
        _known(device.utilisation, "{:.0f}%".format),
        _known(device.foreign_memory_bytes, lambda size: amount(size, "bytes")),
        _known(device.throttled, _throttled),
    )


def _throttled(shares: dict[str, float]) -> str:
    reasons = [(name, share) for name, share in shares.items() if share and name != "GpuIdle"]
    shown = [f"{name} {share:.0%}" + (" (bad)" if name in BAD_REASONS else "") for name, share in reasons]
    return ", ".join(shown) or "no"


def _cores(health: Health) -> tuple[str, ...]:
    return (
        *(_known(share, "{:.0%}".format) for share in (health.job_cpu, health.foreign_cpu, health.steal)),
        str(health.samples),
        f"{health.seconds:.1f} s",
    )


def settings(runs: Sequence[Run]) -> Table:
    """Return a table of the workers' observations in the last launch that has any."""
    observed = next((run.observed for run in reversed(runs) if run.observed is not None), None)
    kinds = {} if observed is None else {"setting": observed.settings, "environment": observed.environment}
    probed = runs[-1].device_probe if runs else {}
    kinds |= {"autotuning": runs[-1].autotuned if runs else {}}
    kinds |= {"before the workload": {name: f"{rate:,.4g}" for name, rate in probed.items()}}
    rows = [(name, value, kind) for kind, entries in kinds.items() for name, value in entries.items()]
    caption = "From the last launch. Settings must equal those of the baseline; the environment may differ."
    return Table(caption=caption, headers=("name", "value", "kind"), rows=rows, text_columns=3)
