"""Sessions as short Markdown, for the summary of a CI job. Pure; imports neither torch nor pytest.

GitHub takes at most 1 MiB: long tables are cut, and say so. Text from data becomes character references
wherever Markdown or HTML would take it for more than text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from perfsuite.report import summary
from perfsuite.report.published import ComparisonTable
from perfsuite.report.text import amount, percent, sentence
from perfsuite.results.outcome import QUIET, WORST_FIRST
from perfsuite.results.session_file import Measurement, SessionFile

MAX_EXPLAINED = 50
MAX_ROWS = 500


def render(sessions: Sequence[SessionFile], comparisons: Sequence[ComparisonTable] = ()) -> str:
    """Counts, what needs somebody's attention with reasons, then, folded, the rest and the comparisons."""
    results = [result for session in sessions for result in session.results]
    results.sort(key=lambda result: WORST_FIRST.index(summary.verdict(result)))
    urgent = [result for result in results if summary.verdict(result) not in QUIET]
    quiet = [result for result in results if summary.verdict(result) in QUIET]
    lines = [f"## perfsuite: {summary.headline(sessions)}", ""]
    for session in sessions:
        facts = summary.provenance(session).items()
        lines += [" · ".join(f"{name} {text(value)}" for name, value in facts), ""]
        if (interruption := summary.interruption(session)) is not None:
            lines += [f"**{text(interruption)}**", ""]
    lines += [f"- note: {text(note)}" for note in summary.machine_notes(results)]
    if urgent:
        lines += [*_table(urgent, anchors=_anchors(urgent[:MAX_EXPLAINED])), ""]
        for result in urgent[:MAX_EXPLAINED]:
            lines += _explained(result)
        if len(urgent) > MAX_EXPLAINED:
            lines += [f"{len(urgent) - MAX_EXPLAINED} more are explained in the HTML report only.", ""]
    if quiet:
        lines += _folded(", ".join(summary.tally(quiet)), _table(quiet, anchors=[]))
    if noted := [(result.case_id, note) for result in quiet for note in summary.launch_notes(result)]:
        rows = [f"| {text(case_id)} | {text(note[:200])} |" for case_id, note in noted]
        lines += _folded(f"Notes: {len(noted)}", ["| case | note |", "| --- | --- |", *_cut(rows, 2)])
    skipped = [skip for session in sessions for skip in session.skipped]
    if skipped:
        rows = [f"| {text(skip.case_id)} | {text(skip.reason)} |" for skip in skipped]
        lines += _folded(f"{len(skipped)} skipped", ["| case | why |", "| --- | --- |", *_cut(rows, 2)])
    for each in comparisons:
        lines += _folded(text(each.title), _comparison(each))
    return "\n".join(lines)


def text(value: str) -> str:
    """As text, on one line, in Markdown and in its tables."""
    flat = " ".join(value.split())
    # An underscore within a word is no markup, and ids are full of them.
    return re.sub(r"[&<>|*`~\[\]\\@#$]|(?<![^\W_])_|_(?![^\W_])", lambda found: f"&#{ord(found[0])};", flat)


def _table(results: Sequence[Measurement], *, anchors: Sequence[str]) -> list[str]:
    rows = []
    unit = summary.speed_unit(results)
    for number, result in enumerate(results):
        case = text(result.case_id)
        if number < len(anchors):
            case = f"[{case}](#{anchors[number]})"
        change, figures = summary.speed_change(result), result.figures
        cells = (
            summary.verdict(result) + "".join(f" ({mark})" for mark in summary.marks(result)),
            case,
            text(summary.reason(result)),
            "-" if figures.tokens_per_s is None else summary.speed(figures.tokens_per_s, result.unit, unit),
            "-" if change is None else percent(change),
            "-" if figures.peak_memory_bytes is None else amount(figures.peak_memory_bytes, "bytes"),
        )
        rows.append(_row(cells))
    heading = f"| verdict | case | why | {unit}/s | vs baseline | memory |"
    return [heading, "| --- | --- | --- | ---: | ---: | ---: |", *_cut(rows, 6)]


def _cut(rows: list[str], columns: int) -> list[str]:
    if len(rows) <= MAX_ROWS:
        return rows
    return [*rows[:MAX_ROWS], f"| and {len(rows) - MAX_ROWS} more {'| ' * columns}".rstrip()]


def _anchors(results: Sequence[Measurement]) -> list[str]:
    """Of the headings of `_explained`, as GitHub makes them."""
    taken: Counter[str] = Counter()
    anchors = []
    for result in results:
        anchor = re.sub(r"[^\w\- ]", "", " ".join(result.case_id.split()).lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{taken[anchor]}" if taken[anchor] else anchor)
        taken[anchor] += 1
    return anchors


def _explained(result: Measurement) -> Iterator[str]:
    yield f"### {text(result.case_id)}"
    yield ""
    telling = [check for check in result.verdict.checks if check.outcome == result.outcome]
    said = [*result.verdict.reasons, *map(sentence, telling)]
    if result.verdict.changed:
        said.append("changed since the baseline: " + "; ".join(result.verdict.changed))
    said += [f"note: {note}" for note in summary.launch_notes(result)]
    yield from (f"- {text(line[:1000])}" for line in said)
    yield ""


def _comparison(table: ComparisonTable) -> Iterator[str]:
    yield text(f"{table.source}. {table.conditions}.")
    yield ""
    yield _row(table.headers)
    yield _row(["---"] * len(table.headers))
    yield from _cut([_row(map(text, cells)) for cells in table.rows], len(table.headers))
    yield ""
    yield from (f"- {text(note)}" for note in table.notes)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _folded(heading: str, lines: Iterable[str]) -> list[str]:
    return [f"<details><summary>{heading}</summary>", "", *lines, "", "</details>", ""]
