"""How far launches of unchanged code scatter on a hardware class, from its baselines. Pure.

A case has few launches, its hardware class many: noise is pooled over the class. Imports neither torch nor
pytest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfsuite.baseline import Baseline
from perfsuite.metric import GATED, TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric
from perfsuite.probe_correction import Pair, corrected_noise, probe_exponent
from perfsuite.sequential import Noise, pooled_noise

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
    """Pool the launches of all baselines of one hardware class."""
    paired = [group for baseline in baselines if (group := _pairs(baseline))]
    exponent = probe_exponent(paired) if paired and len(paired) == len(baselines) else 0.0
    known = {}
    for metric in GATED:
        groups = [
            [metric.cost(value) for value in values]
            for baseline in baselines
            if len(values := baseline.values(metric.name)) > 1 and min(values) > 0
        ]
        if sum(len(group) - 1 for group in groups) < 2:
            continue
        if exponent and metric in PROBE_CORRECTED:
            known[metric.name] = corrected_noise([_pairs(b, metric) for b in baselines], exponent)
        else:
            known[metric.name] = pooled_noise(groups)
    return ClassNoise(by_metric=known, probe_exponent=exponent)


def _pairs(baseline: Baseline, metric: Metric = TOKENS_PER_S) -> list[Pair]:
    """Each launch's cost beside its probe; empty if a launch lacks either."""
    values, probes = baseline.values(metric.name), baseline.values("probe_s_p50")
    if len(probes) != len(baseline.launches) or len(values) != len(probes):
        return []
    return [(metric.cost(value), probe) for value, probe in zip(values, probes, strict=True)]
