"""Reads what a repository fixes in pytest's ini file, for commands that are not pytest's.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import configparser
import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from perfsuite.documents import read_text
from perfsuite.errors import CaseError, FileError
from perfsuite.results.store import STORE

PREFIX = "perf_slurm_"
ENVIRONMENT = "PERFSUITE_SLURM_"
"""How the names of the environment variables begin that win over a setting."""
FILES = (
    "pytest.toml",
    ".pytest.toml",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
"""Files that may hold pytest's settings, in the order in which pytest looks for them."""


@dataclass(frozen=True)
class Ini:
    """pytest's settings of a project."""

    root: Path
    """The directory of the file that holds them; pytest's root directory."""
    values: Mapping[str, Any]

    def text(self, name: str) -> str | None:
        """The setting `perf_slurm_<name>`, or None."""
        value = self.values.get(PREFIX + name)
        return None if value is None else str(value).strip() or None

    def words(self, name: str) -> list[str]:
        """The setting `perf_slurm_<name>` as words: a list in TOML, or a text that is split as by a shell.

        Raises `CaseError` for a text that a shell could not split.
        """
        value = self.values.get(PREFIX + name, "")
        return list(map(str, value)) if isinstance(value, list) else split(PREFIX + name, str(value))

    def directories(self) -> dict[str, str]:
        """The local store (`store`) and the reviewed baselines (`baselines`), where the file fixes them."""
        known = {name: self.values.get(f"perf_{name}") for name in ("store", "baselines")}
        return {name: str(self.root / value) for name, value in known.items() if value}

    def store(self, arguments: Sequence[str]) -> Path:
        """The local store of a session with these arguments of pytest."""
        given = option(arguments, "--perf-store")
        return self.root / (given or self.values.get("perf_store") or STORE)


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option among arguments, or None."""
    for argument, following in pairwise([*arguments, ""]):
        if argument == name:
            return following or None
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def read_ini(directory: Path) -> Ini:
    """The settings for a session in `directory`: of the nearest file upwards that holds settings of pytest.

    Without one, the root is that of the nearest pyproject.toml, as for pytest, else `directory` itself.
    Raises `FileError` for a file that cannot be read.
    """
    for root in (directory, *directory.parents):
        for name in FILES:
            values = _settings(root / name)
            if values is not None:
                return Ini(root, values)
    roots = (root for root in (directory, *directory.parents) if (root / "pyproject.toml").is_file())
    return Ini(next(roots, directory), {})


@dataclass(frozen=True)
class Steps:
    """How the steps of an allocation are started where a cluster needs more than `srun` and this Python."""

    srun_options: tuple[str, ...] = ()
    """Further options of `srun`, such as `--container-image=...`. They come last, and so win."""
    python: str | None = None
    """The interpreter on the nodes, as in a container; None: that of this process."""


def steps(directory: Path) -> Steps:
    """The settings for steps: of the environment, else of the ini file of a session in `directory`.

    Raises `CaseError` for a text that a shell could not split, `FileError` as `read_ini` does.
    """
    ini = read_ini(directory)
    variable = f"{ENVIRONMENT}SRUN_OPTIONS"
    given = os.environ.get(variable)
    options = ini.words("srun_options") if given is None else split(variable, given)
    return Steps(tuple(options), os.environ.get(f"{ENVIRONMENT}PYTHON") or ini.text("python"))


def split(name: str, text: str) -> list[str]:
    """Split the text of a setting as a shell does. Raises `CaseError` where a shell could not."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CaseError(f"{name} is {text!r}: {error}; write it as in a shell") from None


def _settings(file: Path) -> Mapping[str, Any] | None:
    """pytest's settings in a file; None without such a file, or such a section in it."""
    try:
        text = read_text(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    try:
        if file.suffix == ".toml":
            return _of_toml(file, tomllib.loads(text))
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.read_string(text)
    except (tomllib.TOMLDecodeError, configparser.Error) as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    section = "tool:pytest" if file.suffix == ".cfg" else "pytest"
    if parser.has_section(section):
        return dict(parser[section])
    return {} if file.name.removeprefix(".") == "pytest.ini" else None


def _of_toml(file: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """pytest's settings in a TOML file; None in a pyproject.toml that has none."""
    if file.name != "pyproject.toml":
        return dict(content.get("pytest", {}))
    table = content.get("tool", {}).get("pytest", {})
    own = {name: value for name, value in table.items() if name != "ini_options"}
    return own or table.get("ini_options")
