"""What pytest shows of a session: letters and words of verdicts, the table, and what went wrong."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from perfsuite.plugin.keys import SELECTED, SESSION, UNDECIDED, UNWRITTEN, nothing_measured
from perfsuite.report import summary
from perfsuite.report.text import plural, printable, relative
from perfsuite.results.outcome import STYLES
from perfsuite.results.session_file import Measurement
from perfsuite.session import outputs
from perfsuite.session.session import Session


def terminal_of(config: pytest.Config) -> Any:
    """pytest's terminal, or None."""
    return config.pluginmanager.getplugin("terminalreporter")


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Give verdicts that pytest has no word for their own letter and word."""
    style = STYLES.get(getattr(report, "perf_outcome", ""))
    if style is None or style.letter is None:
        return None
    return style.word, style.letter, (style.word.upper(), {style.colour: True, "bold": not style.quiet})


def shown(config: pytest.Config, text: str) -> str:
    """The text as it may go to a terminal, with paths as pytest shows them: from its root directory."""
    return printable(relative(text, config.rootpath))


@pytest.hookimpl(trylast=True)  # below the tables of other plugins
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write the table, each verdict in words where somebody may have to act, and what went wrong."""
    session = config.stash[SESSION]
    if session.results:
        _write_verdicts(terminalreporter, config, session.results)
    if session.results and not session.setup.options.counts:
        terminalreporter.write_line("--perf-no-counts: what a step does was neither counted nor judged")
    if count := len(session.only_shown):
        terminalreporter.write_line(
            f"--perf-allow-shared: {plural(count, 'case')} measured while others used the "
            "machine: figures to look at, of which nothing was judged or recorded; counts are"
        )
    if (why := config.stash.get(UNWRITTEN, None)) is not None:
        terminalreporter.section("perfsuite: the results were not written", red=True, bold=True)
        terminalreporter.write_line(shown(config, why))
    if left := config.stash.get(UNDECIDED, []):
        terminalreporter.section("perfsuite: the allocation is over", red=True, bold=True)
        terminalreporter.write_line(
            f"{plural(len(left), 'case')} left, which --perf-resume measures in another allocation:"
        )
        terminalreporter.write_line("\n".join(f"  {case_id}" for case_id in left))
    if session.running is not None:
        terminalreporter.write_line(f"interrupted, not judged: {session.running}")
    if exitstatus == pytest.ExitCode.USAGE_ERROR:
        return  # its message says all
    if nothing_measured(config):
        _write_nothing_measured(terminalreporter, config)
    elif session.judged < len(session.results):
        _write_judged(terminalreporter, session)


def _write_verdicts(terminal: Any, config: pytest.Config, measurements: list[Measurement]) -> None:
    terminal.section(f"perfsuite: {summary.hardware(measurements) or 'nothing was judged'}")
    session = config.stash[SESSION]
    width = shutil.get_terminal_size().columns if terminal.isatty else None
    whole = config.get_verbosity() > 0 or bool(session.way.arms)
    for line in outputs.lines(session, whole=whole, color=terminal.hasmarkup, width=width):
        terminal.write_line(shown(config, line))


def _write_judged(terminal: Any, session: Session) -> None:
    told = f"{session.judged} of {plural(len(session.results), 'case')} judged"
    if session.too_few_judged:
        terminal.section("perfsuite: too few cases were judged", red=True, bold=True)
        told += f", --perf-min-judged asks for {session.setup.options.min_judged:.0%}: not a pass"
    terminal.write_line(told)


def _write_nothing_measured(terminal: Any, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    has_figures = any(measurement.figures.by_name() for measurement in session.results)
    done = "judged: what was measured is no evidence" if has_figures else "measured"
    done = "judged" if session.running is not None and session.launches else done
    terminal.section(f"perfsuite: nothing was {done}", red=True, bold=True)
    terminal.write_line(f"{plural(config.stash[SELECTED], 'case')} selected, none has a verdict: not a pass.")
    if any(measurement.shared for measurement in session.results):
        terminal.write_line(
            "Others used the machine. --perf-wait-quiet=SECONDS waits longer until they end; "
            "--perf-allow-shared shows what is measured while they run, and judges nothing by it."
        )
    for skip in session.skipped[:20]:
        terminal.write_line(printable(f"  {skip.case_id}: {skip.reason}"))
