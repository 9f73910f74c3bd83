"""How far launches of unchanged code scatter on a hardware class, from its baselines. Pure.

A case has few launches, its hardware class many: noise is pooled over the class. Imports neither torch nor
pytest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

from perfsuite.baseline import Baseline
from perfsuite.metric import GATED, TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric
from perfsuite.probe_correction import Pair, corrected_noise, probe_exponent
from perfsuite.result import Figures
from perfsuite.sequential import Noise, pooled_noise

T = TypeVar("T")

MIN_SPARE = 2
"""Launches beyond one for each baseline, without which nothing is said of the noise."""
PROBE_CORRECTED = (TOKENS_PER_S, TOKENS_PER_S_MEAN)
"""Metrics that follow the machine's own speed."""


@dataclass(frozen=True, kw_only=True)
class ClassNoise:
    """The noise of each metric between launches, and how strongly speed follows the probe."""

    by_metric: Mapping[str, Noise] = field(default_factory=dict)
    """Of the metrics in `PROBE_CORRECTED` as corrected, where the exponent is above 0."""
    probe_exponent: float = 0.0
    uncorrected: Mapping[str, Noise] = field(default_factory=dict)
    """Of the same metrics as they were measured: launches without a probe scatter so much."""

    def of(self, metric: Metric, *, corrected: bool = True) -> Noise | None:
        """The noise of a metric; None if no baseline has enough launches to tell."""
        known = self.by_metric.get(metric.name)
        return known if corrected else self.uncorrected.get(metric.name, known)


def class_noise(baselines: Sequence[Baseline]) -> ClassNoise:
    """Pool the launches of all baselines of one hardware class. One without a sound figure is left out."""
    exponent = probe_exponent(_filled(_pairs(baseline, TOKENS_PER_S) for baseline in baselines))
    known, uncorrected = {}, {}
    for metric in GATED:
        groups = _filled(_costs(baseline, metric) for baseline in baselines)
        measured = pooled_noise(groups) if _spare(groups) >= MIN_SPARE else None
        if exponent and metric in PROBE_CORRECTED:
            paired = _filled(_pairs(baseline, metric) for baseline in baselines)
            if _spare(paired) > MIN_SPARE:
                known[metric.name] = corrected_noise(paired, exponent)
            if measured is not None:
                uncorrected[metric.name] = measured
        elif measured is not None:
            known[metric.name] = measured
    return ClassNoise(by_metric=known, probe_exponent=exponent, uncorrected=uncorrected)


def _costs(baseline: Baseline, metric: Metric) -> list[float]:
    return [metric.cost(value) for value in baseline.values(metric.name) if is_size(value)]


def is_size(value: float | None) -> TypeGuard[float]:
    """Whether a figure is a number that can be measured: there, above 0 and finite."""
    return value is not None and 0 < value < math.inf


def pairs(launches: Iterable[Figures], metric: Metric) -> list[Pair]:
    """Each launch's cost beside its probe; a launch without a sound one of either is left out."""
    told = [(getattr(figures, metric.name), figures.probe_s_p50) for figures in launches]
    return [(metric.cost(value), probe) for value, probe in told if is_size(value) and is_size(probe)]


def _pairs(baseline: Baseline, metric: Metric) -> list[Pair]:
    return pairs((launch.figures for launch in baseline.launches), metric)


def _filled(groups: Iterable[list[T]]) -> list[list[T]]:
    return [group for group in groups if group]


def _spare(groups: Sequence[Sequence[object]]) -> int:
    """Launches beyond one of each group: what is left to tell a noise by."""
    return sum(len(group) - 1 for group in groups)
