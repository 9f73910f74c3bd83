"""Write one HTML page about a history, with a line per case and its changes. The page works offline.

It links to asv's pages, which show one metric each and load scripts from other sites.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from perfsuite import __version__
from perfsuite.case.case import NO_TOKENS
from perfsuite.features.history import store
from perfsuite.features.history import trend as trends
from perfsuite.features.history.asv.results import slot
from perfsuite.features.history.sparkline import DOTS, Mark, limits, sparkline
from perfsuite.features.history.trend import Key, Point
from perfsuite.inputs import git
from perfsuite.inputs.ini import BASELINES
from perfsuite.report.html import page as report
from perfsuite.report.html.charts import BUCKETS
from perfsuite.report.names import short_names
from perfsuite.report.text import NONE, plural
from perfsuite.results.amounts import amount
from perfsuite.results.trend import Drift, MachineStep, Trend

FILE = "history.html"  # next to asv's `index.html`
METRICS = {"tokens/s": "speed", "samples/s": "speed", "peak memory": "memory"}  # metric -> column of the page


class ChangeLine(NamedTuple):
    """One change of a case, as text."""

    state: str  # `worse`, `better` or `past`: the class in the style sheet
    day: str
    commit: str  # the first commit at the new level
    link: str | None  # the URL of that commit
    text: str
    remarks: Sequence[str]  # how certain the commit is, and other changes at the same time


def write(
    pages: Path,
    history: Path,
    repo: Path,
    *,
    branch: str = "",
    commit_url: str = "#",
    baselines: Path = BASELINES,
) -> Path:
    """Write the page of a history next to asv's pages, and return its file.

    `branch` is a branch of `repo` (default: the one that is checked out). The link to a commit is
    `commit_url` followed by the hash. Raises `FileError` and `GitError`.
    """
    branch = branch or git.current_branch(repo)
    sessions = trends.read(store.places(history), history, repo=repo, branch=branch)
    text = render(
        sessions.series,
        trends.changes(sessions, since=date.min, baselines=baselines),
        parameters={case.id: case.parameters for case in sessions.cases.values()},
        title=f"{repo.resolve().name}, {branch}",
        commit_url=commit_url,
    )
    file = pages / FILE
    file.write_text(text, encoding="utf-8")
    return file


def render(
    series: trends.Series,
    trend: Trend,
    *,
    parameters: Mapping[str, Mapping[str, str]],
    title: str,
    commit_url: str = "#",
) -> str:
    """Return the page as HTML, with these series and all changes that were found in them."""
    of_case = defaultdict[tuple[str, str], dict[str, tuple[Key, Sequence[Point]]]](dict)
    for key, points in series.items():
        if points:
            of_case[key.hardware_class, key.case][METRICS[key.metric]] = (key, points)
    changes = defaultdict[Key, list[Drift]](list)
    for drift in trend.findings:
        changes[Key(drift.hardware_class, drift.case, drift.metric)].append(drift)
    names = short_names(parameters)
    lines = [
        _line(number, name, metrics, changes, trend.machine, names, parameters, commit_url)
        for number, ((_, name), metrics) in enumerate(sorted(of_case.items()))
    ]
    lines.sort(key=lambda line: -line["largest_regression"])
    package = __name__.rpartition(".")[0]
    style = report.template_text(report.PACKAGE, "report.css") + report.template_text(package, "history.css")
    days = sorted(point.place.day for points in series.values() for point in points)
    return (
        report.environment(package)
        .get_template("history.html")
        .render(
            title=title,
            lines=lines,
            facts={
                "sessions": f"{trend.sessions:,}",
                "from": _day(days[0]) if days else NONE,
                "to": _day(days[-1]) if days else NONE,
                "perfsuite": __version__,
            },
            headline=_headline(lines),
            machine=["; ".join(change.sentences()) for change in trend.machine],
            dots=DOTS,
            line_points=2 * BUCKETS,
            style=Markup(style),
            policy=report.style_policy(style),
        )
    )


def _headline(lines: Sequence[Mapping[str, Any]]) -> str:
    worse = sum(line["state"] == "worse" for line in lines)
    state = f"{worse} worse" if worse else "none worse"
    return f"{plural(len(lines), 'case')}, {state}"


def _line(
    number: int,
    case: str,
    metrics: Mapping[str, tuple[Key, Sequence[Point]]],
    changes: Mapping[Key, Sequence[Drift]],
    machine: Sequence[MachineStep],
    names: Mapping[str, str],
    parameters: Mapping[str, Mapping[str, str]],
    commit_url: str,
) -> dict[str, Any]:
    """Return the content of one line of the page: one case on one hardware class."""
    of_this = [drift for key, _ in metrics.values() for drift in changes.get(key, ())]
    open_ones = [drift.worsening for drift in of_this if drift.open]
    draw = partial(_drawn, changes=changes, machine=machine, case=case, parameters=parameters[case])
    return {
        "case": case,
        "name": names[case],
        "hardware": next(iter(metrics.values()))[0].hardware_class,
        "state": "worse" if open_ones else "steady",
        "largest_regression": max(open_ones, default=0.0),
        "columns": {
            column: draw(f"c{number}-{column}", *metrics[column]) if column in metrics else None
            for column in ("speed", "memory")
        },
        "changes": [
            _change(drift, commit_url)
            for drift in sorted(of_this, key=lambda drift: drift.last_day, reverse=True)
        ],
    }


def _drawn(
    anchor: str,
    key: Key,
    points: Sequence[Point],
    *,
    changes: Mapping[Key, Sequence[Drift]],
    machine: Sequence[MachineStep],
    case: str,
    parameters: Mapping[str, str],
) -> dict[str, str]:
    """Return the chart of a series, its newest value, and the link to asv's page about the series."""
    unit = "bytes" if key.metric == "peak memory" else key.metric
    values = [point.corrected for point in points]
    is_corrected = any(point.shift for point in points)
    drifts = sorted(changes.get(key, ()), key=lambda drift: drift.change.index)
    marks = [
        Mark(
            drift.change.index,
            _state(drift),
            f"{drift.last_day}, {drift.last_commit[:8]}: {drift.sentences()[0]}",
        )
        for drift in drifts
    ]
    if unit != "bytes":
        marks = _with_machine(marks, machine, key.hardware_class, points)
    lowest, highest = (amount(value, unit) for value in limits(values))
    newest = amount(points[-1].value, unit) + ("" if unit == "bytes" else f" {unit}")
    description = (
        f"{plural(len(values), 'session')} from {_day(points[0].place.day)} to {_day(points[-1].place.day)}"
    )
    description += f", from {lowest} to {highest}; newest {newest}. {plural(len(marks), 'change')}."
    if is_corrected:
        description += " Corrected for changes of the machine, except the newest value."
    chart = sparkline(
        values,
        marks,
        key=anchor,
        title=f"{key.metric} of {case}",
        description=" ".join([description, *(f"{mark.text}." for mark in marks)]),
        labels=(lowest, highest),
    )
    per = "sample" if parameters["sequence_length"] == NO_TOKENS else "token"
    benchmark = "peak_memory" if unit == "bytes" else f"seconds_per_{per}"
    return {
        "chart": chart,
        "newest": newest,
        "asv": f"index.html#{slot(parameters).group}.{benchmark}",
    }


def _with_machine(
    marks: Sequence[Mark], machine: Sequence[MachineStep], hardware_class: str, points: Sequence[Point]
) -> list[Mark]:
    """Return `marks` and a mark for each change of the reference, in the order of the chart."""
    at = {mark.first for mark in marks}
    days = [date.fromisoformat(point.place.day) for point in points]
    added = []
    for change in machine:
        later = [index for index, day in enumerate(days) if day >= change.last_day]
        if change.hardware_class == hardware_class and later and later[0] and later[0] not in at:
            added.append(Mark(later[0], "machine", f"{change.last_day}: {change.sentences()[0]}"))
    return sorted([*marks, *added])


def _change(drift: Drift, commit_url: str) -> ChangeLine:
    among = f"one of {drift.commits_between} commits" if (drift.commits_between or 0) > 1 else ""
    is_sure = drift.first_day == drift.last_day or drift.commits_between == 1
    day = f"{drift.last_day}" if is_sure else f"{drift.first_day} to {drift.last_day}"
    return ChangeLine(
        state=_state(drift),
        day=day,
        commit=drift.last_commit[:8],
        link=f"{commit_url}{drift.last_commit}" if commit_url.startswith(("https://", "http://")) else None,
        text=f"{drift.sentences()[0]}, {drift.state}",
        remarks=[*filter(None, [among]), *drift.environment],
    )


def _state(drift: Drift) -> str:
    return "worse" if drift.open else "past" if drift.worse else "better"


def _day(day: str) -> str:
    return f"{date.fromisoformat(day)}"
