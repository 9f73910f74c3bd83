"""Choose the launches in the local store that become reviewed baselines, and record who accepts them."""

import contextlib
import getpass
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from perfsuite import documents
from perfsuite.analysis.collect import newest_profile
from perfsuite.errors import FileError, GitError
from perfsuite.inputs.git import git
from perfsuite.report.console import console
from perfsuite.results.baseline import MIN_ACCEPTED, Acceptance
from perfsuite.results.count_baseline import target_of
from perfsuite.results.dry_facts import Expected
from perfsuite.results.profile import of_baseline
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir, launches_in
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import BaselineStore, SessionDir, Store
from perfsuite.session.review import counts as of_counts
from perfsuite.session.review import times as of_times
from perfsuite.session.review.times import Launch

T = TypeVar("T")


def measured(
    store: Store, hardware_class: str | None, pattern: str, sessions: int
) -> dict[str, list[Launch]]:
    """Return the launches of each case on a hardware class.

    If `hardware_class` is None, the hardware classes of the newest session are meant. Raises `FileError` if
    there are no launches.
    """

    def case_and_class(run: Run) -> str | None:
        measured_on = run.machine.hardware_class
        is_meant = not run.dry and hardware_class in (None, measured_on)
        return f"{run.case.id} on {measured_on}" if is_meant else None

    def class_of(launches: list[Launch]) -> str:
        return launches[0].run.machine.hardware_class

    runs = _runs(store, pattern, sessions, case_and_class)
    if runs:
        newest = max(launch.session for launches in runs.values() for launch in launches)
        classes = {class_of(launches) for launches in runs.values() if launches[-1].session == newest}
        return {key: launches for key, launches in runs.items() if class_of(launches) in classes}
    where = "" if hardware_class is None else f" on {hardware_class}"
    raise FileError(
        f"no measured run of a case matching {pattern!r}{where} in {store.sessions}. "
        f"Measure first: pytest bench_cases --perf-min-launches={MIN_ACCEPTED} -m ..."
    )


def counted(store: Store, pattern: str, sessions: int) -> dict[str, list[Launch]]:
    """Return the counted launches of each case and target. Raises `FileError` if no launch was counted."""

    def case_and_target(run: Run) -> str | None:
        target = target_of(run.machine, dry=run.dry)
        return f"{run.case.id} counted on {target}" if of_counts.can_be_accepted(run) else None

    runs = _runs(store, pattern, sessions, case_and_target)
    if runs:
        return runs
    raise FileError(
        f"no counted launch of a case matching {pattern!r} in {store.sessions}. "
        "Measure first, without --perf-no-counts: pytest bench_cases -m ..."
    )


def _runs(
    store: Store, pattern: str, sessions: int, key_of: Callable[[Run], str | None]
) -> dict[str, list[Launch]]:
    """Return matching launches by key, oldest first. Launches without a key are left out.

    For each key, only launches of its newest `sessions` sessions are returned.
    """
    by_key: dict[str, dict[str, list[tuple[RunDir, Run]]]] = {}
    for session, run_dir in store.launches(pattern):
        run = _unless_bad(partial(documents.read, run_dir.run, Run))
        if run is not None:
            key = key_of(run)
            if key is not None:
                by_key.setdefault(key, {}).setdefault(session, []).append((run_dir, run))
    content_of = cache(partial(_content_of, store))
    healthy_in = cache(lambda session: _healthy_in(store, session, _results(content_of(session))))
    return {
        key: [
            Launch(
                run,
                session,
                is_healthy=run_dir.path in healthy_in(session),
                expected=_expected_in(_results(content_of(session)), run.case.id),
                commit=_commit_of(content_of(session)),
            )
            for session in sorted(by_session)[-sessions:]
            for run_dir, run in by_session[session]
        ]
        for key, by_session in by_key.items()
    }


def _content_of(store: Store, session: str) -> SessionFile | None:
    """Return what a session has written; None if its file cannot be read."""
    file = SessionDir(store.sessions / session).results
    return _unless_bad(partial(documents.read, file, SessionFile))


def _results(session: SessionFile | None) -> tuple[Measurement, ...]:
    return () if session is None else session.results


def _commit_of(session: SessionFile | None) -> str | None:
    """Return the commit whose code a session measured; None if there were uncommitted changes."""
    return None if session is None or session.dirty else session.commit


def _healthy_in(store: Store, session: str, results: Sequence[Measurement]) -> set[Path]:
    """Return the directories of the launches that a session judged and did not set aside.

    All launches of a case are left out if one of them failed, or if the case ended with an error.
    """
    of_session = SessionDir(store.sessions / session)
    return {
        run_dir.path
        for result in results
        if result.verdict.failure != "error" and all(run.failure is None for run in result.runs)
        for run_dir in launches_in(of_session.path / Path(result.directory).name)
        if run_dir.number not in result.verdict.unhealthy_launches
    }


def _expected_in(results: Sequence[Measurement], case_id: str) -> Expected | None:
    """Return the predicted time of a case's step; None if these results have no prediction."""
    for result in results:
        if result.case_id == case_id and result.prediction is not None:
            return result.prediction.expected
    return None


def _unless_bad(read: Callable[[], T]) -> T | None:
    """Return the result of `read`. If the file is unreadable, report this and return None."""
    try:
        return read()
    except FileError as error:
        console().print(f"left out: {error}", style="yellow")
        return None


def accept(
    reviewed: BaselineStore,
    launches: list[Launch],
    reason: str | None,
    store: Store | None,
    another_machine: bool,
) -> list[Path]:
    """Make these launches the reviewed baselines of their case, show what changes, and return the files.

    `store` contains the launches. If it is None, only the counts of the launches become a baseline. Raises
    `PerfsuiteError` and writes nothing if the launches cannot become baselines, or if this needs a reason and
    `reason` is None.
    """
    acceptance = _acceptance(reason, launches[-1].commit)
    newest = launches[-1].session
    times = profile = counts = None
    if store is not None:
        times = of_times.accepted(reviewed, launches, acceptance, another_machine=another_machine)
        times = times.replace(expected=launches[-1].expected)
        profile = _unless_bad(partial(newest_profile, store.profiled(newest, times.case.id)))
    of_newest = [launch.run for launch in launches if launch.session == newest]
    if profile is not None and profile.unseen is not None:
        console().print(f"counts are left out: {profile.unseen}", style="yellow")
    else:
        counts = of_counts.accepted(reviewed.counts, of_newest, acceptance)
    files = [] if times is None else [reviewed.write_reviewed(times)]
    files += [] if counts is None else [reviewed.counts.write_reviewed(counts)]
    if times is not None and profile is not None:
        files.append(reviewed.profiles.write_reviewed(of_baseline(times, profile)))
    return files


def _acceptance(reason: str | None, measured: str | None) -> Acceptance:
    """Return an `Acceptance` with git's user name or the login name, the date and the current commit.

    `measured` is the commit whose code the launches ran.
    """
    return Acceptance(
        by=_from_git("config", "user.name") or _login(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_from_git("rev-parse", "HEAD"),
        reason=reason,
        measured=measured,
    )


def _from_git(*arguments: str) -> str | None:
    with contextlib.suppress(GitError):
        return git(*arguments, cwd=Path()).strip()
    return None


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container can run as a user without a name
        return f"uid {os.getuid()}"
