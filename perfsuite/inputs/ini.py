"""Read pytest's settings in a repository without running pytest. Imports neither torch nor pytest."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iniconfig import IniConfig, ParseError

from perfsuite.errors import FileError
from perfsuite.inputs import files

STORE = Path(".perfsuite")  # default path of the local store
BASELINES = Path("baselines")  # default directory of the reviewed baselines
CASES = Path("bench_cases")  # default directory of the cases
FILES = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
"""Files that can contain pytest's settings, in the order in which pytest searches them."""


@dataclass(frozen=True)
class Ini:
    """pytest's settings in a project."""

    root: Path  # directory of the file with the settings, which is pytest's root directory
    values: Mapping[str, Any]

    def directories(self) -> dict[str, str]:
        """Return the directories of the store, the baselines and the cases, if the file sets them."""
        values = {name: self.values.get(f"perf_{name}") for name in ("store", "baselines", "cases")}
        return {name: str(self.root / value) for name, value in values.items() if value}


def read_ini(directory: Path) -> Ini:
    """Return the settings for a session in `directory`.

    The settings come from the nearest file with settings, in `directory` or a directory above it. If there is
    no such file, the root is the directory of the nearest pyproject.toml, as in pytest. If there is no
    pyproject.toml either, the root is `directory` itself. Raises `FileError` if a file cannot be read.
    """
    for root in (directory, *directory.parents):
        for name in FILES:
            values = settings(root / name)
            if values is not None:
                return Ini(root, values)
    roots = (root for root in (directory, *directory.parents) if (root / "pyproject.toml").is_file())
    return Ini(next(roots, directory), {})


def settings(file: Path) -> Mapping[str, Any] | None:
    """Return pytest's settings in a file. None if the file does not exist or has no section for pytest."""
    try:
        text = files.read_text(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8
        raise FileError(f"{file} cannot be read: {error}") from error
    return parsed(file, text)


def parsed(file: Path | str, text: str) -> Mapping[str, Any] | None:
    """Parse a file's text, and return pytest's settings in it. None if it has no section for pytest.

    Raises `FileError` if the text cannot be parsed.
    """
    file = Path(file)
    try:
        if file.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            sections = IniConfig(file, data=text).sections
    # `TOMLDecodeError` is a ValueError. A number with thousands of digits also raises a ValueError.
    except (ParseError, ValueError, RecursionError) as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    if file.suffix == ".toml":
        try:
            return _of_toml(file, content)
        except (AttributeError, TypeError, ValueError) as error:  # a number or a list instead of a table
            raise FileError(f"{file} cannot be read: pytest's settings there are not a table") from error
    section = sections.get("tool:pytest" if file.suffix == ".cfg" else "pytest")
    return {} if section is None and file.name.removeprefix(".") == "pytest.ini" else section


def _of_toml(file: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return pytest's settings in a TOML file. None for a pyproject.toml without settings."""
    if file.name != "pyproject.toml":
        return dict(content.get("pytest", {}))
    table = content.get("tool", {}).get("pytest", {})
    own = {name: value for name, value in table.items() if name != "ini_options"}
    options = own or table.get("ini_options")
    return None if options is None else dict(options)
