"""A library's own configuration file of the user, read once and kept in the case. Imports yaml when used."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from perfsuite.documents import Data, digest
from perfsuite.errors import FileError
from perfsuite.inputs import files
from perfsuite.redaction import masked


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
        """Read a file, which gets the name of its stem. Raises `FileError` or `CaseError`."""
        return cls.model_validate({"name": path.stem, "text": cls.read_text(path)})

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
            text = files.read_text(path)
            cls.parse(text)
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            reason = getattr(error, "strerror", error)
            raise FileError(f"cannot read {path}: {reason}. Give {cls.kind}.") from error
        except ValueError as error:
            raise FileError(f"{path}: {error}. Give {cls.kind}.") from error
        before = text.splitlines()
        after = masked(text).splitlines()
        if before != after:  # the text of the line would show it
            line = next(n for n in range(1, len(before) + 1) if before[n - 1 : n] != after[n - 1 : n])
            raise FileError(
                f"{path}: line {line} looks like a secret, and a case is kept in clear in results, baselines "
                "and reports. Set it in the environment of pytest, which training inherits"
            )
        return text
