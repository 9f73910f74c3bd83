"""The files that a repository keeps: reviewed baselines, and the local store.

Only the classes in this module and the modules named below know the names of directories and files:

    baselines/<hardware class>/<case id>.json               reviewed baselines
    .perfsuite/baselines/<hardware class>/<case id>.json    baselines recorded on this machine (the store)
    baselines/counts/<target>/<case id>.json                reviewed baselines of counts; also in the store
    baselines/profiles/<hardware class>/<case id>.json      profiles of reviewed baselines; also in the store
    .perfsuite/history/                                     the history of this machine's nightly runs
    .perfsuite/runs/<session>/results.json                  a session's `SessionFile`
    .perfsuite/runs/<session>/preflight-N/                  the files of a preflight (`RunDir`)
    .perfsuite/runs/<session>/<case id>/launch-N/           the files of a launch (`RunDir`)
    .perfsuite/runs/<session>/reference/<case id>/launch-N/ the files of a launch with the reference
    .perfsuite/runs/<session>/<case id>/profile/            the files of a launch for a profile
    .perfsuite/runs/<session>/<case id>/prediction/         the files of a dry run that predicts the speed
    .perfsuite/runs/<session>/<case id>/compile-caches/     caches of inductor and Triton, for one case
    .perfsuite/compare/<session>/                           the files of two arms: <case id>/<arm>/launch-N/
    .perfsuite/arms/<commit>/                               the worktree of an arm (`perfsuite.launch.arm`)
    .perfsuite/environments/<digest>/                       the packages of a lock file (`launch.installed`)
    .perfsuite/packages/<name==version>-<digest>/           the releases of an arm (`launch.overlay`)
    .perfsuite/bisect/<digest>/search.json                  the state of a bisect
"""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from perfsuite import documents
from perfsuite.case.case import Case, CaseFile
from perfsuite.errors import FileError
from perfsuite.inputs.ini import STORE
from perfsuite.results.baseline import Baseline, BaselineDocument
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.profile import LaunchProfile, ProfileBaseline
from perfsuite.results.run_dir import Below, RunDir, launches_in

BEFORE_AFTER = "before-after.txt"  # file with the measured numbers of each new baseline and the previous one
COUNTS = "counts"  # folder of the baselines of counts, next to the folders of hardware classes
PROFILES = "profiles"  # folder of the profiles that belong to baselines
_REPETITION = re.compile(r"\.\d+$")  # directory suffix of a case that is measured again; not used in ids


B = TypeVar("B", bound=BaselineDocument)


class Found(NamedTuple, Generic[B]):
    """A baseline and its file."""

    baseline: B
    file: Path


FoundBaseline = Found[Baseline]


def digest_of(baselines: Iterable[Found[Any] | None]) -> str | None:
    """Return a digest of the content of these baselines, without None values.

    Returns None if there are no other values.
    """
    contents = [documents.plain(found.baseline) for found in baselines if found is not None]
    return documents.digest(contents) if contents else None


@dataclass(frozen=True)
class BaselineFiles(Generic[B]):
    """Baselines of one kind, in folders. A reviewed baseline takes precedence over a local baseline."""

    reviewed: Path
    local: Path | None = None  # None if there are only reviewed baselines
    kind: type[B] = field(kw_only=True)

    def __str__(self) -> str:
        """Return the directories for messages: `baselines or .perfsuite/baselines`."""
        return " or ".join(map(str, self._directories))

    @property
    def _directories(self) -> Sequence[Path]:
        return [self.reviewed] if self.local is None else [self.reviewed, self.local]

    def reviewed_file(self, folder: str, case_id: str) -> Path:
        """Return the path of a case's reviewed file, which might not exist."""
        return self.reviewed / folder / f"{case_id}.json"

    def local_file(self, folder: str, case_id: str) -> Path:
        """Return the path of a case's local file, which might not exist."""
        assert self.local is not None
        return self.local / folder / f"{case_id}.json"

    def files(self, folder: str | None = None, case_ids: str = "*") -> list[Path]:
        """Return the files of cases whose ids match a pattern, in one folder or all, reviewed files first."""
        return [
            file
            for directory in self._directories
            for subdirectory in ([directory / folder] if folder else sorted(directory.glob("*")))
            for file in sorted(subdirectory.glob(f"{case_ids}.json"))
        ]

    def read(self, file: Path) -> B:
        """Read the baseline in a file.

        Raises `FileError` if the file cannot be read, if its content is that of another case or folder, or if
        it is local but lacks a digest. A local file needs a digest, because nobody reviewed it.
        """
        baseline = documents.read(file, self.kind)
        is_local = self.local is not None and file.is_relative_to(self.local)
        if is_local and "digest" not in documents.read_json(file):
            raise FileError(
                f"{file}: it has no digest: it was damaged, or an older perfsuite recorded it. Delete it to "
                "record it again, or restore it"
            )
        if (file.parent.name, file.stem) != (baseline.folder, baseline.case.id):
            raise FileError(
                f"{file}: it holds the baseline of {baseline.case.id} on {baseline.folder}. "
                "The path of a file must match its content: move the file or delete it."
            )
        return baseline

    def find(self, folder: str, case: Case) -> Found[B] | None:
        """Return the baseline of `case`; None if there is none.

        The reviewed file is read if it exists, and otherwise the local file. Raises `FileError` if that file
        cannot be read.
        """
        files = (directory / folder / f"{case.id}.json" for directory in self._directories)
        file = next(filter(is_there, files), None)
        return None if file is None else Found(self.read(file), file)

    def write_reviewed(self, baseline: B) -> Path:
        """Write an accepted baseline, and return its file. Raises `FileError`."""
        file = self.reviewed_file(baseline.folder, baseline.case.id)
        documents.write(file, baseline)
        return file

    def write_local(self, baseline: B) -> Path:
        """Write a recorded baseline with a digest, and return its file. Raises `FileError`."""
        sealed = documents.sealed(json.loads(baseline.as_json()))
        file = self.local_file(baseline.folder, baseline.case.id)
        documents.write_text(file, documents.lines(sealed) + "\n")
        return file


@dataclass(frozen=True)
class BaselineStore(BaselineFiles[Baseline]):
    """Baselines of times and memory, in folders named by hardware class, and access to the other kinds."""

    kind: type[Baseline] = field(default=Baseline, kw_only=True)

    @property
    def counts(self) -> BaselineFiles[CountBaseline]:
        """The baselines of counts, in folders named by target."""
        return self._below(COUNTS, CountBaseline)

    @property
    def profiles(self) -> BaselineFiles[ProfileBaseline]:
        """The profiles that belong to baselines, in folders named by hardware class."""
        return self._below(PROFILES, ProfileBaseline)

    def _below(self, folder: str, kind: type[B]) -> BaselineFiles[B]:
        return BaselineFiles(self.reviewed / folder, self.local and self.local / folder, kind=kind)

    def profile_of(self, entry: FoundBaseline) -> LaunchProfile | None:
        """Return the profile of a baseline; None if it has none or an outdated one. Raises `FileError`."""
        file = entry.file.parent.parent / PROFILES / entry.file.parent.name / entry.file.name
        document = self.profiles.read(file) if is_there(file) else None
        return document.profile if document and document.of_baseline == entry.baseline.recorded_at else None

    def of_class(self, hardware_class: str) -> list[Baseline]:
        """Return the readable baselines of a hardware class. A reviewed one replaces the local one."""
        first_files: dict[str, Path] = {}
        for file in self.files(hardware_class):
            first_files.setdefault(file.name, file)
        baselines = (documents.read_or_none(file, Baseline) for file in first_files.values())
        return [baseline for baseline in baselines if baseline is not None]


def is_there(file: Path) -> bool:
    """Return whether a file or link exists. A dangling link counts, so it causes an error when it is read."""
    return os.path.lexists(file)


def _session_name() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")


@dataclass(frozen=True)
class SessionDir:
    """The directory of one session, which has the session's name."""

    path: Path
    results = Below("results.json")  # `SessionFile`
    night = Below("night")  # the value of `NIGHT`, if a night runs the session

    @property
    def name(self) -> str:
        """The time at which the session was created (UTC, to the microsecond), so that names sort by age."""
        return self.path.name

    def case(self, case_id: str, repetition: int = 0) -> Path:
        """Return the directory of a case's launches. Each repetition in the session has its own directory."""
        return self.path / (f"{case_id}.{repetition + 1}" if repetition else case_id)

    def reference(self, case_id: str) -> Path:
        """Return the directory of a case's launches with the session's reference."""
        return self.path / "reference" / case_id

    def new_case(self, case_id: str) -> Path:
        """Return an unused path for the launches of a case."""
        return _first_free(self.case(case_id, repetition) for repetition in itertools.count())

    def new_preflight(self) -> Path:
        """Return an unused path for a preflight."""
        return _first_free(self.path / f"preflight-{number}" for number in itertools.count(1))


def _first_free(paths: Iterator[Path]) -> Path:
    """Return the first path that does not exist. Raises `FileError` if a path is invalid (too long)."""
    for path in paths:
        try:
            if not path.exists():
                return path
        except OSError as error:
            raise FileError(f"cannot use {path}: {error.strerror}. Name another directory") from None
    raise AssertionError("there is always another number")


NIGHT = "PERFSUITE_NIGHT"
"""Environment variable with which `perfsuite night` finds its own sessions: an id of the night."""


@dataclass(frozen=True)
class Store:
    """The local store: measurements made and baselines recorded on this machine."""

    path: Path = STORE
    baselines = Below("baselines")  # baselines recorded because a case had none
    history = Below("history")  # the default directory of the history
    sessions = Below("runs")  # one directory per session
    comparisons = Below("compare")  # one directory per comparison

    def new_session(self) -> SessionDir:
        """Return the directory of a new session. It is not created yet."""
        return SessionDir(self.sessions / _session_name())

    def new_comparison(self) -> SessionDir:
        """Return the directory of a new comparison, which is separate from sessions."""
        return SessionDir(self.comparisons / _session_name())

    def results(self) -> list[Path]:
        """Return the `results.json` of every session, oldest first."""
        return sorted(self.sessions.glob("*/results.json"))

    def results_of_night(self, night: str) -> list[Path]:
        """Return the `results.json` of every session of one night (`NIGHT`), oldest first."""
        files = self.sessions.glob("*/night")
        return sorted(file.with_name("results.json") for file in files if file.read_text() == night)

    def profiled(self, session: str, case_id: str) -> Iterator[RunDir]:
        """Yield the profiled launches of a case, newest first. Raises `FileError`.

        Launches with an injected fault are left out.
        """
        of_session = SessionDir(self.sessions / session)
        directories = (of_session.case(case_id, repetition) for repetition in itertools.count())
        for directory in reversed([*itertools.takewhile(Path.exists, directories)]):
            run_dir = RunDir.of_profile(directory)
            if run_dir.case.exists():
                request = documents.read(run_dir.case, CaseFile)
                if request.case.id == case_id and request.inject is None:
                    yield run_dir

    def launches(self, case_ids: str = "*") -> list[tuple[str, RunDir]]:
        """Return (session, launch) for all launches of cases whose ids match a pattern, oldest first."""
        return [
            (directory.parent.name, run_dir)
            for session in sorted(self.sessions.glob("*"))
            for directory in sorted(session.glob("*"))
            if fnmatchcase(_REPETITION.sub("", directory.name), case_ids)
            for run_dir in launches_in(directory)
            if run_dir.run.exists()
        ]


def stored_results(store: Path) -> list[Path]:
    """Return the `results.json` of all sessions in a store, oldest first.

    Raises `FileError` if the store has no session.
    """
    files = Store(store).results()
    if files:
        return files
    where = Store(store).sessions
    compared = sorted(Store(store).comparisons.glob("*/results.json"))
    newest = f", such as the newest comparison: {compared[-1]}" if compared else ""
    raise FileError(
        f"no session in {where}: measure first (pytest bench_cases), or name a results.json{newest}"
    )
