"""The commands `perfsuite baseline list | show | diff | accept | refresh`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from perfsuite import documents
from perfsuite.cli.shared import Hardware, Out, PytestOptions, Reason
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.errors import CaseError, FileError, PerfsuiteError
from perfsuite.node.machine import detect
from perfsuite.report import spans
from perfsuite.report.console import console, plain_table, print_json, say
from perfsuite.report.noise import sentence as noise_sentence
from perfsuite.report.terminal import spans_of, step_of
from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.store import BaselineFiles, BaselineStore, Found, Store
from perfsuite.session.by_command import check_asked
from perfsuite.session.past_nights import noise_of_class
from perfsuite.session.review.accept import accept as write_accepted
from perfsuite.session.review.accept import counted, measured
from perfsuite.session.review.counts import COUNTS
from perfsuite.session.review.refresh import refreshed
from perfsuite.session.review.since import changed_since
from perfsuite.session.review.times import TIMES, Shown, profile_lines
from perfsuite.session.setup import missing_baselines

J = TypeVar("J", Baseline, CountBaseline)
app = typer.Typer(no_args_is_help=True, help="Review baselines, which are the accepted results of each case.")

HardwareClass = Annotated[
    str | None, typer.Option("--hardware-class", help="Hardware class (default: that of this machine).")
]
CaseGlob = Annotated[str, typer.Argument(help="Pattern of case ids, with the wildcards * and ?.")]
ANOTHER_MACHINE = (
    "Also accept launches that were set aside only because their machine differed from that of the baseline."
)


@app.command("list")
@shares("baselines", "store", "as_json")
def list_baselines(*, shared: Shared) -> None:
    """List all baselines, both the reviewed ones and those that were recorded on this machine.

    Baselines of times and memory come first. Baselines of counts follow.
    """
    missing = missing_baselines(shared.baselines, Path())
    if missing is not None:
        say(missing)
    store = BaselineStore(shared.baselines, Store(shared.store).baselines)
    listed = [_listed(TIMES, store), _listed(COUNTS, store.counts)]
    if shared.as_json:
        print_json([row for rows, _ in listed for row in rows])
        return
    for rows, grid in listed:
        if rows:
            console().print(grid)
    if not any(rows for rows, _ in listed):
        console().print(f"no baselines in {store}")


def _listed(shown: Shown[J], files: BaselineFiles[J]) -> tuple[list[dict[str, object]], Table]:
    """Return the baselines as data and as a table."""
    grid = plain_table((*shown.headings, "from", "accepted"))
    rows = list[dict[str, object]]()
    folder = shown.headings[0].replace(" ", "_")
    for recorded in map(files.read, files.files()):
        by = None if recorded.accepted is None else recorded.accepted.by
        day = recorded.recorded_at[:10]
        made = {folder: recorded.folder, "case": recorded.case.id, "day": day, "accepted_by": by}
        rows.append({**made, **shown.figures(recorded)})
        accepted = "local" if by is None else f"by {by}"
        grid.add_row(recorded.folder, recorded.case.id, *shown.cells(recorded), day, accepted)
    return rows, grid


@app.command()
@shares("baselines", "store", "as_json")
def show(*, case: CaseGlob, hardware_class: HardwareClass = None, shared: Shared) -> None:
    """Show baselines in full: launches, noise, settings, environment, who accepted them and why.

    After these baselines, the noise of the hardware class is shown: between launches, between sessions, and
    the additional shift of a single case in a session.

    The last part of the output is about baselines of counts. It covers every target, because counts are not
    tied to one machine.
    """
    store = BaselineStore(shared.baselines, Store(shared.store).baselines)
    machine_class = hardware_class or detect().hardware_class
    files = store.files(machine_class, case)
    count_files = store.counts.files(case_ids=case)
    if not files and not count_files:
        raise FileError(
            f"no baseline matches {case!r} on {machine_class} in {store}. To see all: perfsuite baseline list"
        )
    if shared.as_json:
        contents = [(file, documents.plain(store.read(file))) for file in files]
        contents += [(file, documents.plain(store.counts.read(file))) for file in count_files]
        print_json([{"file": str(file), "baseline": content} for file, content in contents])
        return
    for file in files:
        times = store.read(file)
        profile = store.profile_of(Found(times, file))
        _show(TIMES, times, file, [] if profile is None else profile_lines(profile))
    noise = noise_of_class(machine_class, store, Store(shared.store)).of(TOKENS_PER_S) if files else None
    if noise is not None:
        console().print(noise_sentence(noise, machine_class))
    for file in count_files:
        counts = store.counts.read(file)
        _show(COUNTS, counts, file)
        console().print("\n".join(spans_of(spans.of_counts(counts.counts))))
        for entry in counts.counts:
            console().print("\n".join(step_of(entry)))


def _show(shown: Shown[J], recorded: J, file: Path, more: Sequence[str] = ()) -> None:
    lines: list[str] = [f"file: {file}"]
    accepted = recorded.accepted
    if accepted is not None:
        lines.append(f"accepted by {accepted.by} on {accepted.date} at {accepted.commit or 'no commit'}")
        lines.append(f"measured at {accepted.measured or 'an unknown commit'}")
        lines.append(f"reason: {accepted.reason or 'none given'}")
    console().print(shown.title(recorded))
    for line in (*lines, *shown.details(recorded), *more):
        console().print(f"  {line}")


@app.command()
@shares("baselines", "as_json")
def diff(
    *,
    ref: Annotated[str, typer.Argument(help="Git commit, branch or tag to compare with.")] = "HEAD",
    shared: Shared,
) -> None:
    """Show how the reviewed baselines have changed since a git ref, with old and new values."""
    changes = changed_since(ref, shared.baselines)
    if shared.as_json:
        print_json([change.as_row() for change in changes])
        return
    for change in changes:
        console().print(change.shown.before_after(change.before, change.now))
    if not changes:
        console().print(f"no baseline changed since {ref}")


@app.command()
@shares("baselines", "store")
def accept(
    *,
    case: CaseGlob = "*",
    hardware_class: Annotated[
        str | None,
        typer.Option("--hardware-class", help="Hardware class (default: those of the newest session)."),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            help="Reason, such as 'torch 2.14', for accepting worse results. Required if results are worse "
            "than the baseline."
        ),
    ] = None,
    another_machine: Annotated[bool, typer.Option("--another-machine", help=ANOTHER_MACHINE)] = False,
    sessions: Annotated[
        int, typer.Option(help="Number of newest sessions whose launches are accepted.", min=1)
    ] = 1,
    only_counts: Annotated[
        bool,
        typer.Option(
            "--only-counts", help="Accept only counts, not times. The counts can be from any machine."
        ),
    ] = False,
    shared: Shared,
) -> None:
    """Accept the newest results of each case as its reviewed baseline, and list the files to commit.

    The launches of a case are taken from the newest session that measured the case. By default, only
    launches on the hardware classes of the newest session are accepted. At least 5 launches must be healthy.
    `--sessions 3` also accepts the launches of the two sessions before the newest one, so that the baseline
    shows how much the results of different days differ.
    Launches whose settings differ from those of the newest launch are left out. The counts of the newest
    session, and its profile from `--perf-explain`, are also accepted. `--only-counts` accepts only counts:
    one launch is enough, on any machine, healthy or not. The exit status is 1 if a case was not accepted.
    """
    local = Store(shared.store)
    runs = counted(local, case, sessions) if only_counts else measured(local, hardware_class, case, sessions)
    written = []
    refused = []
    for case_id, launches in sorted(runs.items()):
        try:
            reviewed = BaselineStore(shared.baselines)
            written += write_accepted(
                reviewed, launches, reason, None if only_counts else local, another_machine
            )
        except PerfsuiteError as error:
            refused.append(f"{case_id}: {error}")
    for file in written:
        console().print(f"written: {file}")
    if written:
        console().print("Review and commit: git add " + " ".join(map(str, written)))
    for why in refused:
        console(stderr=True).print(f"not accepted: {why}", style="red")
    if refused:
        raise typer.Exit(1)


@app.command()
@shares("cases", "baselines")
def refresh(
    *,
    hardware: Hardware,
    reason: Reason,
    pytest_options: PytestOptions = None,
    out: Out = Path("out"),
    shared: Shared,
) -> None:
    """Measure cases with ten launches each, and write the results as reviewed baselines that you can commit.

    The exit status is 2 if nothing new was measured.
    """
    check_asked(hardware, shared.cases)
    if not reason.strip():
        raise CaseError("--reason is empty: say why a baseline may change, for example 'torch 2.14'")
    if not refreshed(hardware, reason, pytest_options or (), out, shared.cases, shared.baselines):
        raise typer.Exit(2)
