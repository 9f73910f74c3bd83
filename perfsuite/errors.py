"""Every error that perfsuite raises on purpose, and how any error is told. Imports only `redaction`.

What goes wrong with a *run* is data on the driver's side: `perfsuite.results.rank_report.Failure`.
"""

from perfsuite.redaction import masked


class PerfsuiteError(Exception):
    """Base of all the others."""


class AllocationOverError(PerfsuiteError):
    """The allocation in which jobs are launched is over, or about to be."""


class CaseError(PerfsuiteError, ValueError):
    """A case, model or option that cannot be: the message says what is allowed."""


class DryRunError(PerfsuiteError):
    """A case that cannot be run dry, or a package without a name that a dry run replaces."""


class ExtensionError(PerfsuiteError):
    """What another package adds to perfsuite and cannot be used: names the package."""


class FileError(PerfsuiteError):
    """A file that cannot be read or written: names the file and the field."""


class GitError(PerfsuiteError):
    """A git command that failed: with what it said."""


class LaunchError(PerfsuiteError):
    """A job that cannot be ended."""


class MachineError(PerfsuiteError):
    """A machine that cannot be measured on as it is set up: names the GPU and what to do."""


class PackageError(PerfsuiteError):
    """An optional package that is not installed: with the command that installs it."""


class MismatchError(PerfsuiteError):
    """What runs is not what was asked for; raised in a worker."""


class ReportError(PerfsuiteError):
    """Rank reports that do not fit together."""


class ScriptError(PerfsuiteError):
    """A training script ended before it was measured; raised in a worker."""


class SlurmError(PerfsuiteError):
    """Slurm refused or failed, with its words and the command; or a job was ended from outside."""


class ToolError(PerfsuiteError):
    """Another program failed or is missing, as `gh` and `asv`: names it, with what it said."""


MAX_TOLD = 20_000  # most characters that are kept of the message or the traceback of an error


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
    """Return text that others wrote as it may be kept and shown.

    It has no lone surrogates and no secrets. Beyond `MAX_TOLD` characters its middle is left out.
    """
    text = masked(text.encode("utf-8", "backslashreplace").decode())
    if len(text) <= MAX_TOLD:
        return text
    half = MAX_TOLD // 2 - 50
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[-half:]}"
