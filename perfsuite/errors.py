"""Every error that perfsuite raises on purpose. Imports nothing.

    PerfsuiteError
    ├── CaseError        a case, model or option that cannot be: the message says what is allowed
    ├── FileError        a JSON file that cannot be read or written: names the file and the field
    ├── LaunchError      a job that cannot be ended
    └── WorkerError      raised in a worker; reaches the driver as a typed `Failure`
        ├── MismatchError    what runs is not what was asked for
        └── ReportError      rank reports that do not fit together

What goes wrong with a *run* (out of memory, a crash, a hang) is not an exception on the driver's side
but data: `perfsuite.result.Failure`.
"""


class PerfsuiteError(Exception):
    """Base of all the others."""


class CaseError(PerfsuiteError, ValueError):
    """A case, model or option that cannot be."""


class FileError(PerfsuiteError):
    """A JSON file that cannot be read or written."""


class LaunchError(PerfsuiteError):
    """A job that cannot be ended."""


class WorkerError(PerfsuiteError):
    """Something the worker found out while it measured."""


class MismatchError(WorkerError):
    """What runs is not what was asked for."""


class ReportError(WorkerError):
    """Rank reports that do not fit together."""
