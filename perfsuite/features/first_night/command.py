"""`perfsuite first-night`: examine a new machine before its first baseline."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import __version__, documents
from perfsuite.cli.checks import show
from perfsuite.cli.shared import WaitQuiet, read
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.doctor.rows import EXIT, Row, worst
from perfsuite.errors import CaseError
from perfsuite.features.first_night import page
from perfsuite.features.first_night.cases import SIMULATED, Size, usual_size
from perfsuite.features.first_night.night import FOLDER, Night
from perfsuite.features.first_night.record import FILE, FirstNight, hardware_text, resumed
from perfsuite.features.first_night.running import Running, ends_with_results, run_steps
from perfsuite.features.first_night.sessions import CASE_MIN, number_of_cases
from perfsuite.features.first_night.steps import NAMES, STEPS, Step
from perfsuite.node.machine import detect
from perfsuite.report.console import console, plain_table, print_json, print_rows, say
from perfsuite.report.text import plural

BUDGET = "2h"
WIDTH = 30  # width of the column with the names of checks


@shares("cases", "as_json")
def first_night(
    *,
    step: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STEP", help="Run these steps, even if they are complete (default: all unfinished steps)."
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only show the steps and the minutes that they take.")
    ] = False,
    size: Annotated[
        Size | None,
        typer.Option(
            help="Size of the training: `full`, `tiny` (default without GPUs), or `simulated`, which only "
            "tries out this command."
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Stop after this time, such as 40min or 2h. To continue, run the command again.",
        ),
    ] = BUDGET,
    image: Annotated[
        str | None, typer.Option(help="Also launch in this container image, which must contain perfsuite.")
    ] = None,
    wait_quiet: WaitQuiet = None,
    out: Annotated[Path, typer.Option("--out", help="Directory of the page and its files.")] = Path(
        "first-night"
    ),
    shared: Shared,
) -> None:
    """Examine a new machine before its first baseline, and write a page about it.

    The steps check the machine, run the self-test, measure the noise, inject faults, try every framework, and
    measure your cases twice. They adapt to the number of GPUs, and also work without a GPU. After an
    interruption, run the same command again to continue. The exit status is 1 if a check failed. It is 3 if a
    check has no result or did not run.
    """
    unknown_names = [name for name in step or () if name not in NAMES]
    if unknown_names:
        hint = documents.did_you_mean(unknown_names[0], NAMES)
        raise CaseError(f"there is no step {unknown_names[0]!r}.{hint} The steps are {', '.join(NAMES)}")
    seconds = read("budget", budget)
    wait_quiet_s = read("wait-quiet", wait_quiet)
    _refuse_own_cases(shared.cases, out)
    machine = detect()
    new = FirstNight(
        perfsuite=__version__,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        size=size or usual_size(machine),
    )
    record = resumed(out, new)
    night = Night(
        machine=machine,
        size=record.size,
        out=out,
        cases=shared.cases,
        image=image,
        wait_quiet_s=wait_quiet_s,
        say=lambda text: say(f"perfsuite first-night: {text}"),
    )
    steps = chosen(STEPS, record, step)
    if plan:
        _show_plan(night, record, steps, seconds, as_json=shared.as_json)
        return
    raise typer.Exit(carry_out(night, record, steps, seconds, as_json=shared.as_json))


def _refuse_own_cases(cases: Path, out: Path) -> None:
    """Raise `CaseError` if the cases are in the folder of the steps, where a repeated step removes files."""
    folder = out / FOLDER
    if cases.resolve().is_relative_to(folder.resolve()):
        raise CaseError(
            f"--cases {cases} is in {folder}, whose files first-night removes. Move your cases, or give "
            "another --out"
        )


def chosen(steps: Sequence[Step], record: FirstNight, names: Sequence[str] | None) -> list[Step]:
    """Return the named steps or, without names, the incomplete steps. The order is that of `steps`."""
    if names:
        return [step for step in steps if step.name in names]
    done = {result.step for result in record.results if result.is_complete}
    return [step for step in steps if step.name not in done]


def carry_out(
    night: Night, record: FirstNight, steps: Sequence[Step], seconds: float, *, as_json: bool
) -> int:
    """Run steps for at most `seconds`, print their rows and the answer, and return the exit status."""
    if record.size == "simulated":
        say(f"perfsuite first-night: {SIMULATED}")
    shown: dict[tuple[str, str], Row] = {}
    record = _run(night, record, steps, seconds, shown, as_json=as_json)
    rows = page.all_rows(record)
    # If a step could not run again, the record has only the step's earlier result. Add the row that says why
    # the step could not run again.
    rows += [(name, row) for (name, _), row in shown.items() if (name, row) not in rows]
    if as_json:
        print_json([{"step": name, **documents.plain(row)} for name, row in rows])
    else:
        console().print(page.answer(record))
    say(f"page: {night.out / page.FILE}")
    return EXIT[worst(row for _, row in rows)]


def _run(
    night: Night,
    record: FirstNight,
    steps: Sequence[Step],
    seconds: float,
    shown: dict[tuple[str, str], Row],
    *,
    as_json: bool,
) -> FirstNight:
    """Run steps, and add each row to `shown`. The keys are the names of the step and the check."""
    begun = set[str]()

    def save(current: FirstNight) -> None:
        documents.write(night.out / FILE, current)
        documents.write_text(night.out / page.FILE, page.render(current))

    def show_row(step: Step, row: Row) -> None:
        shown[step.name, row.check] = row
        if as_json:
            return
        if step.name not in begun:
            begun.add(step.name)
            console().print(f"\n{step.name}: {step.question}")
        show(row, max(WIDTH, len(row.check) + 2))

    save(record)
    how = Running(save=save, show=show_row, until=time.monotonic() + seconds)
    with ends_with_results():
        return run_steps(night, record, steps, how)


def _show_plan(
    night: Night, record: FirstNight, steps: Sequence[Step], seconds: float, *, as_json: bool
) -> None:
    """Print the steps with their estimated minutes.

    Steps that will not run are printed too, but their minutes are not part of the total.
    """
    grid = plain_table(("step", "minutes", "at most", "state", "question"))
    rows = []
    total = 0.0
    done = {result.step for result in record.results if result.is_complete}
    cases = 0
    if any(step.name == "cases" for step in steps):
        cases = number_of_cases(replace(night, is_continued="cases" not in done))
    for step in STEPS:
        expected, most = step.minutes[record.size]
        if step.name == "cases":
            expected *= cases
        state = "to run" if step in steps else "complete" if step.name in done else "not chosen"
        total += expected if step in steps else 0.0
        limit = "" if most == float("inf") else f"{most:g}"
        grid.add_row(step.name, f"~{expected:g}", limit or "the budget", state, step.question)
        rows.append(
            {
                "step": step.name,
                "expected_min": expected,
                "most_min": most if limit else None,
                "state": state,
                "question": step.question,
            }
        )
    print_rows(rows, grid, as_json=as_json)
    if as_json:
        return
    console().print(plan_total(record, [step.name for step in steps], total))
    if cases:
        console().print(_plan_of_cases(night, cases, total, seconds / 60))
    if record.size == "simulated":
        console().print(SIMULATED)


def plan_total(record: FirstNight, names: Sequence[str], minutes: float) -> str:
    """Return the sentence below the plan of the named steps: their time, and what the estimate depends on."""
    if not names:
        return "nothing to run: every step is complete"
    time_text = "less than a minute" if minutes < 1 else f"about {minutes:.0f} min"
    estimate = " (an estimate for eight GPUs)" if record.size == "full" else ""
    return f"{time_text}{estimate} on {hardware_text(record.machine)} with {record.size} training"


def _plan_of_cases(night: Night, cases: int, total_min: float, budget_min: float) -> str:
    """Return the sentences on the user's cases: their number, their time, and how many of them fit."""
    case_min = CASE_MIN[night.size]
    others_min = total_min - cases * case_min
    fitting = min(cases, max(0, int((budget_min - others_min) / case_min)))
    text = (
        f"the step `cases` launches {plural(cases, 'case')} in {night.cases} for real, whatever the size: "
        f"about {case_min:g} min for each. Some can take longer"
    )
    if fitting < cases:
        text += (
            f". About {fitting} of them fit into --budget. Run the same command again to measure the others"
        )
    return text
