"""Estimates how much launches of unchanged code scatter on a hardware class, from its baselines. Pure.

A case has few launches and its hardware class has many, so noise is pooled over all baselines of the class.
Two standard deviations are estimated, both of log(cost), so that they are relative (0.01 is 1 %):

    sigma          between launches of one session
    session_sigma  between sessions, of what all launches of a session share (the machine's day);
                   more launches in the same session do not reduce it

Source: analysis of variance. Each variance component is a mean square minus the part of it that the levels
below explain, and at least 0 (Searle, Casella, McCulloch, Variance Components, 1992, chapters 3 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeGuard, TypeVar

from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric, judged
from perfsuite.results.run import Figures
from perfsuite.verdict.probe_correction import Pair, probe_corrected, probe_exponent
from perfsuite.verdict.robust import location, sorted_logs
from perfsuite.verdict.sequential import Noise, pooled_noise

T = TypeVar("T")
LaunchesBySession = Mapping[str | None, Sequence[T]]
"""The launches of one baseline, by the session that made them. None is the name of a session without one."""

MIN_DEGREES = 2
"""Fewest degrees of freedom (launches minus groups) from which a noise is estimated."""
MIN_DEGREES_OF_EXPONENT = 20
"""Degrees of freedom from which an estimated probe exponent of 0 is believed."""
PROBE_CORRECTED = (TOKENS_PER_S, TOKENS_PER_S_MEAN)
"""Metrics that follow the machine's own speed, and are corrected by the probe."""
_UPPER_LIMIT = (40.4, 7.49, 4.33, 3.28, 2.77, 2.46, 2.25, 2.11, 2.0)
"""Upper 87.5 % confidence limit of a variance, as a multiple of its estimate, for 1, 2, ... degrees of
freedom: degrees / (0.125 quantile of chi-squared). The variance between sessions is multiplied by it, because
few sessions can agree by chance. The last factor is used from 9 degrees of freedom (10 sessions) on."""


@dataclass(frozen=True, kw_only=True)
class ClassNoise:
    """The noise of each metric on a hardware class, and how strongly speed follows the probe."""

    by_metric: Mapping[str, Noise] = field(default_factory=dict)
    """Noise by name of the metric. For the metrics in `PROBE_CORRECTED` it is the noise after correction,
    where the exponent is above 0. `session_sigma` is here the standard deviation of one session about the
    mean of all sessions; `against` makes it that of a new session against a baseline."""
    probe_exponent: float = 0.0
    """Exponent by which seconds per step follow the probe's seconds, 0 to 1. See `probe_correction`."""
    knows_exponent: bool = False
    """Whether there are enough launches to estimate the exponent: 0 then means that speed does not follow the
    probe."""
    uncorrected: Mapping[str, Noise] = field(default_factory=dict)
    """Noise of the corrected metrics without correction, for launches that have no probe."""

    def of(self, metric: Metric, *, corrected: bool = True) -> Noise | None:
        """Return the noise of a metric, or None if the baselines have too few launches to estimate it."""
        known = self.by_metric.get(metric.name)
        return known if corrected else self.uncorrected.get(metric.name, known)


def class_noise(baselines: Sequence[Baseline]) -> ClassNoise:
    """Pool the launches of all baselines of one hardware class.

    A launch counts for a metric only if it has a figure above 0 and finite.
    """
    probed = _nonempty(
        pairs((launch.figures for launch in baseline.launches), TOKENS_PER_S) for baseline in baselines
    )
    exponent = probe_exponent(probed)
    known, uncorrected = {}, {}
    for metric in judged(launch.figures for baseline in baselines for launch in baseline.launches):
        measured = pooled_over_sessions([_costs(baseline, metric) for baseline in baselines])
        if exponent and metric in PROBE_CORRECTED:
            costs = [_corrected_costs(baseline, metric, exponent) for baseline in baselines]
            corrected = pooled_over_sessions(costs, fitted=1)
            if corrected is not None:
                known[metric.name] = corrected
            if measured is not None:
                uncorrected[metric.name] = measured
        elif measured is not None:
            known[metric.name] = measured
    return ClassNoise(
        by_metric=known,
        probe_exponent=exponent,
        knows_exponent=exponent > 0 or _degrees(probed) >= MIN_DEGREES_OF_EXPONENT,
        uncorrected=uncorrected,
    )


def pooled_over_sessions(baselines: Sequence[LaunchesBySession[float]], *, fitted: int = 0) -> Noise | None:
    """Estimate the noise within sessions and between them, from the seconds per step of several baselines.

    Returns None with fewer than `MIN_DEGREES` degrees of freedom. `fitted` is the number of parameters
    already fitted to these launches. Where most sessions have one launch, the noise between sessions cannot
    be separated from the noise within them; the total is then used for both.
    """
    by_session = [launches for baseline in baselines for launches in baseline.values()]
    by_baseline = _nonempty(
        [seconds for launches in baseline.values() for seconds in launches] for baseline in baselines
    )
    degrees, degrees_within = (_degrees(groups) - fitted for groups in (by_baseline, by_session))
    if degrees < MIN_DEGREES:
        return None
    separable = 2 * degrees_within >= max(degrees, 2 * MIN_DEGREES)
    noise = pooled_noise(by_session if separable else by_baseline, fitted=fitted)
    return replace(noise, session_sigma=_between_sessions(baselines, noise.sigma if separable else 0.0))


def _between_sessions(baselines: Sequence[LaunchesBySession[float]], sigma: float) -> float:
    """Return the standard deviation between sessions, at its upper limit; 0 if no baseline has two sessions.

    `sigma` is the noise within sessions, 0 if unknown. Cases measured in the same sessions share one session
    effect, so they count once: the degrees of freedom are sessions - 1, not cases x (sessions - 1). What
    varies between sessions for one case alone is added without the factor.
    """
    cases_of: dict[frozenset[str | None], list[LaunchesBySession[float]]] = {}
    for baseline in baselines:
        if len(baseline) > 1:
            cases_of.setdefault(frozenset(baseline), []).append(baseline)
    if not cases_of:
        return 0.0
    weights = [len(sessions) - 1 for sessions in cases_of]
    components = [_components(cases, sigma) for cases in cases_of.values()]
    observed, explained, per_case = (
        sum(weight * variance for weight, variance in zip(weights, column, strict=True)) / sum(weights)
        for column in zip(*components, strict=True)
    )
    sessions = frozenset[str | None]().union(*cases_of)
    degrees = min(sum(weights), len(sessions) - 1)
    limit = _UPPER_LIMIT[min(degrees, len(_UPPER_LIMIT)) - 1]
    return math.sqrt(max(observed, explained) * limit - explained + per_case)


def _components(cases: Sequence[LaunchesBySession[float]], sigma: float) -> tuple[float, float, float]:
    """Return three variances between sessions that all these cases were measured in.

    They are: of the mean of the cases (observed); the part of it that the noise of launches and of cases is
    expected to make; and of one case beyond both, the excess that each case has for itself.
    """
    rows = []  # a row for each case: its deviation in each session from its own mean
    for case in cases:
        means = [location(sorted_logs("session", case[name]), sigma or math.inf) for name in cases[0]]
        rows.append([mean - fmean(means) for mean in means])
    degrees = len(cases[0]) - 1
    shared = [fmean(column) for column in zip(*rows, strict=True)]
    residual = sum((value - common) ** 2 for row in rows for value, common in zip(row, shared, strict=True))
    of_one_case = residual / (degrees * (len(cases) - 1)) if len(cases) > 1 else 0.0
    of_launches = sigma**2 * fmean(1 / len(launches) for case in cases for launches in case.values())
    observed = sum(common**2 for common in shared) / degrees
    return observed, max(of_one_case, of_launches) / len(cases), max(of_one_case - of_launches, 0.0)


def against(noise: Noise, session_sizes: Iterable[int]) -> Noise:
    """Return the noise of a new session against a baseline with these numbers of launches per session.

    The mean of a baseline with n_i launches in session i has variance sum(n_i^2) / (sum n_i)^2 times the
    variance between sessions; with S sessions of equal size `session_sigma` grows by sqrt(1 + 1/S).
    """
    sizes = list(session_sizes)
    share = sum(size**2 for size in sizes) / sum(sizes) ** 2
    return replace(noise, session_sigma=noise.session_sigma * math.sqrt(1 + share))


def _costs(baseline: Baseline, metric: Metric) -> dict[str | None, list[float]]:
    values = [(session, metric.of(launch.figures)) for session, launch in baseline.by_session()]
    return _by_session((session, metric.cost(value)) for session, value in values if is_size(value))


def _corrected_costs(baseline: Baseline, metric: Metric, exponent: float) -> dict[str | None, list[float]]:
    """Return the costs at the baseline's typical probe speed, by session; launches without a probe are
    out."""
    launches = [
        (session, pair)
        for session, launch in baseline.by_session()
        for pair in pairs([launch.figures], metric)
    ]
    if not launches:
        return {}
    measured = [pair for _, pair in launches]
    costs = probe_corrected(measured, measured, exponent=exponent).baseline
    return _by_session(zip((session for session, _ in launches), costs, strict=True))


def _by_session(launches: Iterable[tuple[str | None, float]]) -> dict[str | None, list[float]]:
    groups: dict[str | None, list[float]] = {}
    for session, cost in launches:
        groups.setdefault(session, []).append(cost)
    return groups


def is_size(value: float | None) -> TypeGuard[float]:
    """Tell whether a figure can be a measured size: present, above 0 and finite."""
    return value is not None and 0 < value < math.inf


def pairs(launches: Iterable[Figures], metric: Metric) -> list[Pair]:
    """Pair each launch's cost with its probe, both in seconds; leave out launches that lack either."""
    values = [(metric.of(figures), figures.probe_s_p50) for figures in launches]
    return [(metric.cost(value), probe) for value, probe in values if is_size(value) and is_size(probe)]


def _nonempty(groups: Iterable[list[T]]) -> list[list[T]]:
    return [group for group in groups if group]


def _degrees(groups: Sequence[Sequence[object]]) -> int:
    """Count degrees of freedom: launches minus groups, because each group's own mean is estimated."""
    return sum(len(group) - 1 for group in groups)
