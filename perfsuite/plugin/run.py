"""Runs a test that measures a case: the `bench` fixture, and what becomes of the test."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.errors import AllocationOverError, PerfsuiteError, told
from perfsuite.plugin.benchmark import CLOCK, replay, replay_nothing, set_clock
from perfsuite.plugin.collection import EMPTY, ENDED, NO_CASE, SESSION, case_of, is_worker, shown, uses_bench
from perfsuite.report import summary
from perfsuite.report import terminal as report
from perfsuite.report.text import printable, visible
from perfsuite.results.session_file import Measurement

PASSED = pytest.StashKey[bool]()  # whether the test itself had no complaint
MEASUREMENT = pytest.StashKey[Measurement]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run; give pytest-benchmark a clock that replays."""
    if not uses_bench(item):
        return
    if is_worker(item.config) and not item.config.getoption("--perf-dry"):
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
    except Exception as error:
        session.record_error(case, item.nodeid, error)
        if isinstance(error, PerfsuiteError) or _is_shadow(item):
            raise _failed(item, told(error)) from None
        raise
    if reason is not None:
        session.record_skip(case, item.nodeid, reason)
        pytest.skip(reason)
    if not session.has_time(case, item.nodeid):
        pytest.skip(session.skipped[-1].reason)


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
    session = item.config.stash[SESSION]
    try:
        measurement = session.measure(case, item.nodeid)
    except BaseException as error:
        replay_nothing(benchmark)
        if isinstance(error, AllocationOverError):
            told_how = "--perf-resume measures what is left in another allocation"
            raise pytest.exit.Exception(f"perfsuite: {error}. {told_how}") from None
        if isinstance(error, PerfsuiteError) or (isinstance(error, Exception) and _is_shadow(item)):
            raise _failed(item, told(error)) from None
        raise
    item.stash[MEASUREMENT] = measurement
    properties = {
        name: visible(value) if isinstance(value, str) else value
        for name, value in summary.properties(measurement).items()
    }
    benchmark.extra_info.update(properties)
    item.user_properties += [(f"perf_{name}", value) for name, value in properties.items()]
    if measurement.measured_steps:
        replay(benchmark, item.stash[CLOCK], measurement.measured_steps)
    else:
        replay_nothing(benchmark)
    if measurement.excused is not None:
        reasons = printable("; ".join(measurement.waivers or measurement.verdict.reasons))
        raise pytest.xfail.Exception(f"{measurement.excused}: {reasons}")
    if measurement.shadow:
        raise _failed(item, summary.reason(measurement) or "no step was measured", measurement.outcome)
    if measurement.is_empty or session.setup.options.is_failing(measurement):
        raise _failed(item, report.explanation(measurement, whole=item.config.get_verbosity() > 0))
    return measurement


def _is_shadow(item: pytest.Item) -> bool:
    return item.config.stash[SESSION].setup.options.shadow


def _failed(item: pytest.Item, text: str, outcome: str = "failed") -> BaseException:
    if _is_shadow(item):
        return pytest.xfail.Exception(f"{outcome} (shadow): {printable(text)}")
    return pytest.fail.Exception(shown(item.config, text), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Carry the verdict to the terminal, and all that was found from a process of pytest-xdist."""
    test_report: pytest.TestReport = yield
    session = item.config.stash[SESSION]
    item.stash[ENDED] = test_report.when == "teardown"
    if item.stash[ENDED] and is_worker(item.config) and uses_bench(item):
        test_report.perf_found = [  # type: ignore[attr-defined]
            [documents.plain(each) for each in kept if each.nodeid == item.nodeid]
            for kept in (session.results, session.skipped)
        ]
    if test_report.when != "call":
        return test_report
    item.stash[PASSED] = test_report.passed
    if (measurement := item.stash.get(MEASUREMENT, None)) is None:
        return test_report
    is_failing = session.setup.options.is_failing(measurement)
    if test_report.outcome == ("failed" if is_failing else "passed"):  # else the test itself had more to say
        test_report.perf_outcome = measurement.outcome  # type: ignore[attr-defined]
    return test_report
