"""What the hooks keep for each other, and small things that several of them need."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.report.progress import Progress
from perfsuite.report.text import printable, relative
from perfsuite.results.session_file import Measurement
from perfsuite.session.session import Session

# Of a test:
PASSED = pytest.StashKey[bool]()  # whether the test itself had no complaint
MEASUREMENT = pytest.StashKey[Measurement]()
ENDED = pytest.StashKey[bool]()  # whether the test came to its end: not where an interrupt cut it short

# Of the session:
SESSION = pytest.StashKey[Session]()
PROGRESS = pytest.StashKey[Progress]()
SELECTED = pytest.StashKey[int]()  # how many tests ask for a measurement
NO_SHARE = pytest.StashKey[bool]()  # whether there are cases, and all of them are those of other jobs
UNWRITTEN = pytest.StashKey[str]()  # why the results could not be written as files


def is_worker(config: pytest.Config) -> bool:
    """Whether this is a process of pytest-xdist: another process collects its reports."""
    return hasattr(config, "workerinput")


def terminal_of(config: pytest.Config) -> Any:
    """pytest's terminal, or None."""
    return config.pluginmanager.getplugin("terminalreporter")


def shown(config: pytest.Config, text: str) -> str:
    """The text as it may go to a terminal, with paths as pytest shows them: from its root directory."""
    return printable(relative(text, config.rootpath))


@contextlib.contextmanager
def usage_error() -> Iterator[None]:
    """Turn a `PerfsuiteError` into pytest's `UsageError`, which ends the session before anything runs."""
    try:
        yield
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None
