"""End a session: its files, its exit status, and interrupts."""

import contextlib
import signal
from collections.abc import Generator
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.errors import PerfsuiteError
from perfsuite.inputs import files
from perfsuite.plugin.collection import (
    ENDED,
    NO_SHARE,
    REFUSED,
    SELECTED,
    SESSION,
    TO_RUN,
    UNWRITTEN,
    has_cases,
    is_worker,
    runs_no_test,
)
from perfsuite.plugin.selection import is_elsewhere, is_whole
from perfsuite.results.outcome import STYLES
from perfsuite.results.session_file import Measurement, Skipped, Status
from perfsuite.session import outputs

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
    too_little = nothing_measured(config) or tally.too_few_judged or not record.has_all_cases
    too_little = too_little and not record.options.shadow
    if too_little or tally.failing or record.misses_baselines:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif config.stash.get(SELECTED, 0) and not _is_complete(session, exitstatus):
        config.stash[CUT_SHORT] = True
        session.exitstatus = pytest.ExitCode.INTERRUPTED


def _is_complete(session: pytest.Session, exitstatus: int) -> bool:
    """Return whether every selected case was run.

    pytest's exit status is not enough: see `HoldsInterrupts`. `session.items` is not enough either, because a
    hook can shorten it after the selection.
    """
    has_run = exitstatus in (*NO_ERROR, pytest.ExitCode.TESTS_FAILED)
    if not has_run or session.shouldstop or session.shouldfail or CRASHED in session.config.stash:
        return False
    selected = session.config.stash.get(TO_RUN, [])  # empty if pytest-xdist runs them
    has_ended = all(item.stash.get(ENDED, False) for item in selected)
    return has_ended and session.config.stash[SESSION].record.running is None


def nothing_measured(config: pytest.Config) -> bool:
    """Return whether cases were selected, but none has a result that counts as measured."""
    record = config.stash[SESSION].record
    has_cases = bool(config.stash.get(SELECTED, 0) or record.unclaimed)
    return has_cases and not runs_no_test(config) and record.tally.nothing_measured


class CollectsFromWorkers:
    """Collect the results of pytest-xdist's workers in the session of this process.

    Without pytest-xdist, the hooks get the reports of the tests and files in this process.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.record = config.stash[SESSION].record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record how a test ended, whatever its verdict. If another process ran it, also keep its results."""
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

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """If a file of cases skips itself at import, record the file, because its cases are unknown."""
        file = self.config.rootpath / report.nodeid
        if report.outcome != "skipped" or file.suffix != ".py" or runs_no_test(self.config):
            return
        try:
            source = files.read_text(file)
        except (OSError, ValueError):  # ValueError: invalid UTF-8
            return
        cases = self.record.options.root / self.config.getini("perf_cases")
        if has_cases(source, is_in_cases=file.resolve().is_relative_to(cases.resolve())):
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.record.skip_file(report.nodeid, why.removeprefix("Skipped: "))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send a worker the facts that can be read only from the command line of this process."""
        node.workerinput["perf_is_whole"] = is_whole(self.config)
        node.workerinput["perf_is_elsewhere"] = is_elsewhere(self.config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Record why an ended worker refused the session, and which baselines have no selected case.

        This process reports both, because the output of a worker is not shown.
        """
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
