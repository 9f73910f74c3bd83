"""A library's own configuration file of the user, read once and kept in the case. Imports yaml when used."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from perfsuite.documents import Data, digest
from perfsuite.errors import FileError


class ConfigFile(Data):
    """A file as text, so that ranks and later readers need no copy of it: YAML, unless `parse` is another."""

    kind: ClassVar[str]  # what a user should give, for error messages: "a YAML file that ... wrote"

    text: str = Field(repr=False)

    @model_validator(mode="wrap")
    @classmethod
    def _from_path(cls, value: Any, parse: Any) -> Self:
        """A path stands for the file that is there, which is read now."""
        parsed: Self = cls.read(Path(value)) if isinstance(value, str | Path) else parse(value)
        return parsed

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises `FileError` or `CaseError`."""
        raise NotImplementedError

    @classmethod
    def parse(cls, text: str) -> Any:
        """Return what a text holds. Raises `ValueError` saying what is wrong with it."""
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
        """Digest of the content: the same whatever the comments and the order of keys."""
        return digest(self.content)

    @classmethod
    def read_text(cls, path: Path) -> str:
        """Return the text of a file. Raise `FileError` if it cannot be read, or not be parsed."""
        try:
            text = path.read_text(encoding="utf-8")
            cls.parse(text)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", error)
            raise FileError(f"cannot read {path}: {reason}. Give {cls.kind}.") from error
        except ValueError as error:
            raise FileError(f"{path}: {error}. Give {cls.kind}.") from error
        return text
