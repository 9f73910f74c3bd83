"""A history as the files that asv (airspeed velocity) reads: one machine per hardware class.

The format is asv's documented one (docs/source/dev.rst there), results version 2; it is written directly,
because asv's classes rewrite whole histories. Costs only, for which more is worse: asv takes every increase
for a regression. Imports neither torch nor pytest.

A benchmark is a metric of a model on a topology in a precision; its parameters are what else tells cases
apart, so that they can be compared on one page while combinations that nobody runs stay few. Names depend on
nothing but the case: a new case never renames an old series.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from perfsuite import commits, data, history
from perfsuite.errors import FileError
from perfsuite.hardware import Machine
from perfsuite.history import Place, StoredCase, StoredResult
from perfsuite.metric import PEAK_MEMORY, TOKENS_PER_S
from perfsuite.robust import t_quantile
from perfsuite.sequential import pooled_noise

PARAMETERS = ("framework", "sequence_length", "micro_batch", "gradient_accumulation", "options")
"""Of a benchmark, in asv's sense. Model, topology and precision stand in its name."""
METRICS = {"seconds_per_token": "seconds", "seconds_per_step": "seconds", "peak_memory": "bytes"}
"""Names and units, as asv knows them."""
VERSION = "1"
"""Of this export: another one writes everything anew."""
COLUMNS = (
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples"),
)
_Z_99 = 2.576
_MIN_FOR_QUARTILES = 2


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export did."""

    written: int
    """Files of results: one per hardware class and commit."""
    unchanged: int
    removed: int
    commits: frozenset[str]
    unplaced: dict[str, str]
    """Commits that asv cannot show, and why; their sessions are left out."""


@dataclass
class _Launches:
    """Of one case on one hardware class at one commit, of all sessions."""

    parameters: dict[str, str]
    by_metric: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def export(directory: Path, out: Path, *, repo: Path, branch: str = "", commit_url: str = "#") -> Exported:
    """Bring `out` up to date with a history. Results that have not changed are not touched.

    `repo` is a full clone of the repository that holds the cases, `branch` the line whose commits are shown
    (that which is checked out). Raises `FileError` and `GitError`.
    """
    nights: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in history.places(directory):
        nights[place.hardware_class, place.commit].append(place)
    branch = branch or commits.current_branch(repo)
    dates = commits.dates(repo, branch)
    missing = commits.unplaced({commit for _, commit in nights} - dates.keys(), repo, branch)
    wanted = {
        out / "results" / hardware_class / _file_name(commit, places): places
        for (hardware_class, commit), places in nights.items()
        if commit in dates
    }
    if not wanted:
        raise FileError(f"{directory} holds no session of a commit on {branch} of {repo}: nothing to export")
    if out.exists() and any(out.iterdir()) and not (out / "asv.conf.json").exists():
        raise FileError(f"{out} is not empty and holds no export. Give a directory of its own.")
    _write(out / "asv.conf.json", _configuration(repo, branch, commit_url), indent=1)
    there = set(out.glob("results/*/*.json")) - set(out.glob("results/*/machine.json"))
    listing = out / "results" / "benchmarks.json"
    unchanged = there & wanted.keys() if listing.exists() else set()
    benchmarks = _Benchmarks(listing, keep=bool(unchanged))
    listing.unlink(missing_ok=True)  # it comes back last: without it, what was cut short is done anew
    for stale in there - wanted.keys():
        stale.unlink()
    cases = history.read_cases(directory)
    for file in sorted(wanted.keys() - unchanged):
        _write_night(file, wanted[file], cases, dates, benchmarks)
    benchmarks.write()
    return Exported(
        written=len(wanted) - len(unchanged),
        unchanged=len(unchanged),
        removed=len(there - wanted.keys()),
        commits=frozenset(places[0].commit for places in wanted.values()),
        unplaced=missing,
    )


def _configuration(repo: Path, branch: str, commit_url: str) -> dict[str, Any]:
    return {
        "version": 1,
        "project": repo.resolve().name,
        "repo": str(repo.resolve()),
        "dvcs": "git",
        "branches": [branch],
        "show_commit_url": commit_url,
        "results_dir": "results",
        "html_dir": "html",
        "regressions_thresholds": {
            r".*\.seconds_per_token\b": TOKENS_PER_S.tolerance_gpu,
            r".*\.peak_memory\b": PEAK_MEMORY.tolerance_gpu,
        },
        # At one speed it says the same as seconds per token: one slowdown shall be one entry.
        "regressions_first_commits": {r".*\.seconds_per_step\b": None},
    }


def _file_name(commit: str, places: Sequence[Place]) -> str:
    """Says what went into it, so that a file that is there need not be read to know that it is right."""
    sessions = "\n".join([VERSION, *sorted(place.file.name for place in places)])
    return f"{commit}-{hashlib.sha256(sessions.encode()).hexdigest()[:12]}.json"


def _write_night(
    file: Path,
    places: Sequence[Place],
    cases: dict[str, StoredCase],
    dates: dict[str, int],
    benchmarks: _Benchmarks,
) -> None:
    """The results of one hardware class at one commit: the launches of all its sessions together."""
    by_case: dict[str, _Launches] = {}
    sessions = [place.read() for place in places]
    for place, session in zip(places, sessions, strict=True):
        for result in session.results:
            case = history.known_case(cases, result, place)
            launches = by_case.setdefault(case.id, _Launches(parameters=case.parameters))
            for metric, values in _costs(result).items():
                launches.by_metric[metric] += values
    grouped: dict[str, dict[tuple[str, ...], list[float]]] = defaultdict(dict)
    intervals: dict[str, _Interval] = {}
    for metric in METRICS:
        interval = _interval(metric, [launches.by_metric[metric] for launches in by_case.values()])
        for launches in by_case.values():
            if launches.by_metric[metric]:
                name = benchmarks.add(launches.parameters, metric)
                intervals[name] = interval
                grouped[name][parameters_of(launches.parameters)] = launches.by_metric[metric]
    started_at = round(1000 * max(session.started_at for session in sessions).timestamp())
    content = {
        "version": 2,
        "commit_hash": places[0].commit,
        "date": 1000 * dates[places[0].commit],
        "env_name": "perfsuite",
        "env_vars": {},
        "params": {"machine": places[0].hardware_class},
        "python": "",
        "requirements": {},
        "durations": {},
        "result_columns": COLUMNS,
        "results": {
            name: _row(by_parameters, intervals[name], started_at)
            for name, by_parameters in sorted(grouped.items())
        },
    }
    machine = file.with_name("machine.json")
    if not machine.exists():
        _write(machine, _machine(sessions[-1].machine))
    _write(file, content)


def _costs(result: StoredResult) -> dict[str, list[float]]:
    """The median of each launch in each metric."""
    steps = [value for value in result.step_s_p50 if value is not None]
    tokens = result.tokens_per_step
    return {
        "seconds_per_step": steps,
        "seconds_per_token": [step / tokens for step in steps] if tokens else [],
        "peak_memory": [value for value in result.peak_memory_bytes if value is not None],
    }


_Interval = Callable[[Sequence[float]], tuple[float, float]]


def _interval(metric: str, groups: Sequence[Sequence[float]]) -> _Interval:
    """How sure a median of launches is: 99 % intervals, from which asv takes the weight of a point.

    Two or three launches alone know little of their noise, so that of all cases of the night is pooled.
    Memory is what it is: from the lowest to the highest launch.
    """
    if metric == "peak_memory":
        return lambda values: (min(values), max(values))
    try:
        noise = pooled_noise([group for group in groups if group])
    except ValueError:  # too few launches to tell; asv, too, then calls the interval infinite
        return lambda values: (-math.inf, math.inf)
    error = t_quantile(_Z_99, noise.degrees_of_freedom) * noise.sigma

    def interval(values: Sequence[float]) -> tuple[float, float]:
        factor = math.exp(error / math.sqrt(len(values)))
        centre = median(values)
        return centre / factor, centre * factor

    return interval


def _row(
    by_parameters: dict[tuple[str, ...], list[float]], interval: _Interval, started_at: int
) -> list[Any]:
    """A benchmark's entry: a list for each column, by the product of the parameters' values."""
    params = [_sorted(set(values)) for values in zip(*by_parameters, strict=True)]
    stats = [_statistics(by_parameters.get(key), interval) for key in itertools.product(*params)]
    results, low, high, quarter, three_quarters, number, repeat, samples = map(list, zip(*stats, strict=True))
    spread = (low, high, quarter, three_quarters, number, repeat, samples)
    return [results, params, VERSION, started_at, None, *spread]


def _statistics(values: list[float] | None, interval: _Interval) -> tuple[Any, ...]:
    if values is None:
        return (None,) * 8
    low, high = interval(values)
    if len(values) < _MIN_FOR_QUARTILES:
        quarter, middle, three_quarters = values * 3
    else:
        quarter, middle, three_quarters = quantiles(values, n=4, method="inclusive")
    return middle, low, high, quarter, three_quarters, 1, len(values), values


def parameters_of(parameters: dict[str, str]) -> tuple[str, ...]:
    """The values of `PARAMETERS`."""
    return tuple(parameters[name] or "default" for name in PARAMETERS)


def benchmark_name(parameters: dict[str, str], metric: str) -> str:
    """Parts between dots: asv groups by them."""
    parts = (parameters[name] for name in ("model", "topology", "precision"))
    return ".".join([*(re.sub(r"[^A-Za-z0-9_+-]", "_", part) for part in parts), metric])


class _Benchmarks:
    """`benchmarks.json`. With `keep` what it says stays: results that are not written anew need it."""

    def __init__(self, file: Path, *, keep: bool) -> None:
        self.file = file
        self.params: dict[str, list[set[str]]] = {}
        self.models: dict[str, str] = {}
        if keep:
            known = json.loads(file.read_text(encoding="utf-8"))
            for name, entry in known.items():
                if name != "version":
                    self.params[name] = [set(values) for values in entry["params"]]
                    self.models[name] = entry["code"]

    def add(self, parameters: dict[str, str], metric: str) -> str:
        """Make room for a case. Returns the benchmark's name."""
        name = benchmark_name(parameters, metric)
        model = self.models.setdefault(name, parameters["model"])
        if model != parameters["model"]:
            raise FileError(
                f"models {model!r} and {parameters['model']!r} are one name to asv: "
                f"{name.split('.')[0]!r}. Rename one of them in its cases."
            )
        known = self.params.setdefault(name, [set() for _ in PARAMETERS])
        for values, value in zip(known, parameters_of(parameters), strict=True):
            values.add(value)
        return name

    def write(self) -> None:
        entries = {
            name: {
                "name": name,
                "code": self.models[name],
                "param_names": PARAMETERS,
                "params": [_sorted(values) for values in params],
                "type": "memory" if name.endswith("memory") else "time",
                "unit": METRICS[name.rpartition(".")[2]],
                "version": VERSION,
            }
            for name, params in sorted(self.params.items())
        }
        _write(self.file, {"version": 2, **entries}, indent=1)


def _sorted(values: set[str]) -> list[str]:
    """Numbers by size, before words."""
    return sorted(
        values, key=lambda value: (not value.isdigit(), int(value) if value.isdigit() else 0, value)
    )


def _machine(machine: Machine) -> dict[str, Any]:
    kind = "gpu" if machine.device == "cuda" else "cpu"
    return {
        "version": 1,
        "machine": machine.hardware_class,
        kind: machine.device_name,
        f"num_{kind}": str(machine.devices),
        "ram": f"{machine.memory_bytes / 2**30:.0f} GiB",
    }


def _write(file: Path, content: dict[str, Any], indent: int | None = None) -> None:
    data.write_text(file, json.dumps(content, indent=indent))
