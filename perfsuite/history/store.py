"""The history: what sessions measured, in files to be kept for years.

    DIR/cases/<case id>.<digest>.json                      a case in full, once
    DIR/<hardware class>/<commit>/<time>-<digest>.json     what one session measured there

No file is ever rewritten, and a session's name follows from its content: two machines may add to the same
history at once, git merges it without conflict, and adding a session again changes nothing. The series of
steps are not kept: a night of them is a hundred times as large as all the rest.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from perfsuite import documents
from perfsuite.case.case import NO_TOKENS, Case, Unit
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data, Document
from perfsuite.errors import FileError
from perfsuite.results.outcome import UNMEASURED
from perfsuite.results.run import Run
from perfsuite.results.session_file import Result, SessionFile

Column = tuple[float | None, ...]
"""A figure of each healthy launch, in the order they were made; None where a launch does not have it."""


class StoredCase(Document):
    """A case as it was when it was measured. Plain data: it must be readable when its framework is gone."""

    schema_version: Literal[1] = 1
    id: str
    parameters: dict[str, str]
    """What tells it from other cases: `Case.parameters`."""
    case: dict[str, Any]

    @property
    def unit(self) -> Unit:
        """What it counts: `StoredResult.tokens_per_step` is so many samples, if those."""
        return "samples" if self.parameters.get("sequence_length") == NO_TOKENS else "tokens"


class StoredResult(Data):
    """What a session measured of one case: medians of each launch."""

    case: str
    """The name of its file in `cases/`, without `.json`."""
    outcome: str
    step_s_p50: Column
    step_s_mean: Column
    probe_s_p50: Column
    """On a CPU, how long a fixed piece of work took beside the steps."""
    peak_memory_bytes: Column
    tokens_per_step: int | None
    settings: int
    """Place in `StoredSession.settings`, as the next."""
    environment: int
    device_probe: dict[str, float] = Field(default_factory=dict)
    """Of the last launch: what the device could do before the workload was built."""


class StoredSession(Document):
    """What one session measured on one hardware class at one commit."""

    schema_version: Literal[1] = 1
    perfsuite: str
    hardware_class: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    commit: str = Field(pattern=r"^[0-9a-f]{40,64}$")
    started_at: datetime
    machine: Machine
    settings: tuple[dict[str, str], ...]
    """Every set of settings that ran; most cases of a session share few environments and settings."""
    environments: tuple[dict[str, str], ...]
    results: tuple[StoredResult, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a session stands in a history; all that can be known without reading it."""

    file: Path

    @property
    def hardware_class(self) -> str:
        """The first directory."""
        return self.file.parts[-3]

    @property
    def commit(self) -> str:
        """The second directory."""
        return self.file.parts[-2]

    @property
    def day(self) -> str:
        """When it was started, UTC, as YYYYMMDD."""
        return self.file.name[:8]

    def read(self) -> StoredSession:
        """Raises `FileError`, also if the file does not stand where its content says."""
        session = documents.read(self.file, StoredSession)
        if (session.hardware_class, session.commit) != (self.hardware_class, self.commit):
            raise FileError(
                f"{self.file}: it holds a session on {session.hardware_class} at {session.commit}. "
                "A file must stand where its content says; move it or delete it."
            )
        return session


@dataclass(frozen=True, kw_only=True)
class Added:
    """What became of one `results.json`."""

    written: Sequence[Path]
    """Empty if it was there already, or if nothing of it can be kept."""
    known: bool
    kept: int
    left_out: Sequence[str]
    """What of it cannot be kept, and why."""


def add(history: Path, file: Path) -> Added:
    """Copy what a session measured into a history. Raises `FileError` on a bad file."""
    session = documents.read(file, SessionFile)
    digest = documents.digest(json.loads(file.read_text(encoding="utf-8")), 12)
    try:
        sessions, cases, left_out = _stored(session)
    except ValueError as error:
        raise FileError(f"{file}: {error}") from None
    written = [keep(history, stored, cases, digest) for stored in sessions]
    return Added(
        written=[path for path in written if path is not None],
        known=None in written,
        kept=sum(len(stored.results) for stored in sessions),
        left_out=left_out,
    )


def keep(history: Path, session: StoredSession, cases: Mapping[str, StoredCase], digest: str) -> Path | None:
    """Write a session and the cases it refers to. None, and nothing done, if it is there already."""
    time = session.started_at.strftime("%Y%m%dT%H%M%SZ")
    target = history / session.hardware_class / session.commit / f"{time}-{digest}.json"
    if target.exists():
        return None
    for name in {result.case for result in session.results}:
        if not (case_file := _case_file(history, name)).exists():
            _write(case_file, cases[name])
    _write(target, session)
    return target


def places(
    history: Path, *, hardware_class: str = "*", commit: str = "", since: date | None = None
) -> list[Place]:
    """Every session of a history, oldest first: of a commit that begins so, from a day on.

    Raises `FileError` if there is no history.
    """
    if not history.is_dir():
        raise FileError(f"no history in {history}. Add sessions to one: perfsuite history add")
    hashes = "[0-9a-f]" * 40 + "*"  # other files may live beside: it may be a branch of a repository
    found = [Place(file=file) for file in history.glob(f"{hardware_class}/{hashes}/*.json")]
    found = [place for place in found if place.commit.startswith(commit.lower())]
    found.sort(key=lambda place: place.file.name)
    return [place for place in found if since is None or place.day >= f"{since:%Y%m%d}"]


def read_cases(history: Path) -> dict[str, StoredCase]:
    """Every case by the name that results call it."""
    return {
        file.stem: documents.read(file, StoredCase) for file in sorted((history / "cases").glob("*.json"))
    }


def matching(cases: Mapping[str, StoredCase], pattern: str) -> set[str]:
    """The names of the cases whose id matches; `*` and `?` are any text and any character."""
    return {name for name, case in cases.items() if fnmatchcase(case.id, pattern)}


def check_cases(cases: Mapping[str, StoredCase], session: StoredSession, place: Place) -> None:
    """Raises `FileError` if the history lost a case of this session."""
    for result in session.results:
        if result.case not in cases:
            missing = _case_file(place.file.parents[2], result.case)
            raise FileError(f"{place.file}: its case is missing, restore {missing}")


def _stored(session: SessionFile) -> tuple[list[StoredSession], dict[str, StoredCase], list[str]]:
    """A session by hardware class, its cases, and what is left out. Raises ValueError."""
    if session.commit is None:
        return [], {}, ["the session names no commit: run it in a git repository"]
    if session.dirty:
        return [], {}, [f"uncommitted changes on {session.commit[:8]}: no commit says what was measured"]
    started_at = datetime.fromisoformat(session.started_at).astimezone(UTC)
    cases: dict[str, StoredCase] = {}
    by_class: dict[str, list[Result]] = {}
    left_out = []
    for result in session.results:
        if (reason := _cannot_be_kept(result)) is not None:
            left_out.append(f"{result.case_id}: {reason}")
        else:
            by_class.setdefault(result.runs[0].machine.hardware_class, []).append(result)
    sessions = []
    for hardware_class, results in sorted(by_class.items()):
        tables = _Tables()
        sessions.append(
            StoredSession(
                perfsuite=session.perfsuite,
                hardware_class=hardware_class,
                commit=session.commit,
                started_at=started_at,
                machine=results[0].healthy_runs[0].machine,
                results=tuple(_result(result, cases, tables) for result in results),
                settings=tuple(tables.settings),
                environments=tuple(tables.environments),
            )
        )
    return sessions, cases, left_out


def _cannot_be_kept(result: Result) -> str | None:
    if any(run.inject is not None for run in result.runs):
        return "a fault was injected"
    if result.runs and not result.verdict.healthy(result.runs):
        return "no launch on a healthy machine"
    if result.outcome in UNMEASURED:
        return f"{result.outcome}, which measures nothing"
    if not any(_column(result.healthy_runs, "step_s_p50")):
        return "no launch has a step time"
    return None


class _Tables:
    """Distinct settings and environments, in the order they were first seen."""

    def __init__(self) -> None:
        self.settings: list[dict[str, str]] = []
        self.environments: list[dict[str, str]] = []

    def place(self, table: list[dict[str, str]], entry: dict[str, str]) -> int:
        if entry not in table:
            table.append(entry)
        return table.index(entry)


def _result(result: Result, cases: dict[str, StoredCase], tables: _Tables) -> StoredResult:
    runs = result.healthy_runs
    last = runs[-1]
    seen = last.observed
    name, stored = stored_case(last.case)
    cases[name] = stored
    return StoredResult(
        case=name,
        outcome=result.outcome,
        step_s_p50=_column(runs, "step_s_p50"),
        step_s_mean=_column(runs, "step_s_mean"),
        probe_s_p50=_column(runs, "probe_s_p50"),
        peak_memory_bytes=_column(runs, "peak_memory_bytes"),
        tokens_per_step=_tokens_per_step(last),
        settings=tables.place(tables.settings, seen.settings if seen else {}),
        environment=tables.place(tables.environments, seen.environment if seen else {}),
        device_probe={name: _rounded(rate) for name, rate in last.device_probe.items()},
    )


def stored_case(case: Case) -> tuple[str, StoredCase]:
    """A case as it is kept, and the name of its file."""
    stored = StoredCase(id=case.id, parameters=case.parameters, case=documents.plain(case))
    return f"{case.id}.{documents.digest(documents.plain(stored), 12)}", stored


def _column(runs: Sequence[Run], figure: str) -> Column:
    """A figure of each launch, as far as it is a size."""
    values = [getattr(run.figures, figure) for run in runs]
    return tuple(_rounded(v) if v is not None and math.isfinite(v) and v > 0 else None for v in values)


def _tokens_per_step(run: Run) -> int | None:
    speed, step_s = run.figures.tokens_per_s, run.figures.step_s_p50
    product = speed * step_s if speed is not None and step_s is not None else math.nan
    return round(product) if math.isfinite(product) and product > 0 else None


def _rounded(value: float) -> float:
    """To a millionth, or whole bytes: what is beyond means nothing and takes space for years."""
    return float(f"{value:.6g}") if value < 1e5 else float(round(value))


def _case_file(history: Path, name: str) -> Path:
    return history / "cases" / f"{name}.json"


def _write(file: Path, document: Document) -> None:
    """On one line: such a file is never edited, and there are many."""
    text = json.dumps(documents.plain(document), sort_keys=True, separators=(",", ":"))
    documents.write_text(file, text + "\n")
