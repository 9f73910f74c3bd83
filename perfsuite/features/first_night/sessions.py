"""Measure the user's cases twice, to find those that are steady enough for a baseline.

A night can be too short for all cases, and can be interrupted at any moment. So a few cases are measured
twice before the next ones begin, each result is shown as soon as pytest has written it, and the next night
continues with the other cases. All results are in the sessions of one store, in the directory of this step.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from perfsuite.case.case import CollectedTest
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, failed, passed
from perfsuite.dry.cases import collect
from perfsuite.errors import CaseError
from perfsuite.features.first_night.cases import Size
from perfsuite.features.first_night.fit import case_row
from perfsuite.features.first_night.night import Night, not_reached, not_run, why_not
from perfsuite.features.first_night.pytest_process import measured
from perfsuite.report.text import plural
from perfsuite.results.session_file import Measurement, SessionFile, readable
from perfsuite.results.store import Store
from perfsuite.session.jobs import refused

RECORDED_LAUNCHES = 3
MOST_TOGETHER = 6  # maximum number of cases that are recorded before they are measured again
CASE_MIN: Mapping[Size, float] = {"full": 6, "tiny": 1.5, "simulated": 1.5}
"""Estimated minutes needed to measure a case twice. They are used until the first case is measured."""
MOST_REFUSED = 200  # maximum number of rows about cases that this machine cannot run
REACHED = "cases reached"  # name of the row with the number of cases that are done

Results = dict[str, tuple[Measurement, ...]]
"""Case id -> the newest result that recorded a baseline and, if the case was measured after that, also the
newest result. If no result recorded a baseline, only the newest result."""
Measuring = Callable[[Sequence[str], Path, Store], Iterator[SessionFile]]
"""Arguments of pytest, the file for its output, and the store -> the results, whenever they change."""


def case_rows(night: Night, *, measured: Measuring = measured) -> Iterator[Row]:
    """Record a baseline of every case for this hardware, measure the cases again, and compare."""
    check = "cases"
    if not night.cases.is_dir():
        advice = f"write cases with: perfsuite init --hardware {marker_of(night.machine)}"
        yield not_run(check, f"there is no directory {night.cases}", advice)
        return
    directory = night.continued_directory("cases")
    results = results_in(store_in(directory))
    yield from (case_row(*of_case) for of_case in results.values())
    problem = refused(*session_words(night, directory))
    if problem is not None:
        yield not_reached(check, problem) if results else not_run(check, problem)
        return
    reasons = {test.case.id: (test, why_not(test.case, night)) for test in selected(night)}
    refusals = [not_run(case_id, why) for case_id, (_, why) in reasons.items() if why is not None]
    yield from refusals[:MOST_REFUSED]
    if len(refusals) > MOST_REFUSED:
        yield not_run("more cases", f"{len(refusals) - MOST_REFUSED} more cannot run on this machine")
    tests = [test for test, why in reasons.values() if why is None]
    refused_tests = [test for test, why in reasons.values() if why is not None]
    turns = Turns(tests=tests, refused=refused_tests, results=results)
    yield from _in_turns(night, directory, turns, measured)


def marker_of(machine: Machine) -> str:
    """Return the marker of the cases for a machine.

    It is `cpu` on a machine without GPUs. Otherwise, it is the family of the GPUs, or `gpu` if their product
    is unknown.
    """
    if machine.device == "cpu":
        return "cpu"
    return "gpu" if machine.product is None else machine.product.family


def selected(night: Night) -> list[CollectedTest]:
    """Return the tests of the cases for this hardware. Raises `CaseError` if pytest cannot collect them."""
    words = ("-m", marker_of(night.machine), "-p", "no:cacheprovider")
    with tempfile.TemporaryDirectory() as temporary:
        collected = collect([str(night.cases)], *words, file=Path(temporary) / "cases.json")
    return [test for test in collected.tests if test.left_out != "deselected"]


def number_of_cases(night: Night) -> int:
    """Return the number of cases that the next attempt must measure; 0 if pytest cannot collect them."""
    if not night.cases.is_dir():
        return 0
    try:
        tests = [test for test in selected(night) if why_not(test.case, night) is None]
    except CaseError as error:
        night.say(str(error))
        return 0
    results = results_in(store_in(night.directory("cases"))) if night.is_continued else {}
    return len(Turns(tests=tests, results=results).left)


@dataclass(kw_only=True)
class Turns:
    """The cases of this step, their results so far, and the sessions of this night."""

    tests: Sequence[CollectedTest]
    refused: Sequence[CollectedTest] = ()  # tests of cases that this machine cannot run
    results: Results = field(default_factory=dict)
    sessions: Counter[str] = field(default_factory=Counter)  # number of sessions of each case, by its id
    skipped: set[str] = field(default_factory=set)  # ids of the cases whose test was skipped

    def is_done(self, test: CollectedTest) -> bool:
        """Return whether a case needs no further session.

        A case is done if its test was skipped, if it was measured without recording a baseline, or if it was
        measured again. If the newest measurement of a case was disturbed by other users of the machine, the
        case is not done.
        """
        if test.case.id in self.skipped:
            return True
        of_case = self.results.get(test.case.id, ())
        is_half = len(of_case) == 1 and _has_baseline(of_case)
        return bool(of_case) and not is_half and not of_case[-1].shared

    @property
    def left(self) -> list[CollectedTest]:
        """The tests whose cases are not done."""
        return [test for test in self.tests if not self.is_done(test)]

    def case_s(self, size: Size) -> float:
        """Return the expected seconds that are needed to measure a case twice."""
        measured = [of_case for results in self.results.values() for of_case in results]
        seconds = [sum(run.duration_s for run in measurement.runs) for measurement in measured]
        return 2 * median(seconds) if seconds else 60 * CASE_MIN[size]

    def following(self, night: Night) -> list[CollectedTest]:
        """Return the tests of the next session.

        They measure the recorded cases again or, if there are none, as many new cases as fit.

        Empty if no case is left, or if too little time is left for a session. A case that two sessions could
        not finish is left for another night.
        """
        case_s = self.case_s(night.size)
        left = [test for test in self.left if self.sessions[test.case.id] < 2]
        if night.left_s() < case_s / 2:
            return []
        recorded = [test for test in left if _has_baseline(self.results.get(test.case.id, ()))]
        fitting = max(1, int(min(night.left_s() / case_s, MOST_TOGETHER)))
        return recorded or left[:fitting]

    def row(self, night: Night) -> Row:
        """Return the row with the number of cases that are done. It is never a success if cases are left."""
        left = len(self.left)
        done = f"{len(self.tests) - left} of {plural(len(self.tests), 'case')} done"
        if not left:
            return passed(REACHED, done)
        minutes = max(1, round(left * self.case_s(night.size) / 60))
        advice = "run the same command again to measure the other cases"
        return not_reached(REACHED, f"{done}. The others take about {minutes} min", advice)


def _has_baseline(of_case: Sequence[Measurement]) -> bool:
    """Return whether the first measurement of a case recorded a baseline."""
    return bool(of_case) and of_case[0].excused is None and of_case[0].verdict.is_recorded


def _in_turns(night: Night, directory: Path, turns: Turns, measured: Measuring) -> Iterator[Row]:
    """Run sessions until all cases are done or the time is over, and yield the row of each result."""
    yield turns.row(night)
    while batch := turns.following(night):
        case_ids = [test.case.id for test in batch]
        turns.sessions.update(case_ids)
        others = [test.nodeid for test in (*turns.tests, *turns.refused) if test not in batch]
        words = [*session_words(night, directory), *(f"--deselect={nodeid}" for nodeid in others)]
        log = directory / f"session-{len([*directory.glob('session-*.log')]) + 1}.log"
        night.say(f"pytest measures {plural(len(batch), 'case')} in {night.cases}: see {log}")
        before = turns.results
        for session in measured(words, log, store_in(directory)):
            now = with_session(before, session)
            changed = [case_id for case_id in now if now[case_id] != turns.results.get(case_id)]
            turns.results = now
            yield from (case_row(*now[case_id]) for case_id in changed)
            skipped = {skip.case_id: skip.reason for skip in session.skipped if not skip.not_reached}
            yield from (not_run(*skip) for skip in skipped.items() if skip[0] not in turns.skipped)
            turns.skipped.update(skipped)
        for case_id in case_ids:
            if case_id not in turns.results and case_id not in turns.skipped:
                yield failed(case_id, "pytest ended without a result of this case", f"see {log}")
        yield turns.row(night)


def store_in(directory: Path) -> Store:
    """Return the store of this step: its sessions and the baselines that they recorded."""
    return Store(directory / "store")


def results_in(store: Store) -> Results:
    """Return the results of all sessions in a store. Files that cannot be read are ignored."""
    results: Results = {}
    for session in readable(store.results()):
        results = with_session(results, session)
    return results


def with_session(earlier: Results, session: SessionFile) -> Results:
    """Return `earlier` results, updated with those of a later session."""
    results = {**earlier}
    for result in session.results:
        first = results.get(result.case_id, ())[:1]
        is_second = bool(first) and first[0].verdict.is_recorded and not result.verdict.is_recorded
        results[result.case_id] = (*first, result) if is_second else (result,)
    return results


def session_words(night: Night, directory: Path) -> list[str]:
    """Return pytest's arguments. The user's reviewed baselines are not used, so every case is recorded."""
    return [
        str(night.cases),
        "-m",
        marker_of(night.machine),
        "-q",
        "-p",
        "no:cacheprovider",
        f"--perf-store={store_in(directory).path}",
        f"--perf-baselines={directory / 'none'}",
        "--perf-missing-baseline=record",
        f"--perf-record-launches={RECORDED_LAUNCHES}",
        f"--perf-wait-quiet={night.wait_quiet_s:.0f}",
    ]
