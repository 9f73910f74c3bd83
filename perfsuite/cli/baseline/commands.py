"""The commands `perfsuite baseline list | show | diff | accept`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from perfsuite import documents
from perfsuite.cli.baseline.accept import accept as write_accepted
from perfsuite.cli.baseline.accept import counted, measured
from perfsuite.cli.baseline.counts import COUNTS
from perfsuite.cli.baseline.times import PROFILES, TIMES, B, Refused, Shown, profile_lines
from perfsuite.cli.cases import Reviewed, RowsAsJson
from perfsuite.cli.report import LocalStore
from perfsuite.errors import FileError, PerfsuiteError
from perfsuite.inputs.git import commit_of, git
from perfsuite.node.machine import detect
from perfsuite.report import spans
from perfsuite.report.console import console, plain_table, print_json
from perfsuite.report.terminal import spans_of, step_of
from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.store import BASELINES, STORE, BaselineFiles, BaselineStore, Found, Store, is_there

J = TypeVar("J", Baseline, CountBaseline)
app = typer.Typer(
    no_args_is_help=True, help="Reviewed baselines: what each case reached when somebody accepted it."
)

HardwareClass = Annotated[
    str | None, typer.Option("--hardware-class", help="Another class than this machine's.")
]
CaseGlob = Annotated[str, typer.Argument(help="Case ids; * and ? match.")]
ANOTHER_MACHINE = "Take also launches set aside only because the machine was not as at the baseline."


@app.command("list")
def list_baselines(
    as_json: RowsAsJson = False, baselines: Reviewed = BASELINES, store: LocalStore = STORE
) -> None:
    """Every baseline, reviewed or merely recorded here: of times and memory, then of counts."""
    known = BaselineStore(baselines, Store(store).baselines)
    listed = [_listed(TIMES, known), _listed(COUNTS, known.counts)]
    if as_json:
        print_json([row for rows, _ in listed for row in rows])
        return
    for rows, grid in listed:
        if rows:
            console().print(grid)
    if not any(rows for rows, _ in listed):
        console().print(f"no baselines in {known}")


def _listed(shown: Shown[J], files: BaselineFiles[J]) -> tuple[list[dict[str, object]], Table]:
    """Return the baselines as data and as a table."""
    grid = plain_table((*shown.headings, "from", "accepted"))
    rows = list[dict[str, object]]()
    folder = shown.headings[0].replace(" ", "_")
    for known in map(files.read, files.files()):
        by = None if known.accepted is None else known.accepted.by
        day = known.recorded_at[:10]
        made = {folder: known.folder, "case": known.case.id, "day": day, "accepted_by": by}
        rows.append({**made, **shown.figures(known)})
        accepted = "local" if by is None else f"by {by}"
        grid.add_row(known.folder, known.case.id, *shown.cells(known), day, accepted)
    return rows, grid


@app.command()
def show(
    case: CaseGlob,
    baselines: Reviewed = BASELINES,
    store: LocalStore = STORE,
    hardware_class: HardwareClass = None,
    as_json: RowsAsJson = False,
) -> None:
    """One or more baselines in full: launches, noise, settings, environment, who accepted them and why.

    Then what their steps were counted to do, on every target: counts belong to no machine.
    """
    known = BaselineStore(baselines, Store(store).baselines)
    machine_class = hardware_class or detect().hardware_class
    files = known.files(machine_class, case)
    count_files = known.counts.files(case_ids=case)
    if not files and not count_files:
        raise FileError(
            f"no baseline matches {case!r} on {machine_class} in {known}; see: perfsuite baseline list"
        )
    if as_json:
        contents = [(file, documents.plain(known.read(file))) for file in files]
        contents += [(file, documents.plain(known.counts.read(file))) for file in count_files]
        print_json([{"file": str(file), "baseline": content} for file, content in contents])
        return
    for file in files:
        times = known.read(file)
        profile = known.profile_of(Found(times, file))
        _show(TIMES, times, file, [] if profile is None else profile_lines(profile))
    for file in count_files:
        counts = known.counts.read(file)
        _show(COUNTS, counts, file)
        console().print("\n".join(spans_of(spans.of_counts(counts.counts))))
        for entry in counts.counts:
            console().print("\n".join(step_of(entry)))


def _show(shown: Shown[J], known: J, file: Path, more: Sequence[str] = ()) -> None:
    lines: list[str] = [f"file: {file}"]
    accepted = known.accepted
    if accepted is not None:
        lines.append(f"accepted by {accepted.by} on {accepted.date} at {accepted.commit or 'no commit'}")
        lines.append(f"reason: {accepted.reason or 'none given'}")
    console().print(shown.title(known))
    for line in (*lines, *shown.details(known), *more):
        console().print(f"  {line}")


@app.command()
def diff(
    ref: Annotated[str, typer.Argument(help="A git commit, branch or tag to compare with.")] = "HEAD",
    baselines: Reviewed = BASELINES,
    as_json: RowsAsJson = False,
) -> None:
    """What changed in the reviewed baselines since a git ref, in figures rather than lines."""
    root = Path(git("rev-parse", "--show-toplevel", cwd=Path()).strip())
    commit = commit_of(ref, cwd=root)
    known = BaselineStore(baselines.resolve())
    listed = git(
        "diff", "--name-only", "--no-renames", "--ignore-submodules=dirty", commit, "--", str(known), cwd=root
    )
    listed += git("ls-files", "--others", "--exclude-standard", "--", str(known), cwd=root)
    files = [root / name for name in sorted(set(listed.splitlines())) if name.endswith(".json")]
    told = list[tuple[Text, dict[str, object]]]()
    for file in files:
        if file.parent.parent == known.profiles.reviewed:
            told.append(_changed(PROFILES, known.profiles, ref, file, root))
        elif file.parent.parent == known.counts.reviewed:
            told.append(_changed(COUNTS, known.counts, commit, file, root))
        else:
            told.append(_changed(TIMES, known, ref, file, root))
    if as_json:
        print_json([row for _, row in told])
        return
    for text, _ in told:
        console().print(text)
    if not told:
        console().print(f"no baseline changed since {ref}")


def _changed(
    shown: Shown[B], known: BaselineFiles[B], ref: str, file: Path, root: Path
) -> tuple[Text, dict[str, object]]:
    """Return the changes in a baseline's file since a git ref, in words and as data."""
    name = str(file.relative_to(root))
    before = None
    if git("ls-tree", "--name-only", "--full-tree", ref, "--", name, cwd=root).strip():
        try:
            content = documents.parse(git("show", f"{ref}:{name}", cwd=root))
            before = known.kind.model_validate(content, context=documents.FROM_FILE)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{name} at {ref} is no baseline that this perfsuite reads: {error}") from None
    now = documents.read(file, known.kind) if is_there(file) else None
    row: dict[str, object] = {"file": name}
    for key, each in (("before", before), ("now", now)):
        row[key] = each and documents.plain(each)
    return shown.before_after(before, now), row


@app.command()
def accept(
    case: CaseGlob = "*",
    baselines: Reviewed = BASELINES,
    store: LocalStore = STORE,
    hardware_class: Annotated[
        str | None, typer.Option("--hardware-class", help="This class, not those of the newest session.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why a baseline may become slower or larger.")] = None,
    another_machine: Annotated[bool, typer.Option("--another-machine", help=ANOTHER_MACHINE)] = False,
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
    runs = counted(local, case, sessions) if counts else measured(local, hardware_class, case, sessions)
    written = []
    refused = []
    for case_id, launches in sorted(runs.items()):
        try:
            reviewed = BaselineStore(baselines)
            written += write_accepted(reviewed, launches, reason, None if counts else local, another_machine)
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
