"""The pytest plugin: options, markers, the `bench` fixture, statuses and reports.

The only importer of pytest.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.fault import Fault
from perfsuite.case.hardware import ACCELERATORS
from perfsuite.errors import BusyError, PerfsuiteError
from perfsuite.frameworks.base import TRAINING
from perfsuite.launch.quiet import WAIT_S
from perfsuite.plugin_benchmark import ReplayClock, raise_in, replay
from perfsuite.report import summary
from perfsuite.report import terminal as report
from perfsuite.report.progress import Progress
from perfsuite.report.published import PUBLISHED, PublishedFile, concerned
from perfsuite.report.text import plural, relative
from perfsuite.results.outcome import STYLES
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import BASELINES, STORE
from perfsuite.session import NO_COMPARISONS, Options, Session, check_same
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES

CLOCK = pytest.StashKey[ReplayClock]()
PASSED = pytest.StashKey[bool]()
"""Whether the test itself had no complaint."""
EMPTY = pytest.StashKey[bool]()
"""Of a test whose parametrization found no case: pytest would skip it."""
RESULT = pytest.StashKey[Measurement]()
SESSION = pytest.StashKey[Session]()
NO_BASELINE = ("record", "fail")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The `--perf-*` options; each has an ini key where a repository may want to fix it."""
    group = parser.getgroup("perfsuite", "performance regression tests of distributed training")
    group.addoption("--perf-json", metavar="FILE", help="write every verdict and figure to FILE as JSON")
    group.addoption(
        "--perf-report", metavar="DIR", help="write a report to DIR: index.html, and summary.md for CI"
    )
    group.addoption(
        "--perf-no-baseline",
        choices=NO_BASELINE,
        help="a case without a baseline: record one in the store (default), or fail",
    )
    group.addoption("--perf-store", metavar="DIR", help="local baselines and run files (default: .perfsuite)")
    group.addoption("--perf-baselines", metavar="DIR", help="reviewed baselines (default: baselines)")
    group.addoption(
        "--perf-inject",
        metavar="FAULT",
        help="inject a fault to test the gate, for example slowdown=30%%; such runs are never recorded",
    )
    group.addoption(
        "--perf-max-launches",
        metavar="N",
        help=f"launches at the most until a case is inconclusive (default {MAX_LAUNCHES}); "
        "1 or 2 are a quick look, which never shows a regression",
    )
    group.addoption(
        "--perf-min-launches", metavar="N", help="launches at the least: 5 or more to accept as a baseline"
    )
    group.addoption(
        "--perf-record-launches",
        metavar="N",
        help="launches of a case without a baseline (default 3): 1 only shows that it runs",
    )
    group.addoption(
        "--perf-wait-quiet",
        metavar="SECONDS",
        help="where others used the machine in a launch, wait so long at the most until they end "
        f"(default {WAIT_S:.0f}; 0: launch again at once)",
    )
    group.addoption(
        "--perf-allow-shared",
        action="store_true",
        help="where others use the machine, do not wait but show the figures, marked: they are neither "
        "judged nor recorded",
    )
    group.addoption(
        "--perf-no-wait",
        action="store_true",
        help="fail where another session measures on this machine, instead of waiting until it ends",
    )
    group.addoption("--perf-strict-improved", action="store_true", help="fail where a case improved")
    group.addoption("--perf-strict-inconclusive", action="store_true", help="fail where it is not known")
    parser.addini("perf_max_launches", "as --perf-max-launches", default=str(MAX_LAUNCHES))
    parser.addini("perf_min_launches", "as --perf-min-launches", default="1")
    parser.addini("perf_record_launches", "as --perf-record-launches", default="3")
    parser.addini("perf_wait_quiet", "as --perf-wait-quiet", default=f"{WAIT_S:.0f}")
    parser.addini("perf_no_baseline", "as --perf-no-baseline", default="record")
    parser.addini("perf_store", "as --perf-store, from the root directory", default=str(STORE))
    parser.addini("perf_baselines", "as --perf-baselines, from the root directory", default=str(BASELINES))


def pytest_configure(config: pytest.Config) -> None:
    """Register the hardware markers and check the options."""
    for name in ACCELERATORS:
        config.addinivalue_line("markers", f"{name}: a perfsuite case meant for {name}")
    config.stash[SESSION] = Session(_options(config), _progress(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The next session on this machine may measure."""
    if SESSION in config.stash:
        config.stash[SESSION].lock.release()


def _options(config: pytest.Config) -> Options:
    """Checked: a bad one is a `UsageError` that says what is allowed."""

    def option(name: str) -> str:
        """The command line's value, else the ini file's."""
        value = config.getoption(f"--perf-{name}") or config.getini(f"perf_{name.replace('-', '_')}")
        return str(value)

    def number(name: str, least: int) -> int:
        if not option(name).isdigit() or int(option(name)) < least:
            raise pytest.UsageError(f"--perf-{name}={option(name)}: give a whole number, {least} or more")
        return int(option(name))

    if (no_baseline := option("no-baseline")) not in NO_BASELINE:
        raise pytest.UsageError(f"perf_no_baseline={no_baseline}: give {' or '.join(NO_BASELINE)}")
    inject = config.getoption("--perf-inject")
    with _usage_error():
        if inject:
            Fault.parse(inject)
    if (file := config.getoption("--perf-json")) and Path(file).is_dir():
        raise pytest.UsageError(f"--perf-json {file} is a directory: give a file")
    if (directory := config.getoption("--perf-report")) and Path(directory).is_file():
        raise pytest.UsageError(f"--perf-report {directory} is a file: give a directory")
    published = config.rootpath / PUBLISHED
    comparisons = NO_COMPARISONS
    if directory and published.exists():
        with _usage_error():
            comparisons = documents.read(published, PublishedFile)
    policy = Policy(
        max_launches=number("max-launches", 1),
        min_launches=number("min-launches", 1),
        record_launches=number("record-launches", 1),
    )
    if policy.most < FEWEST_LAUNCHES:  # a quick look is one, whatever there is to see
        records = min(policy.record_launches, policy.most)
        policy = replace(policy, record_launches=records, max_unhealthy=policy.most)
    return Options(
        root=config.rootpath,
        store=config.rootpath / option("store"),
        baselines=config.rootpath / option("baselines"),
        policy=policy,
        inject=inject,
        fail_without_baseline=no_baseline == "fail",
        strict_improved=config.getoption("--perf-strict-improved"),
        strict_inconclusive=config.getoption("--perf-strict-inconclusive"),
        wait_quiet_s=number("wait-quiet", 0),
        allow_shared=config.getoption("--perf-allow-shared"),
        no_wait=config.getoption("--perf-no-wait"),
        published=comparisons,
    )


def _progress(config: pytest.Config) -> Progress:
    """Written past pytest's capturing; the terminal is asked for when there is something to write."""

    def uncaptured() -> Any:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()

    def line(text: str) -> None:
        if (terminal := _terminal(config)) is not None:
            with uncaptured():
                terminal.ensure_newline()
                terminal.write_line(text)

    def live(text: str | None) -> None:
        if (terminal := _terminal(config)) is not None:
            with uncaptured():
                terminal.rewrite((text or "")[: shutil.get_terminal_size().columns - 1], erase=True)
                if text is None:
                    terminal.write("\r")

    return Progress(line=line, live=live)


def _terminal(config: pytest.Config) -> Any:
    return config.pluginmanager.getplugin("terminalreporter")


@contextlib.contextmanager
def _usage_error() -> Iterator[None]:
    try:
        yield
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_make_parametrize_id(val: object) -> str | None:
    """A case is shown by its own id."""
    return val.id if isinstance(val, Case) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with the hardware that its case is meant for, so that `-m` selects on it."""
    if (case := _case(item)) is not None:
        for marker in case.markers:
            item.add_marker(marker)


def _case(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    return next((value for value in callspec.params.values() if isinstance(value, Case)), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse two cases that share an id: they would share a baseline. Find tests that have no case.

    Refuse, too, to measure without pytest-benchmark, as pytest itself would not say why it is missing.
    """
    benchmarks = [item for item in items if _uses_bench(item)]
    if benchmarks and not any(map(config.pluginmanager.hasplugin, ("benchmark", "pytest_benchmark.plugin"))):
        raise pytest.UsageError(
            f"{benchmarks[0].nodeid} asks for bench, which needs pytest-benchmark, and that is turned off: "
            "run without -p no:benchmark"
        )
    for item in benchmarks:
        with_case = [mark for mark in item.own_markers if not _says_empty(mark)]
        if len(with_case) < len(item.own_markers):
            item.own_markers = with_case
            item.stash[EMPTY] = True
    seen: dict[str, Case] = {}
    for case in filter(None, map(_case, items)):
        with _usage_error():
            check_same(seen.setdefault(case.id, case), case)


def _says_empty(mark: pytest.Mark) -> bool:
    """Whether pytest put it there to skip a test whose parametrization is empty."""
    return mark.name == "skip" and str(mark.kwargs.get("reason", "")).startswith("got empty parameter set")


def pytest_collection_finish(session: pytest.Session) -> None:
    """How many benchmarks were selected; and whether there is a terminal to show their progress on."""
    ours = session.config.stash[SESSION]
    progress = ours.progress
    benchmarks = [item for item in session.items if _uses_bench(item)]
    ours.selected = len(benchmarks)
    if benchmarks and not session.config.option.collectonly:
        cases = map(_case, benchmarks)
        with _usage_error():
            progress.cases = sum(case is None or ours.can_run(case) for case in cases)
    terminal = _terminal(session.config)
    progress.is_live = terminal is not None and terminal.isatty


def _uses_bench(item: pytest.Item) -> bool:
    return "bench" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run; give pytest-benchmark a clock that replays."""
    if not _uses_bench(item):
        return
    if hasattr(item.config, "workerinput"):
        pytest.fail(
            "perfsuite does not run under pytest-xdist: cases side by side would disturb each other. "
            "Run without -n (or with -p no:xdist).",
            pytrace=False,
        )
    if EMPTY in item.stash:
        pytest.fail("no case: the parameters of this test are empty", pytrace=False)
    if (case := _case(item)) is not None:
        _skip_if_impossible(item, case)
    clock = item.stash[CLOCK] = ReplayClock()
    closest = item.get_closest_marker("benchmark")
    options = {**(closest.kwargs if closest else {}), "timer": clock}
    item.add_marker(pytest.mark.benchmark(**options), append=False)


def _skip_if_impossible(item: pytest.Item, case: Case) -> None:
    try:
        reason = item.config.stash[SESSION].skip_reason(case, item.nodeid)
    except PerfsuiteError as error:
        pytest.fail(_relative(item.config, str(error)), pytrace=False)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def bench(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[Callable[[Case], Measurement]]:
    """Measure a case and fail the test if it regressed: `def test_llama(bench, case): bench(case)`."""
    item = request.node
    session = request.config.stash[SESSION]
    asked: list[Case] = []

    def measure(case: Case) -> Measurement:
        if asked:
            pytest.fail("bench measures one case per test: parametrize the test instead", pytrace=False)
        asked.append(case)
        if case != _case(item):
            _skip_if_impossible(item, case)
        refused = None
        try:
            result = session.measure(case, item.nodeid)
        except BusyError as error:
            raise_in(benchmark, pytest.exit.Exception(f"perfsuite: {error}"))
        except PerfsuiteError as error:
            refused = pytest.fail.Exception(_relative(request.config, str(error)), pytrace=False)
        except BaseException as error:
            raise_in(benchmark, error)
        if refused is not None:  # raised here, pytest has no second exception to show
            raise_in(benchmark, refused)
        item.stash[RESULT] = result
        told = summary.properties(result)
        benchmark.extra_info.update(told)
        item.user_properties += [(f"perf_{name}", value) for name, value in told.items()]
        told_in_full = _relative(request.config, report.explanation(result))
        failure: BaseException = pytest.fail.Exception(told_in_full, pytrace=False)
        if result.excused is not None:
            failure = pytest.xfail.Exception(f"{result.excused}: {'; '.join(result.verdict.reasons)}")
        if not result.measured_steps:
            raise_in(benchmark, failure)
        replay(benchmark, item.stash[CLOCK], result.measured_steps)
        if session.is_failing(result) or result.excused is not None:
            raise failure
        return result

    yield measure
    if not asked and item.stash.get(PASSED, False):
        pytest.fail("the test asked for bench and never called it: nothing was measured", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Carry the verdict to the terminal."""
    made: pytest.TestReport = yield
    if made.when == "call":
        item.stash[PASSED] = made.passed
    result = item.stash.get(RESULT, None)
    if result is None or made.when != "call":
        return made
    failing = item.config.stash[SESSION].is_failing(result)
    if made.outcome == ("failed" if failing else "passed"):  # else the test itself had more to say
        made.perf_outcome = result.verdict.outcome  # type: ignore[attr-defined]
    return made


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Verdicts that pytest has no word for get their own."""
    style = STYLES.get(getattr(report, "perf_outcome", ""))
    if style is None or style.letter is None:
        return None
    return style.word, style.letter, (style.word.upper(), {style.colour: True, "bold": not style.quiet})


def _relative(config: pytest.Config, text: str) -> str:
    """Paths as pytest shows them: from its root directory."""
    return relative(text, config.rootpath)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table; then what was measured against what where somebody may have to act, the rest in short."""
    session = config.stash[SESSION]
    if session.results:
        machines = {run.machine for result in session.results for run in result.runs}
        names = sorted(f"{machine.hardware_class} ({machine.device_name})" for machine in machines)
        terminalreporter.section(f"perfsuite: {', '.join(names) or 'nothing was launched'}")
        width = shutil.get_terminal_size().columns if terminalreporter.isatty else None
        for note in summary.machine_notes(session.results):
            terminalreporter.write_line(f"note: {note}")
        color = terminalreporter.hasmarkup
        terminalreporter.write_line(report.table(session.results, color=color, width=width))
        is_verbose = config.get_verbosity() > 0
        for result in session.results:
            shown_by_pytest = result.outcome == "failed" and result.excused is None
            if (is_verbose or summary.needs_words(result)) and not shown_by_pytest:
                terminalreporter.write_line("")
                terminalreporter.write_line(_relative(config, report.explanation(result)))
        for line in [] if is_verbose else summary.in_short(session.results):
            terminalreporter.write_line(line)
    if looked_at := len(session.looked_at):
        terminalreporter.write_line(
            f"--perf-allow-shared: {plural(looked_at, 'case')} measured while others used the "
            "machine: figures to look at, nothing was judged or recorded"
        )
    if session.files_error is not None:
        terminalreporter.section("perfsuite: the results were not written", red=True, bold=True)
        terminalreporter.write_line(_relative(config, session.files_error))
    if session.running is not None:
        terminalreporter.write_line(f"interrupted, not judged: {session.running}")
    if _nothing_measured(config):
        terminalreporter.section("perfsuite: nothing was measured", red=True, bold=True)
        terminalreporter.write_line(
            f"{plural(session.selected, 'case')} selected, none gave a valid measurement: not a pass."
        )
        if any(result.shared for result in session.results):
            terminalreporter.write_line(
                "Others used the machine. --perf-wait-quiet=SECONDS waits longer until they end; "
                "--perf-allow-shared shows what is measured beside them, and judges nothing by it."
            )
        for skip in session.skipped[:20]:
            terminalreporter.write_line(f"  {skip.case_id}: {skip.reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the results as a file, and never be green when nothing was measured."""
    ours = session.config.stash[SESSION]
    no_error = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if _nothing_measured(session.config) and exitstatus in no_error:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.config.option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    files = [ours.files.results] if ours.results or ours.launches else []
    if (asked := session.config.getoption("--perf-json")) is not None:
        files.append(Path(asked))
    cut_short = session.shouldstop or session.shouldfail
    completed = exitstatus in (*no_error, pytest.ExitCode.TESTS_FAILED) and not cut_short
    report_to = session.config.getoption("--perf-report")
    if not files and report_to is None:
        return
    told = ours.to_file("complete" if completed else "interrupted")
    try:
        for file in files:
            documents.write(file, told)
        if report_to is not None:
            _write_report(Path(report_to), told, ours.options.published)
    except PerfsuiteError as error:  # the figures are still on the screen
        ours.files_error = str(error)
        if session.exitstatus in no_error:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def _write_report(directory: Path, told: SessionFile, published: PublishedFile) -> None:
    from perfsuite.report import markdown  # not for every run of pytest: they import Jinja
    from perfsuite.report.html import page

    tables = concerned(published, [told])
    documents.write_text(directory / "index.html", page.render([told], tables))
    documents.write_text(directory / "summary.md", markdown.render([told], tables))


def _nothing_measured(config: pytest.Config) -> bool:
    session = config.stash[SESSION]
    return bool(session.selected and session.nothing_measured and not config.option.collectonly)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Hardware and framework versions for pytest-benchmark's JSON."""
    from importlib.metadata import PackageNotFoundError, version

    machine_info["hardware"] = documents.plain(config.stash[SESSION].machine)
    versions = {}
    for package in TRAINING:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    machine_info["frameworks"] = versions


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Refuse to compare cases on unlike hardware; benchmarks of others are not our concern."""
    if not any(
        "case_id" in saved.get("extra_info", {}) for saved in compared_benchmark.get("benchmarks", ())
    ):
        return  # none of ours
    now = machine_info.get("hardware", {}).get("hardware_class")
    then = compared_benchmark.get("machine_info", {}).get("hardware", {}).get("hardware_class")
    if now != then:
        raise pytest.UsageError(
            f"--benchmark-compare: the saved run is from {then or 'a machine without perfsuite'}, "
            f"this machine is {now}: times of unlike hardware cannot be compared"
        )
