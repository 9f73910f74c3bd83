"""Write a history as files that asv reads (results version 2, described in asv's docs/source/dev.rst).

The files are written directly, because asv's own classes would rewrite all files for each change.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError, ToolError
from perfsuite.features.history import store
from perfsuite.features.history.asv import results as asv
from perfsuite.features.history.store import Place, StoredCase, StoredSession
from perfsuite.inputs import git
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S

PER_TOKEN = r".*\.seconds_per_(token|sample)\b"  # also used to recognise an export
WITHOUT_SCRIPTS = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>These charts need the internet</title></head>
<body>
<h1>These charts need the internet</h1>
<p>A script of this page could not be loaded. asv draws the charts, and loads its scripts from:</p>
<ul>{hosts}</ul>
<p>Open this page in a browser that can reach these sites and is allowed to run their scripts. Without the
internet, <code>perfsuite history list</code> and <code>perfsuite history trend</code> show the same history
in a terminal: the speed and memory of each case, and when it became slower or larger.</p>
</body>
</html>
"""
FILE = "-perfsuite.json"  # suffix of the name of a result file, after the commit


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    commits: frozenset[str]
    unplaced: dict[str, str]  # commit that asv cannot show -> the reason; its sessions are left out


def export(history: Path, repo: Path, out: Path, *, branch: str = "", commit_url: str = "#") -> Exported:
    """Write a history to `out`, and replace an earlier export.

    `repo` is a full clone of the repository with the cases. The pages show the commits of `branch` (default:
    the one that is checked out). The link to a commit is `commit_url` followed by the hash. Raises
    `FileError` and `GitError`.
    """
    branch = branch or git.current_branch(repo)
    places, dates, unplaced = store.on_branch(store.places(history), history, repo, branch)
    if out.exists() and any(out.iterdir()) and not _is_export(out):
        raise FileError(f"{out} is not empty and does not contain an export. Give an empty directory.")
    cases = store.read_cases(history)
    slots = _slots(cases)
    # asv has one result per hardware class and commit, so all sessions of a commit on a hardware class are
    # put together.
    nights = defaultdict[tuple[str, str], list[Place]](list)
    for place in places:
        nights[place.hardware_class, place.commit].append(place)
    _write(out / "asv.conf.json", _configuration(repo.resolve(), branch, commit_url), indent=1)
    for stale in out.glob(f"results/*/*{FILE}"):
        stale.unlink()
    parameters = defaultdict[str, list[set[str]]](lambda: [set() for _ in asv.PARAMETERS])
    for (hardware_class, commit), sessions in nights.items():
        file = out / "results" / hardware_class / f"{commit}{FILE}"
        for name, values in _write_night(file, sessions, cases, slots, dates[commit]).items():
            for collected, new in zip(parameters[name], values, strict=True):
                collected.update(new)
    _write(out / "results" / "benchmarks.json", {"version": 2, **_listed(parameters)}, indent=1)
    return Exported(commits=frozenset(place.commit for place in places), unplaced=unplaced)


def _is_export(directory: Path) -> bool:
    """Return whether a directory contains an earlier export, and not somebody's own asv files."""
    with contextlib.suppress(FileError, KeyError, TypeError):
        return PER_TOKEN in documents.read_json(directory / "asv.conf.json")["regressions_thresholds"]
    return False


def _slots(cases: Mapping[str, StoredCase]) -> dict[str, asv.Slot]:
    """Return the slot of each case: its benchmark group and its parameter values in asv.

    Raises `FileError` if two models have the same name in asv.
    """
    slots = {name: asv.slot(case.parameters) for name, case in cases.items()}
    models: dict[str, str] = {}
    for name, slot in slots.items():
        model = cases[name].parameters["model"]
        first_model = models.setdefault(slot.group, model)
        if first_model != model:
            raise FileError(
                f"models {first_model!r} and {model!r} have the same name in asv: "
                f"{slot.group.split('.')[0]!r}. Rename one of them in its cases."
            )
    return slots


def _write_night(
    file: Path,
    places: Sequence[Place],
    cases: Mapping[str, StoredCase],
    slots: Mapping[str, asv.Slot],
    date: int,
) -> dict[str, list[list[str]]]:
    """Write the results of one hardware class at one commit. Return each benchmark's parameter values."""
    sessions = [place.read(cases) for place in places]
    rows = _pooled(sessions, cases, slots)
    commit = places[0].commit
    hardware_class = places[0].hardware_class
    content = {
        "version": 2,
        "commit_hash": commit,
        "date": 1000 * date,
        "env_name": "perfsuite",
        "env_vars": {},
        "params": {"machine": hardware_class},
        "python": "",
        "requirements": {},
        "durations": {},
        "result_columns": asv.COLUMNS,
        "results": rows,
    }
    _write(file, content)
    machine = file.with_name("machine.json")
    if not machine.exists():
        _write(machine, _machine(sessions[-1].machine))
    return {name: row[asv.COLUMNS.index("params")] for name, row in rows.items()}


def _pooled(
    sessions: Sequence[StoredSession], cases: Mapping[str, StoredCase], slots: Mapping[str, asv.Slot]
) -> dict[str, list[Any]]:
    """Pool all launches at one commit on one hardware class, and convert them for asv."""
    launches: dict[str, dict[str, dict[tuple[str, ...], list[float]]]] = {name: {} for name in asv.METRICS}
    for session in sessions:
        for result in session.results:
            group, values = slots[result.case]
            for metric, figures in asv.costs(result, cases[result.case].unit).items():
                if figures:
                    launches[metric].setdefault(group, {}).setdefault(values, []).extend(figures)
    newest = max(session.started_at for session in sessions)
    return asv.results(launches, round(1000 * newest.timestamp()))


def _listed(parameters: Mapping[str, Sequence[set[str]]]) -> dict[str, Any]:
    return {
        name: {
            "name": name,
            "code": "",
            "param_names": asv.PARAMETERS,
            "params": list(map(asv.in_order, params)),
            "type": "memory" if name.endswith("memory") else "time",
            "unit": asv.METRICS[name.rpartition(".")[2]],
            "version": asv.VERSION,
        }
        for name, params in sorted(parameters.items())
    }


def _configuration(repo: Path, branch: str, commit_url: str) -> dict[str, Any]:
    return {
        "version": 1,
        "project": repo.name,
        "repo": str(repo),
        "dvcs": "git",
        "branches": [branch],
        "show_commit_url": commit_url,
        "results_dir": "results",
        "html_dir": "html",
        "regressions_thresholds": {
            PER_TOKEN: TOKENS_PER_S.tolerance("cuda"),
            r".*\.peak_memory\b": PEAK_MEMORY.tolerance("cuda"),
        },
        # A slowdown changes seconds per step and seconds per token. Report only seconds per token.
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


def _explain_missing_scripts(pages: Path) -> None:
    """Replace the page that asv shows if scripts cannot be loaded, because that page is not helpful."""
    index = (pages / "index.html").read_text(encoding="utf-8")
    hosts = sorted(set(re.findall(r'(?:src|href)="https?://([^/"]+)/[^"]*" integrity', index)))
    text = WITHOUT_SCRIPTS.format(hosts="".join(f"<li>{host}</li>" for host in hosts))
    documents.write_text(pages / "error.html", text)


def publish(out: Path, *, commits: frozenset[str]) -> Path:
    """Run `asv publish` on an export, and return the directory of the pages.

    Raises `ToolError` if asv fails or leaves out commits.
    """
    command = [sys.executable, "-m", "asv", "publish", "--no-pull", "--config", "asv.conf.json"]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"asv publish in {out} ended with {done.returncode}: {done.stdout}{done.stderr}")
    pages = out / "html"
    _explain_missing_scripts(pages)
    shown = documents.read_json(pages / "index.json")["revision_to_hash"].values()
    missing = commits - set(shown)
    if missing:  # asv exits with 0 even if it leaves out commits
        raise ToolError(
            f"asv publish left out {len(missing)} of {len(commits)} commits, "
            f"such as {min(missing)[:8]}: {done.stdout}{done.stderr}"
        )
    return pages
