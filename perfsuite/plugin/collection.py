"""Which tests measure a case, and what is refused of them before anything is deselected or launched."""

from collections.abc import Generator
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.case.case import Case, CaseList
from perfsuite.errors import PerfsuiteError
from perfsuite.ini import read_ini
from perfsuite.plugin.keys import NO_SHARE, PROGRESS, SELECTED, SESSION, terminal_of, usage_error
from perfsuite.session import plan
from perfsuite.session.session import Session, check_same
from perfsuite.session.setup import Host

EMPTY = "got empty parameter set"
"""How the reason begins of a mark by which pytest keeps a test without parameters from running."""
NO_CASE = (
    "bench measures a case that is a parameter of the test, so that -m and -k can select it. Write "
    '@pytest.mark.parametrize("case", [Case(...)]) above def test_it(bench, case)'
)


def case_of(item: pytest.Item) -> Case | None:
    """The case of a test: the first of its parameters that is one."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return next((value for value in parameters.values() if isinstance(value, Case)), None)


def uses_bench(item: pytest.Item) -> bool:
    """Whether a test asks for `bench`, itself or by another fixture."""
    return "bench" in getattr(item, "fixturenames", ())


def pytest_make_parametrize_id(val: object) -> str | None:
    """A case is shown by its own id."""
    return val.id if isinstance(val, Case) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with the hardware that its case is meant for, so that `-m` selects on it."""
    if (case := case_of(item)) is not None:
        for marker in case.markers:
            item.add_marker(marker)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Check what was collected, before anything is deselected, and plan what is left."""
    check_collected(config, items)
    result = yield
    _plan(config, items)
    return result


def _plan(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases of other jobs out, and put the rest into the order of the session's budget."""
    session = config.stash[SESSION]
    options = session.setup.options
    cases = {item: case for item in items if uses_bench(item) and (case := case_of(item)) is not None}
    if options.shard is not None:
        ours = plan.shard(cases.values(), *options.shard)
        others = {item: None for item, case in cases.items() if case.id not in ours}
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=[*others])
        config.stash[NO_SHARE] = bool(others) and not items
        cases = {item: case for item, case in cases.items() if item not in others}
    if options.budget_s is not None:
        past = plan.past_of(session.setup.store.results())
        order = plan.planned(cases.values(), past, session.today)
        session.budget = plan.budget_for(order, options.budget_s)
        place = {each.case.id: number for number, each in enumerate(order)}
        items.sort(key=lambda item: place[cases[item].id] if item in cases else -1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the benchmarks that were selected; find out whether a terminal can show their progress."""
    host, progress = session.config.stash[SESSION].setup.host, session.config.stash[PROGRESS]
    benchmarks = [item for item in session.items if uses_bench(item)]
    session.config.stash[SELECTED] = len(benchmarks)
    terminal = terminal_of(session.config)
    progress.is_live = terminal is not None and terminal.isatty
    if benchmarks and not session.config.option.collectonly:
        with usage_error():
            progress.cases = sum(_may_run(host, case_of(item)) for item in benchmarks)
            if session.config.getoption("--perf-resume"):
                progress.cases -= _resume(session.config.stash[SESSION], benchmarks)
    if (file := session.config.getoption("--perf-cases")) is not None:
        by_id = {case.id: case for case in filter(None, map(case_of, benchmarks))}
        with usage_error():
            documents.write(Path(file), CaseList(cases=tuple(by_id.values())))


def _may_run(host: Host, case: Case | None) -> bool:
    """Whether the test of a case will launch it, as far as is known before. Raises `CaseError`."""
    try:
        return case is None or host.why_not(case) is None
    except PerfsuiteError:
        raise
    except Exception:  # its own test tells it
        return True


def _resume(session: Session, benchmarks: list[pytest.Item]) -> int:
    """Go on with the newest session. Return how many of these tests have their result already."""
    session.resume()
    found = [(case, item.nodeid) for item in benchmarks if (case := case_of(item)) is not None]
    return sum(session.earlier_result(case, nodeid) is not None for case, nodeid in found)


def check_collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise `UsageError` for what would be measured wrongly, or never."""
    benchmarks = [item for item in items if uses_bench(item)]
    if not benchmarks:
        return
    _check_root(config)
    known: dict[str, tuple[pytest.Item, Case]] = {}
    for item in benchmarks:
        if any(str(mark.kwargs.get("reason")).startswith(EMPTY) for mark in item.own_markers):
            raise pytest.UsageError(f"{item.nodeid}: no case: the parameters of this test are empty")
        if (case := case_of(item)) is None:
            raise pytest.UsageError(f"{item.nodeid}: {NO_CASE}")
        first, same = known.setdefault(case.id, (item, case))
        with usage_error():
            check_same(same, case)
        if first is not item:
            raise pytest.UsageError(
                f"{first.nodeid} and {item.nodeid} measure the same case, {case.id}, and would share a "
                "baseline: leave one of them out, or change a field of its case"
            )
    config.stash[SESSION].collected = frozenset(known)


def _check_root(config: pytest.Config) -> None:
    """Raise `UsageError` where an option's value keeps pytest from the settings of its tests."""
    if config.inipath is not None or config.getoption("inifilename") is not None:
        return
    here = config.invocation_params.dir
    with usage_error():
        ini = read_ini(here)
    paths = [here / argument.partition("::")[0] for argument in config.args]
    if ini.values and any(path.is_relative_to(ini.root) for path in paths):
        raise pytest.UsageError(
            f"the settings of pytest in {ini.root} were not read. pytest takes an option's value that is an "
            "existing path for a test: write --option=PATH, with =, or use -c FILE"
        )
