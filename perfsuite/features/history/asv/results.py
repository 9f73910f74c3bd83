"""Convert launches to asv's results: names, parameters and statistics. Pure.

A benchmark in asv is one metric (a cost) of one model, topology and precision. Its parameters are all other
differences between cases. Names depend only on the case, so a new case never renames an old series.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

from perfsuite.case.case import Unit
from perfsuite.features.history.store import StoredResult
from perfsuite.results.metric import in_unit
from perfsuite.verdict.robust import Z_99, t_quantile
from perfsuite.verdict.sequential import pooled_noise

PARAMETERS = ("framework", "sequence_length", "micro_batch", "gradient_accumulation", "options")
"""Parameters of a benchmark, in asv's sense. Model, topology and precision are in its name."""
METRICS = {  # metric -> unit in asv ("bytes" would be shown as MB); a case has one of the first two metrics
    "seconds_per_token": "seconds",
    "seconds_per_sample": "seconds",
    "seconds_per_step": "seconds",
    "peak_memory": "MiB",
}
VERSION = "2"  # version of names, parameters and statistics; asv does not compare different versions
COLUMNS = (
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples"),
)


class Slot(NamedTuple):
    """The place of a case among asv's benchmarks."""

    group: str  # the name without the metric; asv groups benchmarks by the parts between dots
    values: tuple[str, ...]  # a value for each of `PARAMETERS`


Launches = Mapping[str, Mapping[str, Mapping[tuple[str, ...], Sequence[float]]]]
"""Metric -> group of the slot -> values of the slot -> the cost of each launch."""


def slot(parameters: Mapping[str, str]) -> Slot:
    """Return the slot of a case, from its `StoredCase.parameters`."""
    parts = (re.sub(r"[^A-Za-z0-9_+-]", "_", parameters[name]) for name in ("model", "topology", "precision"))
    return Slot(".".join(parts), tuple(parameters[name] or "default" for name in PARAMETERS))


def costs(result: StoredResult, unit: Unit) -> dict[str, list[float]]:
    """Return the cost of each launch, by metric: its median times, and its peak memory.

    `unit` is the unit of the case's speed.
    """
    steps = [value for value in result.step_s_p50 if value is not None]
    tokens = result.tokens_per_step
    return {
        "seconds_per_step": steps,
        in_unit("seconds_per_token", unit): [step / tokens for step in steps] if tokens else [],
        "peak_memory": [value / 2**20 for value in result.peak_memory_bytes if value is not None],
    }


def results(launches: Launches, started_at_ms: int) -> dict[str, list[Any]]:
    """Return each benchmark's row in the file of one night. A row has a value for each of `COLUMNS`."""
    rows = {}
    for metric, groups in launches.items():
        error = _error(metric, [launch for by_values in groups.values() for launch in by_values.values()])
        for group, by_values in groups.items():
            rows[f"{group}.{metric}"] = _row(by_values, error, started_at_ms)
    return rows


def in_order(values: set[str]) -> list[str]:
    """Sort values: numbers first, by size, then words."""
    return sorted(values, key=lambda value: (not value.isdigit(), value.isdigit() and int(value), value))


def _error(metric: str, groups: Sequence[Sequence[float]]) -> float | None:
    """Return half the width of a launch's 99% interval, in logarithms. None for memory.

    The noise is pooled over all groups. The width is infinite if there are too few launches.
    """
    if metric == "peak_memory":
        return None
    try:
        noise = pooled_noise(groups)
    except ValueError:  # too few launches
        return math.inf
    return t_quantile(Z_99, noise.degrees_of_freedom) * noise.sigma


def _row(
    by_values: Mapping[tuple[str, ...], Sequence[float]], error: float | None, started_at_ms: int
) -> list[Any]:
    params = [in_order(set(values)) for values in zip(*by_values, strict=True)]
    statistics = [_statistics(by_values.get(values), error) for values in itertools.product(*params)]
    middle, *others = map(list, zip(*statistics, strict=True))
    return [middle, params, VERSION, started_at_ms, None, *others]


def _statistics(values: Sequence[float] | None, error: float | None) -> tuple[Any, ...]:
    """Return the result and statistics of one combination of parameters. All are None if it never ran."""
    if values is None:
        return (None,) * 8
    middle = median(values)
    if error is None:
        low = min(values)
        high = max(values)
    elif error == math.inf:
        # asv's own convention for an unknown interval.
        low = -math.inf
        high = math.inf
    else:
        factor = math.exp(error / math.sqrt(len(values)))
        low = middle / factor
        high = middle * factor
    quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [middle] * 3
    return middle, low, high, quarters[0], quarters[2], 1, len(values), values
