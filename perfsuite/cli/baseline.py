"""`perfsuite baseline list | show | diff | accept`: the only writer of reviewed baselines.

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
from rich.table import Table
from rich.text import Text

from perfsuite import documents
from perfsuite.errors import FileError, GitError, PerfsuiteError
from perfsuite.git import git
from perfsuite.launch.machine import detect
from perfsuite.report import summary
from perfsuite.report.terminal import console
from perfsuite.report.text import amount, plural
from perfsuite.results import baseline
from perfsuite.results.baseline import Acceptance, Baseline
from perfsuite.results.metric import GATED, PEAK_MEMORY, TOKENS_PER_S, Metric
from perfsuite.results.run import Run
from perfsuite.results.store import BASELINES, STORE, BaselineStore, Store
from perfsuite.verdict.comparable import differences, environment_changes, launch_problems
from perfsuite.verdict.loss import loss_differs
from perfsuite.verdict.noise import class_noise

app = typer.Typer(help="Reviewed baselines: what each case reached when somebody accepted it.")

MIN_LAUNCHES = 5
WORSE = 0.005
"""A baseline that gets worse by more than this, relatively, needs a reason."""

BaselinesOption = Annotated[Path, typer.Option("--baselines", help="Directory of reviewed baselines.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Local store, where runs are.")]
HardwareClass = Annotated[
    str | None, typer.Option("--hardware-class", help="Another class than this machine's.")
]
CaseGlob = Annotated[str, typer.Argument(help="Case ids; * and ? match.")]


@app.command("list")
def list_baselines(baselines: BaselinesOption = BASELINES, store: StoreOption = STORE) -> None:
    """Every baseline, reviewed or merely recorded here."""
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("hardware class", "case", "tokens/s", "memory", "launches", "from", "accepted"):
        grid.add_column(heading, overflow="fold")
    known = BaselineStore(baselines, Store(store).baselines)
    for file in known.files():
        held = documents.read(file, Baseline)
        accepted = "local" if held.accepted is None else f"by {held.accepted.by}"
        median = held.median(TOKENS_PER_S.name)
        speed = "not measured" if median is None else summary.speed(median, held.case.unit, "tokens")
        memory = amount(held.median(PEAK_MEMORY.name), PEAK_MEMORY.unit)
        grid.add_row(
            held.hardware_class,
            held.case.id,
            speed,
            memory,
            str(len(held.launches)),
            held.recorded_at[:10],
            accepted,
        )
    console().print(grid if grid.row_count else f"no baselines in {known}")


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
        held = documents.read(file, Baseline)
        out.print(_title(held))
        out.print(f"  file: {file}")
        if held.accepted is not None:
            a = held.accepted
            out.print(f"  accepted by {a.by} on {a.date} at {a.commit or 'no commit'}")
            out.print(f"  reason: {a.reason or 'none given'}")
        for metric in GATED:
            values = ", ".join(amount(value, metric.unit) for value in held.values(metric.name))
            label = metric.counting(held.case.unit).label
            out.print(f"  {label}: {values or 'not measured'}{_noise(held, metric)}")
        if held.observed is not None:
            for what, seen in (
                ("settings", held.observed.settings),
                ("environment", held.observed.environment),
            ):
                out.print(f"  {what}: " + ", ".join(f"{key}={value}" for key, value in seen.items()))


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
    out = console()
    reviewed = BaselineStore(baselines)
    written, refused = [], []
    for case_id, held in sorted(runs.items()):
        measured = [run for launches in held.values() for run in launches]
        try:
            found = reviewed.find(machine_class, measured[-1].case)
            before = found.baseline if found else None
            chosen = _choose(measured, None if reason else before)
            new = baseline.from_runs(chosen, sessions=_sessions(chosen, held), accepted=_acceptance(reason))
            out.print(_before_after(before, new))
            if changed := _changed_among(chosen):
                out.print("  changed from the older of these launches to the newest: " + "; ".join(changed))
            if before is not None and not reason:
                _require_reason(before, new, chosen)
            written.append(reviewed.write_reviewed(new))
        except PerfsuiteError as error:
            refused.append(f"{case_id}: {error}")
    for file in written:
        out.print(f"written: {file}")
    if written:
        out.print("Review and commit: git add " + " ".join(map(str, written)))
    for why in refused:
        console(stderr=True).print(f"not accepted: {why}", style="red")
    if refused:
        raise typer.Exit(1)


class _Refused(PerfsuiteError):
    """These runs cannot become a baseline."""


def _runs(store: Store, hardware_class: str, pattern: str, sessions: int) -> dict[str, dict[str, list[Run]]]:
    """Runs of the newest sessions by case id and session, oldest first. Bad files are said and left out."""
    found: dict[str, dict[str, list[Run]]] = {}
    for session, run_dir in store.launches(pattern):
        try:
            run = documents.read(run_dir.run, Run)
        except FileError as error:
            console().print(f"left out: {error}", style="yellow")
            continue
        if run.machine.hardware_class == hardware_class:
            found.setdefault(run.case.id, {}).setdefault(session, []).append(run)
    return {
        case_id: {session: held[session] for session in sorted(held)[-sessions:]}
        for case_id, held in found.items()
    }


def _sessions(runs: list[Run], measured: dict[str, list[Run]]) -> list[str]:
    """The session of each run. By identity: two launches may be equal."""
    return [
        session
        for run in runs
        for session, launches in measured.items()
        if any(run is launch for launch in launches)
    ]


def _choose(measured: list[Run], before: Baseline | None) -> list[Run]:
    """The healthy launches that compare with the newest of them. Raises `_Refused` if they are too few."""
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
            told = (f"{key} is {its!r}, the newest's {newest!r}" for key, (newest, its) in unlike.items())
            left_out[f"unlike the newest ({'; '.join(told)})"] += 1
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
    """What the newest of these runs found in its environment that an older one found otherwise."""
    older = [baseline.from_runs([run]) for run in runs[:-1]]
    return list(dict.fromkeys(change for each in older for change in environment_changes(runs[-1], each)))


def _require_reason(before: Baseline, now: Baseline, runs: Sequence[Run]) -> None:
    """Raises `_Refused` where a metric gets worse, or training learns otherwise."""
    for metric in GATED:
        old, new = before.median(metric.name), now.median(metric.name)
        label = metric.counting(now.case.unit).label
        let_pass = (
            WORSE if metric in (TOKENS_PER_S, PEAK_MEMORY) else metric.tolerance(runs[-1].machine.device)
        )
        if old and new and metric.worsening(new, old) > let_pass:
            change = f"{amount(old, metric.unit)} -> {amount(new, metric.unit)}"
            raise _Refused(f"{label} gets worse ({change}): say why with --reason")
        if old and not new:
            raise _Refused(f"{label} is in the baseline and was not measured")
    if (difference := loss_differs(runs, before)) is not None:
        raise _Refused(f"{difference}: say why with --reason")


def _acceptance(reason: str | None) -> Acceptance:
    commit: str | None = None
    by = getpass.getuser()
    with contextlib.suppress(GitError):
        commit = git("rev-parse", "HEAD", cwd=Path()).strip()
    with contextlib.suppress(GitError):
        by = git("config", "user.name", cwd=Path()).strip()
    return Acceptance(
        by=by, date=datetime.now(UTC).isoformat(timespec="seconds"), commit=commit, reason=reason
    )


def _title(held: Baseline) -> Text:
    return Text.assemble((held.case.id, "bold"), f" on {held.hardware_class}")


def _before_after(before: Baseline | None, now: Baseline | None) -> Text:
    """Each metric before and after, with the noise between launches."""
    either = now or before
    assert either is not None
    text = _title(either)
    text.append(
        f"\n  launches: {_launches(before) if before else 'new'} -> {_launches(now) if now else 'removed'}"
    )
    for metric in GATED:
        old = before.median(metric.name) if before else None
        new = now.median(metric.name) if now else None
        if old is None and new is None:
            continue
        label = metric.counting(either.case.unit).label
        change = f" ({metric.worsening(new, old):+.1%} cost)" if old and new else ""
        text.append(
            f"\n  {label}: {amount(old, metric.unit) if before else 'new'}{_noise(before, metric)} -> "
            f"{amount(new, metric.unit) if now else 'removed'}{_noise(now, metric)}{change}"
        )
    return text


def _launches(held: Baseline) -> str:
    sessions = len({launch.session for launch in held.launches})
    return f"{len(held.launches)} of {plural(sessions, 'session')}"


def _noise(held: Baseline | None, metric: Metric) -> str:
    known = class_noise([held]).of(metric) if held is not None else None
    return f" +- {known.sigma:.1%}" if known is not None else ""


def _matching(store: BaselineStore, hardware_class: str, pattern: str) -> list[Path]:
    files = store.files(hardware_class, pattern)
    if not files:
        raise FileError(
            f"no baseline matches {pattern!r} on {hardware_class} in {store}; see: perfsuite baseline list"
        )
    return files


def _at_ref(ref: str, file: Path, root: Path) -> Baseline | None:
    """The baseline as it was at a commit; None if it was not there."""
    name = str(file.relative_to(root))
    if not git("ls-tree", "--name-only", "--full-tree", ref, "--", name, cwd=root).strip():
        return None
    try:
        content = json.loads(git("show", f"{ref}:{name}", cwd=root))
        return Baseline.model_validate(content, context=documents.FROM_FILE)
    except ValueError as error:
        raise _Refused(f"{name} at {ref} is no baseline that this perfsuite reads: {error}") from None
