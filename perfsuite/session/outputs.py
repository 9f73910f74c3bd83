"""Print the result of a session (run with pytest or with a command), and write its files."""

from collections.abc import Callable
from pathlib import Path

from perfsuite import documents, errors
from perfsuite.errors import FileError
from perfsuite.report import common_change, summary
from perfsuite.report.safe_text import printable
from perfsuite.report.terminal import explanation, table
from perfsuite.report.text import wrapped
from perfsuite.results.session_file import SessionFile, Status
from perfsuite.session.record import Record
from perfsuite.session.setup import missing_baselines


def lines(record: Record, *, whole: bool, color: bool, width: int | None) -> list[str]:
    """Return the results of a session as lines of text: the arms, the table and the necessary explanations.

    With `whole`, every case is explained in full. Without `whole`, failed cases are left out, because the
    output of their tests explains them.
    """
    measurements = record.results
    printed = [f"note: {note}" for note in summary.machine_notes(measurements)]
    printed += [f"note: {remark}" for remark in record.remarks]
    if not record.mode.arms:
        missing = missing_baselines(record.options.baselines, record.options.root)
        printed += [] if missing is None else [f"note: {missing}"]
    printed += summary.judge_change_lines([record.judge_changes])
    printed += [f"{name}: {arm}" for name, arm in summary.arm_descriptions(record.arm_facts).items()]
    printed = [printable(line) for line in printed]
    if measurements:
        printed.append(table(measurements, color=color, width=width))
    for sentence in common_change.sentences(measurements, record.mode.reference_facts):
        printed += ["", *wrapped(printable(sentence), indent="")]
    for result in measurements:
        reported_by_its_test = result.outcome == "failed" and result.excused is None and not result.shadow
        if whole or (summary.needs_words(result) and not reported_by_its_test):
            printed += ["", explanation(result, whole=whole)]
    return printed if whole else [*printed, *summary.in_short(measurements)]


def write_files(record: Record, status: Status) -> None:
    """Write the requested files, and `results.json` if the session has begun.

    Tries to write every file. Then raises a `FileError` if some could not be written.
    """
    options = record.options
    writes: list[tuple[Callable[[Path, SessionFile], object], Path | None]] = [
        (documents.write, options.json),
        (write_report, options.report),
    ]
    if record.results or record.running is not None:
        writes.insert(0, (documents.write, record.directory.results))
    problems = []
    for write, path in writes:
        try:
            if path is not None:
                write(path, record.session_file(status))
        except Exception as error:  # still try the next file, which can be on another disk
            problems.append(errors.error_text(error))
    if problems:
        raise FileError("; ".join(problems))


def write_report(directory: Path, *contents: SessionFile) -> list[Path]:
    """Write a report of sessions to a directory, and return its files.

    The files are an HTML page that works offline, a summary for CI, and the results of each session.
    """
    from perfsuite.report import markdown  # imported here because most runs of pytest do not need Jinja
    from perfsuite.report.html import page

    texts = {"index.html": page.render(list(contents)), "summary.md": markdown.render(list(contents))}
    for number, content in enumerate(contents, 1):
        texts["results.json" if number == 1 else f"results-{number}.json"] = content.as_json()
    for name, text in texts.items():
        documents.write_text(directory / name, text)
    return [directory / name for name in texts]
