from __future__ import annotations

import pytest

from perfsuite.report import markdown, profile, terminal
from perfsuite.results.outcome import Profiled, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.overall import THE_SAME
from perfsuite.verdict.profiled import NOT_IN_EACH_STEP
from tests.samples import make_compared, make_result, now
from tests.sessions import make_session
from tests.traces import EAGER, make_profile, taken

FOUND = Profiled(
    calls=("aten::bmm 0 -> 24 calls a step", "aten::softmax 0 -> 4 calls a step"),
    hints=("by time, a hint: compute 1.0 -> 2.0 ms (+1.0 of +1.0 ms)",),
    notes=("a note",),
)
COUNTED = "FLOPs in forward: 1.0 -> 2.0 MFLOP"


def because(explained: str | None = COUNTED, **changes: tuple[str, ...]) -> list[str]:
    found = FOUND.replace(**changes)
    return profile.because(Verdict(outcome="regressed", launches=3, explained=explained, profiled=found))


def make_explained() -> Measurement:
    """Arm B computes attention otherwise."""
    result = make_compared()
    verdict = result.verdict.replace(profiled=FOUND, explained=COUNTED)
    return result.replace(profile=taken(EAGER, EAGER), profile_before=taken(), verdict=verdict)


def test_calls_come_before_counts_and_counts_before_times() -> None:
    assert because() == [*FOUND.calls, COUNTED, *FOUND.hints, *FOUND.notes]


def test_that_the_counts_are_the_same_is_told_only_where_calls_are_too() -> None:
    same = "no call differs"
    told = f"{THE_SAME} packages, threads, the machine"
    assert because(told) == [*FOUND.calls, *FOUND.hints, *FOUND.notes]
    assert because(told, calls=()) == [told, same, *FOUND.hints, *FOUND.notes]
    now_and_then = (f"{NOT_IN_EACH_STEP}: aten::item",)
    assert because(told, calls=(), notes=now_and_then) == [told, *FOUND.hints, *now_and_then]


@pytest.mark.parametrize("explained", [None, COUNTED])
def test_without_a_profile_the_counts_alone_explain(explained: str | None) -> None:
    told = profile.because(Verdict(outcome="regressed", launches=3, explained=explained))
    assert told == ([] if explained is None else [explained])


def test_the_parts_of_a_step_in_one_line() -> None:
    assert profile.split(make_profile().split) == (
        "100.0 ms a step: compute 60.0, optimizer 10.0, all_gather exposed 12.1, idle 17.9"
    )


def test_the_trace_to_open_is_named() -> None:
    file = "/tmp/runs/x/profile/trace-0.json.gz (opens in https://ui.perfetto.dev)"
    assert profile.traces(make_explained()) == [
        f"trace of arm A, rank 0: {file}",
        f"trace of arm B, rank 0, beside 1 other: {file}",
    ]
    assert profile.traces(make_result(now(), profile=taken())) == [f"trace of rank 0: {file}"]
    assert profile.traces(make_result(now(), profile=TakenProfile(why_none="boom"))) == []


def test_the_terminal_and_the_summary_tell_it_in_this_order() -> None:
    told = terminal.explanation(make_explained()).splitlines()
    assert told[1:6] == [f"  {line}" for line in (*FOUND.calls, COUNTED, *FOUND.hints, *FOUND.notes)]
    assert sum("ui.perfetto.dev" in line for line in told) == 2
    summary = markdown.render([make_session(0).replace(results=(make_explained(),))])
    assert "- aten::bmm 0 -> 24 calls a step\n- aten::softmax" in summary
    assert "trace of arm B" in summary
