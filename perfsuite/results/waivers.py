"""Read `perf-waivers.toml`: the regressions that a project tolerates for a while, and their limits."""

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from perfsuite.documents import Data, explain
from perfsuite.errors import FileError
from perfsuite.inputs import files

FILE = "perf-waivers.toml"  # in the root directory of the cases


def _tolerated(value: Any) -> Any:
    is_share = isinstance(value, str) and re.fullmatch(r"\d{1,6}(\.\d+)?\s*%", value) and value.strip("0.% ")
    if not is_share and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
        raise ValueError(
            'give a share, such as "22%", or the growth of a count in calls, bytes or FLOP, such as 24'
        )
    return value


class Waiver(Data):
    """A tolerated regression: its maximum cost, its end date, and who is responsible."""

    case: str = Field(min_length=1)  # case id, with wildcards `*` and `?`
    metric: str = Field(min_length=1)  # name or label of a metric, or a count, with wildcards `*` and `?`
    tolerated: Annotated[str | int, BeforeValidator(_tolerated)]
    issue: str = Field(pattern=r"^https?://\S+$")
    owner: str = Field(min_length=1)
    until: date = Field(strict=True)  # the last day on which the waiver is valid

    @property
    def name(self) -> str:
        """The name of this waiver in messages."""
        return f"the waiver of {self.metric} for {self.case}"

    @property
    def terms(self) -> str:
        """The tolerated cost, end date, owner and issue, for messages."""
        return f"{self.tolerated} tolerated until {self.until}, owner {self.owner}, issue {self.issue}"


class _File(Data):
    waiver: tuple[Waiver, ...] = ()


def read(file: Path) -> tuple[Waiver, ...]:
    """Read the waivers in a file. A missing file has none.

    Raises `FileError`, which names the entry and the field.
    """
    try:
        text = files.read_text(file)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8
        raise _unreadable(file, error) from error
    return parsed(file, text)


def parsed(file: Path | str, text: str) -> tuple[Waiver, ...]:
    """Parse the waivers in the text of a file. Raises `FileError`, which names the entry and the field."""
    try:
        return _File.model_validate(tomllib.loads(text)).waiver
    except ValidationError as error:
        fields = tuple(Waiver.model_fields)
        raise FileError(
            f"{file}: {explain(error)}; each [[waiver]] has only the fields {', '.join(fields)} (write dates "
            "without quotes: 2026-12-31)"
        ) from None
    except (ValueError, RecursionError) as error:  # ValueError: invalid TOML, or too many digits
        raise _unreadable(file, error) from error


def _unreadable(file: Path | str, error: Exception) -> FileError:
    return FileError(f"{file} cannot be read: {error}; it must be TOML, with a [[waiver]] for each waiver")
