"""What the hooks keep for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.report.progress import Progress
from perfsuite.results.session_file import Measurement
from perfsuite.session.session import Session

# Of a test:
PASSED = pytest.StashKey[bool]()
"""Whether the test itself had no complaint."""
MEASUREMENT = pytest.StashKey[Measurement]()
ENDED = pytest.StashKey[bool]()
"""Whether the test came to its end: not where an interrupt cut it short."""

# Of the session:
SESSION = pytest.StashKey[Session]()
PROGRESS = pytest.StashKey[Progress]()
SELECTED = pytest.StashKey[int]()
"""How many tests ask for a measurement."""
UNDECIDED = pytest.StashKey[list[str]]()
"""The cases that were left when nothing more could be launched."""
UNWRITTEN = pytest.StashKey[str]()
"""Why the results could not be written as files."""


def is_worker(config: pytest.Config) -> bool:
    """Whether this is a process of pytest-xdist: another process collects its reports."""
    return hasattr(config, "workerinput")


def nothing_measured(config: pytest.Config) -> bool:
    """Whether tests asked for measurements, and none says anything about the code."""
    is_asked = bool(config.stash.get(SELECTED, 0)) and not config.option.collectonly
    return is_asked and config.stash[SESSION].nothing_measured


@contextlib.contextmanager
def usage_error() -> Iterator[None]:
    """Turn a `PerfsuiteError` into pytest's `UsageError`, which ends the session before anything runs."""
    try:
        yield
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None
