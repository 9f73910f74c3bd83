"""`perfsuite plan`: what each case of a hardware costs, and in which order a budget takes them."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from perfsuite.cli.cases import CASES, Cases, LocalStore, RowsAsJson, check_asked, option, options, read
from perfsuite.dry import cases as found
from perfsuite.report.terminal import console, plain_table, print_rows
from perfsuite.report.text import plural
from perfsuite.results.store import Store
from perfsuite.session.plan import past_of, planned


def plan(
    hardware: Annotated[str, typer.Option(help="the marker of the cases: h100")],
    k: Annotated[str, typer.Option("-k", help="only cases that pytest's expression selects, too")] = "",
    budget: Annotated[str | None, option("budget")] = None,
    as_json: RowsAsJson = False,
    cases: Cases = CASES,
    store: LocalStore = None,
) -> None:
    """What does each case cost in minutes and GPU hours, and in which order does a budget take them?

    By the launches in the store. A case that was never measured is expected to take what others on as many
    GPUs took (`~`). Nothing is launched.
    """
    check_asked(hardware, cases)
    most_s = read("budget", budget)
    chosen = found.by_marker(cases, hardware, k)
    order = planned(chosen, past_of(Store(options(store=store).store).results()), datetime.now(UTC).date())
    grid = plain_table(("case", "last", "measured", "minutes", "GPU hours", "reached after"))
    used, reached, hours = 0.0, 0, 0.0
    for each in order:
        cost = each.seconds or 0.0
        fits = most_s is None or used + cost <= most_s
        used, reached, hours = used + cost * fits, reached + fits, hours + (each.gpu_hours or 0) * fits
        about = "" if each.past is not None else "~"
        minutes = "not known" if each.seconds is None else f"{about}{each.seconds / 60:,.1f}"
        of_gpus = "not known" if each.gpu_hours is None else f"{about}{each.gpu_hours:,.1f}"
        last = ("never", "") if each.past is None else (each.past.outcome, each.past.started_at[:10])
        after = f"{used / 60:,.1f} min" if fits else "not reached"
        grid.add_row(each.case.id, *last, minutes, of_gpus, after)
    print_rows(grid, as_json=as_json)
    if as_json:
        return
    within = "" if most_s is None else f" of {len(order)} within {budget}"
    total = f"{used / 60:,.1f} min, {hours:,.1f} GPU hours, as far as is known"
    console().print(f"{plural(reached, 'case')}{within}: {total}")
