"""The history: files that keep the results of sessions for years.

    DIR/cases/<case id>.<digest>.json                      the full definition of a case
    DIR/<hardware class>/<commit>/<time>-<digest>.json     the results of one session

Files are never rewritten, and their names depend on their contents, so several machines can share a history.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from perfsuite import documents
from perfsuite.case.case import NO_TOKENS, Case, Unit
from perfsuite.case.hardware import Machine
from perfsuite.documents import D, Data, Document
from perfsuite.errors import FileError
from perfsuite.inputs import git
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Excuse, Outcome
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile

Column = tuple[float | None, ...]
"""The value of a metric in each healthy launch, in the order of the launches. None if a launch has no
value."""


def middle(column: Column) -> float | None:
    """Return the median of the launches that have a value. None if no launch has one."""
    values = [value for value in column if value is not None]
    return median(values) if values else None


class StoredCase(Document):
    """A case as it was measured.

    It is stored as plain data, so that it can be read even if its framework no longer exists.
    """

    schema_version: Literal[1] = 1
    id: str
    parameters: dict[str, str]  # `Case.parameters`, which distinguish the case from other cases
    case: dict[str, Any]

    @property
    def unit(self) -> Unit:
        """The unit of the case. For samples, `StoredResult.tokens_per_step` is the number of samples."""
        return "samples" if self.parameters.get("sequence_length") == NO_TOKENS else "tokens"


class StoredResult(Data):
    """The results of one case in a session. Times are in seconds, memory is in bytes."""

    case: str  # the name of the case's file in `cases/`, without `.json`
    outcome: Outcome
    step_s_p50: Column
    step_s_mean: Column
    probe_s_p50: Column  # only in launches on a CPU: the time of a fixed piece of work between the steps
    peak_memory_bytes: Column
    tokens_per_step: int | None
    settings: int  # index in `StoredSession.settings`
    environment: int  # index in `StoredSession.environments`
    # Rates that the device reached in the last launch, before the workload was built.
    device_probe: dict[str, float] = Field(default_factory=dict)


class StoredVerdict(Data):
    """The verdict on a case in a session."""

    word: Literal[Outcome, Excuse]  # the outcome or, if it was excused, the excuse
    shadow: bool = False  # whether the test would have failed without `--perf-shadow`
    baselines: str | None = None  # a digest of the baselines that were used


class StoredReference(Data):
    """How much the speed of a session's reference has changed since the baselines were measured.

    The reference is the environment and the commit of the baselines. A change of its speed is a change of the
    machine, because its code is still the same.
    """

    change: float = Field(gt=-1)  # relative change of tokens/s: -0.01 is 1% fewer
    interval: tuple[float, float]  # its 99% interval
    baselines: dict[str, str]  # case id of each canary -> digest of the baselines with which it was compared

    def is_comparable(self, other: Self) -> bool:
        """Return whether this change and `other` are relative to the same baselines."""
        canaries = self.baselines.keys() & other.baselines.keys()
        return bool(canaries) and all(self.baselines[name] == other.baselines[name] for name in canaries)


class StoredSession(Document):
    """The results of one session on one hardware class at one commit."""

    schema_version: Literal[1] = 1
    perfsuite: str
    hardware_class: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    commit: str = Field(pattern=r"^[0-9a-f]{40,64}$")
    started_at: datetime
    machine: Machine
    # The settings and environments of the cases, without duplicates. Most cases of a session share them.
    settings: tuple[dict[str, str], ...]
    environments: tuple[dict[str, str], ...]
    results: tuple[StoredResult, ...]
    # Case id -> verdict, including cases that measured nothing and have no result.
    verdicts: dict[str, StoredVerdict]
    reference: StoredReference | None = None  # None: there was no reference, or its change is unknown

    @model_validator(mode="after")
    def _has_what_results_name(self) -> Self:
        for number, result in enumerate(self.results):
            for name, index, table in (
                ("settings", result.settings, self.settings),
                ("environment", result.environment, self.environments),
            ):
                if not 0 <= index < len(table):
                    raise ValueError(
                        f"results.{number}.{name} is {index}, but the length of its table is {len(table)}"
                    )
        return self


class Place(NamedTuple):
    """The file of a session in a history, and the information in its path."""

    file: Path
    hardware_class: str
    commit: str
    day: str  # the day on which the session started, in UTC, as YYYYMMDD

    def read(self, cases: Mapping[str, StoredCase]) -> StoredSession:
        """Read the session. `cases` are the cases of the history.

        Raises `FileError` if the file belongs to another place, or if the history has lost one of its cases.
        """
        session = _read(self.file, StoredSession)
        if (session.hardware_class, session.commit) != (self.hardware_class, self.commit):
            raise FileError(
                f"{self.file}: the session ran on {session.hardware_class} at {session.commit}, which does "
                "not match the path of the file. Move the file or delete it."
            )
        for result in session.results:
            if result.case not in cases:
                missing = self.file.parents[2] / "cases" / f"{result.case}.json"
                raise FileError(f"{self.file}: a case of this session is missing. Restore {missing}")
        return session


@dataclass(frozen=True, kw_only=True)
class Added:
    """The result of adding one `results.json` to a history."""

    written: Sequence[Path]  # new files; empty if the session was added before or has nothing to keep
    was_added_before: bool  # whether a part of the session had been added before
    kept: int  # number of the session's results that are now in the history
    left_out: Sequence[str]  # a line for each result that cannot be kept, with the reason
    session: SessionFile  # the session that was added


def add(history: Path, file: Path) -> Added:
    """Copy the results of a session to a history. Raises `FileError` if the file is bad."""
    session = documents.read(file, SessionFile)
    if session.arms:
        arms = " and ".join(repr(arm.text) for arm in session.arms)
        raise FileError(
            f"{file}: its session compares {arms}, but each session of a history must have only one "
            "environment"
        )
    try:
        sessions, cases, left_out = _stored(session)
    except ValueError as error:
        raise FileError(f"{file}: {error}") from None
    written = [keep(history, stored, cases) for stored in sessions]
    return Added(
        written=[path for path in written if path is not None],
        was_added_before=None in written,
        kept=sum(len(stored.results) for stored in sessions),
        left_out=left_out,
        session=session,
    )


def keep(history: Path, session: StoredSession, cases: Mapping[str, StoredCase]) -> Path | None:
    """Write the new results of a session, and the cases that they refer to. Return the file of the results.

    A session can be added while it runs, and again when it is complete. If nothing is new, nothing is written
    and None is returned. Raises `FileError` if a file of the same session cannot be read.
    """
    time = session.started_at.strftime("%Y%m%dT%H%M%SZ")
    directory = history / session.hardware_class / session.commit
    there = [_read(file, StoredSession) for file in directory.glob(f"{time}-*.json")]
    kept_results = [_resolved(earlier, result) for earlier in there for result in earlier.results]
    new = tuple(result for result in session.results if _resolved(session, result) not in kept_results)
    kept_verdicts = {(case, verdict) for earlier in there for case, verdict in earlier.verdicts.items()}
    verdicts = {
        case: verdict for case, verdict in session.verdicts.items() if (case, verdict) not in kept_verdicts
    }
    if not new and not verdicts:
        return None
    session = session.replace(results=new, verdicts=verdicts)
    target = directory / f"{time}-{documents.digest(documents.plain(session), 12)}.json"
    for name in {result.case for result in session.results}:
        case_file = history / "cases" / f"{name}.json"
        if not case_file.exists():
            _write(case_file, cases[name])
    _write(target, session)
    return target


def _resolved(session: StoredSession, result: StoredResult) -> tuple[object, ...]:
    """Return a result with its settings and environment, to compare it with results of other files.

    The indices, which differ between files, are set to 0.
    """
    settings = session.settings[result.settings]
    environment = session.environments[result.environment]
    return settings, environment, result.replace(settings=0, environment=0)


def places(history: Path, *, hardware_class: str = "*", since: date | None = None) -> list[Place]:
    """List the sessions of a history, oldest first.

    `hardware_class` is a glob pattern, and `since` is the first day. Raises `FileError` if there is no
    history.
    """
    if not history.is_dir():
        raise FileError(f"there is no history in {history}. Add sessions with: perfsuite history add")
    hashes = "[0-9a-f]" * 40 + "*"  # a history can be a branch of a repository, with other files
    files = sorted(history.glob(f"{hardware_class}/{hashes}/*.json"), key=lambda file: file.name)
    sessions = [Place(file, file.parts[-3], file.parts[-2], file.name[:8]) for file in files]
    return [place for place in sessions if since is None or place.day >= f"{since:%Y%m%d}"]


def on_branch(
    places: Sequence[Place], history: Path, repo: Path, branch: str
) -> tuple[list[Place], dict[str, int], dict[str, str]]:
    """Split sessions by whether their commit is on a branch.

    Returns the sessions on the branch, the time of each commit on the branch (in seconds, oldest first), and
    for each other commit the reason why it is not on the branch. Raises `GitError`, and `FileError` if no
    session is left.
    """
    dates = git.dates(repo, branch)
    unplaced = git.unplaced({place.commit for place in places} - dates.keys(), repo, branch)
    placed = [place for place in places if place.commit in dates]
    if not placed:
        raise FileError(f"{history} has no session whose commit is on {branch} of {repo}")
    return placed, dates, unplaced


def read_cases(history: Path) -> dict[str, StoredCase]:
    """Read all cases of a history. The keys are the names that results use."""
    files = sorted((history / "cases").glob("*.json"))
    return {file.stem: _read(file, StoredCase) for file in files}


def _read(file: Path, kind: type[D]) -> D:
    """Read a file of a history. Raises `FileError` if its content does not match the digest in its name."""
    document = documents.read(file, kind)
    digest = documents.digest(documents.read_json(file), 12)
    if file.stem[-12:] != digest:
        raise FileError(
            f"{file}: its name ends with {file.stem[-12:]!r}, but the digest of its content is {digest!r}: "
            "it was edited or damaged. Restore it or delete it"
        )
    return document


def no_case(history: Path, pattern: str) -> FileError:
    """Return the error for a pattern of case ids that matches no case of the history."""
    return FileError(f"{history} has no case that matches {pattern!r}. See: perfsuite history list")


def matching(cases: Mapping[str, StoredCase], pattern: str) -> set[str]:
    """Return the names of the cases whose id matches. `*` matches any text, and `?` matches one character."""
    return {name for name, case in cases.items() if fnmatchcase(case.id, pattern)}


def _stored(session: SessionFile) -> tuple[list[StoredSession], dict[str, StoredCase], list[str]]:
    """Convert a session to one stored session for each part and hardware class.

    A session that was resumed has several parts. Also returns the cases, and a line for each result that is
    left out. Raises ValueError for a bad time.
    """
    if session.commit is None:
        return [], {}, ["the session has no commit: run it in a git repository"]
    if session.dirty:
        return [], {}, [f"uncommitted changes on {session.commit[:8]}: no commit has the measured code"]
    by_part: dict[tuple[datetime, str], list[Measurement]] = {}
    left_out = []
    for result in session.results:
        why = _why_no_figures(result)
        if why is not None:
            left_out.append(f"{result.case_id}: {why}")
        if not result.dry and all(run.inject is None for run in result.runs):
            part = (_began(session, result), (result.hardware_class or session.machine.hardware_class))
            by_part.setdefault(part, []).append(result)
    cases: dict[str, StoredCase] = {}
    sessions = [_stored_part(session, *part, results, cases) for part, results in sorted(by_part.items())]
    return sessions, cases, left_out


def _why_no_figures(result: Measurement) -> str | None:
    has_time = any(_column(result.healthy_runs, "step_s_p50"))
    return result.no_evidence or (None if has_time else "no launch has a step time")


def _stored_part(
    session: SessionFile,
    started_at: datetime,
    hardware_class: str,
    results: Sequence[Measurement],
    cases: dict[str, StoredCase],
) -> StoredSession:
    """Return the results of one part on one hardware class, and add its cases to `cases`."""
    assert session.commit is not None
    settings: list[dict[str, str]] = []
    environments: list[dict[str, str]] = []
    stored = []
    for result in results:
        if _why_no_figures(result) is not None:
            continue
        runs = result.healthy_runs
        last = runs[-1]
        observed = runs[-1].observed
        name, case = stored_case(last.case)
        cases[name] = case
        stored.append(
            StoredResult(
                case=name,
                outcome=result.outcome,
                step_s_p50=_column(runs, "step_s_p50"),
                step_s_mean=_column(runs, "step_s_mean"),
                probe_s_p50=_column(runs, "probe_s_p50"),
                peak_memory_bytes=_column(runs, "peak_memory_bytes"),
                tokens_per_step=_tokens_per_step(last),
                settings=_index(settings, observed.settings if observed else {}),
                environment=_index(environments, observed.environment if observed else {}),
                device_probe={name: _rounded(rate) for name, rate in last.device_probe.items()},
            )
        )
    return StoredSession(
        perfsuite=session.perfsuite,
        hardware_class=hardware_class,
        commit=session.commit,
        started_at=started_at,
        machine=next((run.machine for result in results for run in result.runs), session.machine),
        verdicts={
            result.case_id: StoredVerdict(
                word=result.excused or result.outcome, shadow=result.shadow, baselines=result.judged_by
            )
            for result in results
        },
        results=tuple(stored),
        reference=_reference(session, hardware_class),
        settings=tuple(settings),
        environments=tuple(environments),
    )


def _reference(session: SessionFile, hardware_class: str) -> StoredReference | None:
    """Return how the speed of the session's reference changed on a hardware class, or None if unknown."""
    if session.reference is None:
        return None
    judged_by = {result.case_id: result.judged_by for result in session.results}
    for change in session.reference.changes:
        if (change.metric, change.hardware_class) == (TOKENS_PER_S.name, hardware_class):
            digests = {name: judged_by.get(name) for name in change.canaries}
            return StoredReference(
                change=change.change,
                interval=change.interval,
                baselines={name: digest for name, digest in digests.items() if digest is not None},
            )
    return None


def _index(table: list[dict[str, str]], entry: dict[str, str]) -> int:
    if entry not in table:
        table.append(entry)
    return table.index(entry)


def _began(session: SessionFile, result: Measurement) -> datetime:
    """Return the start of the part of the session in which a case was measured.

    Raises ValueError for a bad time.
    """
    parts = [datetime.fromisoformat(part.started_at).astimezone(UTC) for part in session.parts]
    launched = [datetime.fromisoformat(run.started_at).astimezone(UTC) for run in result.runs[:1]]
    return max(began for began in parts if began <= max([*launched, parts[0]])) if launched else parts[-1]


def stored_case(case: Case) -> tuple[str, StoredCase]:
    """Return the name of a case's file, and its content."""
    stored = StoredCase(id=case.id, parameters=case.parameters, case=documents.plain(case))
    return f"{case.id}.{documents.digest(documents.plain(stored), 12)}", stored


def _column(runs: Sequence[Run], figure: str) -> Column:
    """Return the rounded value of a metric in each launch. None if it is missing, infinite or not above 0."""
    values = [run.figures.get(figure) for run in runs]
    return tuple(_rounded(v) if v is not None and math.isfinite(v) and v > 0 else None for v in values)


def _tokens_per_step(run: Run) -> int | None:
    speed = run.figures.tokens_per_s
    step_s = run.figures.step_s_p50
    product = speed * step_s if speed is not None and step_s is not None else math.nan
    return round(product) if math.isfinite(product) and product > 0 else None


def _rounded(value: float) -> float:
    """Round to six significant digits. Round values of 100,000 or more to integers.

    More digits would mean nothing, and would take space.
    """
    return float(f"{value:.6g}") if value < 1e5 else float(round(value))


def _write(file: Path, document: Document) -> None:
    """Write a file as one line, because there are many files and nobody edits them."""
    text = json.dumps(documents.plain(document), sort_keys=True, separators=(",", ":"))
    documents.write_text(file, text + "\n")
