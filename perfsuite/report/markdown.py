"""Sessions as short Markdown, for the summary of a CI job. Pure; imports neither torch nor pytest.

GitHub takes at most 1 MiB: long tables are cut, and say so. The template is `summary.md.j2`. Text from data
becomes character references wherever Markdown or HTML would take it for more than text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from perfsuite.report import preflight, summary
from perfsuite.report.columns import SPEED_CHANGE, extras, figure, of_cases, speed_in
from perfsuite.report.explained import explained
from perfsuite.report.scaling import scalings
from perfsuite.report.table import Table
from perfsuite.report.text import cut
from perfsuite.results.metric import PEAK_MEMORY
from perfsuite.results.outcome import QUIET, WORST_FIRST
from perfsuite.results.session_file import Measurement, SessionFile

MAX_EXPLAINED = 50
MAX_ROWS = 500
MAX_FINDINGS = 5
"""Counts of a case that are explained."""
MAX_FINDING = 300
"""Characters of one."""
MAX_NOTE = 200
"""Characters of a note in a table."""


def render(sessions: Sequence[SessionFile]) -> str:
    """Return counts, what needs somebody's attention with reasons, then, folded, the rest."""
    results = [result for session in sessions for result in session.results]
    results.sort(key=lambda result: WORST_FIRST.index(summary.verdict(result)))
    urgent = [result for result in results if summary.verdict(result) not in QUIET]
    quiet = [result for result in results if summary.verdict(result) in QUIET]
    notes = [(result.case_id, note) for result in quiet for note in summary.quiet_notes(result)]
    skipped = [(skip.case_id, skip.reason) for session in sessions for skip in session.skipped]
    environment = Environment(
        loader=PackageLoader("perfsuite.report.html"),
        autoescape=True,
        finalize=_escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("summary.md.j2").render(
        headline=summary.headline(sessions),
        sessions=[(summary.provenance(session), summary.interruption(session)) for session in sessions],
        machine_notes=summary.machine_notes(results),
        urgent=_cases(urgent, linked=MAX_EXPLAINED),
        explained=[(result.case_id, _explanation(result)) for result in urgent[:MAX_EXPLAINED]],
        unexplained=len(urgent[MAX_EXPLAINED:]),
        quiet=_cases(quiet),
        quiet_counts=", ".join(summary.tally(quiet)),
        notes=Table(
            headers=("case", "note"), rows=[(case, note[:MAX_NOTE]) for case, note in notes], text_columns=2
        ),
        skipped=Table(headers=("case", "why"), rows=skipped, text_columns=2),
        preflights=[
            (preflight.title(each), preflight.table(each))
            for session in sessions
            for each in session.preflights
        ],
        scalings=[(each.name, each.table()) for each in scalings(results)],
        max_rows=MAX_ROWS,
    )


def text(value: str) -> str:
    """Return Markdown that reads as this text, on one line, also in a table."""
    flat = " ".join(value.split())
    # An underscore ends what is emphasised only behind a word, and > is markup only in front of a line.
    return re.sub(r"[&<|*`~\[\]\\@#$]|^>|(?<=\S)_(?!\w)|_(?=_)", lambda match: f"&#{ord(match[0])};", flat)


def _escaped(value: object) -> Markup:
    """Escape whatever the template prints, but for what is Markdown already: links, and its own macros."""
    return value if isinstance(value, Markup) else Markup(text(str(value)))


def _cases(results: Sequence[Measurement], *, linked: int = 0) -> Table:
    """The table of cases, a row for each; the first `linked` of them link to their explanation."""
    measured = [speed_in(summary.speed_unit(results)), SPEED_CHANGE, figure(PEAK_MEMORY), *extras(results)]
    columns = of_cases(results, measured)
    anchors = _anchors(results[:linked])
    rows = []
    for number, result in enumerate(results):
        case = result.case_id
        if number < linked:
            case = Markup("[{}](#{})").format(Markup(text(case)), anchors[number])
        rows.append(
            (
                summary.verdict(result) + "".join(f" ({mark})" for mark in summary.marks(result)),
                case,
                summary.reason(result),
                *(column.cell(result) for column in columns),
            )
        )
    headers = ("verdict", "case", "why", *(column.heading for column in columns))
    return Table(headers=headers, rows=rows, text_columns=3)


def _anchors(results: Sequence[Measurement]) -> list[str]:
    """The anchors of the headings of these cases, as GitHub makes them."""
    taken: Counter[str] = Counter()
    anchors = []
    for result in results:
        anchor = re.sub(r"[^\w\- ]", "", " ".join(result.case_id.split()).lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{taken[anchor]}" if taken[anchor] else anchor)
        taken[anchor] += 1
    return anchors


def _explanation(result: Measurement) -> list[str]:
    """Why a case has its verdict, in lines."""
    told = explained(result)
    found = [line[:MAX_FINDING] for line in cut(told.findings, MAX_FINDINGS)]
    counted = [f"counts: {told.not_counted}"] if told.not_counted else []
    changed = [told.changed] if told.changed else []
    notes = [f"note: {note}" for note in told.notes]
    return [*told.why, *told.reasons, *told.decisive, *found, *counted, *changed, *told.traces, *notes]
