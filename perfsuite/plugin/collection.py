"""Find tests that measure a case, and reject invalid tests before any launch.

Also define the state that the hooks share.
"""

import ast
import contextlib
import dataclasses
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case, CaseList, CollectedTest, check_same
from perfsuite.case.hardware import ACCELERATORS
from perfsuite.errors import PerfsuiteError
from perfsuite.inputs.ini import BASELINES, read_ini
from perfsuite.launch.launchers import installed
from perfsuite.plugin.private import EMPTY_REASON, is_unset, parameters
from perfsuite.report.progress import Progress
from perfsuite.report.safe_text import printable
from perfsuite.report.text import relative
from perfsuite.results.outcome import STYLES
from perfsuite.session import plan
from perfsuite.session.case_changes import Selection, case_changes
from perfsuite.session.mode import Mode
from perfsuite.session.option_table import BY_NAME
from perfsuite.session.reference import ReferenceArm
from perfsuite.session.session import Session
from perfsuite.session.setup import DryHost, Host

EMPTY = pytest.StashKey[bool]()  # whether a test has no case, so that pytest would skip it
ENDED = pytest.StashKey[bool]()  # whether a test ran to its end, without an interrupt

# Keys of the session:
SESSION = pytest.StashKey[Session]()
PROGRESS = pytest.StashKey[Progress]()
INSTALLS = pytest.StashKey[Callable[[], Mode]]()
"""A function that installs the packages that the arms name, and then makes the session's mode again."""
REFERENCE = pytest.StashKey[ReferenceArm]()  # the session's reference, if the user wants one
COLLECTED = pytest.StashKey[dict[str, Case]]()  # every case by its id, selected or not
OF_OTHER_JOBS = pytest.StashKey[frozenset[str]]()  # ids of the cases that other jobs of a nightly run measure
SELECTED = pytest.StashKey[int]()  # number of selected tests that use `bench`
# The selected tests that use `bench`. Not set in the main process of pytest-xdist.
TO_RUN = pytest.StashKey[list[pytest.Item]]()
BENCHMARKS = pytest.StashKey[list[pytest.Item]]()  # tests that use `bench`, before any is deselected
NO_SHARE = pytest.StashKey[bool]()  # whether there are cases, but other jobs measure all of them
UNWRITTEN = pytest.StashKey[str]()  # why the files with the results could not be written
UNMATCHED = pytest.StashKey[tuple[str, ...]]()  # names in `-k` that match no collected test
REFUSED = pytest.StashKey[str]()  # why the workers of pytest-xdist run nothing

LETTERS = ", ".join(f"{style.letter} {style.word}" for style in STYLES.values() if style.letter)
"""pytest's letters for verdicts."""
NO_CASE = (
    "bench measures a case that is a parameter of the test, so that -m and -k can select it. Write "
    '@pytest.mark.parametrize("case", [Case(...)]) above def test_it(bench, case)'
)
NOT_SELECTABLE = frozenset(("parametrize", "usefixtures", "filterwarnings"))
"""Marks that control how a test runs. They are not used to select cases."""
NO_BENCH = "no_bench"  # mark of a test that has a case but measures nothing, such as a framework's own test
MORE_LAUNCHES = "To launch each case at least N times, do not repeat its test, but give --perf-min-launches=N"
MARKER_NAME = re.compile(r"\bnot\s+[\w:+.-]+|\([^()]*=[^()]*\)|([\w:+.-]+)")
"""The group matches the names in `-m` that select tests. It matches no names in arguments or after `not`."""
KEYWORD_NAME = re.compile(r"\bnot\s+[^\s()]+|([^\s()]+)")
"""The group matches the names in `-k` that select tests, and the words `and` and `or`."""


def is_worker(config: pytest.Config) -> bool:
    """Return whether this is a worker of pytest-xdist. Another process then collects its reports."""
    return hasattr(config, "workerinput")


def runs_no_test(config: pytest.Config) -> bool:
    """Return whether pytest only lists tests or their fixtures."""
    options = config.option
    return bool(options.collectonly or options.setuponly or options.setupplan)


def terminal_of(config: pytest.Config) -> Any:
    """Return pytest's terminal reporter, or None."""
    return config.pluginmanager.getplugin("terminalreporter")


def shown(config: pytest.Config, text: str) -> str:
    """Make text safe for a terminal. As in pytest's output, paths are relative to its root directory."""
    return printable(relative(text, config.rootpath))


@contextlib.contextmanager
def usage_error() -> Iterator[None]:
    """Turn a `PerfsuiteError` into pytest's `UsageError`, which ends the session before anything runs."""
    try:
        yield
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None


def refuse(config: pytest.Config, items: list[pytest.Item], why: str) -> None:
    """Run no test in a worker of pytest-xdist. Workers print nothing: `CollectsFromWorkers` reports `why`."""
    config.workeroutput["perf_refused"] = why  # type: ignore[attr-defined]
    items.clear()


def case_of(item: pytest.Item) -> Case | None:
    """Return the case of a test: the first of its parameters that is a `Case`, or None."""
    return next((value for value in parameters(item).values() if isinstance(value, Case)), None)


def cases_in(values: Iterable[object]) -> list[Case]:
    """Return the cases in these values, also in nested containers and dataclasses. Each id occurs once."""
    cases = dict[str, Case]()
    seen = set[int]()  # a list can contain itself
    left = [*values][::-1]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Case):
            cases.setdefault(value.id, value)
        elif isinstance(value, dict):
            left += [*value.values()][::-1]
        elif isinstance(value, list | tuple | set | frozenset):
            left += [*value][::-1]
        elif dataclasses.is_dataclass(value):
            left += [getattr(value, field.name, None) for field in dataclasses.fields(value)][::-1]
    return [*cases.values()]


def uses_bench(item: pytest.Item) -> bool:
    """Return whether a test uses `bench`, directly or through another fixture."""
    return "bench" in getattr(item, "fixturenames", ())


def has_cases(source: str, *, is_in_cases: bool) -> bool:
    """Return whether a test file probably has tests that measure cases. `source` is its text.

    This is only needed for a file that skips itself when it is imported, because its tests are then unknown.
    The file counts as having cases if any function in it has the parameter `bench`. `is_in_cases` says
    whether the file is in the directory of the cases. There, a file that imports `Case` also counts, because
    its tests can use `bench` through another fixture.
    """
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError):
        return False
    parameters_of = [node for node in nodes if isinstance(node, ast.arguments)]
    names = {
        argument.arg
        for given in parameters_of
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)
    }
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "perfsuite"]
    has_import = any(alias.name == Case.__name__ for node in imports for alias in node.names)
    return "bench" in names or (is_in_cases and has_import)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return the id of a case as the id of the parameter."""
    return val.id if isinstance(val, Case) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with the hardware that its case is meant for, so that `-m` can select it."""
    case = case_of(item)
    if case is not None:
        for marker in case.markers:
            item.add_marker(marker)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Check the collected tests before any is deselected.

    A test whose parametrization found no case has no hardware marker, so `-m` would deselect it, and nobody
    would notice that it measures nothing. Such a test therefore stays selected, unless it has markers of its
    own.
    """
    try:
        check_collected(config, items)
    except pytest.UsageError as error:
        if not is_worker(config):
            raise
        refuse(config, items, str(error))
    lost = [item for item in items if EMPTY in item.stash]
    lost = [item for item in lost if {mark.name for mark in item.iter_markers()} <= {"parametrize"}]
    result = yield
    if config.option.markexpr and not config.option.keyword:
        items += [item for item in lost if item not in items]
    _plan(config, items)
    return result


def _plan(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the cases of other jobs. With a budget, sort the remaining cases in the order of the plan."""
    session = config.stash[SESSION]
    options = session.setup.options
    case_by_item = {item: case_of(item) for item in items if uses_bench(item)}
    cases = {item: case for item, case in case_by_item.items() if case is not None}
    if options.shard is not None:
        ours = plan.shard(cases.values(), *options.shard)
        others = {item: None for item, case in cases.items() if case.id not in ours}
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=[*others])
        config.stash[OF_OTHER_JOBS] = frozenset(case.id for item, case in cases.items() if item in others)
        config.stash[NO_SHARE] = bool(others) and not items
        cases = {item: case for item, case in cases.items() if item not in others}
    if options.budget_s is not None:
        past = plan.past_of(session.setup.store.results())
        order = plan.planned(cases.values(), past, session.record.today)
        session.setup.budget = plan.budget_for(order, options.budget_s, options.policy.min_launches)
        place = {planned.case.id: number for number, planned in enumerate(order)}
        items.sort(key=lambda item: place[cases[item].id] if item in cases else -1)


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a comparison, find the cases of arm A that arm B has changed or no longer runs."""
    config = session.config
    if config.stash[SESSION].mode.arms and not is_worker(config) and not runs_no_test(config):
        _list_case_changes(config)


def _list_case_changes(config: pytest.Config) -> None:
    ours = config.stash[SESSION]
    wanted = selection_of(config)
    changes, unknown = case_changes(ours.mode.arms, wanted, ours.setup.options.store)
    ours.record.case_changes = changes
    ours.record.cases_unknown = unknown


def selection_of(config: pytest.Config) -> Selection:
    """Return the tests that the user selected, to select the same tests in arm A."""
    is_given = config.args_source is config.ArgsSource.ARGS
    here = config.invocation_params.dir
    arguments = [argument.partition("::") for argument in config.args] if is_given else []
    paths = [here / file for file, _, _ in arguments]
    whole = [here / file for file, _, name in arguments if not name]
    names = dict[Path, list[str]]()
    for file, _, name in arguments:
        if name and not any((here / file).is_relative_to(path) for path in whole):
            names.setdefault(here / file, []).append(name)
    given = (("-k", config.option.keyword), ("-m", config.option.markexpr))
    words = [word for option, value in given if value for word in (option, value)]
    words += [f"--deselect={deselected}" for deselected in config.option.deselect or ()]
    is_directory = len(paths) == 1 and paths[0].is_dir()
    return Selection(paths=paths, names=names, words=words, is_directory_of_cases=is_directory)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the selected benchmarks, prepare their session, and write the file of `--perf-cases`."""
    host = session.config.stash[SESSION].setup.host
    progress = session.config.stash[PROGRESS]
    benchmarks = [item for item in session.items if uses_bench(item)]
    session.config.stash[SELECTED] = len(benchmarks)
    session.config.stash[TO_RUN] = benchmarks
    terminal = terminal_of(session.config)
    progress.is_live = terminal is not None and terminal.isatty
    if benchmarks and not runs_no_test(session.config):
        for problem in installed(BY_NAME).problems.values():
            progress.say(problem)
        with usage_error():
            progress.cases = sum(_may_run(host, case_of(item)) for item in benchmarks)
            if progress.cases:
                _install(session.config)
                _prepare_reference(session.config, [case_of(item) for item in benchmarks])
            if session.config.getoption("--perf-resume"):
                ours = session.config.stash[SESSION]
                ours.resume()
                selected = [(case_of(item), item.nodeid) for item in benchmarks]
                progress.cases -= sum(
                    case is not None and ours.record.earlier_result(case, nodeid) is not None
                    for case, nodeid in selected
                )
    file = session.config.getoption("--perf-cases")
    if file is not None:
        by_id = {case.id: case for case in filter(None, map(case_of, benchmarks))}
        tests = _collected_tests(session.config.stash.get(BENCHMARKS, []), benchmarks)
        with usage_error():
            unmatched = session.config.stash.get(UNMATCHED, ())
            content = CaseList(cases=tuple(by_id.values()), tests=tests, unmatched=unmatched)
            documents.write(Path(file), content)


def _install(config: pytest.Config) -> None:
    """Install the packages named in the arms of a comparison. Call this only if there are cases to run."""
    make = config.stash.get(INSTALLS, None)
    if make is None:
        return
    ours = config.stash[SESSION]
    before = ours.setup.host
    ours.record.mode = make()
    if isinstance(before, DryHost) and isinstance(ours.setup.host, DryHost):
        ours.setup.host.hardware = before.hardware
    if not is_worker(config):  # arm A now has its packages, so it might collect other cases
        _list_case_changes(config)


def _prepare_reference(config: pytest.Config, cases: Iterable[Case | None]) -> None:
    """If the session has a reference, choose its canaries among the selected cases."""
    reference = config.stash.get(REFERENCE, None)
    if reference is not None:
        reference.prepare(case for case in cases if case is not None)


def _collected_tests(collected: list[pytest.Item], selected: list[pytest.Item]) -> tuple[CollectedTest, ...]:
    """Describe every collected test, including those that an option or a hook deselected."""
    left = set(selected)
    tests = []
    for item in collected:
        case = case_of(item)
        if case is None:
            continue
        why = skip_mark(item) if item in left else "deselected"
        marks = {mark.name for mark in item.iter_markers()} - NOT_SELECTABLE
        tests.append(CollectedTest(nodeid=item.nodeid, case=case, marks=tuple(sorted(marks)), left_out=why))
    return tuple(tests)


def skip_mark(item: pytest.Item) -> str | None:
    """Return why a mark will keep a test from running, as `skipped: reason`, or None.

    A condition given as text, which only pytest can evaluate, counts as true.
    """
    for mark in item.iter_markers():
        is_skipped = mark.name == "skip" or (mark.name == "skipif" and any(mark.args or [True]))
        if is_skipped or (mark.name == "xfail" and mark.kwargs.get("run") is False):
            given = mark.args[0] if mark.name == "skip" and mark.args else ""
            reason = mark.kwargs.get("reason") or given
            return f"skipped: {reason}" if reason else "skipped"
    return None


def _may_run(host: Host, case: Case | None) -> bool:
    """Return whether the test of a case will probably launch the case. Raises `CaseError`."""
    try:
        return case is None or host.why_not(case) is None
    except PerfsuiteError:
        raise
    except Exception:  # the case's own test will report this error
        return True


def check_collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find tests without a case. Raises `UsageError` for tests that would not measure their case properly."""
    benchmarks = [item for item in items if uses_bench(item)]
    config.stash[BENCHMARKS] = benchmarks
    without = set[int]()
    for item in items:
        _check_is_measured(item, without)
    if not benchmarks:
        return
    if not any(map(config.pluginmanager.hasplugin, ("benchmark", "pytest_benchmark.plugin"))):
        raise pytest.UsageError(
            f"{benchmarks[0].nodeid} uses bench, which needs pytest-benchmark, but that plugin is turned "
            "off: run without -p no:benchmark"
        )
    _check_root(config)
    by_id: dict[str, tuple[pytest.Item, Case]] = {}
    for item in benchmarks:
        _note_lost_cases(item)
        if EMPTY in item.stash:
            continue
        case = case_of(item)
        if case is None:
            raise pytest.UsageError(f"{item.nodeid}: {NO_CASE}")
        first, same = by_id.setdefault(case.id, (item, case))
        with usage_error():
            check_same(same, case)
        if first is not item:
            more = f". {MORE_LAUNCHES}" if _function_of(first) == _function_of(item) else ""
            raise pytest.UsageError(
                f"{first.nodeid} and {item.nodeid} measure the same case, {case.id}, and would share a "
                f"baseline: leave one of them out, or change a field of its case{more}"
            )
    config.stash[UNMATCHED] = names_without_a_test(config.option.keyword, items)
    config.stash[COLLECTED] = {case_id: case for case_id, (_, case) in by_id.items()}
    config.stash[SESSION].record.collected = frozenset(by_id)
    _check_marker_names(config, items)


def _check_is_measured(item: pytest.Item, without: set[int]) -> None:
    """Raise `UsageError` if the parameters of a test contain a case that bench would not measure.

    `without` collects the `id()` of each parameter value that has no case, so that a large value that many
    tests share is searched only once.
    """
    values = [value for value in parameters(item).values() if id(value) not in without]
    cases = cases_in(values)
    if not cases:
        without.update(map(id, values))
        return
    names = ", ".join(case.id for case in cases[:3]) + (" and more" if len(cases) > 3 else "")
    if not uses_bench(item):
        if item.get_closest_marker(NO_BENCH) is not None:
            return
        raise pytest.UsageError(
            f"{item.nodeid} has a case among its parameters ({names}), but does not use bench, so nothing "
            "would measure the case. Write def test_it(bench, case) and bench(case). If the test is meant to "
            f"measure nothing, mark it with @pytest.mark.{NO_BENCH}"
        )
    if case_of(item) is None:
        raise pytest.UsageError(f"{item.nodeid}: {names} is nested inside a parameter. {NO_CASE}")
    if len(cases) > 1:
        raise pytest.UsageError(
            f"{item.nodeid} has {len(cases)} cases among its parameters ({names}), but bench measures only "
            "one: write a test for each case, or make the cases values of one parameter"
        )


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _check_root(config: pytest.Config) -> None:
    """Raise `UsageError` if an option's value makes pytest miss the settings or baselines of the tests."""
    here = config.invocation_params.dir
    root = config.stash[SESSION].setup.options.root
    paths = [here / argument.partition("::")[0] for argument in config.args]
    why = "If the value of an option is an existing path, pytest mistakes it for a test: write --option=PATH"
    if config.inipath is None and config.getoption("inifilename") is None:
        with usage_error():
            ini = read_ini(here)
        if ini.values and any(path.is_relative_to(ini.root) for path in paths):
            raise pytest.UsageError(f"pytest's settings in {ini.root} were not read. {why}, or use -c FILE")
    is_chosen = config.getoption("--perf-baselines") or config.getini("perf_baselines") != str(BASELINES)
    if is_chosen or config.getoption("rootdir") or not any(path.is_relative_to(here) for path in paths):
        return
    if (here / BASELINES).is_dir() and not (root / BASELINES).is_dir():
        raise pytest.UsageError(
            f"{here / BASELINES} exists, but baselines would be read from {root / BASELINES}. {why}, "
            "or use --perf-baselines=DIR"
        )


def _note_lost_cases(item: pytest.Item) -> None:
    """Remove the marks with which pytest skips a test whose parametrization is empty.

    Raises `pytest.UsageError` if perfsuite does not recognise the mark of such a test. Without this
    error, pytest would skip the test silently.
    """
    for mark in [mark for mark in item.own_markers if mark.name in ("skip", "xfail")]:
        if str(mark.kwargs.get("reason", "")).startswith(EMPTY_REASON):
            item.own_markers.remove(mark)
            item.stash[EMPTY] = True
    has_none = any(map(is_unset, parameters(item).values()))
    if has_none and EMPTY not in item.stash:
        raise pytest.UsageError(
            f"{item.nodeid} has no case, and pytest {pytest.__version__} would skip it in a way that this "
            "perfsuite does not recognise: give the test a case, or upgrade perfsuite"
        )


def _check_marker_names(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject a marker in `-m` that neither pytest nor any test knows, because it would select no case."""
    marker_names = {re.split("[:(]", line)[0].strip() for line in config.getini("markers")}
    marker_names |= {mark.name for item in items for mark in item.iter_markers()}
    for name in re.findall(MARKER_NAME, config.option.markexpr):
        if name and name not in {*marker_names, "and", "or"}:
            family = name.partition("-")[0]  # a case for `a100-80gb` has the marker `a100`
            near = [family] if family in marker_names else get_close_matches(name, marker_names, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Hardware markers are {', '.join(ACCELERATORS)}."
            raise pytest.UsageError(
                f"-m {config.option.markexpr!r}: no marker is named {name}. "
                f"{hint} Register your own markers as `markers` in pytest's ini file"
            )


def names_without_a_test(expression: str, items: Iterable[pytest.Item]) -> tuple[str, ...]:
    """Return the names in `-k` that match no test: in `llama or typo`, the second name selects nothing.

    Names after `not` are left out: excluding a test that does not exist changes nothing. An expression in
    which `not` precedes a parenthesis is not examined.
    """
    if not expression or re.search(r"\bnot\s*\(", expression):
        return ()
    names = dict.fromkeys(KEYWORD_NAME.findall(expression))
    wanted = [name for name in names if name and name not in ("and", "or")]
    keywords = {
        keyword.lower()
        for item in items
        for keyword in (item.nodeid, *item.keywords, *item.listextrakeywords())
    }
    return tuple(name for name in wanted if not any(name.lower() in keyword for keyword in keywords))


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Return a line for names in `-k` that match nothing, and a line that explains pytest's letters.

    With -v, pytest shows words instead of letters.
    """
    unmatched = config.stash.get(UNMATCHED, ())
    names = ", ".join(unmatched)
    lines = [f"perfsuite: -k {config.option.keyword!r}: no test matches {names}"] if unmatched else []
    shows_letters = config.get_verbosity() <= 0 and not runs_no_test(config)
    return [*lines, f"perfsuite: {LETTERS}"] if shows_letters and any(map(uses_bench, items)) else lines
