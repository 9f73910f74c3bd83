"""A setting that pytest's command line, and maybe its ini file, can give."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfsuite.errors import CaseError

Parse = Callable[[str], Any]  # reads a value. Raises `ValueError` with the text that follows `give`

OFF = ("", "0", "f", "false", "n", "no", "off")  # an ini file's values for a flag that is not given


def words(value: str) -> list[str]:
    """Parse words as a shell does."""
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"words as in a shell ({error})") from None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting: `--perf-NAME` in pytest, and `perf_NAME` in its ini file."""

    name: str
    help: str  #: The text for pytest's help, and the page of options.
    page: str = ""  #: More text for the page, in Markdown.
    metavar: str = ""
    """Placeholder of its value; empty for a flag. In `one|other`, the second word means True."""
    parse: Parse = str
    """Reads a value. Raises `ValueError` with what is allowed, which follows `give` in the message."""
    default: str = ""  #: The default as text, parsed like any other value; empty for None.
    ini: bool = False  #: Whether a repository can set it in pytest's ini file.

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
        """The key in pytest's ini file, which is also the name of the Python variable."""
        return self.spelled[2:].replace("-", "_")

    @property
    def help_with_default(self) -> str:
        """The help with the default, for the command line."""
        return self.help + (f" (default: {self.default})" if self.default else "")

    def read(self, spelled: str, value: str | bool | list[str] | None) -> Any:
        """Parse a value. Raises `CaseError`, which names the setting as it was `spelled`.

        A list, which TOML can have, is read as its words in a shell.
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
