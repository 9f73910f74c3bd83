"""All errors that perfsuite raises deliberately, and the text of any error. Imports only `redaction`.

In the process that starts launches, a failed *run* does not raise an error. Its failure is data
(`perfsuite.results.rank_report.Failure`).
"""

from perfsuite.redaction import masked


class PerfsuiteError(Exception):
    """Base class of all other errors."""


class AllocationOverError(PerfsuiteError):
    """The allocation in which jobs are launched has ended, or is about to end."""


class CaseError(PerfsuiteError, ValueError):
    """A case, model or option is not valid. The message says what is allowed."""


class DryRunError(PerfsuiteError):
    """A dry run is not possible, for example because a package lacks a name that the dry run replaces."""


class ExtensionError(PerfsuiteError):
    """An extension in another package cannot be used. The message names the package."""


class FileError(PerfsuiteError):
    """A file cannot be read or written. The message names the file and the field."""


class GitError(PerfsuiteError):
    """A git command failed. The message includes git's message."""


class LaunchError(PerfsuiteError):
    """A job cannot be ended, or its ranks cannot meet."""


class MachineError(PerfsuiteError):
    """A machine, as it is set up, cannot be used for measuring. The message names the GPU and the remedy."""


class PackageError(PerfsuiteError):
    """An optional package is not installed. The message gives the command that installs it."""


class PredictionError(PerfsuiteError):
    """The time of a step cannot be predicted. The message says what is missing."""


class PrivateNameError(PerfsuiteError):
    """A package lacks a private name that perfsuite uses.

    The message gives the package with its version, the name, and what does not work without the name.
    """


class MismatchError(PerfsuiteError):
    """The training that runs is not the requested training. Raised in a worker."""


class ReportError(PerfsuiteError):
    """The reports of ranks contradict each other."""


class ScriptError(PerfsuiteError):
    """A training script ended before it was measured. Raised in a worker."""


class ToolError(PerfsuiteError):
    """Another program, such as `gh` or `asv`, is missing or failed. The message gives the reason."""


MAX_TEXT = 20_000  # maximum number of characters kept of an error's message or traceback


def error_text(error: BaseException) -> str:
    """Return the message of an error as `readable` text.

    If the error is not perfsuite's own, the text begins with its class.
    """
    message = message_of(error)
    return message if isinstance(error, PerfsuiteError) else f"{type(error).__name__}: {message}"


def message_of(error: BaseException) -> str:
    """Return the message of an error as `readable` text, even if its `__str__` fails."""
    try:
        return readable(str(error))
    except Exception as why:
        return f"(its message cannot be shown: {type(why).__name__} in __str__)"


def shortened(text: str, most: int) -> str:
    """Return text with at most `most` characters. A cut text ends in an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 2]} …"


def readable(text: str) -> str:
    """Return text from another source in a form that can be stored and shown.

    Lone surrogates are escaped and secrets are masked. If there are more than `MAX_TEXT` characters, the
    middle is left out.
    """
    text = masked(text.encode("utf-8", "backslashreplace").decode())
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 50
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[-half:]}"
