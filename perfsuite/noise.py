"""How far launches of unchanged code scatter on a hardware class, from its baselines. Pure.

A case has few launches, its hardware class many: noise is pooled over the class. Imports neither torch nor
pytest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from perfsuite.baseline import Baseline
from perfsuite.metric import GATED, TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric
from perfsuite.probe_correction import Pair, corrected_noise, probe_exponent
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
    probe_exponent: float = 0.0

    def of(self, metric: Metric) -> Noise | None:
        """The noise of a metric; None if no baseline has enough launches to tell."""
        return self.by_metric.get(metric.name)


def class_noise(baselines: Sequence[Baseline]) -> ClassNoise:
    """Pool the launches of all baselines of one hardware class. One without a sound figure is left out."""
    exponent = probe_exponent(_filled(_pairs(baseline, TOKENS_PER_S) for baseline in baselines))
    known = {}
    for metric in GATED:
        if exponent and metric in PROBE_CORRECTED:
            pairs = _filled(_pairs(baseline, metric) for baseline in baselines)
            if _spare(pairs) > MIN_SPARE:
                known[metric.name] = corrected_noise(pairs, exponent)
        else:
            groups = _filled(_costs(baseline, metric) for baseline in baselines)
            if _spare(groups) >= MIN_SPARE:
                known[metric.name] = pooled_noise(groups)
    return ClassNoise(by_metric=known, probe_exponent=exponent)


def _costs(baseline: Baseline, metric: Metric) -> list[float]:
    return [metric.cost(value) for value in baseline.values(metric.name) if 0 < value < math.inf]


def _pairs(baseline: Baseline, metric: Metric) -> list[Pair]:
    """Each launch's cost beside its probe."""
    launches = [(getattr(one.figures, metric.name), one.figures.probe_s_p50) for one in baseline.launches]
    return [
        (metric.cost(value), probe)
        for value, probe in launches
        if value is not None and probe is not None and 0 < value < math.inf and 0 < probe < math.inf
    ]


def _filled(groups: Iterable[list[T]]) -> list[list[T]]:
    return [group for group in groups if group]


def _spare(groups: Sequence[Sequence[object]]) -> int:
    """Launches beyond one of each group: what is left to tell a noise by."""
    return sum(len(group) - 1 for group in groups)
