"""`perfsuite baseline list | show | diff | accept`: shows baselines, and alone writes reviewed ones.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from perfsuite import documents
from perfsuite.cli import baseline_counts, baseline_profiles, baseline_times
from perfsuite.cli.baseline_times import Launch, Refused
from perfsuite.documents import Document
from perfsuite.errors import FileError, GitError, PerfsuiteError
from perfsuite.git import git
from perfsuite.launch.machine import detect
from perfsuite.report.terminal import console, plain_table
from perfsuite.results.baseline import MIN_ACCEPTED, Acceptance, Baseline
from perfsuite.results.count_baseline import CountBaseline, target_of
from perfsuite.results.profile import LaunchProfile, ProfileBaseline, of_baseline
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir, launches_in
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import (
    BASELINES,
    COUNTS,
    PROFILES,
    STORE,
    BaselineStore,
    FoundBaseline,
    SessionDir,
    Store,
    is_there,
)

app = typer.Typer(help="Reviewed baselines: what each case reached when somebody accepted it.")
D = TypeVar("D", bound=Document)

BaselinesOption = Annotated[Path, typer.Option("--baselines", help="Directory of reviewed baselines.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Local store, where runs are.")]
HardwareClass = Annotated[
    str | None, typer.Option("--hardware-class", help="Another class than this machine's.")
]
CaseGlob = Annotated[str, typer.Argument(help="Case ids; * and ? match.")]


@app.command("list")
def list_baselines(baselines: BaselinesOption = BASELINES, store: StoreOption = STORE) -> None:
    """Every baseline, reviewed or merely recorded here: of times and memory, then of counts."""
    known = BaselineStore(baselines, Store(store).baselines)
    times = plain_table(baseline_times.HEADINGS, overflow="fold")
    for file in known.files():
        times.add_row(*baseline_times.cells(documents.read(file, Baseline)))
    counts = plain_table(baseline_counts.HEADINGS, overflow="fold")
    for file in known.counts.files():
        counts.add_row(*baseline_counts.cells(documents.read(file, CountBaseline)))
    tables = [table for table in (times, counts) if table.row_count]
    for table in tables:
        console().print(table)
    if not tables:
        console().print(f"no baselines in {known}")


@app.command()
def show(
    case: CaseGlob,
    baselines: BaselinesOption = BASELINES,
    store: StoreOption = STORE,
    hardware_class: HardwareClass = None,
) -> None:
    """One or more baselines in full: launches, noise, settings, environment, who accepted them and why.

    Then what their steps were counted to do, on every target: counts belong to no machine.
    """
    known = BaselineStore(baselines, Store(store).baselines)
    machine_class = hardware_class or detect().hardware_class
    files, counts = known.files(machine_class, case), known.counts.files(case_ids=case)
    if not files and not counts:
        raise FileError(
            f"no baseline matches {case!r} on {machine_class} in {known}; see: perfsuite baseline list"
        )
    out = console()
    for file in files:
        times = documents.read(file, Baseline)
        out.print(baseline_times.title(times))
        profile = known.profiles.of(FoundBaseline(times, file))
        for line in [f"file: {file}", *baseline_times.details(times), *baseline_profiles.details(profile)]:
            out.print(f"  {line}")
    for file in counts:
        counted = documents.read(file, CountBaseline)
        out.print(baseline_counts.title(counted))
        for line in [f"file: {file}", *baseline_counts.details(counted)]:
            out.print(f"  {line}")
        for entry in counted.counts:
            out.print(baseline_counts.table(entry))


@app.command()
def diff(
    ref: Annotated[str, typer.Argument(help="A git commit, branch or tag to compare with.")] = "HEAD",
    baselines: BaselinesOption = BASELINES,
) -> None:
    """What changed in the reviewed baselines since a git ref, in figures rather than lines."""
    root = Path(git("rev-parse", "--show-toplevel", cwd=Path()).strip())
    directory = str(baselines.resolve())
    listed = git("diff", "--name-only", "--no-renames", ref, "--", directory, cwd=root)
    listed += git("ls-files", "--others", "--exclude-standard", "--", directory, cwd=root)
    files = [root / name for name in sorted(set(listed.splitlines())) if name.endswith(".json")]
    if not files:
        console().print(f"no baseline changed since {ref}")
    for file in files:
        if file.parent.parent == Path(directory, PROFILES):
            told = baseline_profiles.before_after(*_then_and_now(ref, file, root, ProfileBaseline))
        elif file.parent.parent == Path(directory, COUNTS):
            told = baseline_counts.before_after(*_then_and_now(ref, file, root, CountBaseline))
        else:
            told = baseline_times.before_after(*_then_and_now(ref, file, root, Baseline))
        console().print(told)


@app.command()
def accept(
    case: CaseGlob = "*",
    baselines: BaselinesOption = BASELINES,
    store: StoreOption = STORE,
    hardware_class: Annotated[
        str | None, typer.Option("--hardware-class", help="This class, not those of the newest session.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why it may be slower or larger than before.")] = None,
    another_machine: Annotated[
        bool,
        typer.Option(
            "--another-machine",
            help="Take also launches set aside only because the machine was not as at the baseline.",
        ),
    ] = False,
    sessions: Annotated[
        int, typer.Option(help="Take the launches of so many sessions, the newest ones.", min=1)
    ] = 1,
    counts: Annotated[
        bool, typer.Option("--counts", help="Accept what was counted, and no times: of any machine.")
    ] = False,
) -> None:
    """Accept measured runs as the reviewed baseline of their case, and say which files to commit.

    Takes the launches that the newest session that measured a case judged as healthy, at least 5, on the
    hardware classes of the newest session of all. `--sessions 3` takes also those of the two before, so that
    the baseline knows how much one day differs from another. Launches whose settings differ from the newest
    one's are left out. What the newest session counted is accepted with them, and the profile that
    `--perf-explain` took in it. `--counts` accepts what was counted alone: one launch is enough, on whatever
    machine, healthy or not. Exit status 1 if a case was not accepted.
    """
    local = Store(store)
    runs = _counted(local, case, sessions) if counts else _measured(local, hardware_class, case, sessions)
    written, refused = [], []
    for case_id, launches in sorted(runs.items()):
        try:
            reviewed = BaselineStore(baselines)
            written += _accept(reviewed, launches, reason, None if counts else local, another_machine)
        except PerfsuiteError as error:
            refused.append(f"{case_id}: {error}")
    out = console()
    for file in written:
        out.print(f"written: {file}")
    if written:
        out.print("Review and commit: git add " + " ".join(map(str, written)))
    for why in refused:
        console(stderr=True).print(f"not accepted: {why}", style="red")
    if refused:
        raise typer.Exit(1)


def _measured(
    store: Store, hardware_class: str | None, pattern: str, sessions: int
) -> dict[str, list[Launch]]:
    """The launches of each case on one hardware class, or on all classes of the newest session.

    Raises `FileError` if there are none.
    """

    def case_and_class(run: Run) -> str | None:
        measured_on = run.machine.hardware_class
        is_meant = not run.dry and hardware_class in (None, measured_on)
        return f"{run.case.id} on {measured_on}" if is_meant else None

    if runs := _runs(store, pattern, sessions, case_and_class):
        newest = max(launch.session for launches in runs.values() for launch in launches)
        classes = {_class_of(launches) for launches in runs.values() if launches[-1].session == newest}
        return {key: launches for key, launches in runs.items() if _class_of(launches) in classes}
    where = "" if hardware_class is None else f" on {hardware_class}"
    raise FileError(
        f"no measured run of a case matching {pattern!r}{where} in {store.sessions}. "
        f"Measure first: pytest bench_cases --perf-min-launches={MIN_ACCEPTED} -m ..."
    )


def _class_of(launches: list[Launch]) -> str:
    return launches[0].run.machine.hardware_class


def _counted(store: Store, pattern: str, sessions: int) -> dict[str, list[Launch]]:
    """The counted launches of each case and target. Raises `FileError` if there are none."""

    def case_and_target(run: Run) -> str | None:
        target = target_of(run.machine, dry=run.dry)
        return f"{run.case.id} counted on {target}" if baseline_counts.can_be_accepted(run) else None

    if runs := _runs(store, pattern, sessions, case_and_target):
        return runs
    raise FileError(
        f"no counted launch of a case matching {pattern!r} in {store.sessions}. "
        "Measure first, without --perf-no-counts: pytest bench_cases -m ..."
    )


def _runs(
    store: Store, pattern: str, sessions: int, key_of: Callable[[Run], str | None]
) -> dict[str, list[Launch]]:
    """Read the launches of matching cases in the newest sessions of each key, oldest first; those without a
    key are left out. Names bad files and leaves them out."""
    by_key: dict[str, dict[str, list[tuple[RunDir, Run]]]] = {}
    for session, run_dir in store.launches(pattern):
        try:
            run = documents.read(run_dir.run, Run)
        except FileError as error:
            console().print(f"left out: {error}", style="yellow")
            continue
        if (key := key_of(run)) is not None:
            by_key.setdefault(key, {}).setdefault(session, []).append((run_dir, run))
    healthy_in = functools.cache(functools.partial(_healthy_in, store))
    return {
        key: [
            Launch(run, session, run_dir.path in healthy_in(session))
            for session in sorted(by_session)[-sessions:]
            for run_dir, run in by_session[session]
        ]
        for key, by_session in by_key.items()
    }


def _healthy_in(store: Store, session: str) -> set[Path]:
    """The directories of the launches that a session judged, and did not set aside.

    None of a case in which a launch failed: then the others were not judged. None of a session whose
    `results.json` cannot be read: it is named.
    """
    of_session = SessionDir(store.sessions / session)
    try:
        results = documents.read(of_session.results, SessionFile).results
    except FileError as error:
        console().print(f"left out: {error}", style="yellow")
        return set()
    return {
        run_dir.path
        for result in results
        if result.verdict.failure != "error" and all(run.failure is None for run in result.runs)
        for run_dir in launches_in(of_session.path / Path(result.directory).name)
        if run_dir.number not in result.verdict.unhealthy_launches
    }


def _accept(
    reviewed: BaselineStore,
    launches: list[Launch],
    reason: str | None,
    store: Store | None,
    another_machine: bool,
) -> list[Path]:
    """Make these launches the reviewed baselines of their case, show what changes, and return the files.

    `store` is where they are; None: only what they counted becomes one. Raises `PerfsuiteError`, and writes
    none, if they cannot be, or if they need a reason.
    """
    acceptance, newest = _acceptance(reason), launches[-1].session
    times = None
    if store is not None:
        times = baseline_times.accepted(reviewed, launches, acceptance, another_machine=another_machine)
    of_newest = [launch.run for launch in launches if launch.session == newest]
    profile = None if store is None or times is None else _profile(store, newest, times.case.id)
    if profile is not None and profile.unseen is not None:
        console().print(f"counts are left out: {profile.unseen}", style="yellow")
        counts = None
    else:
        counts = baseline_counts.accepted(reviewed.counts, of_newest, acceptance)
    files = [] if times is None else [reviewed.write_reviewed(times)]
    files += [] if counts is None else [reviewed.counts.write_reviewed(counts)]
    if times is not None and profile is not None:
        files.append(reviewed.profiles.write_reviewed(of_baseline(times, profile)))
    return files


def _profile(store: Store, session: str, case_id: str) -> LaunchProfile | None:
    """The profile that a session took of a case; None, and why is said, if it cannot be read."""
    try:
        return store.profile(session, case_id)
    except FileError as error:
        console().print(f"left out: {error}", style="yellow")
        return None


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return f"uid {os.getuid()}"


def _acceptance(reason: str | None) -> Acceptance:
    """Return who accepts, when, at which commit, and why: git's user name, or else that of the login."""
    commit: str | None = None
    by = _login()
    with contextlib.suppress(GitError):
        commit = git("rev-parse", "HEAD", cwd=Path()).strip()
    with contextlib.suppress(GitError):
        by = git("config", "user.name", cwd=Path()).strip()
    return Acceptance(
        by=by, date=datetime.now(UTC).isoformat(timespec="seconds"), commit=commit, reason=reason
    )


def _then_and_now(ref: str, file: Path, root: Path, kind: type[D]) -> tuple[D | None, D | None]:
    """A baseline as it was at a commit and as it is; None where it is not."""
    return _at_ref(ref, file, root, kind), documents.read(file, kind) if is_there(file) else None


def _at_ref(ref: str, file: Path, root: Path, kind: type[D]) -> D | None:
    """Return a baseline as it was at a commit; None if it was not there. Raises `Refused` if it is bad."""
    name = str(file.relative_to(root))
    if not git("ls-tree", "--name-only", "--full-tree", ref, "--", name, cwd=root).strip():
        return None
    try:
        content = json.loads(git("show", f"{ref}:{name}", cwd=root))
        return kind.model_validate(content, context=documents.FROM_FILE)
    except ValueError as error:
        raise Refused(f"{name} at {ref} is no baseline that this perfsuite reads: {error}") from None
