"""What pytest writes at the end of a session, and its exit status."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.plugin.collection import uses_bench
from perfsuite.plugin.keys import ENDED, SESSION, UNWRITTEN, is_worker, nothing_measured
from perfsuite.plugin.options import values
from perfsuite.plugin.start import HoldsInterrupts
from perfsuite.plugin.xdist import tell_controller
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
        tell_controller(config)
        return
    is_no_pass = nothing_measured(config) or config.stash[SESSION].too_few_judged
    if is_no_pass and exitstatus in NO_ERROR:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if config.option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    try:
        chosen = values(config)
        outputs.write_files(
            config.stash[SESSION],
            "complete" if _is_complete(session, exitstatus) else "interrupted",
            json_file=chosen["json"],
            report=chosen["report"],
        )
    except PerfsuiteError as error:  # the figures are still on the screen
        config.stash[UNWRITTEN] = str(error)
        if session.exitstatus in NO_ERROR:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def _is_complete(session: pytest.Session, exitstatus: int) -> bool:
    """Whether every case had its turn. pytest's exit status alone does not tell: see `HoldsInterrupts`."""
    if (
        exitstatus not in (*NO_ERROR, pytest.ExitCode.TESTS_FAILED)
        or session.shouldstop
        or session.shouldfail
    ):
        return False
    benchmarks = [item for item in session.items if uses_bench(item)]  # none where pytest-xdist runs them
    has_ended = all(item.stash.get(ENDED, False) for item in benchmarks)
    return has_ended and session.config.stash[SESSION].running is None
