"""The plugin's options, made of the option table: what pytest accepts, and what was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite.ini import read_ini
from perfsuite.launch.slurm.settings import PREFIX
from perfsuite.plugin.keys import usage_error
from perfsuite.results.store import BASELINES
from perfsuite.session.option_table import OLD, OPTIONS, Option, check_together

SLURM_KEYS = {
    **dict.fromkeys(("options", "wait_start"), "as that option of perfsuite slurm submit"),
    **dict.fromkeys(("srun_options", "python"), "how each launch is started on Slurm's nodes"),
}
"""Ini keys, after `perf_slurm_`, that `perfsuite slurm submit` or the launcher slurm reads."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the `--perf-*` options; those that a repository may want to fix have an ini key, too."""
    group = parser.getgroup("perfsuite", "performance regression tests of distributed training")
    for option in OPTIONS:
        takes: dict[str, Any] = {"metavar": option.metavar} if option.metavar else {"action": "store_true"}
        shown = "==SUPPRESS==" if option.hidden else option.help_with_default.replace("%", "%%")
        group.addoption(option.spelled, help=shown, **takes)
        if option.ini and option.is_flag:
            parser.addini(option.key, f"as {option.spelled}", type="bool", default=False)
        elif option.ini:
            parser.addini(option.key, f"as {option.spelled}", default=option.default)
    for old, new in OLD.items():
        group.addoption(f"--perf-{old}", nargs="?", const="", help="==SUPPRESS==")
        parser.addini(f"perf_{old.replace('-', '_')}", f"is {new} now", default="")
    for name, told in SLURM_KEYS.items():
        parser.addini(f"{PREFIX}{name}", told, default="")


def values(config: pytest.Config) -> dict[str, Any]:
    """What every option was set to, by its name. Raises `UsageError` for a bad one, with what is allowed."""
    for old, new in OLD.items():
        if config.getoption(f"--perf-{old}") is not None or config.getini(f"perf_{old.replace('-', '_')}"):
            raise pytest.UsageError(f"there is no --perf-{old} any more: it is {new} now")
    with usage_error():
        check_together({option.name for option in OPTIONS if config.getoption(option.spelled)})
        return {option.name: _value(config, option) for option in OPTIONS}


def _value(config: pytest.Config, option: Option) -> Any:
    """The value of the command line, else that of the ini file."""
    given = config.getoption(option.spelled)
    if given in ([], "--"):  # what argparse makes of two dashes before Python 3.13, and since
        raise pytest.UsageError(f"{option.spelled}=--: give a value, or leave the option out")
    if given or not option.ini:
        return option.read(option.spelled, given)
    return option.read(option.key, config.getini(option.key))


def root_of(config: pytest.Config) -> Path:
    """The directory of the repository that holds the cases: pytest's root directory, if an ini file or the
    user chose it.

    Else pytest takes the value of an option for a test's path where there is such a path, and roots there.
    The root of a session is then that of the `perfsuite` commands in this directory.
    """
    if config.inipath is not None or config.getoption("rootdir") is not None:
        return config.rootpath
    with usage_error():
        return read_ini(config.invocation_params.dir).root


def check_root(config: pytest.Config) -> None:
    """Raise `UsageError` where an option's value keeps pytest from the settings or baselines of its tests."""
    here, root = config.invocation_params.dir, root_of(config)
    paths = [here / argument.partition("::")[0] for argument in config.args]
    why = "pytest takes an option's value that is an existing path for a test: write --option=PATH, with ="
    if config.inipath is None and config.getoption("inifilename") is None:
        with usage_error():
            ini = read_ini(here)
        if ini.values and any(path.is_relative_to(ini.root) for path in paths):
            raise pytest.UsageError(
                f"the settings of pytest in {ini.root} were not read. {why}, or use -c FILE"
            )
    is_chosen = config.getoption("--perf-baselines") or config.getini("perf_baselines") != str(BASELINES)
    if is_chosen or config.getoption("rootdir") or not any(path.is_relative_to(here) for path in paths):
        return
    if (here / BASELINES).is_dir() and not (root / BASELINES).is_dir():
        raise pytest.UsageError(
            f"there is {here / BASELINES}, but baselines would be looked for in {root / BASELINES}. {why}, "
            "or use --perf-baselines=DIR"
        )
