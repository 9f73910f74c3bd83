"""Decide whether a session measures all cases, or only cases chosen on its command line."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import Case
from perfsuite.case.hardware import ACCELERATORS
from perfsuite.plugin import private
from perfsuite.plugin.collection import (
    BENCHMARKS,
    COLLECTED,
    OF_OTHER_JOBS,
    REFUSED,
    SESSION,
    case_of,
    is_worker,
    runs_no_test,
    usage_error,
    uses_bench,
)
from perfsuite.session.unclaimed import unclaimed, without_any_case

NARROWING = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "pyargs")
"""pytest options that leave tests out, by their attributes of `config.option`."""

RUNNING_NOTHING = {
    "collectonly": "--collect-only",
    "setuponly": "--setup-only",
    "setupplan": "--setup-plan",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "markers": "--markers",
    "cacheshow": "--cache-show",
    "version": "--version",
    "help": "--help",
}
"""Options with which pytest runs no test and exits with status 0, by their attributes of `config.option`."""


class CommandLine:
    """The options given on the command line and in PYTEST_ADDOPTS, but not in `addopts`."""

    NAME = "perfsuite-command-line"

    def __init__(self, parser: pytest.Parser) -> None:
        self.parser = parser

    def given(self, config: pytest.Config) -> Any:
        """Return the values of pytest's options that were given, and defaults for all others."""
        words = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
        return self.parser.parse_known_args([*words, *map(str, config.invocation_params.args)])


@pytest.hookimpl(tryfirst=True)  # pytest's own hook can end the session, for example for --help
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Reject options in pytest's settings that make every session measure less and still succeed."""
    command_line: Any = config.pluginmanager.getplugin(CommandLine.NAME)
    names = {"perf_shard": "--perf-shard", **RUNNING_NOTHING}
    chosen = [name for name in names if getattr(config.option, name, None)]
    if not chosen:
        return
    try:
        given = command_line.given(config)
    except Exception:  # pytest's parser raises an exception for --help
        return
    for name in chosen:
        if not getattr(given, name, None):
            why = "no test would run" if name in RUNNING_NOTHING else "no job would measure the other cases"
            raise pytest.UsageError(
                f"{names[name]} is in addopts of {config.inipath}, so {why}. Give it on the command line or "
                "in PYTEST_ADDOPTS instead"
            )


def hardware_of(expression: str) -> frozenset[str]:
    """Return the hardware in `-m`, such as `h100 or a100`; empty if it contains anything else."""
    names = re.split(r"\s+or\s+", expression.strip())
    return frozenset(names) if {*names} <= {*ACCELERATORS} else frozenset()


def is_whole(config: pytest.Config) -> bool:
    """Return whether the command line and PYTEST_ADDOPTS select all cases, or all cases of some hardware.

    Tests left out by pytest's settings do not matter, because every session leaves them out.
    """
    if is_worker(config):
        return bool(config.workerinput.get("perf_is_whole", False))  # type: ignore[attr-defined]
    command_line: Any = config.pluginmanager.getplugin(CommandLine.NAME)
    given = command_line.given(config)
    if any(getattr(given, name, None) for name in NARROWING):
        return False
    if given.markexpr and not hardware_of(given.markexpr):
        return False
    cases = _cases(config)
    return is_elsewhere(config) or all(cases.is_relative_to(path) for path in _paths(config))


def asks_for_cases(config: pytest.Config) -> bool:
    """Return whether the command line names hardware, or paths that can contain cases.

    Otherwise the command might be meant only for the other tests of a repository.
    """
    command_line: Any = config.pluginmanager.getplugin(CommandLine.NAME)
    if is_elsewhere(config):
        return False
    return bool(hardware_of(command_line.given(config).markexpr or "") or _paths(config))


def is_elsewhere(config: pytest.Config) -> bool:
    """Return whether the command line names only directories outside of the directory of cases.

    The setting `perf_cases` names the directory of cases. A directory inside of it is a deliberate selection.
    A directory outside of it does not count as a selection: it might be the old place of cases that have
    moved since the command was written.
    """
    if is_worker(config):
        return bool(config.workerinput.get("perf_is_elsewhere", False))  # type: ignore[attr-defined]
    paths = _paths(config)
    cases = _cases(config)
    is_beside = (not path.is_relative_to(cases) and not cases.is_relative_to(path) for path in paths)
    return bool(paths) and all(path.is_dir() for path in paths) and all(is_beside)


def _paths(config: pytest.Config) -> list[Path]:
    command_line: Any = config.pluginmanager.getplugin(CommandLine.NAME)
    here = config.invocation_params.dir
    return [(here / str(path)).resolve() for path in command_line.given(config).file_or_dir]


def _cases(config: pytest.Config) -> Path:
    name: str = config.getini("perf_cases")
    return (config.stash[SESSION].setup.options.root / name).resolve()


@pytest.hookimpl(trylast=True)  # runs after all hooks that deselect
def pytest_collection_finish(session: pytest.Session) -> None:
    """If all cases were requested, find the reviewed baselines to which no selected case belongs."""
    config = session.config
    ours = session.config.stash[SESSION]
    cases = [case_of(item) for item in session.items if uses_bench(item)]
    selected = {case.id for case in cases if case is not None}
    collected: dict[str, Case] = config.stash.get(COLLECTED, {})  # empty if a test was refused
    if REFUSED in config.stash or runs_no_test(config) or ours.mode.arms:
        return
    # Most sessions without a case are in other repositories, which have no baselines.
    if not (selected or ours.setup.baselines.reviewed.is_dir()) or not is_whole(config):
        return
    if not selected:
        if asks_for_cases(config):
            with usage_error():
                baselines = without_any_case(ours.mode, hardware_of(config.option.markexpr))
            ours.record.unclaimed = tuple(description for _, description in baselines)
        return
    if not collected:
        return
    elsewhere = config.getini("perf_cases") if is_elsewhere(config) else None
    files = [file for case_id in selected for file in ours.mode.reviewed_files(collected[case_id])]
    if elsewhere and not any(file.exists() for file in files):
        return  # no selected case has a baseline here: these can be cases of another package
    of_others: frozenset[str] = config.stash.get(OF_OTHER_JOBS, frozenset())
    with usage_error():
        markers = hardware_of(config.option.markexpr)
        baselines = unclaimed(ours.mode, collected, selected | of_others, markers, elsewhere)
    by_mark = _left_out_by_mark(config)
    ours.record.unclaimed = tuple(description for case_id, description in baselines if case_id not in by_mark)
    ours.record.deselected = tuple(
        f"{description.partition(': ')[0]}: deselected by the -m in pytest's settings"
        for case_id, description in baselines
        if case_id in by_mark
    )
    if is_worker(config):
        config.workeroutput["perf_unclaimed"] = ours.record.unclaimed  # type: ignore[attr-defined]
        config.workeroutput["perf_deselected"] = ours.record.deselected  # type: ignore[attr-defined]


def _left_out_by_mark(config: pytest.Config) -> frozenset[str]:
    """Return the ids of the cases that `-m` deselects only because of one mark of their test, such as `slow`.

    Cases that `-m` deselects for other reasons, such as a missing mark or other hardware, might have been
    lost by mistake.
    """
    if not config.option.markexpr:
        return frozenset()
    expression = private.expression(config.option.markexpr)
    if expression is None:
        return frozenset()
    case_ids = set[str]()
    for item in config.stash[BENCHMARKS]:
        case = case_of(item)
        if case is None:
            continue
        marks = [*item.iter_markers()]
        own = {mark.name for mark in marks} - {*case.markers}
        rests = ([mark for mark in marks if mark.name != name] for name in own)
        if not _matches(expression, marks) and any(_matches(expression, rest) for rest in rests):
            case_ids.add(case.id)
    return frozenset(case_ids)


def _matches(expression: Any, marks: Sequence[pytest.Mark]) -> bool:
    def has(name: str, /, **values: object) -> bool:
        return any(
            mark.name == name and all(mark.kwargs.get(key) == value for key, value in values.items())
            for mark in marks
        )

    return bool(expression.evaluate(has))
