"""The pytest plugin: markers, the `bench` fixture, skips, statuses and reports.

Only this package imports pytest.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case, CaseList
from perfsuite.case.hardware import ACCELERATORS
from perfsuite.compare import Comparison
from perfsuite.errors import AllocationOverError, BusyError, FileError, PerfsuiteError
from perfsuite.launch.arm import here, resolve
from perfsuite.launch.launchers import launcher
from perfsuite.plugin.benchmark import CLOCK, raise_in, replay, replay_nothing, set_clock
from perfsuite.plugin.benchmark import (
    pytest_benchmark_compare_machine_info as pytest_benchmark_compare_machine_info,
)
from perfsuite.plugin.benchmark import (
    pytest_benchmark_update_machine_info as pytest_benchmark_update_machine_info,
)
from perfsuite.plugin.collection import EMPTY, NO_CASE, case_of, check_collected, has_marks, uses_bench
from perfsuite.plugin.options import SESSION, max_pairs, options, usage_error
from perfsuite.plugin.options import pytest_addoption as pytest_addoption
from perfsuite.report import summary
from perfsuite.report import terminal as report
from perfsuite.report.progress import Progress
from perfsuite.report.text import plural, printable, relative
from perfsuite.results.outcome import STYLES
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.session import DrySession, Host, Session, session_file

# Of a test:
PASSED = pytest.StashKey[bool]()
"""Whether the test itself had no complaint."""
MEASUREMENT = pytest.StashKey[Measurement]()
ENDED = pytest.StashKey[bool]()
"""Whether the test came to its end: not where an interrupt cut it short."""

# Of the session:
PROGRESS = pytest.StashKey[Progress]()
SELECTED = pytest.StashKey[int]()
"""How many tests ask for a measurement."""
UNDECIDED = pytest.StashKey[list[str]]()
"""The cases that were left when nothing more could be launched."""
UNWRITTEN = pytest.StashKey[str]()
"""Why the results could not be written as files."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the hardware markers and check the options."""
    for name in ACCELERATORS:
        config.addinivalue_line("markers", f"{name}: a perfsuite case meant for {name}")
    progress = config.stash[PROGRESS] = _progress(config)
    config.stash[SESSION] = _session(config, progress)
    config.pluginmanager.register(HoldsInterrupts(config))
    if not _is_worker(config):
        config.pluginmanager.register(CollectsFromWorkers(config))


def _session(config: pytest.Config, progress: Progress) -> Session:
    chosen, most = options(config), max_pairs(config)
    if config.getoption("--perf-dry"):
        return DrySession(chosen, progress, saves=not _is_worker(config))
    against = config.getoption("--perf-against")
    with usage_error():
        name = config.getoption("--perf-launcher") or config.getini("perf_launcher")
        host = Host(launcher(name), chosen.store)
        if against is not None:
            arms = (
                resolve("--perf-against", against, root=chosen.root, store=chosen.store),
                here(chosen.root),
            )
            return Comparison(chosen, progress, host, saves=not _is_worker(config), arms=arms, max_pairs=most)
    return Session(chosen, progress, host, saves=not _is_worker(config))


class HoldsInterrupts:
    """Has a second Ctrl-C wait until the results are written, which takes pytest and perfsuite a second.

    Else it hits pytest while it takes note of the first one, and its exit status says that all is well.
    """

    KEY = pytest.StashKey[Any]()

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_keyboard_interrupt(self) -> Generator[None, object, object]:
        """Ignore SIGINT from now on, before any other plugin looks at the first one."""
        if self.config.stash.get(SELECTED, 0) and signal.getsignal(signal.SIGINT) is not None:
            with contextlib.suppress(ValueError):  # not in the main thread, which alone gets an interrupt
                self.config.stash[self.KEY] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        return (yield)

    @classmethod
    def release(cls, config: pytest.Config) -> None:
        """Answer SIGINT as before."""
        if cls.KEY in config.stash:
            signal.signal(signal.SIGINT, config.stash[cls.KEY])
            del config.stash[cls.KEY]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the next session on this machine measure."""
    HoldsInterrupts.release(config)
    if SESSION in config.stash:
        config.stash[SESSION].lock.release()


def _progress(config: pytest.Config) -> Progress:
    """The progress of a session, written past pytest's capturing."""

    def uncaptured() -> Any:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()

    def line(text: str) -> None:
        if (terminal := _terminal(config)) is not None:
            with uncaptured():
                terminal.ensure_newline()
                terminal.write_line(printable(text))

    def live(text: str | None) -> None:
        if (terminal := _terminal(config)) is not None:
            with uncaptured():
                terminal.rewrite((text or "")[: shutil.get_terminal_size().columns - 1], erase=True)
                if text is None:
                    terminal.write("\r")

    return Progress(line=line, live=live)


def _terminal(config: pytest.Config) -> Any:
    return config.pluginmanager.getplugin("terminalreporter")


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
    """Check what was collected, before anything is deselected.

    A test that lost its cases has no hardware either. It is left whatever `-m` selects: else nobody would see
    that it measures nothing.
    """
    check_collected(config, items)
    lost = [item for item in items if EMPTY in item.stash and not has_marks(item)]
    result = yield
    if config.option.markexpr and not config.option.keyword:
        items += [item for item in lost if item not in items]
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the benchmarks that were selected; find out whether a terminal can show their progress."""
    host, progress = session.config.stash[SESSION].host, session.config.stash[PROGRESS]
    benchmarks = [item for item in session.items if uses_bench(item)]
    session.config.stash[SELECTED] = len(benchmarks)
    terminal = _terminal(session.config)
    progress.is_live = terminal is not None and terminal.isatty
    if benchmarks and not session.config.option.collectonly:
        cases = map(case_of, benchmarks)
        with usage_error():
            progress.cases = sum(case is None or _may_run(host, case) for case in cases)
            if session.config.getoption("--perf-resume"):
                progress.cases -= _resume(session.config.stash[SESSION], benchmarks)
    if (file := session.config.getoption("--perf-cases")) is not None:
        by_id = {case.id: case for case in filter(None, map(case_of, benchmarks))}
        with usage_error():
            documents.write(Path(file), CaseList(cases=tuple(by_id.values())))


def _may_run(host: Host, case: Case) -> bool:
    """Whether the test of a case will launch it, as far as is known before. Raises `CaseError`."""
    try:
        return host.why_not(case) is None
    except PerfsuiteError:
        raise
    except Exception:  # its own test tells it
        return True


def _resume(session: Session, benchmarks: list[pytest.Item]) -> int:
    """Go on with the newest session. Return how many of these tests have their result already."""
    try:
        session.resume()
    except BusyError as error:
        pytest.exit(f"perfsuite: {error}")
    found = [(case, item.nodeid) for item in benchmarks if (case := case_of(item)) is not None]
    return sum(session.earlier_result(case, nodeid) is not None for case, nodeid in found)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run; give pytest-benchmark a clock that replays."""
    if not uses_bench(item):
        return
    if _is_worker(item.config) and not item.config.getoption("--perf-dry"):
        pytest.fail(
            "perfsuite does not run under pytest-xdist: cases side by side would disturb each other. "
            "Run without -n (or with -p no:xdist); --perf-dry, which times nothing, may have it.",
            pytrace=False,
        )
    if EMPTY in item.stash:
        pytest.fail("no case: the parameters of this test are empty", pytrace=False)
    if (case := case_of(item)) is not None:
        _skip_if_impossible(item, case)
    set_clock(item)


def _skip_if_impossible(item: pytest.Item, case: Case) -> None:
    session = item.config.stash[SESSION]
    try:
        reason = session.skip_reason(case)
    except PerfsuiteError as error:
        session.record_error(case, item.nodeid, error)
        pytest.fail(_relative(item.config, str(error)), pytrace=False)
    except Exception as error:
        session.record_error(case, item.nodeid, error)
        raise
    if reason is not None:
        session.record_skip(case, item.nodeid, reason)
        pytest.skip(reason)


@pytest.fixture
def bench(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[Callable[[Case], Measurement]]:
    """Measure a case and fail the test if it regressed: `def test_llama(bench, case): bench(case)`."""
    item = request.node
    if not uses_bench(item) or case_of(item) is None:  # by `request.getfixturevalue`, unseen when collected
        pytest.fail(NO_CASE, pytrace=False)
    cases: list[Case] = []

    def measure(case: Case) -> Measurement:
        if cases:
            pytest.fail("bench measures one case per test: parametrize the test instead", pytrace=False)
        cases.append(case)
        if case != case_of(item):
            _skip_if_impossible(item, case)
        return _measure(item, case, benchmark)

    yield measure
    if not cases and item.stash.get(PASSED, False):
        pytest.fail("the test asked for bench and never called it: nothing was measured", pytrace=False)


def _measure(item: pytest.Item, case: Case, benchmark: Any) -> Measurement:
    """Measure the case of a test. Raises what the test is to end with, if it is not to pass."""
    session = item.config.stash[SESSION]
    refusal: BaseException | None = None
    try:
        measurement = session.measure(case, item.nodeid)
    except BusyError as error:
        raise_in(benchmark, pytest.exit.Exception(f"perfsuite: {error}"))
    except AllocationOverError as error:
        item.config.stash[UNDECIDED] = [case.id, *_not_begun(item)]
        raise_in(benchmark, pytest.exit.Exception(f"perfsuite: {error}"))
    except PerfsuiteError as error:
        refusal = pytest.fail.Exception(_relative(item.config, str(error)), pytrace=False)
    except BaseException as error:
        raise_in(benchmark, error)
    if refusal is not None:  # raised here, pytest has no second exception to show
        raise_in(benchmark, refusal)
    item.stash[MEASUREMENT] = measurement
    if measurement.dry:
        replay_nothing(benchmark)
    properties = summary.properties(measurement)
    benchmark.extra_info.update(properties)
    item.user_properties += [(f"perf_{name}", value) for name, value in properties.items()]
    if not measurement.dry:
        if not measurement.measured_steps:
            raise_in(benchmark, _failure(item.config, measurement))
        replay(benchmark, item.stash[CLOCK], measurement.measured_steps)
    if session.options.is_failing(measurement) or measurement.excused is not None:
        raise _failure(item.config, measurement)
    return measurement


def _not_begun(item: pytest.Item) -> list[str]:
    """The cases of the tests after this one."""
    items = item.session.items
    cases = [case_of(each) for each in items[items.index(item) + 1 :] if uses_bench(each)]
    return [case.id for case in cases if case is not None]


def _failure(config: pytest.Config, measurement: Measurement) -> BaseException:
    """What ends a test that does not pass: a failure with the whole text, or xfail where it is excused."""
    if measurement.excused is not None:
        reasons = printable("; ".join(measurement.verdict.reasons))
        return pytest.xfail.Exception(f"{measurement.excused}: {reasons}")
    told = report.explanation(measurement, whole=config.get_verbosity() > 0)
    return pytest.fail.Exception(_relative(config, told), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Carry the verdict to the terminal."""
    test_report: pytest.TestReport = yield
    if test_report.when == "call":
        item.stash[PASSED] = test_report.passed
    item.stash[ENDED] = test_report.when == "teardown"
    measurement = item.stash.get(MEASUREMENT, None)
    if measurement is None or test_report.when != "call":
        return test_report
    if _is_worker(item.config):
        test_report.perf_measurement = documents.plain(measurement)  # type: ignore[attr-defined]
    is_failing = item.config.stash[SESSION].options.is_failing(measurement)
    if test_report.outcome == ("failed" if is_failing else "passed"):  # else the test itself had more to say
        test_report.perf_outcome = measurement.outcome  # type: ignore[attr-defined]
    return test_report


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is a process of pytest-xdist, which another one collects the reports of."""
    return hasattr(config, "workerinput")


def _tell_controller(config: Any) -> None:
    """Of a process of pytest-xdist: send what its reports of tests do not hold, as it ends."""
    session = config.stash[SESSION]
    config.workeroutput["perf_selected"] = config.stash.get(SELECTED, 0)
    config.workeroutput["perf_skipped"] = [documents.plain(each) for each in session.skipped]
    config.workeroutput["perf_results"] = [documents.plain(each) for each in session.results]


class CollectsFromWorkers:
    """Where pytest-xdist runs the tests: takes what its processes measured into this process's session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.session = config, config.stash[SESSION]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the measurement of a test that ran in another process."""
        if (measurement := getattr(report, "perf_measurement", None)) is not None:
            self.session.keep(Measurement.model_validate(measurement, context=documents.FROM_FILE))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Keep what a process skipped, and what failed in it before there was a measurement."""
        told = getattr(node, "workeroutput", {})  # none of a process that died
        self.config.stash[SELECTED] = max(self.config.stash.get(SELECTED, 0), told.get("perf_selected", 0))
        skipped = [Skipped.model_validate(each) for each in told.get("perf_skipped", [])]
        self.session.skipped += [each for each in skipped if each not in self.session.skipped]
        known = {(result.nodeid, result.case_id) for result in self.session.results}
        for each in told.get("perf_results", []):
            result = Measurement.model_validate(each, context=documents.FROM_FILE)
            if (result.nodeid, result.case_id) not in known:
                self.session.keep(result)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Give verdicts that pytest has no word for their own letter and word."""
    style = STYLES.get(getattr(report, "perf_outcome", ""))
    if style is None or style.letter is None:
        return None
    return style.word, style.letter, (style.word.upper(), {style.colour: True, "bold": not style.quiet})


def _relative(config: pytest.Config, text: str) -> str:
    """The text as it may go to a terminal, with paths as pytest shows them: from its root directory."""
    return printable(relative(text, config.rootpath))


@pytest.hookimpl(trylast=True)  # below the tables of other plugins
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write the table, each verdict in words where somebody may have to act, and what went wrong."""
    session = config.stash[SESSION]
    if session.results:
        _write_verdicts(terminalreporter, config, session.results)
    if count := len(session.shown_only):
        terminalreporter.write_line(
            f"--perf-allow-shared: {plural(count, 'case')} measured while others used the "
            "machine: figures to look at, of which nothing was judged or recorded; counts are"
        )
    if (why := config.stash.get(UNWRITTEN, None)) is not None:
        terminalreporter.section("perfsuite: the results were not written", red=True, bold=True)
        terminalreporter.write_line(_relative(config, why))
    if left := config.stash.get(UNDECIDED, []):
        terminalreporter.section("perfsuite: the allocation is over", red=True, bold=True)
        terminalreporter.write_line(
            f"{plural(len(left), 'case')} left, which --perf-resume measures in another allocation:"
        )
        terminalreporter.write_line("\n".join(f"  {case_id}" for case_id in left))
    if session.running is not None:
        terminalreporter.write_line(f"interrupted, not judged: {session.running}")
    if exitstatus == pytest.ExitCode.USAGE_ERROR:
        return  # its message says all
    if _nothing_measured(config):
        _write_nothing_measured(terminalreporter, config)
    elif session.judged < len(session.results):
        _write_judged(terminalreporter, session)


def _write_verdicts(terminal: Any, config: pytest.Config, measurements: list[Measurement]) -> None:
    terminal.section(f"perfsuite: {summary.hardware(measurements) or 'nothing was judged'}")
    for note in summary.machine_notes(measurements):
        terminal.write_line(printable(f"note: {note}"))
    for line in summary.arm_lines(config.stash[SESSION].arm_facts):
        terminal.write_line(_relative(config, line))
    width = shutil.get_terminal_size().columns if terminal.isatty else None
    terminal.write_line(report.table(measurements, color=terminal.hasmarkup, width=width))
    is_verbose = config.get_verbosity() > 0 or bool(config.stash[SESSION].arms)
    for measurement in measurements:
        is_shown_by_pytest = measurement.outcome == "failed" and measurement.excused is None
        if (is_verbose or summary.needs_words(measurement)) and not is_shown_by_pytest:
            terminal.write_line("")
            terminal.write_line(_relative(config, report.explanation(measurement, whole=is_verbose)))
    for line in [] if is_verbose else summary.in_short(measurements):
        terminal.write_line(printable(line))


def _write_judged(terminal: Any, session: Session) -> None:
    told = f"{session.judged} of {plural(len(session.results), 'case')} judged"
    if session.too_few_judged:
        terminal.section("perfsuite: too few cases were judged", red=True, bold=True)
        told += f", --perf-min-judged asks for {session.options.min_judged:.0%}: not a pass"
    terminal.write_line(told)


def _write_nothing_measured(terminal: Any, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    has_figures = any(measurement.figures.by_name() for measurement in session.results)
    done = "judged: what was measured is no evidence" if has_figures else "measured"
    done = "judged" if session.running is not None and session.launches else done
    terminal.section(f"perfsuite: nothing was {done}", red=True, bold=True)
    terminal.write_line(f"{plural(config.stash[SELECTED], 'case')} selected, none has a verdict: not a pass.")
    if any(measurement.shared for measurement in session.results):
        terminal.write_line(
            "Others used the machine. --perf-wait-quiet=SECONDS waits longer until they end; "
            "--perf-allow-shared shows what is measured beside them, and judges nothing by it."
        )
    for skip in session.skipped[:20]:
        terminal.write_line(printable(f"  {skip.case_id}: {skip.reason}"))


NO_ERROR = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    """Write the results as files. Fail the session where nothing was measured.

    Before all others: an error of another plugin here, as of one whose file cannot be written, loses nothing.
    """
    try:
        _finish(session, exitstatus)
    finally:
        HoldsInterrupts.release(session.config)
        result = yield
    return result


def _finish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if _is_worker(config):
        _tell_controller(config)
        return
    is_no_pass = _nothing_measured(config) or config.stash[SESSION].too_few_judged
    if is_no_pass and exitstatus in NO_ERROR:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if config.option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
        return
    try:
        _write_files(config, is_complete=_is_complete(session, exitstatus))
    except PerfsuiteError as error:  # the figures are still on the screen
        config.stash[UNWRITTEN] = str(error)
        if session.exitstatus in NO_ERROR:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def _is_complete(session: pytest.Session, exitstatus: int) -> bool:
    """Whether every case had its turn. pytest's exit status alone does not tell: see `HoldsInterrupts`."""
    if (
        exitstatus not in (*NO_ERROR, pytest.ExitCode.TESTS_FAILED)
        or session.shouldstop
        or session.shouldfail
    ):
        return False
    benchmarks = [item for item in session.items if uses_bench(item)]  # none where pytest-xdist runs them
    has_ended = all(item.stash.get(ENDED, False) for item in benchmarks)
    return has_ended and session.config.stash[SESSION].running is None


def _write_files(config: pytest.Config, *, is_complete: bool) -> None:
    """Write `results.json`, and the files that the options ask for: as many as can be. Raises `FileError`."""
    session = config.stash[SESSION]
    json_file, report_directory = config.getoption("--perf-json"), config.getoption("--perf-report")
    has_begun = session.results or session.launches or session.running is not None
    files = [session.directory.results] if has_begun else []
    if json_file is not None:
        files.append(Path(json_file))
    if not files and report_directory is None:
        return
    content = session_file(session, "complete" if is_complete else "interrupted")
    writes = [partial(documents.write, file, content) for file in files]
    if report_directory is not None:
        writes.append(partial(_write_report, Path(report_directory), content))
    problems = []
    for write in writes:
        try:
            write()
        except PerfsuiteError as error:  # another file may lie on another disk
            problems.append(str(error))
    if problems:
        raise FileError("; ".join(problems))


def _write_report(directory: Path, content: SessionFile) -> None:
    from perfsuite.report import markdown  # not for every run of pytest: they import Jinja
    from perfsuite.report.html import page

    documents.write_text(directory / "index.html", page.render([content]))
    documents.write_text(directory / "summary.md", markdown.render([content]))


def _nothing_measured(config: pytest.Config) -> bool:
    return bool(
        config.stash.get(SELECTED, 0)
        and config.stash[SESSION].nothing_measured
        and not config.option.collectonly
    )
