"""The end of a session: its files, its exit status, what processes of pytest-xdist tell, and interrupts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.errors import PerfsuiteError
from perfsuite.plugin.collection import uses_bench
from perfsuite.plugin.keys import ENDED, SELECTED, SESSION, UNWRITTEN, is_worker, nothing_measured
from perfsuite.plugin.options import values
from perfsuite.results.session_file import Measurement, Skipped, Status
from perfsuite.session import outputs

NO_ERROR = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    """Write the results as files. Fail the session where nothing was measured.

    Before all others: an error of another plugin here, as of one whose file cannot be written, loses nothing.
    """
    try:
        _finish(session, exitstatus)
    finally:
        HoldsInterrupts.release(session.config)
        result = yield
    return result


def _finish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if is_worker(config):
        _tell_controller(config)
        return
    is_no_pass = nothing_measured(config) or config.stash[SESSION].too_few_judged
    if is_no_pass and exitstatus in NO_ERROR:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if config.option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    status: Status = "complete" if _is_complete(session, exitstatus) else "interrupted"
    try:
        files = values(config)
        outputs.write_files(config.stash[SESSION], status, json_file=files["json"], report=files["report"])
    except PerfsuiteError as error:  # the figures are still on the screen
        config.stash[UNWRITTEN] = str(error)
        if session.exitstatus in NO_ERROR:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def _is_complete(session: pytest.Session, exitstatus: int) -> bool:
    """Whether every case had its turn. pytest's exit status alone does not tell: see `HoldsInterrupts`."""
    has_run = exitstatus in (*NO_ERROR, pytest.ExitCode.TESTS_FAILED)
    if not has_run or session.shouldstop or session.shouldfail:
        return False
    benchmarks = [item for item in session.items if uses_bench(item)]  # none where pytest-xdist runs them
    has_ended = all(item.stash.get(ENDED, False) for item in benchmarks)
    return has_ended and session.config.stash[SESSION].running is None


def _tell_controller(config: Any) -> None:
    """Send what the reports of tests do not hold, as a process of pytest-xdist ends."""
    session, output = config.stash[SESSION], config.workeroutput
    output["perf_selected"] = config.stash.get(SELECTED, 0)
    output["perf_skipped"] = [documents.plain(each) for each in session.skipped]
    output["perf_results"] = [documents.plain(each) for each in session.results]


class CollectsFromWorkers:
    """Takes what the processes of pytest-xdist measured into the session of this process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.session = config, config.stash[SESSION]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the measurement of a test that ran in another process."""
        if (measurement := getattr(report, "perf_measurement", None)) is not None:
            self.session.keep(Measurement.model_validate(measurement, context=documents.FROM_FILE))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Keep what a process skipped, and what failed in it before there was a measurement."""
        told = getattr(node, "workeroutput", {})  # none of a process that died
        self.config.stash[SELECTED] = max(self.config.stash.get(SELECTED, 0), told.get("perf_selected", 0))
        skipped = [Skipped.model_validate(each) for each in told.get("perf_skipped", [])]
        self.session.skipped += [each for each in skipped if each not in self.session.skipped]
        known = {(result.nodeid, result.case_id) for result in self.session.results}
        for each in told.get("perf_results", []):
            result = Measurement.model_validate(each, context=documents.FROM_FILE)
            if (result.nodeid, result.case_id) not in known:
                self.session.keep(result)


class HoldsInterrupts:
    """Has a second Ctrl-C wait until the results are written, which takes pytest and perfsuite a second.

    Else it hits pytest while it takes note of the first one, and its exit status says that all is well.
    """

    KEY = pytest.StashKey[Any]()

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_keyboard_interrupt(self) -> Generator[None, object, object]:
        """Ignore SIGINT from now on, before any other plugin looks at the first one."""
        if self.config.stash.get(SELECTED, 0) and signal.getsignal(signal.SIGINT) is not None:
            with contextlib.suppress(ValueError):  # not in the main thread, which alone gets an interrupt
                self.config.stash[self.KEY] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        return (yield)

    @classmethod
    def release(cls, config: pytest.Config) -> None:
        """Answer SIGINT as before."""
        if cls.KEY in config.stash:
            signal.signal(signal.SIGINT, config.stash[cls.KEY])
            del config.stash[cls.KEY]
