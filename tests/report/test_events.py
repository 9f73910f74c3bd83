from perfsuite.report import events
from perfsuite.report.markdown import render
from perfsuite.report.terminal import explanation
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.rank_report import SpanTimes
from perfsuite.results.run import Run
from tests.samples import make_result, make_run, make_session_file

SAVED = Counts(spans={"save checkpoint": Counts(bytes_written=2**30)})
STEPS = 10
SPANS = {
    "load checkpoint": SpanTimes(seconds=(1.5,), steps=(0,)),
    "save checkpoint": SpanTimes(seconds=(1.0, 3.0, 1.2), steps=(0, 6, 8)),
    "rollout": SpanTimes(seconds=(0.05,) * STEPS, steps=tuple(range(STEPS))),
    "imports": SpanTimes(seconds=(4.0,)),  # a part of the start
}


def with_events(**changes: object) -> Run:
    fields: dict[str, object] = {
        "step_s": (0.1,) * STEPS,
        "window": (4, STEPS),
        "spans": SPANS,
        "counts": (RankCounts(ranks=(0, 1), counts=SAVED), RankCounts(ranks=(2,), counts=Counts())),
    }
    return make_run(**{**fields, **changes})


def test_each_event_has_a_row_with_its_times_and_when() -> None:
    assert events.table([with_events()]).rows == [
        ("load checkpoint", "1", "1.5 s", "1.5 s", "–", "before step 1"),  # noqa: RUF001
        ("save checkpoint", "3", "1.2 s", "3.0 s", "2.00 GiB", "before step 1, in steps 7,9"),
        ("rollout", "10", "50.0 ms", "50.0 ms", "–", "before step 1, in steps 2-10"),  # noqa: RUF001
    ]


def test_many_steps_are_told_by_their_number() -> None:
    steps = tuple(range(0, 80, 10))
    run = with_events(spans={"evaluate": SpanTimes(seconds=(1.0,) * 8, steps=steps)})
    assert events.table([run]).rows[0][-1] == "before step 1, in 7 steps, 11 to 71"


def test_a_launch_without_events_has_no_table() -> None:
    assert not events.table([make_run()])
    assert not events.table([])


def test_the_longest_event_of_the_measured_steps_names_its_step() -> None:
    """Neither one before them, nor what most steps hold."""
    assert events.held([with_events()]) == ["step 7 held: save checkpoint 3.0 s"]


def test_a_short_event_makes_no_step_long() -> None:
    short = {"save checkpoint": SpanTimes(seconds=(0.009,), steps=(6,))}
    assert events.held([with_events(spans=short)]) == []


def test_the_terminal_has_the_table_and_the_step() -> None:
    text = explanation(make_result(with_events()))
    assert "  events and phases:\n" in text
    assert "step 7 held: save checkpoint 3.0 s" in text


def test_the_summary_has_the_table_of_all_cases() -> None:
    session = make_session_file(make_result(with_events()))
    assert "<summary>Events and phases: 3</summary>" in render([session])
