"""Find changes of level in a history: their time, size and commits, and other changes at the same time."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.features.history import changepoint, store
from perfsuite.features.history.store import Place, StoredReference, StoredResult, StoredSession
from perfsuite.inputs import git
from perfsuite.inputs.ini import BASELINES
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import Metric
from perfsuite.results.store import BaselineStore
from perfsuite.results.trend import METRICS, Drift, MachineStep, MetricName, Trend

# Without `since`, the changes of the last 90 days are reported. The period is long, because a slow change is
# found only weeks after it began.
PERIOD = timedelta(days=90)
MIN_CHANGE = 0.005  # smallest relative change that is reported
MIN_FOR_CORRELATION = 30  # minimum number of sessions in a series to estimate the correlation of neighbours
NEAR = 5  # the measured size of a change is computed from this many sessions on each side of it
UNKNOWN_CORRELATION: Mapping[MetricName, float] = {"tokens/s": 0.3, "samples/s": 0.3, "peak memory": 0.0}
"""Assumed correlation of neighbouring sessions in a series of fewer than 30 sessions.

It is 0.3 for speed, because a machine has good and bad weeks, and 0 for memory. Suppose that the true
correlation is 0.7 (AR(1)): if perfsuite assumed 0, 18% of series would have a false alarm in their first
month. If it assumes 0.3, only 1% have a false alarm. The price is that a change of 5% at 1% noise is found
after 8 nights instead of 3.
"""


class Point(NamedTuple):
    """The value of a metric in one session."""

    value: float
    place: Place
    circumstances: Mapping[str, str]  # name -> value of a setting or version that could explain a change
    shift: float = 0.0  # logarithm of how much slower the machine was; 0 for metrics that do not depend on it

    @property
    def corrected(self) -> float:
        """The value that the case would have if the machine had not changed."""
        return self.value * math.exp(self.shift)


class Key(NamedTuple):
    """The metric, the case and the hardware class of a series."""

    hardware_class: str
    case: str
    metric: MetricName


Series = Mapping[Key, Sequence[Point]]
"""The points of each series. Sessions without the metric are left out; empty series are included."""

References = Mapping[str, Sequence[Point]]
"""The speeds of the reference on each hardware class, in order of time. The first speed is 1."""

Correlations = Mapping[tuple[str, MetricName], float]
"""The correlation of neighbouring sessions, by hardware class and metric."""


def trend(
    directory: Path,
    *,
    hardware_class: str = "*",
    case: str = "*",
    since: date | None = None,
    repo: Path | None = None,
    branch: str = "",
    baselines: Path = BASELINES,
    period: timedelta = PERIOD,
) -> Trend:
    """Find the changes since a day.

    By default, these are the changes in the 90 days before the newest session, and older changes that are
    still open. `since` limits only the report: the whole history is used as evidence. `baselines` is the
    directory of the reviewed baselines, which show whether a regression was accepted. Raises `FileError` and
    `GitError`.
    """
    places = store.places(directory, hardware_class=hardware_class)
    # The history can be empty, for example because the first night had no result that could be kept.
    if not places and not store.places(directory):
        return Trend(since=since or datetime.now(UTC).date(), sessions=0, series=0, findings=(), unplaced={})
    if not places:
        raise FileError(f"{directory} has no session on {hardware_class}")
    sessions = read(places, directory, repo=repo, branch=branch)
    wanted = {sessions.cases[name].id for name in store.matching(sessions.cases, case)}
    if not any(key.case in wanted for key in sessions.series):
        raise store.no_case(directory, case)
    return changes(sessions, cases=wanted, since=since, baselines=baselines, period=period)


class Sessions(NamedTuple):
    """The sessions of a history, and their series."""

    places: Sequence[Place]  # in the order of commits or, without a repository, of time
    order: Mapping[str, int]  # commit -> its position on the branch; empty without a repository
    unplaced: Mapping[str, str]  # commit whose sessions are left out -> the reason
    newest: date  # day of the newest session, even if its commit is not on the branch
    cases: Mapping[str, store.StoredCase]
    series: Series
    references: References


def read(places: Sequence[Place], directory: Path, *, repo: Path | None = None, branch: str = "") -> Sessions:
    """Read the sessions at these places of a history. At least one place is required.

    With a repository, only sessions whose commit is on `branch` are read (default: the branch that is checked
    out). Raises `FileError` and `GitError`.
    """
    newest = _day(places[-1])
    order: dict[str, int] = {}
    unplaced: dict[str, str] = {}
    if repo is not None:
        branch = branch or git.current_branch(repo)
        places, dates, unplaced = store.on_branch(places, directory, repo, branch)
        order = {commit: number for number, commit in enumerate(dates)}
        places.sort(key=lambda place: order[place.commit])  # sessions of one commit stay sorted by time
    cases = store.read_cases(directory)
    stored = [(place, place.read(cases)) for place in places]
    references, shifts = _machines(stored)
    return Sessions(places, order, unplaced, newest, cases, _series(stored, cases, shifts), references)


def changes(
    sessions: Sessions,
    *,
    cases: Collection[str] | None = None,
    since: date | None = None,
    baselines: Path = BASELINES,
    period: timedelta = PERIOD,
) -> Trend:
    """Find changes as `trend` does, in the series of the cases with these ids (default: all cases)."""
    series = sessions.series
    if cases is not None:
        series = {key: points for key, points in series.items() if key.case in cases}
    from_day = since or sessions.newest - period
    measured = correlations(sessions.series)
    judge = partial(
        _findings,
        order=sessions.order,
        baselines=BaselineStore(baselines),
        measured_since=_day(sessions.places[-1]) - period,
    )
    findings = [
        finding
        for key, points in series.items()
        for finding in judge(key, points, correlation=correlation_of(key, measured))
    ]
    reported = [
        finding for finding in findings if finding.last_day >= from_day or (since is None and finding.open)
    ]
    return Trend(
        since=from_day,
        sessions=len(sessions.places),
        series=len(series),
        findings=tuple(sorted(reported, key=lambda finding: -finding.worsening)),
        machine=tuple(machine_steps(sessions.references, from_day)),
        unplaced=dict(sessions.unplaced),
    )


def _machines(stored: Sequence[tuple[Place, StoredSession]]) -> tuple[References, Mapping[Path, float]]:
    """Return the speed of the reference on each hardware class and, by file, the shift of each session.

    The shift is the logarithm of how much slower the machine was than in its first session with a reference.

    After new baselines are accepted, the reference is compared with the new baselines. perfsuite then assumes
    that the machine did not change between the last session with the old baselines and the first session with
    the new ones. A session without a reference gets the shift of the session before it.
    """
    by_class = defaultdict[str, list[tuple[Place, StoredSession]]](list)
    for place, session in sorted(stored, key=lambda entry: entry[0].file.name):
        by_class[place.hardware_class].append((place, session))
    references = dict[str, list[Point]]()
    shifts = dict[Path, float]()
    for hardware_class, sessions in by_class.items():
        shift = 0.0
        offset = 0.0
        before: StoredReference | None = None
        points = []
        for place, session in sessions:
            reference = session.reference
            if reference is not None:
                slower = -math.log1p(reference.change)
                if before is None or not before.is_comparable(reference):
                    offset = shift - slower
                shift = slower + offset
                before = reference
                points.append(Point(math.exp(-shift), place, _of_machine(session)))
            shifts[place.file] = shift
        if points:
            references[hardware_class] = points
    return references, shifts


def _series(
    stored: Sequence[tuple[Place, StoredSession]],
    cases: Mapping[str, store.StoredCase],
    shifts: Mapping[Path, float],
) -> Series:
    series = defaultdict[Key, list[Point]](list)
    distinct: dict[frozenset[tuple[str, str]], Mapping[str, str]] = {}
    for place, session in stored:
        for result in session.results:
            case = cases[result.case]
            around = _circumstances(session, result)
            around = distinct.setdefault(frozenset(around.items()), around)
            step_s = store.middle(result.step_s_p50)
            figures: dict[MetricName, float | None] = {
                "samples/s" if case.unit == "samples" else "tokens/s": (
                    result.tokens_per_step / step_s if step_s and result.tokens_per_step else None
                ),
                "peak memory": store.middle(result.peak_memory_bytes),
            }
            for metric, value in figures.items():
                points = series[Key(place.hardware_class, case.id, metric)]
                shift = 0.0 if metric == "peak memory" else shifts[place.file]
                points += [] if value is None else [Point(value, place, around, shift)]
    return series


def _circumstances(session: StoredSession, result: StoredResult) -> Mapping[str, str]:
    return {
        **session.environments[result.environment],
        **session.settings[result.settings],
        **_of_machine(session),
        "perfsuite": session.perfsuite,
        "case definition": result.case.rpartition(".")[2],
    }


def _of_machine(session: StoredSession) -> Mapping[str, str]:
    machine = session.machine
    return {"driver": machine.driver or "none", "device": f"{machine.devices} x {machine.device_name}"}


def correlations(series: Series) -> Correlations:
    """Estimate the correlation of neighbouring sessions for each hardware class and metric.

    The correlation is a property of the machine, so the median over the series of all cases is used.
    """
    estimates = defaultdict[tuple[str, MetricName], list[float]](list)
    for key, points in series.items():
        if len(points) >= MIN_FOR_CORRELATION:
            estimate = changepoint.correlation([point.corrected for point in points])
            estimates[key.hardware_class, key.metric].append(estimate)
    return {key: median(values) for key, values in estimates.items()}


def correlation_of(key: Key, measured: Correlations) -> float:
    """Return the measured correlation of neighbouring sessions in a series, or the assumed one."""
    return measured.get((key.hardware_class, key.metric), UNKNOWN_CORRELATION[key.metric])


def _findings(
    key: Key,
    points: Sequence[Point],
    *,
    correlation: float,
    order: Mapping[str, int],
    baselines: BaselineStore,
    measured_since: date,
) -> list[Drift]:
    """Find the changes of a series. `order` maps commits to their position on the branch, or is empty."""
    metric = key.metric
    changes = changepoint.change_points(
        [point.corrected for point in points],
        min_change=MIN_CHANGE,
        correlation=correlation,
    )
    drifts = []
    bounds = [0, *(change.index for change in changes), len(points)]
    for number, change in enumerate(changes):
        inside = points[change.earliest - 1 : change.latest + 1]
        first = inside[0].place
        last = inside[-1].place
        cost = METRICS[metric].cost
        before, after, newest = map(cost, (change.before, change.after, changes[-1].after))
        worse = after > before
        file = baselines.reviewed_file(key.hardware_class, key.case)
        levels = before, min(after, newest)
        start = bounds[number]
        accepted = worse and _accepts(file, METRICS[metric], levels, _day(last), points)
        still_worse = worse and newest >= before * (1 + MIN_CHANGE)
        drifts.append(
            Drift(
                **key._asdict(),
                change=change,
                measured=_measured(points[start : bounds[number + 2]], change.index - start),
                first_day=_day(first),
                last_day=_day(last),
                first_commit=first.commit,
                last_commit=last.commit,
                commits_between=order[last.commit] - order[first.commit] if order else None,
                environment=_differences([point.circumstances for point in inside]),
                worse=worse,
                accepted=accepted,
                open=still_worse and not accepted and _day(points[-1].place) >= measured_since,
            )
        )
    return drifts


def _measured(points: Sequence[Point], index: int) -> float | None:
    """Return the relative change of the measured values at an index. None if the machine never changed.

    Only the sessions near the index are compared, because the machine can also have changed at other times.
    """
    if len({point.shift for point in points}) == 1:
        return None
    near = points[max(0, index - NEAR) : index], points[index : index + NEAR]
    before, after = (fmean(math.log(point.value) for point in side) for side in near)
    return math.expm1(after - before)


def machine_steps(references: References, since: date) -> list[MachineStep]:
    """Find the changes of the machines since a day, oldest first."""
    found = []
    for hardware_class, points in references.items():
        changes = changepoint.change_points(
            [point.value for point in points],
            min_change=MIN_CHANGE,
            correlation=UNKNOWN_CORRELATION["tokens/s"],
        )
        for change in changes:
            inside = points[change.earliest - 1 : change.latest + 1]
            found.append(
                MachineStep(
                    hardware_class=hardware_class,
                    change=change,
                    first_day=_day(inside[0].place),
                    last_day=_day(inside[-1].place),
                    environment=_differences([point.circumstances for point in inside]),
                )
            )
    reported = (change for change in found if change.last_day >= since)
    return sorted(reported, key=lambda change: change.last_day)


def _accepts(
    file: Path, metric: Metric, levels: tuple[float, float], day: date, points: Sequence[Point]
) -> bool:
    """Return whether a baseline accepts a change between two levels of cost.

    A baseline accepts the change if it was measured on `day` (UTC) or later, and is closer to the new level
    than to the old one. The levels are corrected for changes of the machine. So the baseline is corrected
    too. Its shift is that of the last point that was measured on or before the day of the baseline.
    """
    try:
        baseline = documents.read(file, Baseline)
        measured_on = datetime.fromisoformat(baseline.recorded_at).astimezone(UTC).date()
    except (FileError, ValueError):
        return False
    level = baseline.median(metric.name)
    if not level or measured_on < day:
        return False
    shift = max((point for point in points if _day(point.place) <= measured_on), key=_time).shift
    return metric.cost(level) * math.exp(-shift) > math.sqrt(levels[0] * levels[1])


def _time(point: Point) -> str:
    return point.place.file.name


def _differences(circumstances: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the circumstances that changed, each as `key: old -> new`, in the order of the sessions."""
    differences = []
    for key in sorted({key for one in circumstances for key in one}):
        steps = [value for value, _ in groupby(one.get(key, "none") for one in circumstances)]
        if len(steps) > 1:
            differences.append(f"{key}: {' -> '.join(steps)}")
    return tuple(differences)


def _day(place: Place) -> date:
    return date.fromisoformat(place.day)
