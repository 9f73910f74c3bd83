"""Write the results of a session to pytest's terminal, below the tables of other plugins."""

import shutil
from typing import Any

import pytest

from perfsuite.analysis.health import is_shared
from perfsuite.plugin.collection import REFUSED, SELECTED, SESSION, UNWRITTEN, shown
from perfsuite.plugin.ending import CUT_SHORT, TEST_ENDED, nothing_measured
from perfsuite.report import summary
from perfsuite.report.safe_text import printable
from perfsuite.report.text import plural
from perfsuite.session import outputs
from perfsuite.session.record import Record


@pytest.hookimpl(trylast=True)  # prints below the tables of other plugins
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write the table, explanations of verdicts that might need action, and problems of the session."""
    terminal = terminalreporter
    record = config.stash[SESSION].record
    why = config.stash.get(REFUSED, None)
    if why is not None:
        terminal.section("perfsuite: no test was run", red=True, bold=True)
        terminal.write_line(f"ERROR: {shown(config, why)}")
        return
    _write_verdicts(terminal, config, record)
    _write_only_shown(terminal, record)
    _write_unwritten(terminal, config)
    _write_swallowed(terminal, config, record)
    _write_unclaimed(terminal, config, record)
    _write_not_reached(terminal, record)
    _write_skipped_files(terminal, config, record)
    _write_changed_cases(terminal, config, record)
    _write_cut_short(terminal, config, record)
    if exitstatus != pytest.ExitCode.USAGE_ERROR:  # otherwise, pytest's message is enough
        _write_shadow(terminal, record)
        _write_judged(terminal, config, record)


def _write_verdicts(terminal: Any, config: pytest.Config, record: Record) -> None:
    if not record.results:
        return
    terminal.section(f"perfsuite: {summary.hardware(record.results) or 'nothing was judged'}")
    width = shutil.get_terminal_size().columns if terminal.isatty else None
    whole = config.get_verbosity() > 0 or bool(record.mode.arms)
    for line in outputs.lines(record, whole=whole, color=terminal.hasmarkup, width=width):
        terminal.write_line(shown(config, line))
    if not record.options.counts:
        terminal.write_line("--perf-no-counts: the work of a step was neither counted nor judged")
    _write_same_work(terminal, record)


def _write_same_work(terminal: Any, record: Record) -> None:
    """Report in how many cases the counts of the work are the same, if any were compared.

    Counts have no noise, so they are judged even on a busy machine, where times can remain undecided.
    """
    checks = [result.verdict.counts for result in record.results if result.verdict.counts is not None]
    if any(check.compared and check.outcome != "recorded" for check in checks):
        same = sum(result.verdict.is_same_work for result in record.results)
        terminal.write_line(
            f"same work as before, by exact counts: {same} of {plural(len(record.results), 'case')}"
        )


def _write_only_shown(terminal: Any, record: Record) -> None:
    """Report how many cases were measured beside other jobs."""
    count = len(record.tally.only_shown)
    if count:
        terminal.write_line(
            f"--perf-allow-shared: other jobs used the machine during launches of {plural(count, 'case')}. "
            "Only the counts of these launches are judged and recorded. Times and memory are shown without "
            "being judged"
        )


def _write_unwritten(terminal: Any, config: pytest.Config) -> None:
    """Report why the session's files could not be written."""
    why = config.stash.get(UNWRITTEN, None)
    if why is not None:
        terminal.section("perfsuite: the results were not written", red=True, bold=True)
        terminal.write_line(shown(config, why))


def _write_swallowed(terminal: Any, config: pytest.Config, record: Record) -> None:
    """Report tests that ignored their verdicts."""
    ended = config.stash.get(TEST_ENDED, {})
    swallowed = [result for result in record.tally.failing if ended.get(result.nodeid, "failed") != "failed"]
    if not swallowed:
        return
    verb = "verdict was" if len(swallowed) == 1 else "verdicts were"
    terminal.section(f"perfsuite: {len(swallowed)} {verb} swallowed by the test", red=True, bold=True)
    for result in swallowed:
        how = ended[result.nodeid]
        terminal.write_line(shown(config, f"{result.nodeid}: {result.outcome}, but its test ended as {how}"))
    terminal.write_line(
        "The exit status follows the verdict. To expect a failure, declare known_issue in the case or waive "
        "it in perf-waivers.toml"
    )


def _write_unclaimed(terminal: Any, config: pytest.Config, record: Record) -> None:
    """Report reviewed baselines to which no case of a complete nightly run belongs."""
    if record.deselected:
        deselected = plural(len(record.deselected), "reviewed baseline")
        terminal.section(f"perfsuite: {deselected} deselected", yellow=True)
        for baseline in record.deselected:
            terminal.write_line(f"  {shown(config, baseline)}")
    unclaimed = summary.unclaimed(record.unclaimed)
    if unclaimed is None:
        return
    heading, baselines = unclaimed
    color = {"red": True} if record.misses_baselines else {"yellow": True}
    terminal.section(f"perfsuite: {heading}", bold=True, **color)
    for baseline in baselines:
        terminal.write_line(f"  {shown(config, baseline)}")
    fails = "--perf-missing-baseline=fail: not a pass. " if record.misses_baselines else ""
    terminal.write_line(f"{fails}Was a case lost? If it was removed on purpose, delete its baseline")


def _write_not_reached(terminal: Any, record: Record) -> None:
    """Report the cases for which the budget did not suffice."""
    missed = [skip for skip in record.skipped if skip.not_reached]
    if not missed:
        return
    terminal.section("perfsuite: the budget is used up", yellow=True, bold=True)
    terminal.write_line(f"{plural(len(missed), 'case')} not reached within --perf-budget, and not judged:")
    for skip in missed:
        terminal.write_line(f"  {skip.case_id}: {skip.reason.removeprefix('not reached: ')}")


def _write_skipped_files(terminal: Any, config: pytest.Config, record: Record) -> None:
    """Report which files of cases skipped themselves at import, because pytest reports only how many did."""
    skipped = [skip for skip in record.skipped if skip.case_id == skip.nodeid]
    if not skipped:
        return
    number = plural(len(skipped), "file")
    terminal.section(f"perfsuite: {number} of cases skipped at import", yellow=True, bold=True)
    for skip in skipped:
        terminal.write_line(shown(config, f"  {skip.nodeid}: {skip.reason}"))
    terminal.write_line("The cases in such a file are not judged, and each file counts as one case")


def _write_changed_cases(terminal: Any, config: pytest.Config, record: Record) -> None:
    """Report how the cases of two arms differ."""
    changed = summary.case_changes(record.session_file("running")) if record.mode.arms else []
    if not changed:
        return
    terminal.section("perfsuite: the arms have different cases", yellow=True, bold=True)
    for line in changed:
        terminal.write_line(shown(config, line))


def _write_cut_short(terminal: Any, config: pytest.Config, record: Record) -> None:
    """Report that the session ended before all cases were run, and which cases were interrupted.

    In a resumed session, these include the cases that were interrupted in its earlier parts.
    """
    if config.stash.get(CUT_SHORT, False):
        terminal.section("perfsuite: not every case was run", red=True, bold=True)
        terminal.write_line("pytest ended early or left out tests, so this is not a pass")
    for case_id in record.interrupted:
        terminal.write_line(f"interrupted, not judged: {case_id}")


def _write_shadow(terminal: Any, record: Record) -> None:
    """With `--perf-shadow`, report how many cases would have failed."""
    if record.options.shadow:
        would = sum(result.shadow for result in record.results)
        cases = plural(len(record.results), "case")
        terminal.write_line(f"--perf-shadow: {would} of {cases} would have failed")


def _write_judged(terminal: Any, config: pytest.Config, record: Record) -> None:
    """Report how many cases were judged, unless all cases were judged."""
    tally = record.tally
    # A case that failed because of its code was judged, even if nothing was measured.
    if nothing_measured(config) and not tally.judged:
        _write_nothing_measured(terminal, config, record)
    elif tally.judged < tally.to_judge:
        message = f"{tally.judged} of {plural(tally.to_judge, 'case')} judged"
        if tally.too_few_judged:
            terminal.section("perfsuite: too few cases were judged", red=True, bold=True)
            message += f", but --perf-min-judged requires {record.options.min_judged:.0%}: not a pass"
        terminal.write_line(message)


def _write_nothing_measured(terminal: Any, config: pytest.Config, record: Record) -> None:
    has_figures = any(measurement.figures.by_name() for measurement in record.results)
    done = "judged: no measurement can be used as evidence" if has_figures else "measured"
    done = "judged" if record.running is not None and record.launches.all else done
    terminal.section(f"perfsuite: nothing was {done}", red=True, bold=True)
    selected = plural(config.stash[SELECTED], "case")
    terminal.write_line(f"{selected} selected, none could be judged: not a pass.")
    launches = [run for measurement in record.results for run in measurement.runs]
    if any(is_shared(run.health, run.machine) for run in launches):
        terminal.write_line(
            "Other jobs used the machine. --perf-wait-quiet=SECONDS waits longer for them to end. "
            "--perf-allow-shared does not wait: it judges the counts, and shows timings without judging them."
        )
    for skip in record.skipped[:20]:
        terminal.write_line(printable(f"  {skip.case_id}: {skip.reason}"))
