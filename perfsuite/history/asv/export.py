"""A history as the files that asv (airspeed velocity) reads: one machine per hardware class.

The format is asv's documented one (docs/source/dev.rst there), results version 2. It is written directly:
asv's own classes rewrite all of it. Imports neither torch nor pytest.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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


CHUNK = 16
"""Nights that a process is given at a time."""
Benchmarks = dict[str, list[set[str]]]
"""The values of each parameter, by benchmark."""


def export(directory: Path, out: Path, *, repo: Path, branch: str = "", commit_url: str = "#") -> Exported:
    """Bring `out` up to date with a history. Results that have not changed are not touched.

    `repo` is a full clone of the repository that holds the cases, `branch` the line whose commits are shown
    (that which is checked out). Raises `FileError` and `GitError`.
    """
    nights: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for place in store.places(directory):
        nights[place.hardware_class, place.commit].append(place)
    branch = branch or git.current_branch(repo)
    dates = git.dates(repo, branch)
    unplaced = git.unplaced({commit for _, commit in nights} - dates.keys(), repo, branch)
    wanted = {
        out / "results" / hardware_class / _file_name(commit, places): places
        for (hardware_class, commit), places in nights.items()
        if commit in dates
    }
    if not wanted:
        raise FileError(f"{directory} holds no session of a commit on {branch} of {repo}: nothing to export")
    if out.exists() and any(out.iterdir()) and not (out / "asv.conf.json").exists():
        raise FileError(f"{out} is not empty and holds no export. Give a directory of its own.")
    cases = store.read_cases(directory)
    slots = _slots(cases)
    _write(out / "asv.conf.json", _configuration(repo, branch, commit_url), indent=1)
    there = set(out.glob("results/*/*.json")) - set(out.glob("results/*/machine.json"))
    listing = out / "results" / "benchmarks.json"
    unchanged = there & wanted.keys() if listing.exists() else set()
    benchmarks = _read_benchmarks(listing) if unchanged else {}
    listing.unlink(missing_ok=True)  # it comes back last: without it, what was cut short is done anew
    for stale in there - wanted.keys():
        stale.unlink()
    write = partial(_write_night, cases=cases, slots=slots, dates=dates)
    new = sorted(wanted.keys() - unchanged)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for parameters in pool.map(write, new, [wanted[file] for file in new], chunksize=CHUNK):
            _add_parameters(benchmarks, parameters)
    _write(listing, {"version": 2, **_listed(benchmarks)}, indent=1)
    return Exported(
        written=len(wanted) - len(unchanged),
        unchanged=len(unchanged),
        removed=len(there - wanted.keys()),
        commits=frozenset(places[0].commit for places in wanted.values()),
        unplaced=unplaced,
    )


def _file_name(commit: str, places: Sequence[Place]) -> str:
    """Says what went into it, so that a file that is there need not be read to know that it is right."""
    sessions = "\n".join([VERSION, *sorted(place.file.name for place in places)])
    return f"{commit}-{hashlib.sha256(sessions.encode()).hexdigest()[:12]}.json"


def _slots(cases: Mapping[str, StoredCase]) -> dict[str, Slot]:
    """Where each case stands among asv's benchmarks. Raises `FileError` if models share a name there."""
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
    """Write what one hardware class did at one commit. Returns the values of each benchmark's parameters."""
    sessions = [place.read() for place in places]
    for place, session in zip(places, sessions, strict=True):
        store.check_cases(cases, session, place)
    rows = _pooled(sessions, slots)
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


def _pooled(sessions: Iterable[StoredSession], slots: Mapping[str, Slot]) -> dict[str, list[Any]]:
    """The results of one hardware class at one commit: the launches of all its sessions together."""
    launches: dict[Slot, dict[str, list[float]]] = {}
    newest = 0.0
    for session in sessions:
        newest = max(newest, session.started_at.timestamp())
        for result in session.results:
            slot = slots[result.case]
            of_case = launches.setdefault(slot, {metric: [] for metric in METRICS})
            for metric, values in costs(result, slot.unit).items():
                of_case[metric] += values
    return results(launches, round(1000 * newest))


def _add_parameters(benchmarks: Benchmarks, parameters: Mapping[str, list[list[str]]]) -> None:
    for name, found in parameters.items():
        known = benchmarks.setdefault(name, [set() for _ in PARAMETERS])
        for values, new in zip(known, found, strict=True):
            values.update(new)


def _read_benchmarks(listing: Path) -> Benchmarks:
    """What results that are not written anew need."""
    entries = json.loads(listing.read_text(encoding="utf-8"))
    del entries["version"]
    return {name: [set(values) for values in entry["params"]] for name, entry in entries.items()}


def _listed(benchmarks: Benchmarks) -> dict[str, Any]:
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
            r".*\.seconds_per_(token|sample)\b": TOKENS_PER_S.tolerance_gpu,
            r".*\.peak_memory\b": PEAK_MEMORY.tolerance_gpu,
        },
        # At one speed it says the same as seconds per token or sample: one slowdown shall be one entry.
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
