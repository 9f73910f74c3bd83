"""Changes of level in a history: when, by how much, between which commits, and what else changed there.

A gate that compares with one baseline does not see what creeps. Here every session counts, in the order of
time or, with a repository, of its commits. Imports neither torch nor pytest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Literal

from perfsuite import documents, git
from perfsuite.documents import Data, Document
from perfsuite.errors import FileError
from perfsuite.history import changepoint, store
from perfsuite.history.changepoint import Change
from perfsuite.history.store import Place, StoredResult, StoredSession
from perfsuite.results.baseline import Baseline

MetricName = Literal["seconds per token", "seconds per sample", "peak memory"]
PERIOD = timedelta(days=90)
"""How far back changes count unless said otherwise: a slow one is found weeks after it began."""
MIN_CHANGE = 0.005
"""Relative: smaller changes are not worth a look."""
MIN_FOR_CORRELATION = 30
"""Sessions of a series before it says anything on how alike neighbours are."""
UNKNOWN_CORRELATION: Mapping[MetricName, float] = {
    "seconds per token": 0.3,
    "seconds per sample": 0.3,
    "peak memory": 0.0,
}
"""Believed until then: weeks make a machine slower, but take no memory. With 0, good and bad weeks (AR(1),
0.7) make a false alarm in 18 % of series in their first month, with 0.3 in 1 %; a step of 5 % at 1 % noise
then takes 8 nights instead of 3."""


class Finding(Data):
    """A change of one series."""

    hardware_class: str
    case: str
    metric: MetricName
    change: Change
    """Places are sessions of this series."""
    first_day: date
    """The last session surely before it, and the first surely after it, as the next three."""
    last_day: date
    first_commit: str
    last_commit: str
    commits_between: int | None
    """How many commits it may be, where the repository was given."""
    environment: tuple[str, ...]
    """What changed between these sessions: versions, settings, driver, the case itself."""
    worse: bool
    accepted: bool
    """Whether the reviewed baseline of this case was measured after it, at the new level."""
    open: bool
    """Worse, not accepted, and the newest level is still worse than that before this change. A case that was
    not measured for 90 days is gone, and its worsenings with it."""

    @property
    def state(self) -> str:
        """In words: whether somebody must look."""
        if not self.worse:
            return "better"
        return "worse" if self.open else "worse, accepted" if self.accepted else "worse, but no longer"

    def sentences(self) -> list[str]:
        """How much, when, and what else changed there."""
        low, high = self.change.interval
        count = "" if self.commits_between is None else f", commits: {self.commits_between}"
        return [
            f"{self.metric}: {self.change.relative:+.1%} (99 % interval {low:+.1%} to {high:+.1%})",
            f"between {self.first_day} and {self.last_day}, "
            f"{self.first_commit[:8]}..{self.last_commit[:8]}{count}",
            *(f"changed there: {difference}" for difference in self.environment),
        ]


class Trend(Document):
    """What `perfsuite history trend --json` prints."""

    schema_version: Literal[1] = 1
    since: date
    sessions: int
    series: int
    findings: tuple[Finding, ...]
    """Of changes since that day, and of older ones that are open unless a day was asked for; the largest
    worsening first."""
    unplaced: dict[str, str]
    """Commits whose sessions are left out, and why."""

    @property
    def failing(self) -> list[Finding]:
        """Worsenings that are still there, and that nobody accepted."""
        return [finding for finding in self.findings if finding.open]


@dataclass
class _Series:
    """Of one case on one hardware class: an entry for each session that measured it."""

    sessions: list[int] = field(default_factory=list)
    circumstances: list[int] = field(default_factory=list)
    by_metric: dict[MetricName, list[float | None]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class _Circumstances:
    """Distinct sets of what may explain a change, by number: most sessions share one."""

    known: list[dict[str, str]] = field(default_factory=list)
    numbers: dict[frozenset[tuple[str, str]], int] = field(default_factory=dict)

    def number(self, session: StoredSession, result: StoredResult) -> int:
        seen = {
            **session.environments[result.environment],
            **session.settings[result.settings],
            "driver": session.machine.driver or "none",
            "device": f"{session.machine.devices} x {session.machine.device_name}",
            "perfsuite": session.perfsuite,
            "case definition": result.case.rpartition(".")[2],
        }
        number = self.numbers.setdefault(frozenset(seen.items()), len(self.known))
        if number == len(self.known):
            self.known.append(seen)
        return number


def trend(
    directory: Path,
    *,
    hardware_class: str = "*",
    case: str = "*",
    since: date | None = None,
    repo: Path | None = None,
    branch: str = "",
    baselines: Path = Path("baselines"),
) -> Trend:
    """Find what changed since a day: by default in the 90 days before the newest session, or open since then.

    The whole history is the evidence, whatever `since` is. `baselines` are the reviewed ones: they tell which
    worsenings were accepted. Raises `FileError` and `GitError`.
    """
    places = store.places(directory, hardware_class=hardware_class)
    if not places:
        raise FileError(f"{directory} holds no session on {hardware_class}: nothing to look at")
    from_day = since or _day(places[-1]) - PERIOD
    order: dict[str, int] = {}
    left_out: dict[str, str] = {}
    if repo is not None:
        branch = branch or git.current_branch(repo)
        order = {commit: number for number, commit in enumerate(git.dates(repo, branch))}
        left_out = git.unplaced({place.commit for place in places} - order.keys(), repo, branch)
        places = [place for place in places if place.commit in order]
        places.sort(key=lambda place: order[place.commit])  # stable: by time within a commit
        if not places:
            raise FileError(f"{directory} holds no session of a commit on {branch} of {repo}")
    circumstances = _Circumstances()
    series = _read(places, store.read_cases(directory), case, circumstances)
    if not series:
        raise FileError(f"{directory} holds no case that matches {case!r}; see: perfsuite history list")
    correlations = _correlations(series)
    findings = [
        finding
        for key, one in series.items()
        for finding in _findings(key, one, places, circumstances, order, correlations, baselines)
        if finding.last_day >= from_day or (since is None and finding.open)
    ]
    return Trend(
        since=from_day,
        sessions=len(places),
        series=sum(len(one.by_metric) for one in series.values()),
        findings=tuple(sorted(findings, key=lambda finding: -finding.change.relative)),
        unplaced=left_out,
    )


def _read(
    places: Sequence[Place],
    cases: Mapping[str, store.StoredCase],
    pattern: str,
    circumstances: _Circumstances,
) -> dict[tuple[str, str], _Series]:
    series: dict[tuple[str, str], _Series] = defaultdict(_Series)
    wanted = store.matching(cases, pattern)
    for number, place in enumerate(places):
        session = place.read()
        store.check_cases(cases, session, place)
        for result in session.results:
            if result.case in wanted:
                case = cases[result.case]
                one = series[place.hardware_class, case.id]
                time: MetricName = "seconds per sample" if case.unit == "samples" else "seconds per token"
                one.sessions.append(number)
                one.circumstances.append(circumstances.number(session, result))
                one.by_metric[time].append(_seconds_per_token(result))
                one.by_metric["peak memory"].append(_median(result.peak_memory_bytes))
    return series


def _seconds_per_token(result: StoredResult) -> float | None:
    step_s = _median(result.step_s_p50)
    return step_s / result.tokens_per_step if step_s is not None and result.tokens_per_step else None


def _median(column: store.Column) -> float | None:
    values = [value for value in column if value is not None]
    return median(values) if values else None


def _correlations(series: Mapping[tuple[str, str], _Series]) -> dict[tuple[str, MetricName], float]:
    """How alike neighbouring nights are, by hardware class and metric: good and bad weeks are a machine's."""
    known: dict[tuple[str, MetricName], list[float]] = defaultdict(list)
    for (hardware_class, _), one in series.items():
        for metric, values in one.by_metric.items():
            measured = [value for value in values if value is not None]
            if len(measured) >= MIN_FOR_CORRELATION:
                known[hardware_class, metric].append(changepoint.correlation(measured))
    return {key: median(values) for key, values in known.items()}


def _findings(
    key: tuple[str, str],
    one: _Series,
    places: Sequence[Place],
    circumstances: _Circumstances,
    order: Mapping[str, int],
    correlations: Mapping[tuple[str, MetricName], float],
    baselines: Path,
) -> list[Finding]:
    found = []
    alive = _day(places[one.sessions[-1]]) >= _day(places[-1]) - PERIOD
    for metric, values in one.by_metric.items():
        measured = [index for index, value in enumerate(values) if value is not None]
        series = [value for value in values if value is not None]
        correlation = correlations.get((key[0], metric), UNKNOWN_CORRELATION[metric])
        changes = changepoint.changes(series, min_change=MIN_CHANGE, correlation=correlation)
        for change in changes:
            inside = measured[change.earliest - 1 : change.latest + 1]
            first, last = (places[one.sessions[index]] for index in (inside[0], inside[-1]))
            worse = change.relative > 0
            newest = changes[-1].after
            file = baselines / key[0] / f"{key[1]}.json"
            accepted = worse and _accepts(
                file, metric, (change.before, min(change.after, newest)), _day(last)
            )
            found.append(
                Finding(
                    hardware_class=key[0],
                    case=key[1],
                    metric=metric,
                    change=change,
                    first_day=_day(first),
                    last_day=_day(last),
                    first_commit=first.commit,
                    last_commit=last.commit,
                    commits_between=order[last.commit] - order[first.commit] if order else None,
                    environment=_differences([circumstances.known[one.circumstances[i]] for i in inside]),
                    worse=worse,
                    accepted=accepted,
                    open=worse and alive and not accepted and newest >= change.before * (1 + MIN_CHANGE),
                )
            )
    return found


def _accepts(file: Path, metric: MetricName, levels: tuple[float, float], day: date) -> bool:
    """Whether a baseline was measured on that day (UTC) or later, nearer to the new of two levels than to the
    old. One that cannot be read accepts nothing: it is an error where its case is judged."""
    if not file.exists():
        return False
    try:
        held = documents.read(file, Baseline)
        measured_on = datetime.fromisoformat(held.recorded_at).astimezone(UTC).date()
    except (FileError, ValueError):
        return False
    speed, memory = held.median("tokens_per_s"), held.median("peak_memory_bytes")
    level = memory if metric == "peak memory" else 1 / speed if speed else None
    if level is None:
        return False
    return measured_on >= day and level > math.sqrt(levels[0] * levels[1])


def _differences(seen: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """What is not the same in all of these, each as `key: old -> new`, in the order of time."""
    told = []
    for key in sorted({key for one in seen for key in one}):
        values = [one.get(key, "none") for one in seen]
        steps = [value for index, value in enumerate(values) if not index or value != values[index - 1]]
        if len(steps) > 1:
            told.append(f"{key}: {' -> '.join(steps)}")
    return tuple(told)


def _day(place: Place) -> date:
    return datetime.strptime(place.day, "%Y%m%d").date()
