"""Writes a history as the files that asv (airspeed velocity) reads: one machine per hardware class.

The format is the one that asv documents (docs/source/dev.rst there), results version 2. The files are written
directly, because asv's own classes rewrite all of them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perfsuite import documents, git
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError
from perfsuite.history import store
from perfsuite.history.asv.results import (
    COLUMNS,
    METRICS,
    PARAMETERS,
    VERSION,
    Slot,
    costs,
    in_order,
    results,
    slot,
)
from perfsuite.history.store import Place, StoredCase, StoredSession
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S

CHUNK = 16
"""Nights that a process is given at a time."""
Benchmarks = dict[str, list[set[str]]]
"""The values of each parameter, by benchmark."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The history to export, and the repository that its commits belong to."""

    history: Path
    """Directory of the history."""
    repo: Path
    """Full clone of the repository that holds the cases."""
    branch: str = ""
    """Branch whose commits are shown; by default the one that is checked out."""
    commit_url: str = "#"
    """The address to which a commit's hash is appended, for links to it."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export. Counts are files of results: one per hardware class and commit."""

    written: int
    unchanged: int
    removed: int
    commits: frozenset[str]
    unplaced: dict[str, str]
    """Commits that asv cannot show, and why; their sessions are left out."""


def export(source: Source, out: Path) -> Exported:
    """Bring `out` up to date with a history. Results that have not changed are not touched.

    Raises `FileError` and `GitError`.
    """
    nights: dict[tuple[str, str], list[Place]] = defaultdict(list)  # all sessions are one of asv's results
    for place in store.places(source.history):
        nights[place.hardware_class, place.commit].append(place)
    branch = source.branch or git.current_branch(source.repo)
    dates = git.dates(source.repo, branch)
    unplaced = git.unplaced({commit for _, commit in nights} - dates.keys(), source.repo, branch)
    wanted = {
        out / "results" / hardware_class / _file_name(commit, places): places
        for (hardware_class, commit), places in nights.items()
        if commit in dates
    }
    if not wanted:
        raise FileError(
            f"{source.history} holds no session of a commit on {branch} of {source.repo}: nothing to export"
        )
    if out.exists() and any(out.iterdir()) and not (out / "asv.conf.json").exists():
        raise FileError(f"{out} is not empty and holds no export. Give a directory of its own.")
    cases = store.read_cases(source.history)
    write = partial(_write_night, cases=cases, slots=_slots(cases), dates=dates)
    _write(out / "asv.conf.json", _configuration(source, branch), indent=1)
    present = set(out.glob("results/*/*.json")) - set(out.glob("results/*/machine.json"))
    for stale in present - wanted.keys():
        stale.unlink()
    written = _write_new(out, wanted, present, write)
    return Exported(
        written=written,
        unchanged=len(wanted) - written,
        removed=len(present - wanted.keys()),
        commits=frozenset(places[0].commit for places in wanted.values()),
        unplaced=unplaced,
    )


def _write_new(
    out: Path,
    wanted: Mapping[Path, Sequence[Place]],
    present: set[Path],
    write: Callable[[Path, Sequence[Place]], dict[str, list[list[str]]]],
) -> int:
    """Write the wanted results that are not present, and the list of all benchmarks. Returns their number.

    The list is removed first and written last: an export that was cut short has none, and is done anew.
    """
    listing = out / "results" / "benchmarks.json"
    unchanged = present & wanted.keys() if listing.exists() else set()
    benchmarks = _read_benchmarks(listing) if unchanged else {}
    listing.unlink(missing_ok=True)
    new = sorted(wanted.keys() - unchanged)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for parameters in pool.map(write, new, [wanted[file] for file in new], chunksize=CHUNK):
            for name, values in parameters.items():
                known = benchmarks.setdefault(name, [set() for _ in PARAMETERS])
                for all_values, new_values in zip(known, values, strict=True):
                    all_values.update(new_values)
    _write(listing, {"version": 2, **_listed(benchmarks)}, indent=1)
    return len(new)


def _file_name(commit: str, places: Sequence[Place]) -> str:
    """Name a file of results by its commit and sessions: one of that name need not be read or rewritten."""
    sessions = "\n".join([VERSION, *sorted(place.file.name for place in places)])
    return f"{commit}-{hashlib.sha256(sessions.encode()).hexdigest()[:12]}.json"


def _slots(cases: Mapping[str, StoredCase]) -> dict[str, Slot]:
    """Return the slot of each case. Raises `FileError` if two models have the same name in asv."""
    slots = {name: slot(case.parameters) for name, case in cases.items()}
    models: dict[str, str] = {}
    for name, one in slots.items():
        model = cases[name].parameters["model"]
        if (other := models.setdefault(one.group, model)) != model:
            raise FileError(
                f"models {other!r} and {model!r} are one name to asv: {one.group.split('.')[0]!r}. "
                "Rename one of them in its cases."
            )
    return slots


def _write_night(
    file: Path,
    places: Sequence[Place],
    *,
    cases: Mapping[str, StoredCase],
    slots: Mapping[str, Slot],
    dates: Mapping[str, int],
) -> dict[str, list[list[str]]]:
    """Write the results of one hardware class at one commit. Returns each benchmark's parameter values."""
    sessions = [place.read() for place in places]
    for place, session in zip(places, sessions, strict=True):
        store.check_cases(cases, session, place)
    rows = _pooled(sessions, cases, slots)
    commit, hardware_class = places[0].commit, places[0].hardware_class
    content = {
        "version": 2,
        "commit_hash": commit,
        "date": 1000 * dates[commit],
        "env_name": "perfsuite",
        "env_vars": {},
        "params": {"machine": hardware_class},
        "python": "",
        "requirements": {},
        "durations": {},
        "result_columns": COLUMNS,
        "results": rows,
    }
    _write(file, content)
    if not (machine := file.with_name("machine.json")).exists():
        _write(machine, _machine(sessions[-1].machine))
    return {name: row[COLUMNS.index("params")] for name, row in rows.items()}


def _pooled(
    sessions: Sequence[StoredSession], cases: Mapping[str, StoredCase], slots: Mapping[str, Slot]
) -> dict[str, list[Any]]:
    """Pool the launches of all sessions of one hardware class at one commit into asv's results."""
    launches: dict[Slot, dict[str, list[float]]] = {}
    for session in sessions:
        for result in session.results:
            of_case = launches.setdefault(slots[result.case], {metric: [] for metric in METRICS})
            for metric, values in costs(result, cases[result.case].unit).items():
                of_case[metric] += values
    newest = max(session.started_at for session in sessions)
    return results(launches, round(1000 * newest.timestamp()))


def _read_benchmarks(listing: Path) -> Benchmarks:
    entries = json.loads(listing.read_text(encoding="utf-8"))
    del entries["version"]
    return {name: [set(values) for values in entry["params"]] for name, entry in entries.items()}


def _listed(benchmarks: Benchmarks) -> dict[str, Any]:
    """Return the content of asv's benchmarks.json, without its version."""
    return {
        name: {
            "name": name,
            "code": "",
            "param_names": PARAMETERS,
            "params": [in_order(values) for values in params],
            "type": "memory" if name.endswith("memory") else "time",
            "unit": METRICS[name.rpartition(".")[2]],
            "version": VERSION,
        }
        for name, params in sorted(benchmarks.items())
    }


def _configuration(source: Source, branch: str) -> dict[str, Any]:
    repo = source.repo.resolve()
    return {
        "version": 1,
        "project": repo.name,
        "repo": str(repo),
        "dvcs": "git",
        "branches": [branch],
        "show_commit_url": source.commit_url,
        "results_dir": "results",
        "html_dir": "html",
        "regressions_thresholds": {
            r".*\.seconds_per_(token|sample)\b": TOKENS_PER_S.tolerance("cuda"),
            r".*\.peak_memory\b": PEAK_MEMORY.tolerance("cuda"),
        },
        # At one speed a step takes as long as its tokens or samples: one slowdown is one entry, not two.
        "regressions_first_commits": {r".*\.seconds_per_step\b": None},
    }


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
    documents.write_text(file, json.dumps(content, indent=indent))
