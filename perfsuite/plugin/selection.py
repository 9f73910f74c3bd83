"""Whether a session is to measure every case, or those that somebody chose on its command line."""

import re
from typing import Any

import pytest

from perfsuite.case.case import Case
from perfsuite.case.hardware import ACCELERATORS
from perfsuite.plugin.collection import (
    COLLECTED,
    OF_OTHER_JOBS,
    SESSION,
    case_of,
    is_worker,
    usage_error,
    uses_bench,
)
from perfsuite.session.unclaimed import unclaimed

NARROWING = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "pyargs")
"""pytest's options, by the names of their values, that leave tests out."""


class CommandLine:
    """Reads what was given on the command line alone: pytest adds `addopts` and PYTEST_ADDOPTS to that."""

    NAME = "perfsuite-command-line"

    def __init__(self, parser: pytest.Parser) -> None:
        self.parser = parser

    def given(self, config: pytest.Config) -> Any:
        """The values of pytest's options on the command line, with their defaults."""
        return self.parser.parse_known_args(list(map(str, config.invocation_params.args)))


def hardware_of(expression: str) -> frozenset[str]:
    """Return the hardware that `-m` selects, as `h100` or `h100 or a100`; empty if it is not that alone."""
    names = re.split(r"\s+or\s+", expression.strip())
    return frozenset(names) if {*names} <= {*ACCELERATORS} else frozenset()


def is_whole(config: pytest.Config) -> bool:
    """Whether the command line asks for all cases, or for all of some hardware.

    What pytest's settings leave out was not chosen for this session.
    """
    if is_worker(config):
        return bool(config.workerinput.get("perf_is_whole", False))  # type: ignore[attr-defined]
    command_line: Any = config.pluginmanager.getplugin(CommandLine.NAME)
    given = command_line.given(config)
    if any(getattr(given, name, None) for name in NARROWING):
        return False
    if given.markexpr and not hardware_of(given.markexpr):
        return False
    here = config.invocation_params.dir
    cases = (config.stash[SESSION].setup.options.root / config.getini("perf_cases")).resolve()
    return all(cases.is_relative_to((here / str(path)).resolve()) for path in given.file_or_dir)


@pytest.hookimpl(trylast=True)  # after whatever deselects
def pytest_collection_finish(session: pytest.Session) -> None:
    """Find the reviewed baselines that no selected case claims, if all cases were asked for."""
    config, ours = session.config, session.config.stash[SESSION]
    cases = [case_of(item) for item in session.items if uses_bench(item)]
    selected = {case.id for case in cases if case is not None}
    collected: dict[str, Case] = config.stash.get(COLLECTED, {})  # empty if something was refused
    is_measured = selected and collected and not config.option.collectonly
    if not is_measured or ours.way.arms or not is_whole(config):
        return
    of_others: frozenset[str] = config.stash.get(OF_OTHER_JOBS, frozenset())
    with usage_error():
        markers = hardware_of(config.option.markexpr)
        ours.unclaimed = unclaimed(ours, collected, selected | of_others, markers)
    if is_worker(config):
        config.workeroutput["perf_unclaimed"] = ours.unclaimed  # type: ignore[attr-defined]
