"""Find past launches that ran the code of the baselines.

The noise is estimated from these past launches and from the launches of the baselines. There are two kinds of
past launches: launches of a case for which nothing has changed since its baseline, and launches that a
session made with its reference.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.results import baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.run import Run
from perfsuite.results.session_file import Canary, Measurement, SessionFile
from perfsuite.results.store import BaselineStore, Store
from perfsuite.verdict.comparability import launch_problems
from perfsuite.verdict.noise import ClassNoise, class_noise
from perfsuite.verdict.tonight import other_than_baseline
from perfsuite.verdict.unchanged import changes

DAYS_READ = 30  # how many of the newest days in the store are read
SESSIONS_READ = 60  # maximum number of sessions of these days that are read, the newest first
DAY = 8  # number of characters of a session's name that give its day, as in `20261130-133615-630174`


def noise_of_class(hardware_class: str, baselines: BaselineStore, store: Store) -> ClassNoise:
    """Estimate the noise of a hardware class from its baselines and from past sessions of the same code."""
    of_class = baselines.of_class(hardware_class)
    return class_noise(of_class, nights_of(of_class, store.results()))


def nights_of(baselines: Sequence[Baseline], files: Sequence[Path]) -> list[Baseline]:
    """Return the launches of past sessions that ran the code of these baselines, as one baseline per case.

    All sessions of a day count as one session, because sessions that follow each other differ less than
    sessions of different nights. `files` are the results of all past sessions, oldest first. Sessions whose
    launches are part of a baseline are left out. A case is left out if only one day has such launches,
    because one day shows nothing about the noise between sessions.
    """
    by_case = {stored.case.id: stored for stored in baselines}
    days = sorted({_day(file) for file in files})[-DAYS_READ:]
    newest = [file for file in files if _day(file) in days][-SESSIONS_READ:]
    runs: dict[str, dict[str, list[Run]]] = {}  # id of a case -> day -> launches
    for file in newest:
        session = documents.read_or_none(file, SessionFile)  # the file can be of another version, or cut off
        for case_id, launches in () if session is None else _unchanged(session, by_case):
            if file.parent.name not in {launch.session for launch in by_case[case_id].launches}:
                runs.setdefault(case_id, {}).setdefault(_day(file), []).extend(launches)
    return [
        baseline.from_runs(
            [run for launches in by_day.values() for run in launches],
            sessions=[day for day, launches in by_day.items() for _ in launches],
        )
        for by_day in runs.values()
        if len(by_day) > 1
    ]


def _day(file: Path) -> str:
    return file.parent.name[:DAY]


def _unchanged(session: SessionFile, by_case: dict[str, Baseline]) -> Iterator[tuple[str, list[Run]]]:
    """Yield the ids of cases whose code is unchanged, with their healthy launches."""
    for result in session.results:
        stored = by_case.get(result.case_id)
        if stored is not None and _is_of(stored, result.runs) and _did_nothing_change(result, stored):
            yield result.case_id, result.verdict.healthy(result.runs)
    if session.reference is not None:
        commit = session.reference.arm.facts.get("commit")
        for canary in session.reference.canaries:
            # Launches that were made only because a case looked slower are not typical of that night.
            stored = None if canary.looked_slower else by_case.get(canary.case_id)
            if stored is not None and _is_of(stored, canary.runs):
                launches = [run for run in canary.runs if _is_reference(run, canary, stored, commit)]
                if launches:
                    yield canary.case_id, launches


def _is_of(stored: Baseline, runs: Iterable[Run]) -> bool:
    """Return whether there are launches, and all of them ran on the hardware class of the baseline."""
    classes = {run.machine.hardware_class for run in runs}
    return classes == {stored.hardware_class}


def _did_nothing_change(result: Measurement, stored: Baseline) -> bool:
    verdict = result.verdict
    return (
        not (result.dry or result.before or verdict.outcome == "failed")
        and verdict.is_same_work
        and bool(verdict.healthy(result.runs))
        and not any(change for run in result.runs for change in changes(run, stored))
    )


def _is_reference(run: Run, canary: Canary, stored: Baseline, commit: str | None) -> bool:
    """Return whether a launch with a reference shows the speed of the baseline's code."""
    if canary.unused is not None or run.failure is not None or launch_problems(run, stored):
        return False
    measured = None if stored.accepted is None else stored.accepted.measured
    is_at_commit = measured is not None and commit == measured[:12]
    return not other_than_baseline(run, stored, measured if is_at_commit else None)
