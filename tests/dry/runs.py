"""Dry runs that are to pass, and those that are to fail."""

from pathlib import Path
from typing import Any

from perfsuite import Case
from perfsuite.dry.driver import dry_run
from perfsuite.results.counts import KeptObjects
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run


def passed(case: Case, directory: Path, **how: Any) -> Run:
    run = dry_run(case, directory, **how)
    assert run.failure is None, f"{run.failure.message}\n{run.failure.traceback}"
    kept = [entry.counts.kept for entry in run.counts if entry.counts.kept not in (None, KeptObjects())]
    assert not kept, kept
    return run


def failure_of(case: Case, directory: Path, **how: Any) -> Failure:
    failure = dry_run(case, directory, **how).failure
    assert failure is not None
    return failure
