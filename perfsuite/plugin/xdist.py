"""Where pytest-xdist runs the tests: brings together what its processes measured."""

from __future__ import annotations

from typing import Any

import pytest

from perfsuite import documents
from perfsuite.plugin.keys import SELECTED, SESSION
from perfsuite.results.session_file import Measurement, Skipped


def tell_controller(config: Any) -> None:
    """Send what the reports of tests do not hold, as a process of pytest-xdist ends."""
    session = config.stash[SESSION]
    config.workeroutput["perf_selected"] = config.stash.get(SELECTED, 0)
    config.workeroutput["perf_skipped"] = [documents.plain(each) for each in session.skipped]
    config.workeroutput["perf_results"] = [documents.plain(each) for each in session.results]


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
