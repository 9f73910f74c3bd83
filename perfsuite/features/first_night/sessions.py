"""Measure the user's cases twice, to find those that are steady enough for a baseline."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.errors import FileError
from perfsuite.features.first_night.night import Night, not_run
from perfsuite.report.summary import change, reason
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Check
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.session.jobs import refused

RECORDED_LAUNCHES = 3
END_S = 20.0  # seconds in which an interrupted pytest must write its results
MOST_CASES = 200  # maximum number of rows on the page


def case_rows(night: Night) -> Iterator[Row]:
    """Record a baseline of every case for this hardware, measure again, and compare."""
    check = "cases"
    if not night.cases.is_dir():
        advice = f"write cases with: perfsuite init --hardware {marker_of(night.machine)}"
        yield not_run(check, f"there is no directory {night.cases}", advice)
        return
    directory = night.new_directory("cases")
    words = session_words(night, directory)
    problem = refused(*words)
    if problem is not None:
        yield not_run(check, problem)
        return
    first = measured(night, words, directory / "first")
    if first is None:
        yield failed(check, "the first session wrote no results", f"see {directory / 'first.log'}")
        return
    second = measured(night, words, directory / "second")
    if not (first.results or first.skipped):
        yield unknown(check, "the first session measured no case", f"see {directory / 'first.log'}")
        return
    yield from compared(first, second)


def marker_of(machine: Machine) -> str:
    """Return the marker of the cases for a machine: the family of its GPUs, `gpu` or `cpu`."""
    if machine.device == "cpu":
        return "cpu"
    return "gpu" if machine.product is None else machine.product.family


def session_words(night: Night, directory: Path) -> list[str]:
    """Return pytest's arguments. Reviewed baselines are left out, so that both sessions are alike."""
    words = [
        str(night.cases),
        "-m",
        marker_of(night.machine),
        "-q",
        "-p",
        "no:cacheprovider",
        f"--perf-store={directory / 'store'}",
        f"--perf-baselines={directory / 'none'}",
        "--perf-missing-baseline=record",
        f"--perf-record-launches={RECORDED_LAUNCHES}",
        f"--perf-wait-quiet={night.wait_quiet_s:.0f}",
    ]
    left_s = night.left_s()
    # Each of the two sessions gets half of the time.
    return words if left_s == float("inf") else [*words, f"--perf-budget={max(left_s / 2 - END_S, 1):.0f}s"]


def measured(night: Night, words: Sequence[str], out: Path) -> SessionFile | None:
    """Run pytest, and return its results; None if it wrote none. Its output is kept next to `out`."""
    night.say(f"pytest {' '.join(words)}")
    results = out / "results.json"
    with out.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", "pytest", *words, f"--perf-report={out}"]
        session = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            session.wait()
        except BaseException:
            # As after Ctrl-C, pytest then ends its launches and writes the results so far.
            session.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                session.wait(END_S)
            session.kill()
            raise
    try:
        return documents.read(results, SessionFile)
    except FileError:
        return None


def compared(first: SessionFile, second: SessionFile | None) -> Iterator[Row]:
    """Return a row for each case. A case is fit for a baseline if it is recorded first and then passes."""
    again = {} if second is None else {result.case_id: result for result in second.results}
    for result in first.results[:MOST_CASES]:
        yield _case_row(result, again.get(result.case_id))
    if len(first.results) > MOST_CASES:
        yield unknown("more cases", f"{len(first.results) - MOST_CASES} more are not listed")
    for skip in first.skipped[:MOST_CASES]:
        yield not_run(skip.case_id, skip.reason)


def _case_row(first: Measurement, second: Measurement | None) -> Row:
    check = first.case_id
    if first.excused is not None:
        return unknown(check, f"no baseline: {first.excused}: {reason(first)}".rstrip(": "))
    if first.outcome == "failed":
        return failed(check, reason(first) or "failed", "fix it, or expect it with known_issue")
    if not first.verdict.is_recorded:
        return unknown(check, f"no baseline: {first.outcome}: {reason(first) or ''}".rstrip(": "))
    if second is None:
        return unknown(check, "recorded, but not measured again")
    if second.excused is not None:
        return unknown(check, f"recorded, then {second.excused}: {reason(second)}".rstrip(": "))
    if second.verdict.moved_by_machine:
        return _moved_row(check, second.verdict.moved_by_machine)
    if second.outcome == "passed":
        speed = second.verdict.check(TOKENS_PER_S.name)
        least = None if speed is None else speed.minimum_detectable
        detects = "" if least is None else f"changes of {least:.1%} or more in tokens/s can be detected"
        if speed is not None and speed.blind:
            advice = "use longer steps or lock the clocks: changes of the allowed size would be missed"
            shown = f"passed, but only {detects}, and the allowed change is {speed.allowed:.1%}"
            return unknown(check, shown, advice)
        return passed(check, f"fit for a baseline: recorded, then passed; {detects}".rstrip("; "))
    outcome = f"{second.outcome} without a change: {reason(second) or ''}".rstrip(": ")
    if second.outcome in ("regressed", "failed"):
        return failed(check, outcome, "find out why before accepting a baseline")
    return unknown(check, outcome)


def _moved_row(check: str, moved: Sequence[Check]) -> Row:
    """Return the row of a case whose speed changed although the code did not.

    The cause is the machine, which could also hide a change of the code. Only a slower case fails.
    """
    changes = ", ".join(map(change, moved))
    observed = f"two sessions of the same code differ: {changes}"
    advice = "find out why before accepting a baseline: the machine was not as steady as one session shows"
    is_slower = any(metric.outcome == "inconclusive" for metric in moved)
    return failed(check, observed, advice) if is_slower else unknown(check, observed, advice)
