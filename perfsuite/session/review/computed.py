"""Compare the computation of two baselines: loss, gradients, tokens, dtypes, settings."""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from perfsuite import documents
from perfsuite.documents import Data
from perfsuite.report import text
from perfsuite.report.text import plural
from perfsuite.results.baseline import Baseline, BaselineLaunch, values_of
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.verdict.computation import TOKENS
from perfsuite.verdict.loss import NORMS, part_of_steps

MISSING = "not recorded"
FIGURES = {
    **NORMS,
    TOKENS: "tokens given to the model in a step",
    "loss_first": "first loss",
    "loss_last": "last loss",
}


def of_times(before: Baseline, now: Baseline) -> Iterator[str]:
    """Yield the differences in computation between two baselines of times, with both values."""
    yield from _of_launches(before.launches, now.launches)
    for name in ("case", "flops", "observed", "dtypes"):
        yield from _of_field(name, getattr(before, name), getattr(now, name))


def of_counts(before: CountBaseline, now: CountBaseline) -> Iterator[str]:
    """Yield the differences in computation between two baselines of counts, with both values."""
    yield from _of_launches(before.computed, now.computed)
    for name in ("case", "settings", "dtypes"):
        yield from _of_field(name, getattr(before, name), getattr(now, name))


def _of_launches(before: Sequence[BaselineLaunch], now: Sequence[BaselineLaunch]) -> Iterator[str]:
    yield from _of_losses([launch.loss for launch in before], [launch.loss for launch in now])
    for figure, name in FIGURES.items():
        then = values_of(before, figure)
        today = values_of(now, figure)
        if _differ(then, today):
            yield f"{name}: {_both(then, today)}"


def _of_losses(before: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yield a line about the range of steps in which the losses differ most.

    The line also gives the number of other ranges in which the losses differ.
    """
    parts = max(map(len, (*before, *now)), default=0)
    differing = dict[int, tuple[list[float], list[float]]]()
    for part in range(parts):
        then, today = ([curve[part] for curve in side if len(curve) > part] for side in (before, now))
        if _differ(then, today):
            differing[part] = then, today
    if differing:
        part = max(differing, key=lambda number: _size(*differing[number]))
        others = len(differing) - 1
        more = f"; the loss also differs in {plural(others, 'other part')}" if others else ""
        yield f"loss {part_of_steps(part, parts)}: {_both(*differing[part])}{more}"


def _differ(before: Sequence[float], now: Sequence[float]) -> bool:
    """Return whether the sets of values or their medians differ; the number of launches does not matter."""
    return {*before} != {*now} or (bool(now) and median(before) != median(now))


def _size(before: Sequence[float], now: Sequence[float]) -> float:
    if not before or not now:
        return 0.0
    then = median(before)
    today = median(now)
    return abs(today - then) / abs(then) if then else abs(today)


def _both(before: Sequence[float], now: Sequence[float]) -> str:
    """Format the medians over the launches or, if these are equal, the values of all launches."""
    if not before or not now:
        return " -> ".join(f"{median(side):.6g}" if side else MISSING for side in (before, now))
    then = median(before)
    today = median(now)
    if then == today:
        return " -> ".join(", ".join(f"{value:.6g}" for value in side) for side in (before, now))
    change = f" ({text.percent(today / then - 1)})" if then else ""
    return f"{then:.6g} -> {today:.6g}{change}"


def _of_field(
    name: str, before: Data | Mapping[str, Any] | None, now: Data | Mapping[str, Any] | None
) -> Iterator[str]:
    then, today = (
        dict(_flat(name, documents.plain(side) if isinstance(side, Data) else side)) for side in (before, now)
    )
    for key in dict.fromkeys([*then, *today]):
        if then.get(key) != today.get(key):
            values = (_shown(side[key]) if key in side else MISSING for side in (then, today))
            yield f"{key}: {' -> '.join(values)}"


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value below a name with its path: `observed.settings.optimizer`, `AdamW`."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _flat(f"{name}.{key}", below)
    elif value is not None:
        yield name, value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
