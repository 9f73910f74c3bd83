"""A setting that can be given on pytest's command line and, for some settings, in its ini file."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfsuite.errors import CaseError

# Parses a value. If the value is wrong, the message to the user is "give " and the text of the `ValueError`.
Parse = Callable[[str], Any]

OFF = ("", "0", "f", "false", "n", "no", "off")  # values in an ini file that turn a flag off


def words(value: str) -> list[str]:
    """Split a text into words, as a shell would do."""
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"words as in a shell ({error})") from None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting: `--perf-NAME` in pytest, and `perf_NAME` in its ini file."""

    name: str
    help: str  #: The text for pytest's help, and for the page of options.
    page: str = ""  #: Further text for the page, in Markdown.
    metavar: str = ""
    """Placeholder for the value. It is empty for a flag. With `one|other`, the second word means True."""
    parse: Parse = str
    """Parses a value. If the value is wrong, it raises `ValueError`, whose text gives the allowed values."""
    default: str = ""  #: The default as text, which is parsed like any other value. Empty: None.
    ini: bool = False  #: Whether a repository can give this setting in pytest's ini file.

    @property
    def is_flag(self) -> bool:
        """Whether the option takes no value."""
        return not self.metavar

    @property
    def spelled(self) -> str:
        """The name of pytest's option."""
        return f"--perf-{self.name}"

    @property
    def key(self) -> str:
        """The key in pytest's ini file, such as `perf_store`. pytest stores the option by this name."""
        return self.spelled[2:].replace("-", "_")

    @property
    def help_with_default(self) -> str:
        """The help for the command line, including the default."""
        return self.help + (f" (default: {self.default})" if self.default else "")

    def read(self, spelled: str, value: str | bool | list[str] | None) -> Any:
        """Parse a value. Raises `CaseError` if it is wrong.

        `spelled` is the name of the setting in the message. A list, which is possible in TOML, is read as the
        words of a shell command.
        """
        if self.is_flag:
            is_given = str(value or "").lower() not in OFF
            return is_given != self.name.startswith("no-")
        given = shlex.join(map(str, value)) if isinstance(value, list) else str(value or "")
        given = given or self.default
        if not given:
            return None
        choices = self.metavar.split("|")
        try:
            if len(choices) == 1:
                return self.parse(given)
            if given not in choices:
                raise ValueError(" or ".join(choices))
            return given == choices[1]
        except CaseError:
            raise  # this error already names the option
        except ValueError as error:
            raise CaseError(f"{spelled}={given[:80]}: give {error}") from None
