"""Every error that perfsuite raises on purpose, and how any error is told. Imports nothing.

    PerfsuiteError
    ├── AllocationOverError  the scheduler's allocation is over: nothing more can be launched
    ├── BusyError        another session measures on this machine, and nobody wants to wait
    ├── CaseError        a case, model or option that cannot be: the message says what is allowed
    ├── DryRunError      a case that cannot be run dry, or a package without a name that a dry run replaces
    ├── ExtensionError   what another package adds to perfsuite and cannot be used: names the package
    ├── FileError        a file that cannot be read or written: names the file and the field
    ├── GitError         a git command that failed: with what it said
    ├── GitHubError      gh, GitHub's command line, failed or is missing
    ├── LaunchError      a job that cannot be ended
    ├── MachineError     a machine that cannot be measured on as it is set up: names the GPU and what to do
    ├── PackageError     an optional package that is not installed: with the command that installs it
    ├── SlurmError       Slurm's words, with the command that it refused
    ├── PublishError     history pages that could not be made: with what asv said
    ├── MismatchError    what runs is not what was asked for; raised in a worker
    ├── ReportError      rank reports that do not fit together
    └── ScriptError      a training script that ended before it was measured; raised in a worker

MismatchError, ReportError and ScriptError reach the driver's user as a typed `Failure`.

What goes wrong with a *run* (out of memory, a crash, a hang) is not an exception on the driver's side
but data: `perfsuite.results.rank_report.Failure`.
"""


class PerfsuiteError(Exception):
    """Base of all the others."""


class AllocationOverError(PerfsuiteError):
    """The allocation in which jobs are launched is over, or about to be."""


class BusyError(PerfsuiteError):
    """Another session measures on this machine, and nobody wants to wait."""


class CaseError(PerfsuiteError, ValueError):
    """A case, model or option that cannot be."""


class DryRunError(PerfsuiteError):
    """A case cannot be run dry, or not with these packages."""


class ExtensionError(PerfsuiteError):
    """A framework, metric or launcher of another package that cannot be used."""


class FileError(PerfsuiteError):
    """A file that cannot be read or written."""


class GitError(PerfsuiteError):
    """A git command failed."""


class GitHubError(PerfsuiteError):
    """GitHub's command line failed or is missing."""


class LaunchError(PerfsuiteError):
    """A job that cannot be ended."""


class MachineError(PerfsuiteError):
    """A machine that cannot be measured on as it is set up."""


class PackageError(PerfsuiteError):
    """An optional package that is not installed."""


class PublishError(PerfsuiteError):
    """History pages that could not be made."""


class MismatchError(PerfsuiteError):
    """What runs is not what was asked for."""


class ReportError(PerfsuiteError):
    """Rank reports that do not fit together."""


class ScriptError(PerfsuiteError):
    """A training script ended before it was measured."""


class SlurmError(PerfsuiteError):
    """Slurm refused or failed, or a job ended otherwise than by its own end."""


MAX_TOLD = 20_000
"""Most characters that are kept of the message or the traceback of an error."""


def told(error: BaseException) -> str:
    """Return the message of an error as `readable` text, with its class unless perfsuite raised it."""
    message = message_of(error)
    return message if isinstance(error, PerfsuiteError) else f"{type(error).__name__}: {message}"


def message_of(error: BaseException) -> str:
    """Return the message of an error as `readable` text, even if it cannot be made."""
    try:
        return readable(str(error))
    except Exception as why:
        return f"(its message cannot be shown: {type(why).__name__} in __str__)"


def readable(text: str) -> str:
    """Return text that can be written into a file: without lone surrogates, at most `MAX_TOLD` characters.

    What is left out is the middle.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MAX_TOLD:
        return text
    half = MAX_TOLD // 2 - 50
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[-half:]}"
