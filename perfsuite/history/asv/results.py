"""Launches as asv's results: names, parameters and statistics. Pure; imports neither torch nor pytest.

A benchmark is a metric of a model on a topology in a precision; its parameters are what else tells cases
apart, so that they can be compared on one page while combinations that nobody runs stay few. Names depend on
nothing but the case: a new case never renames an old series.

Costs only, for which more is worse: asv takes every increase for a regression.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from perfsuite.case.case import NO_TOKENS, Unit
from perfsuite.history.store import StoredResult
from perfsuite.results.metric import in_unit
from perfsuite.verdict.robust import t_quantile
from perfsuite.verdict.sequential import pooled_noise

PARAMETERS = ("framework", "sequence_length", "micro_batch", "gradient_accumulation", "options")
"""Of a benchmark, in asv's sense. Model, topology and precision stand in its name."""
METRICS = {
    "seconds_per_token": "seconds",
    "seconds_per_sample": "seconds",
    "seconds_per_step": "seconds",
    "peak_memory": "bytes",
}
"""Names and units, as asv knows them. A case has the first or the second, by what it counts."""
VERSION = "1"
"""Of names, parameters and statistics. A change of it makes every export begin anew."""
COLUMNS = (
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples"),
)
_Z_99 = 2.576


class Slot(NamedTuple):
    """Where a case stands among asv's benchmarks."""

    group: str
    """Their names without the metric. asv groups by what is between dots."""
    values: tuple[str, ...]
    """Of `PARAMETERS`."""

    @property
    def unit(self) -> Unit:
        """What the case counts."""
        return "samples" if self.values[PARAMETERS.index("sequence_length")] == NO_TOKENS else "tokens"


Launches = Mapping[Slot, Mapping[str, Sequence[float]]]
"""Of each case in each metric: the median of each launch."""


def slot(parameters: Mapping[str, str]) -> Slot:
    """For a case's `StoredCase.parameters`."""
    parts = (re.sub(r"[^A-Za-z0-9_+-]", "_", parameters[name]) for name in ("model", "topology", "precision"))
    return Slot(".".join(parts), tuple(parameters[name] or "default" for name in PARAMETERS))


def costs(result: StoredResult, unit: Unit) -> dict[str, list[float]]:
    """The median of each launch in each metric, of a case that counts `unit`."""
    steps = [value for value in result.step_s_p50 if value is not None]
    tokens = result.tokens_per_step
    return {
        "seconds_per_step": steps,
        in_unit("seconds_per_token", unit): [step / tokens for step in steps] if tokens else [],
        "peak_memory": [value for value in result.peak_memory_bytes if value is not None],
    }


def results(launches: Launches, started_at_ms: int) -> dict[str, list[Any]]:
    """The rows of one night's file: by benchmark a list for each of `COLUMNS`."""
    rows = {}
    for metric in METRICS:
        groups: dict[str, dict[tuple[str, ...], Sequence[float]]] = {}
        for one, by_metric in launches.items():
            if by_metric.get(metric):
                groups.setdefault(one.group, {})[one.values] = by_metric[metric]
        interval = _interval(metric, [by_metric.get(metric, ()) for by_metric in launches.values()])
        for group, by_values in groups.items():
            rows[f"{group}.{metric}"] = _row(by_values, interval, started_at_ms)
    return rows


def in_order(values: set[str]) -> list[str]:
    """Numbers by size, before words."""
    return sorted(
        values, key=lambda value: (not value.isdigit(), int(value) if value.isdigit() else 0, value)
    )


_Interval = Callable[[float, int], tuple[float, float]]
"""From a median and how many launches it is of to its 99 % interval."""


def _interval(metric: str, groups: Sequence[Sequence[float]]) -> _Interval | None:
    """How sure a median of launches is; asv weighs points by it. None: from the lowest to the highest.

    Two or three launches alone know little of their noise, so that of all cases of the night is pooled.
    Memory has none to speak of.
    """
    if metric == "peak_memory":
        return None
    try:
        noise = pooled_noise([group for group in groups if group])
    except ValueError:  # too few launches to tell; asv, too, then calls the interval infinite
        return lambda middle, count: (-math.inf, math.inf)
    error = t_quantile(_Z_99, noise.degrees_of_freedom) * noise.sigma

    def interval(middle: float, count: int) -> tuple[float, float]:
        factor = math.exp(error / math.sqrt(count))
        return middle / factor, middle * factor

    return interval


def _row(
    by_values: Mapping[tuple[str, ...], Sequence[float]], interval: _Interval | None, started_at_ms: int
) -> list[Any]:
    params, combinations = _product(frozenset(by_values))
    statistics = [_statistics(by_values.get(values), interval) for values in combinations]
    middle, *others = map(list, zip(*statistics, strict=True))
    return [middle, params, VERSION, started_at_ms, None, *others]


@functools.cache
def _product(present: frozenset[tuple[str, ...]]) -> tuple[list[list[str]], list[tuple[str, ...]]]:
    """Each parameter's values, and their combinations in asv's order."""
    params = [in_order(set(values)) for values in zip(*present, strict=True)]
    return params, list(itertools.product(*params))


def _statistics(values: Sequence[float] | None, interval: _Interval | None) -> tuple[Any, ...]:
    """The columns of one combination but for those that all share; None where nobody ran it."""
    if values is None:
        return (None,) * 8
    ordered = sorted(values)
    middle = _quantile(ordered, 0.5)
    low, high = interval(middle, len(ordered)) if interval is not None else (ordered[0], ordered[-1])
    return middle, low, high, _quantile(ordered, 0.25), _quantile(ordered, 0.75), 1, len(ordered), values


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
