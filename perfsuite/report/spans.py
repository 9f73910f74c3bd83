"""Shows the seconds of spans that are no steps: the parts of start-up, checkpoints, and others. Pure."""

from collections.abc import Sequence
from statistics import median

from perfsuite.report.text import NONE, Table, percent
from perfsuite.results.amounts import amount
from perfsuite.results.metric import span_seconds
from perfsuite.results.rank_report import COLD, START_UP
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement


def table(result: Measurement) -> Table:
    """Return the spans of a case's launches, the start-up first, with what they are judged by."""
    runs, verdict = result.runs, result.verdict
    names = {name.removeprefix(COLD): None for run in runs for name in run.figures.spans_s}
    rows = []
    for name in sorted(names, key=lambda name: (not name.startswith(START_UP), name)):
        check = verdict.check(span_seconds(name).name)
        rows.append(
            (
                name,
                NONE if check is None else check.outcome,
                _seconds(_values(runs, name)),
                NONE if check is None else amount(check.baseline, "s"),
                NONE if check is None or check.change is None else percent(check.change),
                _seconds(_values(runs, f"{COLD}{name}")),
            )
        )
    caption = (
        "Seconds of what is no step: the median over launches, on the rank that took longest. A cold launch "
        "compiled what later ones found in a cache: it is shown and not judged. Nor are a span without a "
        "baseline, and the start-up as a whole."
    )
    headers = ("span", "verdict", "seconds", verdict.against or "baseline", "change", "cold")
    return Table(caption=caption, headers=headers, rows=rows, text_columns=2)


def start_ups(results: Sequence[Measurement]) -> Table:
    """Return the start-up of each case that has one, with its parts."""
    every = {name for result in results for run in result.runs for name in run.figures.spans_s}
    parts = sorted(name for name in every if name.startswith(f"{START_UP}: "))
    shown = [START_UP, *parts, *sorted(every & {f"{COLD}{START_UP}"})]
    rows = [
        (result.case_id, *(_seconds(_values(result.runs, name)) for name in shown))
        for result in results
        if any(_values(result.runs, name) for name in shown)
    ]
    headers = ("case", *(name.removeprefix(f"{START_UP}: ") for name in shown))
    return Table(headers=headers, rows=rows)


def _values(runs: Sequence[Run], name: str) -> list[float]:
    return [run.figures.spans_s[name] for run in runs if name in run.figures.spans_s]


def _seconds(values: Sequence[float]) -> str:
    return amount(median(values), "s") if values else NONE
