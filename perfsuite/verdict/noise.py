"""Use the baselines of a hardware class to estimate how much launches of unchanged code scatter. Pure.

The noise is described by two numbers. Both are standard deviations of log(cost), so 0.01 means about 1% of
the cost. `sigma` is the standard deviation between launches of one session. `session_sigma` is the standard
deviation of the shift that all launches of a session have in common. In addition, `of_case` is the variance
of a further shift, which each case of a session has on its own.

A probe is a fixed piece of work that is timed between the steps of a launch. The probe is used to remove the
drift of the machine: if the machine slows down both steps and probe, seconds / probe_seconds**exponent
scatters less than seconds. The exponent is the least-squares slope of log(seconds) on log(probe_seconds),
shrunk towards 0 like Stein's positive-part estimator (James and Stein 1961; here F replaces chi-squared).
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeGuard

from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric, judged_metrics
from perfsuite.results.run import Figures
from perfsuite.verdict.robust import location, sorted_logs
from perfsuite.verdict.sequential import Noise, pooled_noise
from perfsuite.verdict.variance import TABULATED, Component, pooled, upper_limit

Pair = tuple[float, float]  # seconds per step of a launch, and the seconds of its probe
# The costs of one baseline's launches, by name of the session that made them; None: a session without a name.
LaunchesBySession = Mapping[str | None, Sequence[float]]
# The baselines of cases that have the same sessions, by the names of these sessions.
CasesBySessions = Mapping[frozenset[str | None], Sequence[LaunchesBySession]]

MIN_DEGREES = 2  # minimum degrees of freedom (launches minus groups) for estimating a noise
MIN_DEGREES_OF_EXPONENT = 20  # minimum degrees of freedom at which an estimated exponent of 0 is trusted
PROBE_CORRECTED = (TOKENS_PER_S, TOKENS_PER_S_MEAN)  # metrics that follow the machine's speed


@dataclass(frozen=True, kw_only=True)
class ClassNoise:
    """The noise of each metric on a hardware class, and how strongly the speed follows the probe."""

    by_metric: Mapping[str, Noise] = field(default_factory=dict)
    """Noise by name of the metric. If the exponent is above 0, the noise of the metrics in `PROBE_CORRECTED`
    is the noise after correction. Here, `session_sigma` is the standard deviation of one session about the
    mean of all sessions. `against` converts it to the standard deviation of a new session against a
    baseline."""
    # Exponent e from 0 to 1: the seconds per step are about proportional to (seconds of the probe)^e.
    probe_exponent: float = 0.0
    # Whether there are enough launches to estimate the exponent. If so, an exponent of 0 means that the speed
    # does not follow the probe.
    knows_exponent: bool = False
    uncorrected: Mapping[str, Noise] = field(default_factory=dict)
    """Noise of the corrected metrics before correction, for launches without a probe."""

    def of(self, metric: Metric, *, corrected: bool = True) -> Noise | None:
        """Return the noise of a metric; None if the baselines have too few launches to estimate it."""
        noise = self.by_metric.get(metric.name)
        return noise if corrected else self.uncorrected.get(metric.name, noise)


def class_noise(baselines: Sequence[Baseline], nights: Sequence[Baseline] = ()) -> ClassNoise:
    """Estimate the noise from the launches of all baselines of one hardware class.

    `nights` has the launches of later sessions that ran the code of the baselines. These launches improve
    only two estimates: the noise between sessions, and the noise of a case within a session.
    """
    by_baseline = [[launch.figures for launch in baseline.launches] for baseline in baselines]
    groups = (pairs(figures, TOKENS_PER_S) for figures in by_baseline)
    probed = [group for group in groups if group]
    exponent = probe_exponent(probed)
    by_metric = {}
    uncorrected = {}
    for metric in judged_metrics(itertools.chain(*by_baseline)):
        noise = measured = pooled_over_sessions(
            [costs_by_session(baseline, metric) for baseline in baselines],
            nights=[costs_by_session(night, metric) for night in nights],
        )
        if exponent and metric in PROBE_CORRECTED:
            noise = pooled_over_sessions(
                [costs_by_session(baseline, metric, exponent) for baseline in baselines],
                nights=[costs_by_session(night, metric, exponent) for night in nights],
                fitted=1,
            )
            if measured is not None:
                uncorrected[metric.name] = measured
        if noise is not None:
            by_metric[metric.name] = noise
    return ClassNoise(
        by_metric=by_metric,
        probe_exponent=exponent,
        knows_exponent=exponent > 0 or _degrees(probed) >= MIN_DEGREES_OF_EXPONENT,
        uncorrected=uncorrected,
    )


def pooled_over_sessions(
    baselines: Sequence[LaunchesBySession], *, nights: Sequence[LaunchesBySession] = (), fitted: int = 0
) -> Noise | None:
    """Estimate the noise within and between sessions, from the seconds per step of several baselines.

    Returns None with fewer than `MIN_DEGREES` degrees of freedom. `fitted` is the number of parameters
    already fitted to these launches. If most sessions have only one launch, the noise between sessions cannot
    be separated from the noise within sessions. In that case, the total noise is used for both.

    `nights` are further sessions of the same cases. They are compared with each other, and not with the
    baselines. Because many of them have one launch per case, the noise within sessions is not estimated from
    them.
    """
    by_session = [launches for baseline in baselines for launches in baseline.values()]
    by_baseline = [[*itertools.chain(*baseline.values())] for baseline in baselines if baseline]
    degrees, degrees_within = (_degrees(groups) - fitted for groups in (by_baseline, by_session))
    if degrees < MIN_DEGREES:
        return None
    separable = 2 * degrees_within >= max(degrees, 2 * MIN_DEGREES)
    noise = pooled_noise(by_session if separable else by_baseline, fitted=fitted)
    sigma = noise.sigma if separable else 0.0
    cases_of = _by_sessions([*baselines, *(nights if separable else ())])
    of_session, per_case = _of_sessions(cases_of, sigma)
    return replace(
        noise,
        session_sigma=_between_sessions(of_session, per_case),
        of_session=of_session,
        of_case=_of_a_case(cases_of, sigma),
    )


def _by_sessions(baselines: Sequence[LaunchesBySession]) -> CasesBySessions:
    """Group the baselines with two sessions or more by the names of their sessions."""
    cases_of: dict[frozenset[str | None], list[LaunchesBySession]] = {}
    for baseline in baselines:
        if len(baseline) > 1:
            cases_of.setdefault(frozenset(baseline), []).append(baseline)
    return cases_of


def _of_sessions(cases_of: CasesBySessions, sigma: float) -> tuple[Component | None, float]:
    """Estimate the noise between sessions, and the additional variance of a single case.

    `sigma` is the noise within sessions, or 0 if unknown. Cases of the same sessions have one session effect
    in common, so the degrees of freedom are sessions - 1, not cases x (sessions - 1). The estimate is None if
    no baseline has two sessions. If no two cases have the same sessions, the estimate includes the noise of a
    case within a session.
    """
    if not cases_of:
        return None, 0.0
    weights = [len(sessions) - 1 for sessions in cases_of]
    components = [_components(cases, sigma) for cases in cases_of.values()]
    observed, explained, per_case = (
        sum(weight * variance for weight, variance in zip(weights, column, strict=True)) / sum(weights)
        for column in zip(*components, strict=True)
    )
    sessions = frozenset[str | None]().union(*cases_of)
    degrees = min(sum(weights), len(sessions) - 1)
    return Component(observed=observed, explained=explained, degrees=degrees), per_case


def _between_sessions(of_session: Component | None, per_case: float) -> float:
    """Return an upper limit of the standard deviation of a case between sessions; 0 if it is unknown.

    `of_session` is the variance that the cases of a session have in common. Its upper confidence limit is
    used. `per_case` is the additional variance of a single case.
    """
    if of_session is None:
        return 0.0
    explained = of_session.explained
    limit = upper_limit(min(of_session.degrees, TABULATED))
    return math.sqrt(max(of_session.observed, explained) * limit - explained + per_case)


def _of_a_case(cases_of: CasesBySessions, sigma: float) -> Component | None:
    """Estimate the noise of a case within a session: a shift that no other case of the session shares.

    Each case has a mean in each session, and these means scatter. The noise is the part of this scatter that
    neither the effect of the case nor the effect of the session explains. Returns None if no two cases have
    the same sessions.
    """
    return pooled(
        Component(
            observed=_residual(rows, _shared(rows)),
            explained=_of_launches(cases, sigma),
            degrees=(len(cases[0]) - 1) * (len(rows) - 1),
        )
        for cases in cases_of.values()
        for rows in [_deviations(cases, sigma)]
        if len(rows) > 1
    )


def _components(cases: Sequence[LaunchesBySession], sigma: float) -> tuple[float, float, float]:
    """Return three variances.

    The first is the observed variance between sessions. The second is the part of the first that other noise
    is expected to cause. The third is the additional variance of a single case, which neither its sessions
    nor its launches explain.
    """
    rows = _deviations(cases, sigma)
    shared = _shared(rows)
    # pragma: no mutate 0.0 to -1.0: a variance below 0 counts as 0
    of_one_case = _residual(rows, shared) if len(cases) > 1 else 0.0
    of_launches = _of_launches(cases, sigma)
    observed = sum(common**2 for common in shared) / (len(shared) - 1)
    return observed, max(of_one_case, of_launches) / len(cases), max(of_one_case - of_launches, 0.0)


def _deviations(cases: Sequence[LaunchesBySession], sigma: float) -> list[list[float]]:
    """Return, for each case, the deviation of each session from the mean of the case."""
    rows = []
    for case in cases:
        # pragma: no mutate [0] to [-1]: all cases have the same sessions, and their order does not matter
        means = [location(sorted_logs(case[name]), sigma or math.inf) for name in cases[0]]
        rows.append([mean - fmean(means) for mean in means])
    return rows


def _shared(rows: list[list[float]]) -> list[float]:
    """Return, for each session, the deviation that its cases have in common."""
    return [fmean(column) for column in zip(*rows, strict=True)]


def _residual(rows: list[list[float]], shared: list[float]) -> float:
    """Return the mean square of the deviations that the sessions do not explain, for two cases or more."""
    # pragma: no mutate True: `shared` has one entry for each entry of a row
    squares = [(value - common) ** 2 for row in rows for value, common in zip(row, shared, strict=True)]
    return sum(squares) / ((len(shared) - 1) * (len(rows) - 1))


def _of_launches(cases: Sequence[LaunchesBySession], sigma: float) -> float:
    """Return the variance that launches add to the mean of a case in a session."""
    return sigma**2 * fmean(1 / len(launches) for case in cases for launches in case.values())


def against(noise: Noise, session_sizes: Iterable[float]) -> Noise:
    """Return the noise of a new session against a baseline.

    `session_sizes` are the numbers (or shares) of the baseline's launches in each session. The mean of a
    baseline with n_i launches in session i has variance sum(n_i^2) / (sum n_i)^2 times the variance between
    sessions. With S sessions of equal size, `session_sigma` grows by the factor sqrt(1 + 1/S).
    """
    sizes = list(session_sizes)
    share = sum(size**2 for size in sizes) / sum(sizes) ** 2
    return replace(noise, session_sigma=noise.session_sigma * math.sqrt(1 + share))


def at_one_level(launches: LaunchesBySession, sigma: float) -> list[float]:
    """Return a baseline's costs as if its sessions did not differ. The mean of all launches stays the same.

    The noise between sessions is already in `Noise.session_sigma`. If the costs of a baseline contained this
    noise too, the test would mistake it for noise between launches. The deviations of launches from the mean
    of their session are scaled up, because the mean was computed from the same launches. A launch that is
    alone in its session is not changed. `sigma` is the noise between launches.
    """
    logs = [sorted_logs(session) for session in launches.values()]
    means = [location(session, sigma) for session in logs]
    total = sum(map(len, logs))
    level = sum(mean * len(session) for mean, session in zip(means, logs, strict=True)) / total
    costs = []
    for session, mean in zip(logs, means, strict=True):
        if len(session) == 1 or len(logs) == 1:
            costs += [math.exp(log) for log in session]
        else:
            scale = math.sqrt(len(session) / (len(session) - 1))
            costs += [math.exp(level + scale * (log - mean)) for log in session]
    return costs


def costs_by_session(
    baseline: Baseline, metric: Metric, exponent: float = 0.0
) -> dict[str | None, list[float]]:
    """Return the costs of a baseline's launches, by session.

    With an exponent, the costs are corrected with the probe, and launches without a probe are left out.
    """
    metric = metric.against(launch.figures for launch in baseline.launches)
    kept = []
    for session, launch in baseline.by_session():
        value = metric.of(launch.figures)
        probe = launch.figures.probe_s_p50 if exponent else 1.0
        if is_size(value) and is_size(probe):
            kept.append((session, (metric.cost(value), probe)))
    measured = [pair for _, pair in kept]
    groups: dict[str | None, list[float]] = {}
    for session, pair in kept:
        groups.setdefault(session, []).extend(probe_corrected([pair], measured, exponent))
    return groups


def is_size(value: float | None) -> TypeGuard[float]:
    """Return whether a value can be a measured size: not None, above 0 and finite."""
    return value is not None and 0 < value < math.inf


def pairs(launches: Iterable[Figures], metric: Metric) -> list[Pair]:
    """Pair the cost of each launch with its probe, in seconds. Leave out launches that lack either."""
    values = [(metric.of(figures), figures.probe_s_p50) for figures in launches]
    return [(metric.cost(value), probe) for value, probe in values if is_size(value) and is_size(probe)]


def _degrees(groups: Sequence[Sequence[object]]) -> int:
    return sum(len(group) - 1 for group in groups)


def probe_corrected(launches: Sequence[Pair], baseline: Sequence[Pair], exponent: float) -> list[float]:
    """Return seconds at the baseline's usual speed: seconds x (median baseline probe / probe)^exponent.

    `exponent` (0 to 1) should be estimated from all baselines of the hardware class (`probe_exponent`), and
    never from today's launches.
    """
    typical = math.exp(median(math.log(probe) for _, probe in baseline))
    return [seconds * (typical / probe) ** exponent for seconds, probe in launches]


def probe_exponent(groups: Sequence[Sequence[Pair]]) -> float:
    """Estimate from one or more baselines how strongly launches follow their probe: 0 to 1.

    The least-squares slope is multiplied by max(0, 1 - E[F] / F). F is the squared t statistic of the slope.
    With d residual degrees of freedom, E[F] = d / (d - 2) is the expectation of F if there is no relation.
    The result is 0 if d is below 3, or if a correction with the reduced slope would not lower the clipped
    noise of the launches. Five launches with unrelated probes give an exponent above 0 about 7 times in 100.
    """
    y, x = ([log for group in groups for log in _centred_logs(group, of)] for of in (0, 1))
    exponent = shrunk_slope(x, y, len(y) - len(groups) - 1)
    if not exponent:
        return 0.0
    measured = pooled_noise([[launch for launch, _ in group] for group in groups])
    corrected = pooled_noise([probe_corrected(group, group, exponent) for group in groups], fitted=1)
    return exponent if corrected.sigma < measured.sigma else 0.0


def shrunk_slope(x: Sequence[float], y: Sequence[float], degrees: float) -> float:
    """Return the slope of y on x (0 to 1), shrunk as in `probe_exponent`. x and y must have mean 0."""
    shared = sum(a * b for a, b in zip(x, y, strict=True))
    if degrees < 3 or shared <= 0:
        return 0.0
    slope = shared / sum(a * a for a in x)
    explained = slope * shared
    # pragma: no mutate 0.0 to -1.0: only a rounding error is below 0
    residual = max(sum(b * b for b in y) - explained, 0.0)
    by_chance = residual / (degrees - 2)
    return min(1.0, slope * max(0.0, 1 - by_chance / explained))


def _centred_logs(group: Sequence[Pair], of: int) -> list[float]:
    logs = [math.log(launch[of]) for launch in group]
    mean = sum(logs) / len(logs)
    return [value - mean for value in logs]
