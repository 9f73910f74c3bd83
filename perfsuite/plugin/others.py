"""Keep other pytest plugins from disturbing tests that measure a case.

A case has its own time limit (`timeout_s`), is launched until its verdict is decided, and needs the machine
to itself. pytest-timeout would kill it, pytest-rerunfailures would repeat it until it passes, and
pytest-xdist would run another case at the same time. These plugins still apply to ordinary tests in the same
session.
"""

import faulthandler
from typing import Any

import pytest

from perfsuite.plugin.collection import SESSION, is_worker, refuse, uses_bench

NOT_SIDE_BY_SIDE = (
    "perfsuite does not run under pytest-xdist, because parallel cases would disturb each other. Run without "
    "-n (or with -n 0). Only --perf-dry, which times nothing, can be combined with -n"
)
IGNORED = pytest.StashKey[bool]()  # whether the session ignores a request for pytest-xdist


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool | None:
    """Prevent pytest-timeout from setting a timer for a case, however the timer was requested."""
    return True if uses_bench(item) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    """Run a test of a case only once, in pytest's own loop. Other plugins would repeat the test."""
    if not uses_bench(item):
        return None
    runner: Any = item.config.pluginmanager.getplugin("runner")
    return runner.pytest_runtest_protocol(item=item, nextitem=nextitem)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stop the timer of pytest's `faulthandler_timeout`, because it can end the whole session."""
    if uses_bench(item) and float(item.config.getini("faulthandler_timeout") or 0) > 0:
        faulthandler.cancel_dump_traceback_later()


def turn_off_xdist(config: pytest.Config) -> None:
    """Turn pytest-xdist off, before it reads its options, if only the directory of the cases was selected.

    In such a session, `addopts = -n auto` is not wanted: it is meant for the other tests of a repository.
    """
    asks = not is_worker(config) and config.getoption("dist", "no") != "no"
    if asks and not config.getoption("--perf-dry") and _are_of_cases(config):
        config.option.numprocesses = 0
        config.option.dist = "no"
        config.option.tx = []
        config.stash[IGNORED] = True


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return a line that reports that `-n` was ignored."""
    is_ignored = config.stash.get(IGNORED, False)
    return "perfsuite: -n is ignored, because cases run one after another" if is_ignored else None


def _are_of_cases(config: pytest.Config) -> bool:
    """Return whether all paths given to pytest are in the directory of the cases."""
    root = config.stash[SESSION].setup.options.root
    cases = (root / config.getini("perf_cases")).resolve()
    here = config.invocation_params.dir
    paths = [(here / argument.partition("::")[0]).resolve() for argument in config.args]
    return bool(paths) and all(path.is_relative_to(cases) for path in paths)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker of pytest-xdist, reject a session that has only cases, before anything is launched."""
    is_timed = is_worker(config) and not config.getoption("--perf-dry")
    if is_timed and items and all(map(uses_bench, items)):
        refuse(config, items, NOT_SIDE_BY_SIDE)
