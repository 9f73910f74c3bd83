"""Format the output for the terminal at the end of a session: the table and the explanations."""

import io
from collections.abc import Sequence
from itertools import accumulate, chain, groupby
from pathlib import Path

from rich.table import Table as RichTable
from rich.text import Text

from perfsuite.report import counts, nodes, slopes, spans, summary
from perfsuite.report.columns import SPEED_CHANGE, STEP_MS, figure, of_cases, speed_in
from perfsuite.report.console import PlainConsole, plain_table
from perfsuite.report.explained import Explained, explained
from perfsuite.report.safe_text import printable
from perfsuite.report.text import WIDTH, Table, cut, plural, relative, wrapped
from perfsuite.results import metric as metrics
from perfsuite.results.amounts import amount, rate
from perfsuite.results.counts import RankCounts
from perfsuite.results.metric import MFU, PEAK_MEMORY, extra_metrics
from perfsuite.results.outcome import STYLES
from perfsuite.results.session_file import Measurement, Preflight

MOST_LINES = 12  # maximum lines about a case that did not pass, unless the full explanation is requested
LONGEST_SENTENCE = 250  # maximum length of the sentence about a count in such a case, in characters
COST_LINES = 2  # maximum lines for the cost of a changed count, in addition to `TEXT_LINES`
TEXT_LINES = 3  # maximum lines of a text about such a case
MOST_COUNTS = 10  # maximum number of sentences about judged counts. The same limit applies to other counts
MOST_ENTRIES = 2  # maximum number of `RankCounts` whose step is shown
SPANS_INDENT = 6  # indentation of the table of spans in an explanation
WIDEST = 10_000  # width of an unlimited table; no table is this wide
SHOWN = (  # metrics that are shown but not judged
    *(metrics.TOKENS_PER_S_PER_DEVICE, metrics.STEP_S_P95, metrics.STEP_JITTER, metrics.ROOFLINE_SHARE),
    *(metrics.CPU_S_PER_STEP, metrics.GC_S_PER_STEP, metrics.GPU_UTILISATION, metrics.ENERGY_PER_TOKEN),
)


def table(results: Sequence[Measurement], *, color: bool, width: int | None) -> str:
    """Return the cases as a table of at most `width` characters (80 or more; default: `WIDTH`).

    If the rows would be too wide with the ids of the cases, each id has a line of its own.
    """
    measured = [
        speed_in(summary.speed_unit(results)),
        STEP_MS,
        figure(PEAK_MEMORY),
        *([figure(MFU)] if any(MFU.of(result.figures) is not None for result in results) else []),
        SPEED_CHANGE._replace(heading="vs base"),
    ]
    columns = of_cases(results, measured)
    only_dry = summary.only_dry(results)
    grid = plain_table()
    for column in columns:
        grid.add_column(column.heading, justify="right", no_wrap=True)
    grid.add_column("dry run" if only_dry else "verdict", no_wrap=True)
    for result in results:
        style = STYLES[summary.verdict(result)]
        verdict = Text.assemble((style.word, style.colour))
        for mark in summary.marks(result):
            if mark in ("shadow", "shared", "not counted") or (mark == "dry run" and not only_dry):
                verdict.append(f" ({mark})", "" if mark == "dry run" else "yellow")
        grid.add_row(*(column.text(result) for column in columns), verdict)
    ids = ["case", *(printable(result.case_id) for result in results)]
    longest = max(map(len, ids))
    rows = zip(ids, _rendered(grid, color=color), strict=True)
    if longest + 2 + max(map(len, _rendered(grid))) <= (width or WIDTH):
        return "\n".join(f"{case_id:<{longest}}  {row}" for case_id, row in rows)
    _, *lines = [line for case_id, row in rows for line in (case_id, f"  {row}")]
    return "\n".join(lines)


def _rendered(grid: RichTable, *, color: bool = False) -> list[str]:
    system = "standard" if color else None
    out = PlainConsole(file=io.StringIO(), width=WIDEST, force_terminal=color, color_system=system)
    with out.capture() as text:
        out.print(grid)
    return [line.rstrip() for line in text.get().splitlines()]


def lines_of(table: Table) -> list[str]:
    """Return a table as lines without colours, as wide as necessary."""
    grid = plain_table()
    for number, heading in enumerate(table.headers):
        grid.add_column(heading, justify="right" if table.is_figure(number) else "left")
    for row in table.rows:
        grid.add_row(*row)
    return _rendered(grid)


def preflight_text(preflight: Preflight) -> str:
    """Return title, table and notes of a preflight as lines without colours."""
    lines = [f"  {line}" for line in lines_of(nodes.table(preflight))]
    lines += [f"  note: {note}" for note in nodes.notes(preflight)]
    return "\n".join([nodes.title(preflight), *lines])


def step_of(entry: RankCounts) -> list[str]:
    """Return the counts of a step on some ranks as lines, in the same tables as on the HTML page."""
    lines = [f"step {entry.counts.step} of {counts.ranks(entry)}, counted:"]
    for table in counts.tables(entry.counts):
        lines += [*wrapped(table.caption), *(f"    {line}" for line in lines_of(table))]
    return lines


def spans_of(table: Table, indent: str = "") -> list[str]:
    """Return spans as lines, in the same table as on the HTML page; empty without spans.

    If the rows would be too wide with the names of the spans, each name has a line of its own.
    """
    if not table:
        return []
    lines = lines_of(table)
    if max(map(len, lines)) > WIDTH - SPANS_INDENT:
        lines = _below_names(table)
    caption = wrapped(table.caption, indent=f"{indent}  ")
    return [f"{indent}spans of the run:", *caption, *(f"{indent}    {line}" for line in lines)]


def _below_names(table: Table) -> list[str]:
    """Return the lines of a table without its first column.

    Each name in that column has its own line above the rows with this name.
    """
    rest = Table(
        headers=table.headers[1:],
        rows=[row[1:] for row in table.rows],
        text_columns=table.text_columns - 1,
    )
    heading, *rows = lines_of(rest)
    lines = [f"  {heading}"]
    for name, of_name in groupby(zip(table.rows, rows, strict=True), lambda pair: pair[0][0]):
        lines += [name, *(f"  {row}" for _, row in of_name)]
    return lines


def explanation(result: Measurement, *, whole: bool = True) -> str:
    """Explain one case in lines of at most `WIDTH` columns.

    If not `whole`, the explanation of a launched case has at most `MOST_LINES` lines: the reasons for the
    verdict, the changes, and the directory of the files.
    """
    if whole or result.dry:
        lines = _all(result, explained(result))
    else:
        lines = _in_short(result, explained(result, LONGEST_SENTENCE))
    return printable("\n".join(lines))


def _all(result: Measurement, sections: Explained) -> list[str]:
    counted = [] if sections.counts is None else [f"counts: {sections.counts}"]
    findings = cut(sections.findings, MOST_COUNTS)
    listed = cut(sections.listed, MOST_COUNTS)
    notes = [f"note: {note}" for note in summary.notes(result)]
    files = [f"{name}: {file}" for name, file in sections.files.items()]
    parts = [
        ("  ", [*sections.why, *sections.reasons, *counted]),
        ("    ", [*findings, *sections.prices, *listed, *sections.remarks]),
        (
            "  ",
            [
                *sections.checks,
                *sections.excuses,
                *sections.held,
                *_shown(result),
                *sections.predicted,
                *notes,
                *sections.changed,
            ],
        ),
        ("  ", [*files, *sections.traces]),
    ]
    lines = _lines(f"{result.case_id}: {sections.verdict}", indent="")
    lines += [line for indent, texts in parts for text in texts for line in _lines(text, indent=indent)]
    lines += spans_of(spans.table(spans.of_result(result)), indent="  ")
    lines += [f"  {line}" for entry in result.counts[:MOST_ENTRIES] for line in step_of(entry)]
    left = sum(len(entry.ranks) for entry in result.counts[MOST_ENTRIES:])
    if left:
        lines.append(f"  not shown: the counts of {plural(left, 'rank')}; see the HTML report")
    for title, traceback in sections.tracebacks:
        lines += [f"  {title}:", *(f"    {line}" for line in traceback.splitlines())]
    return lines


def _in_short(result: Measurement, sections: Explained) -> list[str]:
    """Return the verdict, its reasons and changes.

    Two parts are never left out: the reasons to doubt the verdict, and the directory of the launches' files.
    """
    lines = _lines(f"{result.case_id}: {sections.verdict}", indent="")
    *others, (name, directory) = sections.files.items()
    worth_less = [*sections.not_counted, *sections.excuses]
    if not any(check.blind for check in summary.decisive(result.verdict)):
        worth_less += filter(None, [summary.blind_to(result)])
    end = [line for text in worth_less for line in _lines(text, most=2)] + _lines(f"{name}: {directory}")
    findings = [finding for finding in sections.findings if not any(why in finding for why in sections.why)]
    with_cost = TEXT_LINES + COST_LINES
    named_files = [f"{heading}: {file}" for heading, file in others]
    parts = [
        (with_cost, sections.why),
        (TEXT_LINES, [*sections.reasons, *sections.decisive]),
        (with_cost, findings),
        (TEXT_LINES, [*sections.prices, *sections.held, *sections.changed, *sections.notes, *named_files]),
    ]
    sentences = [_lines(text, most=most) for most, texts in parts for text in texts]
    body = list(chain.from_iterable(sentences))
    room = MOST_LINES - len(lines) - len(end)
    if len(body) > room:  # keep as many whole sentences as fit
        kept = max((n for n in accumulate(map(len, sentences)) if n < room), default=room - 1)
        body[kept:] = [f"  {plural(len(body) - kept, 'line')} not shown: {summary.REST}"]
    lines += body
    room -= len(body) + 1
    if sections.tracebacks and room > 0:
        title, traceback = sections.tracebacks[-1]
        last = [f"    {line}" for line in traceback.splitlines()]
        lines.append(f"  {title}{' (last lines)' if len(last) > room else ''}:")
        lines += [line[:WIDTH] for line in last[-room:]]
    return lines + end


def _lines(text: str, *, indent: str = "  ", most: int | None = None) -> list[str]:
    """Return text as lines, with paths relative to the current directory, to keep them short."""
    return wrapped(relative(text, Path.cwd()), indent=indent, most=most)


def _shown(result: Measurement) -> list[str]:
    """Return the figures that are shown but not judged, one per line."""
    figures = result.figures
    judged = {check.metric for check in result.verdict.checks}
    shown = [metric for metric in SHOWN if metric.name not in judged]
    shown += [metric for metric in extra_metrics([figures]) if metric.judged == "shown"]
    lines = [
        f"{metric.label}: {amount(metric.of(figures), metric.unit)} (not judged)"
        for metric in (metric.counting(result.unit) for metric in shown if metric.of(figures) is not None)
    ]
    lines += [f"{sentence} (not judged)" for sentence in slopes.sentences(result.runs, result.before)]
    if figures.own_tokens_per_s is not None and figures.tokens_per_s is not None:
        apart = figures.own_tokens_per_s / figures.tokens_per_s - 1
        reported = f"{rate(figures.own_tokens_per_s)} {result.unit}/s"
        lines.append(
            f"reported by {result.framework}: {reported} ({apart:+.1%} compared with perfsuite's clock)"
        )
    return lines
