"""How far launches of unchanged code scatter on a hardware class, from its baselines. Pure.

A case has few launches, its hardware class many: noise is pooled over the class. What the launches of one
session share (the machine's day) is apart from it: no number of launches of that session averages it away.
Imports neither torch nor pytest.

Source: variances between sessions, and of cases within them, as mean squares less what lies beneath them
explains, never below 0 (Searle, Casella, McCulloch, Variance Components, 1992, chapters 3 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeGuard, TypeVar

from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import GATED, TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric
from perfsuite.results.run import Figures
from perfsuite.verdict.probe_correction import Pair, probe_corrected, probe_exponent
from perfsuite.verdict.robust import location, sorted_logs
from perfsuite.verdict.sequential import Noise, pooled_noise

T = TypeVar("T")
Sessions = Mapping[str | None, Sequence[T]]
"""The launches of one baseline by the session that they are of."""

MIN_SPARE = 2
"""Launches beyond one for each baseline, without which nothing is said of the noise."""
MIN_FOR_EXPONENT = 20
"""Launches beyond one for each baseline, from which on an exponent of 0 is believed."""
PROBE_CORRECTED = (TOKENS_PER_S, TOKENS_PER_S_MEAN)
"""Metrics that follow the machine's own speed."""
_WIDENED = (40.4, 7.49, 4.33, 3.28, 2.77, 2.46, 2.25, 2.11, 2.0)
"""Upper 87.5 % confidence limit of a variance from 1, 2, ... degrees of freedom, over its estimate: degrees /
quantile of chi-squared at 0.125. The variance between sessions is taken to be that large, as a few may agree
by chance; from 10 sessions on the last one holds."""


@dataclass(frozen=True, kw_only=True)
class ClassNoise:
    """The noise of each metric between launches, and how strongly speed follows the probe."""

    by_metric: Mapping[str, Noise] = field(default_factory=dict)
    """Of the metrics in `PROBE_CORRECTED` as corrected, where the exponent is above 0. Their `session_sigma`
    is that of one session about the mean of all: see `against`."""
    probe_exponent: float = 0.0
    knows_exponent: bool = False
    """Whether there are launches enough to tell: 0 then says that speed does not follow the probe."""
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
        measured = pooled_over_sessions([_costs(baseline, metric) for baseline in baselines])
        if exponent and metric in PROBE_CORRECTED:
            paired = [_corrected(baseline, metric, exponent) for baseline in baselines]
            corrected = pooled_over_sessions(paired, fitted=1)
            if corrected is not None:
                known[metric.name] = corrected
            if measured is not None:
                uncorrected[metric.name] = measured
        elif measured is not None:
            known[metric.name] = measured
    probed = _filled(_pairs(baseline, TOKENS_PER_S) for baseline in baselines)
    enough = _spare(probed) >= MIN_FOR_EXPONENT
    return ClassNoise(
        by_metric=known,
        probe_exponent=exponent,
        knows_exponent=exponent > 0 or enough,
        uncorrected=uncorrected,
    )


def pooled_over_sessions(baselines: Sequence[Sessions[float]], *, fitted: int = 0) -> Noise | None:
    """Noise within sessions and between them, from the seconds per step of several baselines' launches.

    None if too few launches tell it. `fitted` as in `pooled_noise`. Where most sessions have one launch, what
    is between sessions cannot be told from what is within: it then counts as both.
    """
    within = [launches for held in baselines for launches in held.values()]
    whole = _filled([value for launches in held.values() for value in launches] for held in baselines)
    if _spare(whole) - fitted < MIN_SPARE:
        return None
    told_apart = 2 * (_spare(within) - fitted) >= max(_spare(whole) - fitted, 2 * MIN_SPARE)
    noise = pooled_noise(within if told_apart else whole, fitted=fitted)
    return replace(noise, session_sigma=_between_sessions(baselines, noise.sigma, told_apart=told_apart))


def _between_sessions(baselines: Sequence[Sessions[float]], sigma: float, *, told_apart: bool) -> float:
    """Standard deviation between sessions, widened for their small number; 0 where no baseline has two.

    Cases measured in the same sessions share what those were like: together they tell that well, but as one
    witness of so many sessions, however many cases they are. What a case has for itself comes on top.
    """
    together: dict[frozenset[str | None], list[Sessions[float]]] = {}
    for held in baselines:
        if len(held) > 1:
            together.setdefault(frozenset(held), []).append(held)
    if not together:
        return 0.0
    spare = [len(sessions) - 1 for sessions in together]
    parts = [_components(cases, sigma if told_apart else 0.0) for cases in together.values()]
    shared, by_chance, own = (
        sum(weight * part for weight, part in zip(spare, column, strict=True)) / sum(spare)
        for column in zip(*parts, strict=True)
    )
    degrees = min(sum(spare), len(frozenset[str | None]().union(*together)) - 1)
    return math.sqrt(max(shared, by_chance) * _WIDENED[min(degrees, len(_WIDENED)) - 1] - by_chance + own)


def _components(cases: Sequence[Sessions[float]], sigma: float) -> tuple[float, float, float]:
    """Variances between the sessions that some cases have in common.

    Observed in the mean of the cases, what of that the noise of launches and cases explains, and between the
    sessions of one case beyond what the mean of the cases and the noise of launches explain.
    """
    rows = []
    for held in cases:
        means = [location(sorted_logs("session", held[name]), sigma or math.inf) for name in cases[0]]
        rows.append([mean - fmean(means) for mean in means])
    spare = len(cases[0]) - 1
    shared = [fmean(column) for column in zip(*rows, strict=True)]
    left = sum((value - common) ** 2 for row in rows for value, common in zip(row, shared, strict=True))
    apart = left / (spare * (len(cases) - 1)) if len(cases) > 1 else 0.0
    launches = sigma**2 * fmean(1 / len(each) for held in cases for each in held.values())
    observed = sum(common**2 for common in shared) / spare
    return observed, max(apart, launches) / len(cases), max(apart - launches, 0.0)


def against(noise: Noise, launches: Iterable[int]) -> Noise:
    """The class's noise, for a new session against a baseline with so many launches of each of its sessions.

    S sessions of equal size make `session_sigma` sqrt(1 + 1/S) times what it is between sessions.
    """
    counts = list(launches)
    share = sum(count**2 for count in counts) / sum(counts) ** 2
    return replace(noise, session_sigma=noise.session_sigma * math.sqrt(1 + share))


def _costs(baseline: Baseline, metric: Metric) -> dict[str | None, list[float]]:
    told = [(launch.session, getattr(launch.figures, metric.name)) for launch in baseline.launches]
    return _by_session((session, metric.cost(value)) for session, value in told if is_size(value))


def _corrected(baseline: Baseline, metric: Metric, exponent: float) -> dict[str | None, list[float]]:
    """The costs at the machine speed that is typical of the baseline."""
    paired = [
        (launch.session, pair) for launch in baseline.launches for pair in pairs([launch.figures], metric)
    ]
    if not paired:
        return {}
    both = [pair for _, pair in paired]
    costs = probe_corrected(both, both, exponent=exponent).baseline
    return _by_session(zip((session for session, _ in paired), costs, strict=True))


def _by_session(launches: Iterable[tuple[str | None, float]]) -> dict[str | None, list[float]]:
    held: dict[str | None, list[float]] = {}
    for session, cost in launches:
        held.setdefault(session, []).append(cost)
    return held


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
