"""Runs a test that measures a case: the `bench` fixture, and what becomes of the test."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.errors import AllocationOverError, BusyError, PerfsuiteError
from perfsuite.plugin.benchmark import CLOCK, raise_in, replay, replay_nothing, set_clock
from perfsuite.plugin.collection import EMPTY, NO_CASE, case_of, uses_bench
from perfsuite.plugin.keys import ENDED, MEASUREMENT, PASSED, SESSION, UNDECIDED, is_worker
from perfsuite.plugin.terminal import shown
from perfsuite.report import summary
from perfsuite.report import terminal as report
from perfsuite.report.text import printable
from perfsuite.results.session_file import Measurement


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
    except PerfsuiteError as error:
        session.record_error(case, item.nodeid, error)
        pytest.fail(shown(item.config, str(error)), pytrace=False)
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
        refusal = pytest.fail.Exception(shown(item.config, str(error)), pytrace=False)
    except BaseException as error:
        raise_in(benchmark, error)
    if refusal is not None:  # raised here, pytest has no second exception to show
        raise_in(benchmark, refusal)
    item.stash[MEASUREMENT] = measurement
    properties = summary.properties(measurement)
    benchmark.extra_info.update(properties)
    item.user_properties += [(f"perf_{name}", value) for name, value in properties.items()]
    if measurement.dry:
        replay_nothing(benchmark)
    elif not measurement.measured_steps:
        raise_in(benchmark, _failure(item.config, measurement))
    else:
        replay(benchmark, item.stash[CLOCK], measurement.measured_steps)
    if session.setup.options.is_failing(measurement) or measurement.excused is not None:
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
    return pytest.fail.Exception(shown(config, told), pytrace=False)


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
    if is_worker(item.config):
        test_report.perf_measurement = documents.plain(measurement)  # type: ignore[attr-defined]
    is_failing = item.config.stash[SESSION].setup.options.is_failing(measurement)
    if test_report.outcome == ("failed" if is_failing else "passed"):  # else the test itself had more to say
        test_report.perf_outcome = measurement.outcome  # type: ignore[attr-defined]
    return test_report
