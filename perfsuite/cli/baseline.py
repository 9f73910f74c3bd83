"""`perfsuite baseline list | show | diff | accept`: shows baselines, and alone writes reviewed ones.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import contextlib
import getpass
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from perfsuite import documents
from perfsuite.errors import FileError, GitError, PerfsuiteError
from perfsuite.git import git
from perfsuite.launch.machine import detect
from perfsuite.report import summary, text
from perfsuite.report.terminal import console, plain_table
from perfsuite.report.text import amount, plural
from perfsuite.results import baseline
from perfsuite.results.baseline import Acceptance, Baseline
from perfsuite.results.metric import (
    GATED,
    PEAK_MEMORY,
    TOKENS_PER_S,
    Metric,
    extra_metrics,
    judged,
)
from perfsuite.results.run import Figures, Run
from perfsuite.results.store import BASELINES, STORE, BaselineStore, Store
from perfsuite.verdict.comparable import differences, environment_changes, launch_problems
from perfsuite.verdict.loss import loss_differs
from perfsuite.verdict.noise import class_noise

app = typer.Typer(help="Reviewed baselines: what each case reached when somebody accepted it.")

MIN_LAUNCHES = 5
"""Fewest healthy launches of a reviewed baseline."""
MAX_WORSENING = 0.005
"""Largest worsening of a baseline that needs no reason, relative."""

BaselinesOption = Annotated[Path, typer.Option("--baselines", help="Directory of reviewed baselines.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Local store, where runs are.")]
HardwareClass = Annotated[
    str | None, typer.Option("--hardware-class", help="Another class than this machine's.")
]
CaseGlob = Annotated[str, typer.Argument(help="Case ids; * and ? match.")]


@app.command("list")
def list_baselines(baselines: BaselinesOption = BASELINES, store: StoreOption = STORE) -> None:
    """Every baseline, reviewed or merely recorded here."""
    headings = ("hardware class", "case", "tokens/s", "memory", "launches", "from", "accepted")
    grid = plain_table(headings, overflow="fold")
    known = BaselineStore(baselines, Store(store).baselines)
    for file in known.files():
        grid.add_row(*_cells(documents.read(file, Baseline)))
    console().print(grid if grid.row_count else f"no baselines in {known}")


def _cells(shown: Baseline) -> list[str]:
    """Return the cells of a baseline's row in the list."""
    median = shown.median(TOKENS_PER_S.name)
    return [
        shown.hardware_class,
        shown.case.id,
        "not measured" if median is None else summary.speed(median, shown.case.unit, "tokens"),
        amount(shown.median(PEAK_MEMORY.name), PEAK_MEMORY.unit),
        str(len(shown.launches)),
        shown.recorded_at[:10],
        "local" if shown.accepted is None else f"by {shown.accepted.by}",
    ]


@app.command()
def show(
    case: CaseGlob,
    baselines: BaselinesOption = BASELINES,
    store: StoreOption = STORE,
    hardware_class: HardwareClass = None,
) -> None:
    """One or more baselines in full: launches, noise, settings, environment, who accepted them and why."""
    known = BaselineStore(baselines, Store(store).baselines)
    files = _matching(known, hardware_class or detect().hardware_class, case)
    out = console()
    for file in files:
        shown = documents.read(file, Baseline)
        out.print(_title(shown))
        for line in [f"file: {file}", *_details(shown)]:
            out.print(f"  {line}")


def _details(shown: Baseline) -> list[str]:
    """Return lines: who accepted a baseline, its launches, and what it ran with."""
    lines = []
    if (accepted := shown.accepted) is not None:
        lines += [
            f"accepted by {accepted.by} on {accepted.date} at {accepted.commit or 'no commit'}",
            f"reason: {accepted.reason or 'none given'}",
        ]
    for metric in (*GATED, *extra_metrics(_figures(shown))):
        values = ", ".join(text.value(metric, value) for value in shown.values(metric.name))
        label = metric.counting(shown.case.unit).label
        lines.append(f"{label}: {values or 'not measured'}{_noise(shown, metric)}")
    if (observed := shown.observed) is not None:
        for name, entries in (("settings", observed.settings), ("environment", observed.environment)):
            lines.append(f"{name}: " + ", ".join(f"{key}={value}" for key, value in entries.items()))
    return lines


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
    rows = [
        (documents.read(file, Baseline) if file.exists() else None, _at_ref(ref, file, root))
        for file in files
    ]
    if not rows:
        console().print(f"no baseline changed since {ref}")
    for now, then in rows:
        console().print(_before_after(then, now))


@app.command()
def accept(
    case: CaseGlob = "*",
    baselines: BaselinesOption = BASELINES,
    store: StoreOption = STORE,
    hardware_class: HardwareClass = None,
    reason: Annotated[str | None, typer.Option(help="Why it may be slower or larger than before.")] = None,
    sessions: Annotated[
        int, typer.Option(help="Take the launches of so many sessions, the newest ones.", min=1)
    ] = 1,
) -> None:
    """Accept measured runs as the reviewed baseline of their case, and say which files to commit.

    Takes the healthy launches of the newest session that measured a case, at least 5. `--sessions 3` takes
    also those of the two before, so that the baseline knows how much one day differs from another. Launches
    whose settings differ from the newest one's are left out. Exit status 1 if a case was not accepted.
    """
    machine_class = hardware_class or detect().hardware_class
    runs = _runs(Store(store), machine_class, case, sessions)
    if not runs:
        raise FileError(
            f"no measured run of a case matching {case!r} on {machine_class} in {Store(store).sessions}. "
            f"Measure first: pytest bench_cases --perf-min-launches={MIN_LAUNCHES} -m ..."
        )
    written, refused = [], []
    for case_id, by_session in sorted(runs.items()):
        try:
            written.append(_accept(BaselineStore(baselines), by_session, reason))
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


RunsBySession = dict[str, list[Run]]
"""Launches of one case on one hardware class, by session, oldest first."""


def _accept(reviewed: BaselineStore, by_session: RunsBySession, reason: str | None) -> Path:
    """Make these launches the reviewed baseline of their case, show what changes, and return its file.

    Raises `PerfsuiteError` if they cannot be, or if they need a reason.
    """
    measured = [run for launches in by_session.values() for run in launches]
    newest = measured[-1]
    known = reviewed.find(newest.machine.hardware_class, newest.case)
    before = known.baseline if known else None
    chosen = _choose(measured, None if reason else before)
    now = baseline.from_runs(chosen, sessions=_sessions(chosen, by_session), accepted=_acceptance(reason))
    out = console()
    out.print(_before_after(before, now))
    if changed := _changed_among(chosen):
        out.print("  changed from the older of these launches to the newest: " + "; ".join(changed))
    if before is not None and not reason:
        _require_reason(before, now, chosen)
    return reviewed.write_reviewed(now)


class _Refused(PerfsuiteError):
    """These runs cannot become a baseline."""


def _runs(store: Store, hardware_class: str, pattern: str, sessions: int) -> dict[str, RunsBySession]:
    """Read the launches of each matching case in its newest sessions. Names bad files and leaves them out."""
    by_case: dict[str, RunsBySession] = {}
    for session, run_dir in store.launches(pattern):
        try:
            run = documents.read(run_dir.run, Run)
        except FileError as error:
            console().print(f"left out: {error}", style="yellow")
            continue
        if run.machine.hardware_class == hardware_class:
            by_case.setdefault(run.case.id, {}).setdefault(session, []).append(run)
    return {
        case_id: {session: by_session[session] for session in sorted(by_session)[-sessions:]}
        for case_id, by_session in by_case.items()
    }


def _sessions(runs: list[Run], by_session: RunsBySession) -> list[str]:
    """Return the session of each run. Runs are compared by identity, because two launches may be equal."""
    return [
        session
        for run in runs
        for session, launches in by_session.items()
        if any(run is launch for launch in launches)
    ]


def _choose(measured: list[Run], before: Baseline | None) -> list[Run]:
    """Return the healthy launches that compare with the newest of them. Raises `_Refused` if too few do."""
    left_out = Counter[str]()
    chosen: list[Run] = []
    for run in reversed(measured):
        if run.failure is not None:
            left_out["failed"] += 1
        elif run.inject is not None:
            left_out["injected"] += 1
        elif launch_problems(run, before):
            left_out["unhealthy"] += 1
        elif chosen and (unlike := differences(run, baseline.from_runs(chosen[:1]))):
            reasons = (f"{key} is {its!r}, the newest's {newest!r}" for key, (newest, its) in unlike.items())
            left_out[f"unlike the newest ({'; '.join(reasons)})"] += 1
        else:
            chosen.append(run)
    if len(chosen) < MIN_LAUNCHES:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none"
        raise _Refused(
            f"{len(chosen)} healthy launches, a baseline needs {MIN_LAUNCHES} (left out: {why}). "
            f"Measure again with --perf-min-launches={MIN_LAUNCHES}; "
            "where the machine itself is another, say so with --reason"
        )
    return chosen[::-1]


def _changed_among(runs: list[Run]) -> list[str]:
    """Return what differs between the environment of the newest run and that of an older one."""
    older = [baseline.from_runs([run]) for run in runs[:-1]]
    return list(dict.fromkeys(change for each in older for change in environment_changes(runs[-1], each)))


def _require_reason(before: Baseline, now: Baseline, runs: Sequence[Run]) -> None:
    """Raise `_Refused` if a metric gets worse or is missing, or if the loss differs."""
    for metric in judged(_figures(before, now)):
        old, new = before.median(metric.name), now.median(metric.name)
        if old is None:
            continue
        label = metric.counting(now.case.unit).label
        if new is None:
            raise _Refused(f"{label} is in the baseline and was not measured")
        allowed = (
            MAX_WORSENING
            if metric in (TOKENS_PER_S, PEAK_MEMORY)
            else metric.tolerance(runs[-1].machine.device)
        )
        if _is_worse(metric, old, new, allowed):
            change = f"{text.value(metric, old)} -> {text.value(metric, new)}"
            raise _Refused(f"{label} gets worse ({change}): say why with --reason")
    if (difference := loss_differs(runs, before)) is not None:
        raise _Refused(f"{difference}: say why with --reason")


def _is_worse(metric: Metric, old: float, new: float, allowed: float) -> bool:
    """Tell whether the cost grew by more than `allowed`, relative. 0 bytes are a measured value."""
    less, more = (old, new) if metric.better == "lower" else (new, old)
    return more > less * (1 + allowed)


def _acceptance(reason: str | None) -> Acceptance:
    """Return who accepts, when, at which commit, and why: git's user name, or else that of the login."""
    commit: str | None = None
    by = getpass.getuser()
    with contextlib.suppress(GitError):
        commit = git("rev-parse", "HEAD", cwd=Path()).strip()
    with contextlib.suppress(GitError):
        by = git("config", "user.name", cwd=Path()).strip()
    return Acceptance(
        by=by, date=datetime.now(UTC).isoformat(timespec="seconds"), commit=commit, reason=reason
    )


def _title(shown: Baseline) -> Text:
    return Text.assemble((shown.case.id, "bold"), f" on {shown.hardware_class}")


def _before_after(before: Baseline | None, now: Baseline | None) -> Text:
    """Show each metric of a baseline before and after, with the noise between launches."""
    either = now or before
    assert either is not None
    shown = _title(either)
    shown.append(
        f"\n  launches: {_launches(before) if before else 'new'} -> {_launches(now) if now else 'removed'}"
    )
    for metric in (*GATED, *extra_metrics(_figures(before, now))):
        old = before.median(metric.name) if before else None
        new = now.median(metric.name) if now else None
        if old is None and new is None:
            continue
        label = metric.counting(either.case.unit).label
        change = f" ({metric.worsening(new, old):+.1%} cost)" if old and new else ""
        shown.append(
            f"\n  {label}: {text.value(metric, old) if before else 'new'}{_noise(before, metric)} -> "
            f"{text.value(metric, new) if now else 'removed'}{_noise(now, metric)}{change}"
        )
    return shown


def _figures(*baselines: Baseline | None) -> list[Figures]:
    """Return the figures of every launch of these baselines."""
    return [launch.figures for shown in baselines if shown is not None for launch in shown.launches]


def _launches(shown: Baseline) -> str:
    """Return the number of launches and of their sessions."""
    sessions = len({launch.session for launch in shown.launches})
    return f"{len(shown.launches)} of {plural(sessions, 'session')}"


def _noise(shown: Baseline | None, metric: Metric) -> str:
    """Return the standard deviation between the launches of one baseline; nothing if they are too few."""
    known = class_noise([shown]).of(metric) if shown is not None else None
    return f" +- {known.sigma:.1%}" if known is not None else ""


def _matching(store: BaselineStore, hardware_class: str, pattern: str) -> list[Path]:
    """Return the files of the baselines that match. Raises `FileError` if there are none."""
    files = store.files(hardware_class, pattern)
    if not files:
        raise FileError(
            f"no baseline matches {pattern!r} on {hardware_class} in {store}; see: perfsuite baseline list"
        )
    return files


def _at_ref(ref: str, file: Path, root: Path) -> Baseline | None:
    """Return a baseline as it was at a commit; None if it was not there. Raises `_Refused` if it is bad."""
    name = str(file.relative_to(root))
    if not git("ls-tree", "--name-only", "--full-tree", ref, "--", name, cwd=root).strip():
        return None
    try:
        content = json.loads(git("show", f"{ref}:{name}", cwd=root))
        return Baseline.model_validate(content, context=documents.FROM_FILE)
    except ValueError as error:
        raise _Refused(f"{name} at {ref} is no baseline that this perfsuite reads: {error}") from None
