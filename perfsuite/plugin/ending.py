"""End a session: its output and files, its exit status, and interrupts."""

import contextlib
import shutil
import signal
from collections.abc import Generator
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.analysis.health import is_shared
from perfsuite.errors import PerfsuiteError
from perfsuite.plugin.collection import (
    ENDED,
    NO_SHARE,
    REFUSED,
    SELECTED,
    SESSION,
    UNWRITTEN,
    is_worker,
    runs_no_test,
    shown,
    uses_bench,
)
from perfsuite.plugin.selection import is_elsewhere, is_whole
from perfsuite.report import summary
from perfsuite.report.safe_text import printable
from perfsuite.report.text import plural
from perfsuite.results.outcome import STYLES
from perfsuite.results.session_file import Measurement, Skipped, Status
from perfsuite.session import outputs
from perfsuite.session.record import Record

TEST_ENDED = pytest.StashKey[dict[str, str]]()  # the outcome of each test itself, regardless of its verdict
CUT_SHORT = pytest.StashKey[bool]()  # whether pytest ended early without an error of its own
CRASHED = pytest.StashKey[bool]()  # whether a process of pytest-xdist died
NO_ERROR = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Give verdicts their own letters and words, if pytest has none for them."""
    style = STYLES.get(getattr(report, "perf_outcome", ""))
    if style is None or style.letter is None:
        return None
    return style.word, style.letter, (style.word.upper(), {style.colour: True, "bold": not style.quiet})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    """Write the results before other plugins can fail, and set the exit status from the verdicts."""
    try:
        _finish(session, exitstatus)
    finally:
        HoldsInterrupts.release(session.config)
        result = yield
        _fail_if_due(session, session.exitstatus)  # a hook in conftest.py might have changed the status
    return result


def _finish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    record = config.stash[SESSION].record
    if is_worker(config):
        return  # the controller has all results
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.stash.get(NO_SHARE, False):
        session.exitstatus = pytest.ExitCode.OK
    _fail_if_due(session, exitstatus)
    if REFUSED in config.stash:
        return
    if runs_no_test(config) or exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    status: Status = "complete" if _is_complete(session, exitstatus) else "interrupted"
    try:
        outputs.write_files(record, status)
    except PerfsuiteError as error:  # the terminal still shows the results
        config.stash[UNWRITTEN] = str(error)
        if session.exitstatus in NO_ERROR:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def _fail_if_due(session: pytest.Session, exitstatus: int) -> None:
    """Set the exit status from the session's results, because a test can swallow its verdict."""
    config = session.config
    record = config.stash[SESSION].record
    if is_worker(config) or runs_no_test(config) or exitstatus not in NO_ERROR:
        return
    if REFUSED in config.stash:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
        return
    tally = record.tally
    too_little = _nothing_measured(config) or tally.too_few_judged or not record.has_all_cases
    too_little = too_little and not record.options.shadow
    if too_little or tally.failing or record.misses_baselines:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif config.stash.get(SELECTED, 0) and not _is_complete(session, exitstatus):
        config.stash[CUT_SHORT] = True
        session.exitstatus = pytest.ExitCode.INTERRUPTED


def _is_complete(session: pytest.Session, exitstatus: int) -> bool:
    """Return whether every case was run. pytest's exit status is not enough: see `HoldsInterrupts`."""
    has_run = exitstatus in (*NO_ERROR, pytest.ExitCode.TESTS_FAILED)
    if not has_run or session.shouldstop or session.shouldfail or CRASHED in session.config.stash:
        return False
    benchmarks = [item for item in session.items if uses_bench(item)]  # empty if pytest-xdist runs them
    has_ended = all(item.stash.get(ENDED, False) for item in benchmarks)
    return has_ended and session.config.stash[SESSION].record.running is None


def _nothing_measured(config: pytest.Config) -> bool:
    record = config.stash[SESSION].record
    has_cases = bool(config.stash.get(SELECTED, 0) or record.unclaimed)
    return has_cases and not runs_no_test(config) and record.tally.nothing_measured


@pytest.hookimpl(trylast=True)  # prints below the tables of other plugins
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write the table, explanations of verdicts that might need action, and problems of the session."""
    record = config.stash[SESSION].record
    tally = record.tally
    terminal = terminalreporter
    why = config.stash.get(REFUSED, None)
    if why is not None:
        terminal.section("perfsuite: no test was run", red=True, bold=True)
        terminal.write_line(f"ERROR: {shown(config, why)}")
        return
    if record.results:
        _write_verdicts(terminal, config, record)
        _write_same_work(terminal, record)
    count = len(tally.only_shown)
    if count:
        terminal.write_line(
            f"--perf-allow-shared: other jobs used the machine in {plural(count, 'case')}, so only counts "
            "are judged and recorded. Times and memory are shown without being judged"
        )
    why = config.stash.get(UNWRITTEN, None)
    if why is not None:
        terminal.section("perfsuite: the results were not written", red=True, bold=True)
        terminal.write_line(shown(config, why))
    _write_swallowed(terminal, config, record)
    _write_unclaimed(terminal, config, record)
    missed = [skip for skip in record.skipped if skip.not_reached]
    if missed:
        terminal.section("perfsuite: the budget is used up", yellow=True, bold=True)
        terminal.write_line(
            f"{plural(len(missed), 'case')} not reached within --perf-budget, and not judged:"
        )
        for skip in missed:
            terminal.write_line(f"  {skip.case_id}: {skip.reason.removeprefix('not reached: ')}")
    changed = summary.case_changes(record.session_file("running")) if record.mode.arms else []
    if changed:
        terminal.section("perfsuite: the arms have different cases", yellow=True, bold=True)
        for line in changed:
            terminal.write_line(shown(config, line))
    if config.stash.get(CUT_SHORT, False):
        terminal.section("perfsuite: not every case was run", red=True, bold=True)
        terminal.write_line("pytest ended early or left out tests, so this is not a pass")
    if record.running is not None:
        terminal.write_line(f"interrupted, not judged: {record.running}")
    if exitstatus == pytest.ExitCode.USAGE_ERROR:
        return  # pytest's message is enough
    if record.options.shadow:
        would = sum(result.shadow for result in record.results)
        terminal.write_line(
            f"--perf-shadow: {would} of {plural(len(record.results), 'case')} would have failed"
        )
    if _nothing_measured(config) and not tally.judged:  # a failure of the code is also a verdict
        _write_nothing_measured(terminal, config, record)
    elif tally.judged < tally.to_judge:
        message = f"{tally.judged} of {plural(tally.to_judge, 'case')} judged"
        if tally.too_few_judged:
            terminal.section("perfsuite: too few cases were judged", red=True, bold=True)
            message += f", but --perf-min-judged requires {record.options.min_judged:.0%}: not a pass"
        terminal.write_line(message)


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


def _write_verdicts(terminal: Any, config: pytest.Config, record: Record) -> None:
    terminal.section(f"perfsuite: {summary.hardware(record.results) or 'nothing was judged'}")
    width = shutil.get_terminal_size().columns if terminal.isatty else None
    whole = config.get_verbosity() > 0 or bool(record.mode.arms)
    for line in outputs.lines(record, whole=whole, color=terminal.hasmarkup, width=width):
        terminal.write_line(shown(config, line))
    if not record.options.counts:
        terminal.write_line("--perf-no-counts: the work of a step was neither counted nor judged")


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


class CollectsFromWorkers:
    """Collect the results of pytest-xdist's workers in the session of this process.

    Without pytest-xdist, the hooks get the reports of the tests in this process.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.record = config.stash[SESSION].record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test itself, and its results if it ran in another process."""
        if report.when not in ("setup", "call", "teardown"):
            self.config.stash[CRASHED] = True  # pytest-xdist's report of a test whose process died
        ended = self.config.stash.setdefault(TEST_ENDED, {})
        how = getattr(report, "perf_swallowed", "failed" if report.failed else None)
        if how is not None or report.nodeid not in ended:
            ended[report.nodeid] = how or report.outcome
        sent = getattr(report, "perf_found", None)
        if sent is None:
            return
        results, skipped = sent
        self.config.stash[SELECTED] = self.config.stash.get(SELECTED, 0) + 1
        self.record.skipped += [Skipped.model_validate(skip) for skip in skipped]
        for result in results:
            self.record.keep(Measurement.model_validate(result, context=documents.FROM_FILE))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send a worker the facts that can be read only from the command line of this process."""
        node.workerinput["perf_is_whole"] = is_whole(self.config)
        node.workerinput["perf_is_elsewhere"] = is_elsewhere(self.config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over the refusal and the unclaimed baselines of an ended worker: its output is not shown."""
        output = getattr(node, "workeroutput", {})
        if "perf_refused" in output:
            self.config.stash[REFUSED] = output["perf_refused"]
        if "perf_unclaimed" in output:
            self.record.unclaimed = tuple(output["perf_unclaimed"])
            self.record.deselected = tuple(output["perf_deselected"])


class HoldsInterrupts:
    """Ignore a second Ctrl-C until results are written. Without this, pytest would exit with success."""

    KEY = pytest.StashKey[Any]()

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_keyboard_interrupt(self) -> Generator[None, object, object]:
        """Ignore further interrupts (SIGINT), before any other plugin handles the first one."""
        if self.config.stash.get(SELECTED, 0) and signal.getsignal(signal.SIGINT) is not None:
            with contextlib.suppress(ValueError):  # only the main thread gets interrupts
                self.config.stash[self.KEY] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        return (yield)

    @classmethod
    def release(cls, config: pytest.Config) -> None:
        """Restore the handler of SIGINT."""
        if cls.KEY in config.stash:
            signal.signal(signal.SIGINT, config.stash[cls.KEY])
            del config.stash[cls.KEY]
