"""A library's own YAML file of the user, read once and kept in the case. Imports yaml when used."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from perfsuite.documents import Data, digest, read_text
from perfsuite.errors import FileError


class ConfigFile(Data):
    """A YAML file as text: the case carries it, so that ranks and later readers need no copy of the file."""

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

    @cached_property
    def content(self) -> Any:
        import yaml

        return yaml.safe_load(self.text)

    @property
    def digest(self) -> str:
        """Digest of the content: the same whatever the comments and the order of keys."""
        return digest(self.content)

    @classmethod
    def read_text(cls, path: Path) -> str:
        """Return the text of a YAML file. Raise `FileError` if it cannot be read or is not YAML."""
        import yaml

        try:
            text = read_text(path)
            yaml.safe_load(text)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", error)
            raise FileError(f"cannot read {path}: {reason}. Give {cls.kind}.") from error
        except yaml.YAMLError as error:
            raise FileError(f"{path}: not YAML ({' '.join(str(error).split())}). Give {cls.kind}.") from error
        return text
