"""Run the tests that measure cases. Defines the `bench` fixture, and decides the outcome of each test."""

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.errors import AllocationOverError, CaseError, PerfsuiteError, error_text
from perfsuite.plugin.benchmark import CLOCK, replay, replay_nothing, set_clock
from perfsuite.plugin.collection import (
    EMPTY,
    ENDED,
    NO_CASE,
    SESSION,
    case_of,
    is_worker,
    runs_no_test,
    shown,
    uses_bench,
)
from perfsuite.plugin.others import NOT_SIDE_BY_SIDE
from perfsuite.report import summary, terminal
from perfsuite.report.safe_text import printable, visible
from perfsuite.results.session_file import Measurement
from perfsuite.session.mode import Mode

PASSED = pytest.StashKey[bool]()  # whether the test function itself passed
MEASUREMENT = pytest.StashKey[Measurement]()  # the result of the test's case
ENDED_AS = pytest.StashKey[str]()  # the outcome of a test, regardless of its verdict
WHY = pytest.StashKey[str]()  # the message of a test that did not pass
ENDED_WORDS = {"passed": "passed", "skipped": "was skipped", "xfailed": "failed as expected"}
UNMEASURED = "the test passed without measuring its case"
NEVER_CALLED = "the test uses bench but never called it, so nothing was measured"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a case that this machine cannot run, with the reason. Give pytest-benchmark a replay clock."""
    if not uses_bench(item):
        return
    if is_worker(item.config) and not item.config.getoption("--perf-dry"):
        pytest.fail(NOT_SIDE_BY_SIDE, pytrace=False)
    if EMPTY in item.stash:
        pytest.fail("no case: the parameters of this test are empty", pytrace=False)
    case = case_of(item)
    if case is not None and not runs_no_test(item.config):
        _skip_if_impossible(item, case)
    set_clock(item)


def _skip_if_impossible(item: pytest.Item, case: Case) -> None:
    session = item.config.stash[SESSION]
    try:
        reason = session.skip_reason(case)
    except Exception as error:
        item.stash[MEASUREMENT] = session.record_error(case, item.nodeid, error)
        if isinstance(error, PerfsuiteError) or _is_shadow(item):
            raise _failed(item, error_text(error)) from None
        raise
    if reason is not None:
        session.record.skip(case, item.nodeid, reason)
        pytest.skip(reason)
    if not session.has_time(case, item.nodeid):
        pytest.skip(session.record.skipped[-1].reason)


@pytest.fixture
def bench(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[Callable[[Case], Measurement]]:
    """Measure a case and fail the test if it regressed: `def test_llama(bench, case): bench(case)`."""
    item = request.node
    thread = threading.get_ident()
    parameter = case_of(item)
    # Check this again, because collection does not see a test that calls `request.getfixturevalue("bench")`.
    if not uses_bench(item) or parameter is None:
        pytest.fail(NO_CASE, pytrace=False)
    cases: list[Case] = []
    refused = [NEVER_CALLED]

    def measure(case: Case) -> Measurement:
        why = _why_refused(case, parameter, is_first=not cases)
        if why is None and threading.get_ident() != thread:
            why = "bench was called in another thread, where its verdict would be lost: call it in the test"
        if why is not None:
            refused.append(why)
            pytest.fail(why, pytrace=False)
        cases.append(case)
        return _measure(item, case, benchmark)

    yield measure
    if not cases:
        replay_nothing(benchmark)
    if not cases and item.stash.get(PASSED, False):
        pytest.fail(refused[-1], pytrace=False)


def _why_refused(given: object, parameter: Case, *, is_first: bool) -> str | None:
    """Return why bench refuses `given` in a test whose case is `parameter`; None if bench accepts it."""
    if given == parameter:
        return None if is_first else "bench measures one case per test: parametrize the test instead"
    if not isinstance(given, Case):
        return f"bench was given {given!r:.80}: give it the case that is the test's parameter, {parameter.id}"
    name = given.id
    if name == parameter.id:
        differing = (
            field for field in Case.model_fields if getattr(given, field) != getattr(parameter, field)
        )
        name = f"a different case with the same id (it differs in {', '.join(differing)})"
    return (
        f"bench measures the case that is the test's parameter, {parameter.id}, but was given {name}. Make "
        'that case a parameter: @pytest.mark.parametrize("case", [case.replace(...)])'
    )


def _how_to_go_on(mode: Mode) -> str:
    """Return what to do after the allocation of a session has ended."""
    if mode.arms or mode.reference_facts is not None:
        return "Measure the remaining cases in another session: select them with -k"
    return "--perf-resume measures the remaining cases in another allocation"


def _measure(item: pytest.Item, case: Case, benchmark: Any) -> Measurement:
    session = item.config.stash[SESSION]
    before = session.record.measured
    try:
        measurement = session.measure(case, item.nodeid)
    except BaseException as error:
        replay_nothing(benchmark)
        if session.record.measured > before:
            item.stash[MEASUREMENT] = session.record.results[-1]
        if isinstance(error, AllocationOverError):
            raise pytest.exit.Exception(f"perfsuite: {error}. {_how_to_go_on(session.mode)}") from None
        if isinstance(error, PerfsuiteError) or (isinstance(error, Exception) and _is_shadow(item)):
            raise _failed(item, error_text(error)) from None
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
    if session.setup.options.fails_session(measurement):
        raise _failed(item, _explanation(item, measurement))
    return measurement


def _explanation(item: pytest.Item, measurement: Measurement) -> str:
    return terminal.explanation(measurement, whole=item.config.get_verbosity() > 0)


def _is_shadow(item: pytest.Item) -> bool:
    return item.config.stash[SESSION].setup.options.shadow


def _failed(item: pytest.Item, text: str, outcome: str = "failed") -> BaseException:
    if _is_shadow(item):
        return pytest.xfail.Exception(f"{outcome} (shadow): {printable(text)}")
    return pytest.fail.Exception(shown(item.config, text), pytrace=False)


# As the outermost wrapper, this gets the report after the hooks that handle expected failures (xfail).
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Pass the verdict on to the terminal. A worker of pytest-xdist also passes on all results.

    A test with a failing verdict fails, even if the test itself swallowed the failure. If a test ends without
    a verdict, its case is recorded as skipped by the test, or as failed. So every case is in the results.
    """
    test_report: pytest.TestReport = yield
    if not uses_bench(item) or runs_no_test(item.config):
        return test_report
    record = item.config.stash[SESSION].record
    options = record.options
    item.stash[ENDED] = test_report.when == "teardown"
    _note_outcome(item, test_report, call)
    if test_report.when == "call":
        item.stash[PASSED] = test_report.passed
    has_verdict = MEASUREMENT in item.stash
    if item.stash[ENDED] and not has_verdict:
        _note_unmeasured(item)
    measurement = item.stash.get(MEASUREMENT, None)
    if measurement is not None and test_report.when != "setup":
        fails = options.fails_session(measurement) and not measurement.shadow
        if fails and item.stash[ENDED_AS] != "failed":
            if has_verdict:
                test_report.perf_swallowed = item.stash[ENDED_AS]  # type: ignore[attr-defined]
            _fail(item, test_report, measurement)
        is_failing = options.is_failing(measurement)
        if test_report.when == "call" and test_report.outcome == ("failed" if is_failing else "passed"):
            test_report.perf_outcome = measurement.outcome  # type: ignore[attr-defined]
    if item.stash[ENDED] and is_worker(item.config):
        test_report.perf_found = [  # type: ignore[attr-defined]
            [documents.plain(result) for result in kept if result.nodeid == item.nodeid]
            for kept in (record.results, record.skipped)
        ]
    return test_report


def _note_outcome(item: pytest.Item, test_report: pytest.TestReport, call: pytest.CallInfo[Any]) -> None:
    """Record the outcome of a test so far, and the reason.

    The first failed phase decides. If no phase failed, the last phase whose outcome is not `passed` decides.
    """
    if test_report.when == "setup":
        item.stash[ENDED_AS] = "passed"
        item.stash[WHY] = "its test gave no reason"
    if item.stash[ENDED_AS] == "failed" or test_report.passed:
        return
    was_expected = hasattr(test_report, "wasxfail")
    item.stash[ENDED_AS] = "xfailed" if was_expected else test_report.outcome
    if call.excinfo is not None:
        error = call.excinfo.value
        is_outcome = isinstance(error, (pytest.fail.Exception, pytest.skip.Exception))
        item.stash[WHY] = str(error) if is_outcome else error_text(error)


def _note_unmeasured(item: pytest.Item) -> None:
    """Record the case of a test that ended without a verdict, regardless of its outcome."""
    session = item.config.stash[SESSION]
    case = case_of(item)
    is_noted = any(skip.nodeid == item.nodeid for skip in session.record.skipped)
    if case is None or is_noted:
        return  # an empty parametrization has already failed, and a skipped case is already recorded
    why = item.stash[WHY]
    how = item.stash[ENDED_AS]
    if how == "skipped":
        missing = session.why_required(case)
        if missing is None:
            session.record.skip(case, item.nodeid, why, by_test=True)
            return
        why = f"the test skipped the case ({why}), but {missing}"
    elif how == "xfailed":
        why = (
            f"its test expected a failure: {why}. Declare the failure in the case (known_issue), or waive it"
        )
    text = UNMEASURED if how == "passed" else f"it was not measured: {why}"
    result = session.record_error(case, item.nodeid, CaseError(text))
    # The test itself is wrong, so it fails in shadow mode too.
    item.stash[MEASUREMENT] = result.replace(shadow=False)


def _fail(item: pytest.Item, test_report: pytest.TestReport, measurement: Measurement) -> None:
    """Fail a test that ignored its verdict."""
    ended = item.stash[ENDED_AS]
    item.stash[ENDED_AS] = "failed"
    test_report.outcome = "failed"
    if hasattr(test_report, "wasxfail"):
        del test_report.wasxfail
    text = f"the test {ENDED_WORDS[ended]}, but its verdict is a failure\n{_explanation(item, measurement)}"
    test_report.longrepr = shown(item.config, text)
