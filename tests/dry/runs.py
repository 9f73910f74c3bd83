"""Helpers: make dry runs that must pass, and dry runs that must fail."""

from pathlib import Path
from typing import Any

from perfsuite import Case
from perfsuite.dry.driver import dry_run
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run


def passed(case: Case, directory: Path, *, leaks: str = "", **how: Any) -> Run:
    """Make a dry run that must pass. `leaks` is the type of objects that each step is known to keep."""
    run = dry_run(case, directory, **how)
    assert run.failure is None, f"{run.failure.message}\n{run.failure.traceback}"
    kept = [entry.counts.kept for entry in run.counts if entry.counts.kept is not None]
    types = {name for objects in kept for name in objects.by_type}
    assert leaks in types if leaks else not types, types
    assert not any(objects.graphs for objects in kept), kept
    return run


def failure_of(case: Case, directory: Path, **how: Any) -> Failure:
    failure = dry_run(case, directory, **how).failure
    assert failure is not None
    return failure
