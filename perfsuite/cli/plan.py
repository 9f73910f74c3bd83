"""`perfsuite plan`: what each case of a hardware costs, and in which order a budget takes them."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from perfsuite.cli import cases as shared
from perfsuite.dry import cases as found
from perfsuite.report.terminal import console, plain_table, print_json
from perfsuite.report.text import plural
from perfsuite.results.store import Store
from perfsuite.session.plan import budget_for, past_of, planned


def plan(
    hardware: shared.Hardware,
    k: Annotated[str, typer.Option("-k", help="only cases that pytest's expression selects, too")] = "",
    budget: Annotated[str | None, shared.option("budget")] = None,
    as_json: shared.RowsAsJson = False,
    cases: shared.Cases = shared.CASES,
    store: shared.LocalStore = None,
) -> None:
    """What does each case cost in minutes and GPU hours, and in which order does a budget take them?

    By the launches in the store. A case that was never measured is expected to take what others on as many
    GPUs took (`~`). Nothing is launched.
    """
    shared.check_asked(hardware, cases)
    most_s = shared.read("budget", budget)
    chosen = found.by_expression(cases, k, hardware)
    past = past_of(Store(shared.options(store=store).store).results())
    order = planned(chosen, past, datetime.now(UTC).date())
    limit = None if most_s is None else budget_for(order, most_s)
    grid = plain_table(("case", "last", "measured", "minutes", "GPU hours", "reached after"))
    rows, used, hours, never = list[dict[str, object]](), 0.0, 0.0, list[str]()
    for each in order:
        cost, before = each.seconds or 0.0, each.past
        fits = most_s is None or used + cost <= most_s
        used, hours = used + cost * fits, hours + (each.gpu_hours or 0) * fits
        last, day = ("never", "") if before is None else (before.outcome, before.started_at[:10])
        about = "~" if before is None else ""
        minutes = "not known" if each.seconds is None else f"{about}{each.seconds / 60:,.1f}"
        of_gpus = "not known" if each.gpu_hours is None else f"{about}{each.gpu_hours:,.1f}"
        after = f"{used / 60:,.1f} min" if fits else "not reached"
        grid.add_row(each.case.id, last, day, minutes, of_gpus, after)
        known = {"outcome": last, "day": day} if before else {"outcome": None, "day": None}
        costs = {"expected_s": each.seconds, "gpu_hours": each.gpu_hours}
        rows.append({"case": each.case.id, **known, **costs, "reached_after_s": used if fits else None})
        if limit is not None and cost > limit.seconds:
            never.append(f"{each.case.id}: {limit.told(each.case)}")
    if as_json:
        print_json(rows)
        return
    console().print(grid)
    reached = sum(row["reached_after_s"] is not None for row in rows)
    within = "" if most_s is None else f" of {len(order)} within {budget}"
    total = f"{used / 60:,.1f} min, {hours:,.1f} GPU hours, as far as is known"
    console().print("\n".join([*never, f"{plural(reached, 'case')}{within}: {total}"]))
