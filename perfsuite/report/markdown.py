"""Render sessions as short Markdown for the summary of a CI job, with the template `summary.md.j2`.

GitHub accepts at most 1 MiB, so long tables are cut, with a note on the number of missing rows.
"""

import re
from collections.abc import Sequence
from functools import partial

from markupsafe import Markup

from perfsuite.report import spans, summary
from perfsuite.report.columns import SPEED_CHANGE, extras, figure, of_cases, speed_in
from perfsuite.report.explained import explained
from perfsuite.report.html.page import rendered
from perfsuite.report.safe_text import printable, visible
from perfsuite.report.text import Table, cut
from perfsuite.results.metric import PEAK_MEMORY
from perfsuite.results.outcome import WORST_FIRST
from perfsuite.results.session_file import Measurement, SessionFile

MAX_EXPLAINED = 50
MAX_ROWS = 500
MAX_SPANS = 200  # rows of the table of spans; each case has several
MAX_FINDINGS = 5  # number of explained counts per case
MAX_FINDING = 300  # length of the sentence about a count, in characters
MAX_NOTE = 200  # length of a note in a table, in characters


def render(sessions: Sequence[SessionFile]) -> str:
    """Render the totals, the cases that need attention (with reasons) and, folded, all other cases."""
    results = [result for session in sessions for result in session.results]
    results.sort(key=lambda result: WORST_FIRST.index(summary.verdict(result)))
    urgent = [result for result in results if summary.needs_words(result)]
    quiet = [result for result in results if not summary.needs_words(result)]
    notes = [
        (result.case_id, note)
        for result in quiet
        for note in (*summary.excuses(result), *(note[:MAX_NOTE] for note in summary.quiet_notes(result)))
    ]
    return rendered(
        "summary.md.j2",
        sessions,
        finalize=_escaped,
        grid=partial(grid, most=MAX_ROWS),
        machine_notes=summary.machine_notes(results),
        urgent=_cases(urgent),
        explained=[(result.case_id, _explanation(result)) for result in urgent[:MAX_EXPLAINED]],
        unexplained=len(urgent[MAX_EXPLAINED:]),
        quiet=_cases(quiet),
        quiet_counts=", ".join(summary.tally(quiet)),
        spans=spans.of_cases(results),
        max_spans=MAX_SPANS,
        notes=Table(headers=("case", "note"), rows=notes, text_columns=2),
    )


def text(value: str) -> str:
    """Escape text as a single line of Markdown that can also be a cell of a table."""
    # The summary can be read in a terminal, which obeys control characters. Make these characters visible
    # before `split` removes some of them as white space.
    flat = " ".join(visible(re.sub(r"[ \t\r\n]+", " ", value)).split())
    # An underscore ends emphasis only after a word, and > is markup only at the beginning of a line.
    return re.sub(r"[&<|*`~\[\]\\@#$]|^>|(?<=\S)_(?!\w)|_(?=_)", lambda match: f"&#{ord(match[0])};", flat)


def code(value: str) -> str:
    """Return text as inline Markdown code on one line."""
    flat = " ".join(printable(value)[:500].replace("`", "'").split())
    return f"`{flat}`"


def grid(table: Table, most: int | None = None) -> Markup:
    """Render a table as Markdown without its caption.

    If there are more than `most` rows, the last line gives the number of the remaining rows.
    """
    rules = ["---:" if table.is_figure(column) else "---" for column in range(len(table.headers))]
    shown = table.rows[:most]
    headings, *cells = ([text(cell) for cell in row] for row in (table.headers, *shown))
    rows = [headings, rules, *cells]
    left = len(table.rows) - len(shown)
    if left:
        rows.append([f"and {left} more", *[""] * (len(rules) - 1)])
    return Markup("\n".join(f"| {' | '.join(row)} |" for row in rows))


def _escaped(value: object) -> Markup:
    """Escape the values that the template prints, except the output of its macros, which is Markdown."""
    return value if isinstance(value, Markup) else Markup(text(str(value)))


def _cases(results: Sequence[Measurement]) -> Table:
    measured = [speed_in(summary.speed_unit(results)), SPEED_CHANGE, figure(PEAK_MEMORY), *extras(results)]
    columns = of_cases(results, measured)
    rows = [
        (
            summary.verdict(result) + "".join(f" ({mark})" for mark in summary.marks(result)),
            result.case_id,
            summary.reason(result),
            *(column.text(result) for column in columns),
        )
        for result in results
    ]
    headers = ("verdict", "case", "why", *(column.heading for column in columns))
    return Table(headers=headers, rows=rows, text_columns=3)


def _explanation(result: Measurement) -> list[str]:
    sections = explained(result, MAX_FINDING)
    new = [line for line in sections.findings if not any(why in line for why in sections.why)]
    since = [*sections.not_counted, *sections.changed, *sections.traces, *sections.notes]
    return [
        *sections.why,
        *sections.reasons,
        *sections.decisive,
        *cut(new, MAX_FINDINGS),
        *sections.prices,
        *sections.excuses,
        *sections.held,
        *since,
    ]
