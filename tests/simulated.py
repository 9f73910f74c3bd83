"""Helper: launches of the framework `fake`, with ranks that run one after another in this process."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.driving import prepare
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.launch.local import LocalLauncher
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import LaunchFile
from perfsuite.worker.faults import injector
from perfsuite.worker.main import _simulate
from perfsuite.worker.rank import Rank, empty_report, failure_of, write_failure

REAL = LocalLauncher.launch
CONFTEST = f"""
import sys
import pytest

sys.path.append({str(Path(__file__).parents[1])!r})
from tests import simulated as ranks_in_this_process

def pytest_configure():
    ranks_in_this_process.patch(pytest.MonkeyPatch())
"""
"""A `conftest.py` with which a session in another process simulates its ranks in that process."""


class _Exit(BaseException):
    """Replaces the end of a rank's process."""


def launch(self: LocalLauncher, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
    """Run a job of `fake` here, and any other job as `LocalLauncher.launch` does."""
    if framework_of(job.case).plan(job.case).needs_torch:
        return REAL(self, job, on_progress)
    prepare(job.run_dir)
    request = documents.read(job.run_dir.case, CaseFile)
    ended = []
    for number in range(job.case.topology.world_size):
        report = empty_report(number, job.case.topology.world_size)
        before = {*threading.enumerate()}
        try:
            rank = Rank(job.run_dir, request, report)
            rank.write(_simulate(rank))
        except _Exit as error:
            ended.append(Failure(kind="crash", message=f"exit code {error}", rank=number))
        except Exception as error:
            write_failure(job.run_dir, report, failure_of(error, number))
        finally:
            for thread in set(threading.enumerate()) - before:  # it might still be writing its progress
                thread.join(60)
    documents.write(job.run_dir.launch(0), LaunchFile(node=0, failures=tuple(ended)))
    return None


class EndsAfter(LocalLauncher):
    """Simulates some launches of `fake` in this process. The next launch raises an error."""

    def __init__(self, launches: int, error: BaseException) -> None:
        super().__init__()
        self._left = launches
        self._error = error

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        if self._left == 0:
            raise self._error
        self._left -= 1
        return launch(self, job, on_progress)


class Rewrites(LocalLauncher):
    """Simulates launches of `fake` in this process, and changes these fields of the ranks' reports."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self._changes = changes

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        failure = launch(self, job, on_progress)
        for rank in range(job.case.topology.world_size):
            file = job.run_dir.rank(rank)
            documents.write(file, documents.read(file, RankReport).replace(**self._changes))
        return failure


def patch(patch: pytest.MonkeyPatch) -> None:
    """Make jobs of `fake` run in this process."""

    def end(status: int) -> NoReturn:
        raise _Exit(status)

    patch.setattr(LocalLauncher, "launch", launch)
    patch.setattr(injector, "os", SimpleNamespace(_exit=end))
