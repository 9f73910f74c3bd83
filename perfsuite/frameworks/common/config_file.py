"""A user's configuration file for a library. It is read once and kept in the case. Imports yaml when used."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from perfsuite.documents import Data, digest
from perfsuite.errors import FileError
from perfsuite.inputs import files
from perfsuite.redaction import masked


class ConfigFile(Data):
    """The text of a configuration file. The case contains this text, so the file is not needed later.

    The format is YAML, unless a subclass overrides `parse`.
    """

    kind: ClassVar[str]  # describes the expected file in error messages: "a YAML file that ... wrote"

    text: str = Field(repr=False)

    @model_validator(mode="wrap")
    @classmethod
    def _from_path(cls, value: Any, parse: Any) -> Self:
        """If a path is given, read the file now."""
        parsed: Self = cls.read(Path(value)) if isinstance(value, str | Path) else parse(value)
        return parsed

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. The object's `name` is the file's name without its suffix.

        Raises `FileError` or `CaseError`.
        """
        return cls.model_validate({"name": path.stem, "text": cls.read_text(path)})

    @classmethod
    def parse(cls, text: str) -> Any:
        """Parse a text, and return its content. If this fails, raises `ValueError` with the reason."""
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
        """The digest of the content. Comments and the order of keys do not change it."""
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
        if before != after:  # give only the number of the line, because the line itself reveals the secret
            line = next(n for n in range(1, len(before) + 1) if before[n - 1 : n] != after[n - 1 : n])
            raise FileError(
                f"{path}: line {line} looks like a secret, but results, baselines and reports contain the "
                "case in plain text. Set the secret in the environment of pytest, which the training inherits"
            )
        return text
