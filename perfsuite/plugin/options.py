"""Define pytest's options from the option table, and create the session that they describe."""

import argparse
import contextlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.hardware import ACCELERATORS
from perfsuite.errors import ExtensionError
from perfsuite.inputs.ini import read_ini
from perfsuite.inputs.setting import Setting
from perfsuite.launch.launchers import installed, launcher
from perfsuite.plugin.collection import (
    INSTALLS,
    NO_BENCH,
    PROGRESS,
    REFERENCE,
    SESSION,
    is_worker,
    terminal_of,
    usage_error,
)
from perfsuite.plugin.ending import CollectsFromWorkers, HoldsInterrupts
from perfsuite.plugin.others import turn_off_xdist
from perfsuite.plugin.selection import CommandLine, hardware_of
from perfsuite.plugin.settings import check_settings
from perfsuite.report.progress import Progress
from perfsuite.report.safe_text import printable
from perfsuite.session import against_arm
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.dry import dry_session
from perfsuite.session.option_table import BY_NAME, GIVEN_ONCE, OPTIONS, check_together, options_of
from perfsuite.session.reference import ReferenceArm
from perfsuite.session.session import Session
from perfsuite.session.setup import DryHost, Host, Setup


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the `--perf-*` options, with ini keys for options that a repository may want to set."""
    pluginmanager.register(CommandLine(parser), CommandLine.NAME)
    group = parser.getgroup("perfsuite", "performance regression tests of distributed training")
    try:
        of_launchers = installed(BY_NAME).settings
    except ExtensionError as error:  # perfsuite's own metadata is missing
        raise pytest.UsageError(str(error)) from None
    for option in (*OPTIONS, *of_launchers):
        takes: dict[str, Any] = {"metavar": option.metavar} if option.metavar else {"action": "store_true"}
        group.addoption(option.spelled, help=option.help_with_default.replace("%", "%%"), **takes)
        if option.ini and option.is_flag:
            parser.addini(option.key, f"as {option.spelled}", type="bool", default=False)
        elif option.ini:
            parser.addini(option.key, f"as {option.spelled}", default=option.default)
    # perfsuite's commands use this option to make pytest write the selected cases to a file. argparse hides
    # an option only if its help is the object SUPPRESS itself.
    group.addoption("--perf-cases", help=argparse.SUPPRESS)
    parser.addini(
        "perf_cases", "directory of the cases, for the commands of perfsuite", default="bench_cases"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the hardware markers, check the options, and create the session that they describe."""
    for name in ACCELERATORS:
        config.addinivalue_line("markers", f"{name}: a perfsuite case meant for {name}")
    config.addinivalue_line("markers", f"{NO_BENCH}: a test that has a perfsuite case but measures nothing")
    progress = config.stash[PROGRESS] = _progress(config)
    session = config.stash[SESSION] = _session(config, progress)
    session.record.saves = not is_worker(config)
    if isinstance(session.setup.host, DryHost):
        session.setup.host.hardware = hardware_of(config.option.markexpr)
    turn_off_xdist(config)
    config.pluginmanager.register(HoldsInterrupts(config))
    if not is_worker(config):
        config.pluginmanager.register(CollectsFromWorkers(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Release the machine for the next session."""
    HoldsInterrupts.release(config)
    if SESSION in config.stash:
        config.stash[SESSION].setup.lock.release()


def values(config: pytest.Config) -> dict[str, Any]:
    """Return the values of all options by name. For an invalid value, raises `UsageError`."""
    launchers = installed(BY_NAME)
    ours = [setting.key for setting in (*OPTIONS, *launchers.settings) if setting.ini]
    # If a launcher cannot be used, its settings are unknown. Keys that begin with its name are then not
    # checked.
    check_settings(config, ours, [Setting(name=f"{name}-", help="").key for name in launchers.problems])
    _check_given_once(config)
    with usage_error():
        check_together({option.name for option in OPTIONS if config.getoption(option.spelled)})
        return {option.name: _value(config, option) for option in OPTIONS}


def _check_given_once(config: pytest.Config) -> None:
    """Raise `UsageError` for an option in `GIVEN_ONCE` that the command line has twice.

    An option on the command line may still override the same option in `addopts` or PYTEST_ADDOPTS.
    """
    words = [str(word).partition("=")[0] for word in config.invocation_params.args]
    for name in GIVEN_ONCE:
        spelled = BY_NAME[name].spelled
        times = words.count(spelled)
        if times > 1:
            of_command = f" If a perfsuite command starts pytest, give --{name} instead of {spelled}."
            raise pytest.UsageError(
                f"{spelled} is given {times} times on the command line, but takes one value: give it once."
                f"{of_command if name == 'baselines' else ''}"
            )


def _value(config: pytest.Config, option: Setting) -> Any:
    given = config.getoption(option.spelled)
    if given in ([], "--"):  # argparse's values for two dashes: a list before Python 3.13, now a string
        raise pytest.UsageError(f"{option.spelled}=--: give a value, or leave the option out")
    if given == "":  # for example, because a shell variable is not set
        raise pytest.UsageError(f"{option.spelled}= has no value: give one, or leave the option out")
    if given or not option.ini:
        return option.read(option.spelled, given)
    return option.read(option.key, config.getini(option.key))


def root_of(config: pytest.Config) -> Path:
    """Return the root directory of the repository that contains the cases.

    This is pytest's root directory, if an ini file or the user chose it. Otherwise pytest might have mistaken
    the value of an option for the path of a test, and chosen the wrong root. The root is then the one that
    the `perfsuite` commands use in this directory.
    """
    if config.inipath is not None or config.getoption("rootdir") is not None:
        return config.rootpath
    with usage_error():
        return read_ini(config.invocation_params.dir).root


def _session(config: pytest.Config, progress: Progress) -> Session:
    chosen = values(config)
    options = options_of(root_of(config), chosen)
    with usage_error():
        launches = None if chosen["dry"] else launcher(chosen["launcher"], partial(_value, config))
        against = chosen["against"]
        if against:
            words = (("--perf-against", against), ("", "."))

            def compare(*, installs: bool) -> Session:
                arms = against_arm.resolved(options, words, installs=installs)
                if launches is None:
                    return against_arm.by_counts(options, progress, None, arms)
                return against_arm.by_times(options, progress, launches, arms, max_pairs=chosen["max-pairs"])

            session = compare(installs=False)
            if not all(arm.is_installed for arm in session.mode.arms):
                config.stash[INSTALLS] = lambda: compare(installs=True).mode
            return session
        if launches is None:
            return dry_session(options, progress)
        setup = Setup(options, progress, Host(launches, options.store))
        reference = None
        if chosen["reference"]:
            given = [("--perf-reference", chosen["reference"])]
            reference = config.stash[REFERENCE] = ReferenceArm(
                setup, lambda: against_arm.resolved(options, given)[0], chosen["canaries"]
            )
        return Session(AgainstBaseline(setup, reference=reference))


def _progress(config: pytest.Config) -> Progress:
    def uncaptured() -> Any:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()

    def line(text: str) -> None:
        terminal = terminal_of(config)
        if terminal is not None:
            with uncaptured():
                terminal.ensure_newline()
                terminal.write_line(printable(text))

    def live(text: str | None) -> None:
        terminal = terminal_of(config)
        if terminal is not None:
            with uncaptured():
                terminal.rewrite((text or "")[: shutil.get_terminal_size().columns - 1], erase=True)
                if text is None:
                    terminal.write("\r")

    return Progress(line=line, live=live)
