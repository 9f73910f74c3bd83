"""Test spans of this process with a clock and meters that the test controls."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from perfsuite.results.counts import Counts
from perfsuite.worker.spans.recording import MOST_NAMES, Meters, Span, Spans
from tests.samples import known
from tests.worker.loops import in_a_thread

SAVE = "save checkpoint"


class Machine:
    """The values that the meters read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.collectives: int | None = 0
        self.peak: int | None = 0
        self.steps = 0


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def spans(machine: Machine) -> Spans:
    meters = Meters(
        now=lambda: machine.now, collectives=lambda: machine.collectives, peak=lambda: machine.peak
    )
    spans = Spans(meters)
    spans.train(lambda: machine.steps)
    return spans


def span(spans: Spans, *work: Callable[[], object], name: str = SAVE, is_event: bool = True) -> Span | None:
    begun: Span | None = spans.begin(name, is_event=is_event)
    for act in work:
        act()
    if begun is not None:
        spans.end(begun)
    return begun


def takes(machine: Machine, seconds: float) -> Callable[[], None]:
    def work() -> None:
        machine.now += seconds

    return work


def counts(spans: Spans, name: str = SAVE) -> Counts:
    return known(spans.counts().get(name))


def test_each_time_has_its_seconds_and_prior_steps(spans: Spans, machine: Machine) -> None:
    span(spans, takes(machine, 2))
    machine.steps = 10
    span(spans, takes(machine, 3))
    times = spans.times()[SAVE]
    assert (times.seconds, times.steps) == ((2, 3), (0, 10))


def test_an_event_within_another_is_part_of_it(spans: Spans, machine: Machine) -> None:
    span(spans, lambda: span(spans, takes(machine, 2), name="load checkpoint"), takes(machine, 1))
    assert {name: times.seconds for name, times in spans.times().items()} == {SAVE: (3,)}


def test_an_event_within_a_phase_is_also_an_event(spans: Spans, machine: Machine) -> None:
    span(spans, lambda: span(spans, takes(machine, 2)), name="validate", is_event=False)
    assert {name: times.seconds for name, times in spans.times().items()} == {SAVE: (2,), "validate": (2,)}


def test_a_phase_within_itself_is_one(spans: Spans, machine: Machine) -> None:
    inner = lambda: span(spans, takes(machine, 2), name="rollout", is_event=False)  # noqa: E731
    span(spans, inner, name="rollout", is_event=False)
    assert spans.times()["rollout"].seconds == (2,)


def test_ending_a_span_leaves_later_ones_open(spans: Spans, machine: Machine) -> None:
    first = known(spans.begin("tokenize"))
    second = known(spans.begin("generate"))
    spans.end(first)
    assert spans.begin("generate") is None, "it is a part of the open one"
    machine.now += 3
    spans.end(second)
    assert spans.times()["generate"].seconds == (3,)


def test_what_another_thread_does_delays_nothing(spans: Spans, machine: Machine) -> None:
    in_a_thread(lambda: span(spans, takes(machine, 2), lambda: spans.wrote(100)))
    assert (spans.times(), spans.counts()) == ({}, {})


def test_early_span_is_of_the_thread_that_trains(machine: Machine) -> None:
    spans = Spans(Meters(now=lambda: machine.now))
    span(spans, takes(machine, 2))
    spans.train(lambda: 0)
    assert spans.times()[SAVE].seconds == (2,)


def test_a_span_that_has_not_ended_is_a_note(spans: Spans, machine: Machine) -> None:
    spans.begin("train", is_event=False)
    assert spans.times() == {}
    assert spans.notes == ["train: the last one was still open when the last step ended, so it is left out"]


def test_bytes_are_those_of_the_first_step(spans: Spans, machine: Machine) -> None:
    machine.steps = 5
    span(spans, lambda: spans.wrote(100), lambda: spans.wrote(20))
    machine.steps = 6
    span(spans, lambda: spans.wrote(7))
    assert counts(spans).bytes_written == 120


def test_calls_in_one_step_are_one_checkpoint(spans: Spans, machine: Machine) -> None:
    """A script can save its model and its optimizer into two files."""

    def save(size: int, collectives: int, peak: int) -> None:
        spans.wrote(size)
        machine.collectives = known(machine.collectives) + collectives
        machine.peak = peak

    machine.collectives = 0
    span(spans, lambda: save(100, 2, 1000))
    span(spans, lambda: save(7, 1, 900))
    saved = counts(spans)
    assert (saved.bytes_written, saved.collectives_begun, saved.allocator_peak) == (107, 3, 1000)


def test_bytes_of_a_step_need_those_of_each_call(spans: Spans) -> None:
    span(spans, lambda: spans.wrote(100))
    span(spans)
    assert counts(spans).bytes_written is None


def test_later_background_writes_of_a_step_count(spans: Spans) -> None:
    backgrounds = []
    span(spans, lambda: spans.wrote(100))
    span(spans, lambda: backgrounds.append(known(spans.leave())))
    in_a_thread(lambda: spans.wrote(50, in_background=True))
    backgrounds[0].future = Future()
    assert counts(spans).bytes_written is None
    backgrounds[0].future.set_result(None)
    assert (counts(spans).bytes_written, counts(spans).collectives_begun) == (150, None)


def test_bytes_that_nobody_saw_are_unknown(spans: Spans) -> None:
    span(spans)
    assert counts(spans).bytes_written is None


def test_bytes_count_for_the_phase_around_an_event(spans: Spans) -> None:
    span(spans, lambda: span(spans, lambda: spans.wrote(100)), name="validate", is_event=False)
    assert [counts(spans, name).bytes_written for name in ("validate", SAVE)] == [100, 100]


def test_counts_collectives_that_the_span_began(spans: Spans, machine: Machine) -> None:
    machine.collectives = 40

    def gather() -> None:
        machine.collectives = 43

    span(spans, gather)
    assert counts(spans).collectives_begun == 3


@pytest.mark.parametrize("after", [None, 39])
def test_collectives_of_a_gone_group_are_unknown(spans: Spans, machine: Machine, after: int | None) -> None:
    machine.collectives = 40

    def destroy() -> None:
        machine.collectives = after

    span(spans, destroy)
    assert counts(spans).collectives_begun is None


@pytest.mark.parametrize(("after", "peak"), [(1000, None), (1200, 1200)])
def test_a_peak_is_known_if_it_is_a_new_one(
    spans: Spans, machine: Machine, after: int, peak: int | None
) -> None:
    machine.peak = 1000

    def allocate() -> None:
        machine.peak = after

    span(spans, allocate)
    assert counts(spans).allocator_peak == peak


def leave(spans: Spans, future: Any) -> Callable[[], None]:
    def work() -> None:
        spans.leave().future = future

    return work


def write_behind(spans: Spans) -> None:
    in_a_thread(lambda: spans.wrote(100, in_background=True))


def test_background_writes_count_for_their_span(spans: Spans, machine: Machine) -> None:
    future = Future[None]()
    span(spans, leave(spans, future), takes(machine, 1))
    machine.now = 50
    write_behind(spans)
    future.set_result(None)
    assert (counts(spans).bytes_written, spans.times()[SAVE].seconds) == (100, (1,))


def test_a_span_runs_until_its_background_work_ends(spans: Spans, machine: Machine) -> None:
    """Training can wait for the work unseen, such as with `concurrent.futures.wait`."""
    future = Future[None]()
    span(spans, leave(spans, future))
    assert spans.open_for(120) is None
    machine.now = 120
    assert spans.open_for(120) == SAVE
    future.set_result(None)
    assert spans.open_for(120) is None


def test_background_work_that_never_began_does_not_run(spans: Spans, machine: Machine) -> None:
    span(spans, lambda: known(spans.leave()))
    machine.now = 120
    assert spans.open_for(120) is None


def test_writes_before_the_future_count(spans: Spans) -> None:
    def begin_and_write() -> None:
        left = spans.leave()
        write_behind(spans)
        left.future = Future[None]()
        left.future.set_result(None)

    span(spans, begin_and_write)
    assert counts(spans).bytes_written == 100


def test_write_unfinished_at_the_end_is_unknown(spans: Spans) -> None:
    span(spans, leave(spans, Future[None]()))
    write_behind(spans)
    assert counts(spans).bytes_written is None
    assert spans.notes == [
        f"{SAVE}: the bytes written by the first one are unknown, because its work in the background "
        "was still running when the last step ended"
    ]


def test_what_two_write_at_once_is_unknown(spans: Spans) -> None:
    first = Future[None]()
    span(spans, leave(spans, first))
    span(spans, leave(spans, Future[None]()))
    write_behind(spans)
    first.set_result(None)
    assert counts(spans).bytes_written is None
    assert spans.notes[0].endswith("its work in the background was still running when the next one began")


def test_background_work_hides_collectives(spans: Spans) -> None:
    future = Future[None]()
    future.set_result(None)
    span(spans, leave(spans, future))
    assert counts(spans).collectives_begun is None


def test_names_without_end_are_cut(spans: Spans) -> None:
    for number in range(MOST_NAMES + 5):
        span(spans, name=f"rollout {number}", is_event=False)
    assert len(spans.times()) == MOST_NAMES
    assert spans.notes == [f"only the first {MOST_NAMES} names of events and phases are reported"]


def test_an_error_of_ours_becomes_a_note() -> None:
    def fail() -> int:
        raise RuntimeError("no such group")

    spans = Spans(Meters(collectives=fail))
    assert span(spans) is None
    assert spans.notes == ["some events or phases are unknown (RuntimeError: no such group)"]


def test_a_failed_occurrence_is_left_out(spans: Spans, machine: Machine) -> None:
    failed = known(spans.begin(SAVE, is_event=True))
    spans.wrote(5)
    spans.end(failed, OSError)
    span(spans, takes(machine, 2), lambda: spans.wrote(100))
    assert spans.times()[SAVE].seconds == (2,)
    assert (counts(spans).bytes_written, counts(spans).occurrences) == (100, None)
    assert spans.notes == ["save checkpoint: 1 ended with an exception (OSError) and does not count"]


def test_counts_each_kind_of_exception_once(spans: Spans) -> None:
    for error in (OSError, ValueError, OSError):
        spans.end(known(spans.begin(SAVE)), error)
    assert (spans.times(), spans.counts()) == ({}, {})
    assert spans.notes == [
        "save checkpoint: 3 ended with an exception (OSError, ValueError) and do not count"
    ]


def test_failures_of_another_thread_are_no_note(spans: Spans) -> None:
    in_a_thread(lambda: spans.end(known(spans.begin(SAVE)), OSError))
    span(spans)
    spans.times()
    assert (spans.notes, counts(spans).occurrences) == ([], 1)


def test_counts_the_occurrences(spans: Spans) -> None:
    span(spans)
    span(spans)
    span(spans, name="evaluate")
    in_a_thread(lambda: span(spans))
    assert (counts(spans).occurrences, counts(spans, "evaluate").occurrences) == (2, 1)


def test_occurrences_are_unknown_while_one_is_open(spans: Spans) -> None:
    span(spans)
    spans.begin(SAVE, is_event=True)
    assert counts(spans).occurrences is None


def test_a_wait_adds_seconds_but_no_occurrence(spans: Spans, machine: Machine) -> None:
    span(spans, takes(machine, 2))
    machine.steps = 3
    wait = known(spans.begin(SAVE, is_event=True, is_wait=True))
    machine.now += 4
    spans.end(wait)
    times = spans.times()[SAVE]
    assert (times.seconds, times.steps, times.occurrences, times.mean_s) == ((2, 4), (0, 3), 1, 6)
    assert counts(spans).occurrences == 1


def test_a_wait_that_fails_keeps_its_seconds(spans: Spans, machine: Machine) -> None:
    span(spans, takes(machine, 2))
    wait = known(spans.begin(SAVE, is_event=True, is_wait=True))
    machine.now += 4
    spans.end(wait, RuntimeError)
    assert (spans.times()[SAVE].seconds, counts(spans).occurrences) == ((2, 4), None)
    assert spans.notes == ["save checkpoint: 1 ended with an exception (RuntimeError) and does not count"]


def test_a_wait_is_not_the_counted_occurrence(spans: Spans) -> None:
    spans.end(known(spans.begin(SAVE, is_event=True, is_wait=True)))
    assert spans.counts() == {}


def test_an_abandoned_span_ends_no_later_ones(spans: Spans, machine: Machine) -> None:
    """For example, a generator with a phase is never finished."""
    outer = known(spans.begin("rollout"))
    spans.begin("load")
    spans.end(outer)
    for _ in range(2):
        machine.steps += 1
        span(spans, name="load")
    assert len(spans.times()["load"].seconds) == 2
