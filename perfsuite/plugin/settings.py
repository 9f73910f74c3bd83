"""Find perfsuite settings that pytest does not read: without them, a strict gate might pass by mistake."""

import contextlib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

import pytest

from perfsuite.documents import did_you_mean
from perfsuite.inputs import ini
from perfsuite.inputs.files import read_text
from perfsuite.plugin.collection import usage_error

PREFIX = "perf_"
OF_PYTEST = ("pytest", "tool:pytest", "tool.pytest", "tool.pytest.ini_options")
"""The sections of pytest in different kinds of files."""
NEAR = 0.8  # minimum similarity of a misspelt section to one of pytest's: `pytesd` has 0.83
PREFIX_NEAR = 0.7  # minimum similarity of a misspelt prefix of a key to `perf`: `pref` has 0.75
WHERE = (
    "[pytest] in pytest.ini and tox.ini, [tool.pytest.ini_options] in pyproject.toml, or [tool:pytest] in "
    "setup.cfg"
)
_HEADER = re.compile(r"[ \t]*\[+([^]\n]*)\]?")
_KEY = re.compile(r"[ \t]*[\"']?([A-Za-z][\w-]*)[\"']?[ \t]*[=:]")


class Line(NamedTuple):
    """A line of a file that looks like a setting."""

    section: str
    key: str


def check_settings(config: pytest.Config, ours: Iterable[str], unchecked: Iterable[str] = ()) -> None:
    """Raise `UsageError` for a perfsuite setting that is not read, for example because of a typo.

    For such a setting, pytest itself only warns, if at all. `ours` has perfsuite's keys. Keys that begin with
    one of `unchecked` are not checked.
    """
    names = [*ours]
    beginnings = tuple(unchecked)
    for override in config.option.override_ini or ():
        key = override.partition("=")[0].strip()
        if not key.startswith(beginnings):
            _check_key(config, f"-o {override}", key, names)
    for file in _candidates(config):
        if file.is_symlink() and not file.exists():
            raise pytest.UsageError(
                f"{file} is a link to {os.readlink(file)}, which does not exist, so pytest reads no settings "
                "there: correct or remove the link"
            )
        if file.is_file():
            _check_file(config, file, names, beginnings)


def _candidates(config: pytest.Config) -> Iterator[Path]:
    """Yield the files that pytest searches for its settings, up to the one that it uses."""
    taken = config.inipath
    if taken is not None and config.getoption("inifilename"):
        yield taken
        return
    here = config.invocation_params.dir
    last = None if taken is None else taken.parent
    start = _start(config)
    for directory in dict.fromkeys((start, *start.parents, here, *here.parents, config.rootpath)):
        if last is None or directory.is_relative_to(last):
            yield from (directory / name for name in ini.FILES)


def _start(config: pytest.Config) -> Path:
    """Return the directory from which pytest searches upwards: the common directory of the given tests."""
    here = config.invocation_params.dir
    if config.args_source is not config.ArgsSource.ARGS:
        return here
    paths = [here / argument.partition("::")[0] for argument in config.args]
    there = [os.path.abspath(path) for path in paths if os.path.exists(path)]  # also drops bad names
    common = Path(os.path.commonpath(there or [str(here)]))
    return common if common.is_dir() else common.parent


def _check_file(config: pytest.Config, file: Path, ours: list[str], unchecked: tuple[str, ...]) -> None:
    taken = config.inipath
    keys: Mapping[str, object] = {}
    if file == taken:
        with usage_error():
            keys = ini.settings(file) or {}
        for key in keys:
            if not key.startswith(unchecked):
                _check_key(config, str(file), key, ours)
    try:
        text = read_text(file, errors="replace")
    except OSError:
        return  # pytest itself reports an unreadable file that it uses
    for section, key in _lines(file, text):
        if key.isupper() or not _is_meant(key, ours):  # upper case: a variable for pytest-env
            continue
        is_of_pytest = section in _sections(file)
        if is_of_pytest and file == taken and file.suffix != ".toml" and key in ours and key not in keys:
            raise pytest.UsageError(
                f"{file}: {key} is part of the value above it, because its line is indented: write it at the "
                "beginning of the line"
            )
        if is_of_pytest and taken is not None and file != taken and file.parent == taken.parent:
            raise pytest.UsageError(
                f"{file}: {key} is not read, because pytest takes its settings from {taken}: move "
                "it there or remove it"
            )
        if not is_of_pytest and (not section or _is_near_pytest(section)):
            where = f", in [{section}]" if section else ""
            raise pytest.UsageError(
                f"{file}: {key} is outside pytest's section{where}, so it is ignored. Move it to {WHERE}"
            )


def _check_key(config: pytest.Config, where: str, key: str, ours: list[str]) -> None:
    if _is_meant(key, ours) and not _is_known(config, key):
        hint = did_you_mean(key, ours)
        raise pytest.UsageError(f"{where}: perfsuite has no setting {key}.{hint} Correct or remove it")


def _is_meant(key: str, ours: list[str]) -> bool:
    """Return whether a key is meant for perfsuite, perhaps misspelt: `pref_strict`, but not `strict`."""
    name = key.lower().replace("-", "_")
    if name.startswith(PREFIX):
        return True
    prefix, is_split, _ = name.partition("_")
    # A key that begins with `perf`, but not with `perf_`, belongs to another plugin (`perfetto_out`), unless
    # it resembles one of our settings.
    if name.startswith(PREFIX.rstrip("_")):
        return bool(did_you_mean(name, ours))
    is_near = SequenceMatcher(None, prefix, PREFIX.rstrip("_")).ratio() >= PREFIX_NEAR
    return bool(is_split) and is_near and bool(did_you_mean(name, ours))


def _is_known(config: pytest.Config, key: str) -> bool:
    """Return whether any plugin has a setting with this name."""
    try:
        config.getini(key)
    except KeyError:  # known, with a value that pytest refuses
        return True
    except ValueError as error:
        return "unknown configuration value" not in str(error)
    return True


def _lines(file: Path, text: str) -> Iterator[Line]:
    """Yield the settings of a file. A file that is not TOML, or cannot be parsed, is read line by line."""
    if file.suffix == ".toml":
        with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
            yield from _of_tables("", tomllib.loads(text))
            return
    section = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        key = _KEY.match(line)
        if header:
            section = header[1].strip() if file.suffix == ".toml" else header[1]
        elif key:
            yield Line(section, key[1])


def _of_tables(section: str, table: Mapping[str, object]) -> Iterator[Line]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _of_tables(f"{section}.{key}" if section else key, value)
        else:
            yield Line(section, key)


def _sections(file: Path) -> tuple[str, ...]:
    """Return the sections that pytest reads in a file."""
    if file.suffix == ".cfg":
        return ("tool:pytest",)
    if file.suffix == ".ini":
        return ("pytest",)
    if file.suffix != ".toml":
        return ()
    if file.name == "pyproject.toml":
        return ("tool.pytest", "tool.pytest.ini_options")
    return ("pytest",) if file.name in ini.FILES else ("pytest", "tool.pytest", "tool.pytest.ini_options")


def _is_near_pytest(section: str) -> bool:
    name = re.sub(r"[\W_]", "", section).lower()
    names = (re.sub(r"[\W_]", "", option) for option in OF_PYTEST)
    return any(SequenceMatcher(None, name, option).ratio() >= NEAR for option in names)
