"""Show the cost of each case in a nightly run, and the order in which cases are measured within a budget."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.cli.shared import read
from perfsuite.report.console import console, plain_table, print_rows
from perfsuite.report.text import plural
from perfsuite.results.store import Store
from perfsuite.session.plan import Planned, budget_for, past_of, planned

NOT_KNOWN = "not known"


def show_plan(cases: Sequence[Case], store: Path, budget: str | None, *, as_json: bool) -> None:
    """Print the cost of each case, in the order in which the cases are measured within a budget.

    The costs are estimated from the launches in a store.
    """
    most_s = read("budget", budget)
    past = past_of(Store(store).results())
    order = planned(cases, past, datetime.now(UTC).date())
    limit = None if most_s is None else budget_for(order, most_s)
    grid = plain_table(("case", "last", "measured", "minutes", "GPU hours", "reached after"))
    rows = list[dict[str, object]]()
    never = list[str]()
    reached = list[Planned]()
    used = 0.0
    for entry in order:
        # Within a budget, a case is reached if one launch of it fits.
        cost = entry.seconds
        needed = cost if most_s is None else entry.launch_s
        before = entry.past
        fits = most_s is None or used + (needed or 0.0) <= most_s
        if fits:
            reached.append(entry)
            used += needed or 0.0
        # After a case of unknown cost, the start of the next case is unknown.
        is_known = all(done.seconds is not None for done in reached)
        last, day = ("never", "") if before is None else (before.outcome, before.started_at[:10])
        about = "~" if before is None else ""
        minutes = NOT_KNOWN if cost is None else f"{about}{cost / 60:,.1f}"
        of_gpus = NOT_KNOWN if entry.gpu_hours is None else f"{about}{entry.gpu_hours:,.1f}"
        after = "not reached"
        if fits:
            after = f"{used / 60:,.1f} min" if is_known else NOT_KNOWN
        grid.add_row(entry.case.id, last, day, minutes, of_gpus, after)
        last_result = {"outcome": last, "day": day} if before else {"outcome": None, "day": None}
        costs = {"expected_s": cost, "gpu_hours": entry.gpu_hours}
        reached_after = used if fits and is_known else None
        rows.append({"case": entry.case.id, **last_result, **costs, "reached_after_s": reached_after})
        if limit is not None and needed is not None and needed > limit.seconds:
            never.append(f"{entry.case.id}: {limit.why_not_reached(entry.case)}")
    print_rows(rows, grid, as_json=as_json)
    if as_json:
        return
    within = "" if most_s is None else f" of {len(order)} within {budget}"
    console().print("\n".join([*never, f"{plural(len(reached), 'case')}{within}: {total(reached)}"]))


def total(cases: Sequence[Planned]) -> str:
    """Describe the total cost of cases, and the number of cases whose cost is unknown."""
    with_cost = [case for case in cases if case.seconds is not None]
    if not with_cost:
        return "no cost is known" if cases else "0.0 min, 0.0 GPU hours"
    seconds = sum(case.seconds or 0.0 for case in with_cost)
    hours = sum(case.gpu_hours or 0.0 for case in with_cost)
    left = len(cases) - len(with_cost)
    more = f" and {plural(left, 'case')} of unknown cost" if left else ""
    return f"{seconds / 60:,.1f} min, {hours:,.1f} GPU hours{more}"
