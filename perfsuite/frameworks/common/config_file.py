"""A user's configuration file for a library, read once and kept in the case. Imports yaml when used."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from perfsuite.documents import Data, digest
from perfsuite.errors import FileError
from perfsuite.inputs import files
from perfsuite.redaction import masked


class ConfigFile(Data):
    """The text of a file, so that ranks and later readers need no copy of it.

    It is YAML, unless `parse` reads another format.
    """

    kind: ClassVar[str]  # what a user should give, for error messages: "a YAML file that ... wrote"

    text: str = Field(repr=False)

    @model_validator(mode="wrap")
    @classmethod
    def _from_path(cls, value: Any, parse: Any) -> Self:
        """Read the file now if a path is given."""
        parsed: Self = cls.read(Path(value)) if isinstance(value, str | Path) else parse(value)
        return parsed

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file and name it after its stem. Raises `FileError` or `CaseError`."""
        return cls.model_validate({"name": path.stem, "text": cls.read_text(path)})

    @classmethod
    def parse(cls, text: str) -> Any:
        """Return the content of a text. Raises `ValueError` that says what is wrong with it."""
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML ({' '.join(str(error).split())})") from error

    @cached_property
    def content(self) -> Any:
        return self.parse(self.text)

    @property
    def digest(self) -> str:
        """The digest of the content, independent of comments and the order of keys."""
        return digest(self.content)

    @classmethod
    def read_text(cls, path: Path) -> str:
        """Return the text of a file. Raises `FileError` if it cannot be read or parsed."""
        try:
            text = files.read_text(path)
            cls.parse(text)
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            reason = getattr(error, "strerror", error)
            raise FileError(f"cannot read {path}: {reason}. Give {cls.kind}.") from error
        except ValueError as error:
            raise FileError(f"{path}: {error}. Give {cls.kind}.") from error
        before = text.splitlines()
        after = masked(text).splitlines()
        if before != after:  # the text of the line itself would reveal it
            line = next(n for n in range(1, len(before) + 1) if before[n - 1 : n] != after[n - 1 : n])
            raise FileError(
                f"{path}: line {line} looks like a secret, and a case is kept in clear in results, baselines "
                "and reports. Set it in the environment of pytest, which training inherits"
            )
        return text
