from typing import Any

import pytest

from perfsuite.report import spans
from perfsuite.report.html import page
from perfsuite.report.markdown import render
from perfsuite.report.spans import SpanRow
from perfsuite.report.terminal import explanation
from perfsuite.report.text import NONE
from perfsuite.results.counts import Counts, PythonCalls, RankCounts, WorkerBatch, step_name
from perfsuite.results.rank_report import SpanTimes
from perfsuite.results.run import Run
from tests.counted import MIB, make_collective, make_compiled, make_counts
from tests.samples import make_compared, make_result, make_run, make_session_file

STEPS = 10
WARM = {"start-up": 8.0, "start-up: imports": 6.0, "start-up: first step": 2.0}
COLD = {"cold start-up": 60.0, "cold start-up: imports": 7.0, "cold start-up: first step": 53.0}
EVENTS = {
    "load checkpoint": SpanTimes(seconds=(1.5,), steps=(0,)),
    "save checkpoint": SpanTimes(seconds=(1.0, 3.0, 1.2), steps=(0, 6, 8)),
    "rollout": SpanTimes(seconds=(0.05,) * STEPS, steps=tuple(range(STEPS))),
}


def times(start_up: dict[str, float]) -> dict[str, SpanTimes]:
    return {name: SpanTimes(seconds=(seconds,)) for name, seconds in start_up.items()}


def launch(*counts: Counts, **changes: Any) -> Run:
    """Return a launch of ten steps of 0.1 s. The last six are measured. Each of `counts` is one rank."""
    entries = tuple(RankCounts(ranks=(rank,), counts=rank_counts) for rank, rank_counts in enumerate(counts))
    fields = {"step_s": (0.1,) * STEPS, "window": (4, STEPS), "counts": entries, "spans": times(WARM)}
    return make_run(**{**fields, **changes})


def test_a_later_wait_is_shown_as_part_of_its_event() -> None:
    saves = SpanTimes(seconds=(1.0, 2.0, 6.0), steps=(5, 6, 8), waits=1)

    row = of(launch(make_counts(), spans={"save checkpoint": saves}))["save checkpoint"]

    assert (row.times, row.median_s) == (2, 4.5)


def stepping(changed: dict[int, dict[str, Any]], **changes: Any) -> Run:
    """Return a launch with counts of steps 4 to 15. `changed` has the fields that differ, by step."""
    done = make_counts(memory=None)
    for step in range(5, 16):
        done = done.with_step(make_counts(memory=None, step=step, **changed.get(step, {})))
    return launch(done, **{"step_s": (0.1,) * 30, "window": (20, 30), **changes})


def of(*runs: Run, before: tuple[Run, ...] = ()) -> dict[str, SpanRow]:
    """Return the rows of the table by name. With two arms, the name includes the arm."""
    return {f"{row.name} {row.arm}".strip(): row for row in spans.rows(runs, before)}


def cells(run: Run) -> dict[str, dict[str, str]]:
    table = spans.table(spans.rows([run]))
    return {row[0]: dict(zip(table.headers, row, strict=True)) for row in table.rows}


def test_spans_come_in_the_order_of_a_run() -> None:
    done = make_counts().with_step(make_counts(step=10, memory=None))
    rows = of(launch(done, window=(4, 9), spans={**EVENTS, **times(WARM)}))
    assert list(rows) == [
        *WARM,
        "step 4",
        "measured steps",
        "step 10 (after the window)",
        "data wait",
        *EVENTS,
    ]


def test_parts_of_the_start_up_come_as_they_run() -> None:
    """Files list the parts in alphabetical order, but the table must not."""
    parts = ("build", "first step", "imports")
    run = launch(spans=times({f"start-up: {part}": 1.0 for part in parts} | {"start-up": 3.0}))
    assert [*of(run)][:4] == ["start-up", "start-up: imports", "start-up: build", "start-up: first step"]


def test_span_has_times_median_and_share() -> None:
    saved = of(launch(spans={**EVENTS, **times(WARM)}))["save checkpoint"]
    assert (saved.times, saved.median_s) == (3, 1.2)
    assert saved.share == pytest.approx(5.2 / (8.0 + 0.9)), "the start-up includes the first step"


def test_without_start_up_share_is_of_the_steps() -> None:
    assert of(launch(make_counts(), spans={}))["measured steps"].share == pytest.approx(0.6)


def test_step_shows_the_busiest_ranks_amounts() -> None:
    busy = make_counts(kernels={"forward": 20_000}, memory=None)
    row = of(launch(make_counts(), busy))["step 4"]
    assert (row.kernels, row.host_reads, row.collectives) == (20_000, 1, 100)
    assert (row.python_calls, row.peak_bytes) == (None, 41 * 2**30)


def test_an_event_has_what_all_ranks_wrote() -> None:
    saved = {"save checkpoint": Counts(bytes_written=2**30, collectives_begun=4)}
    both = RankCounts(ranks=(0, 1), counts=Counts(spans=saved))
    run = launch(counts=(both, RankCounts(ranks=(2,), counts=Counts())), spans=EVENTS)
    assert of(run)["save checkpoint"].bytes_written == 2 * 2**30
    assert of(run)["save checkpoint"].collectives == 4


def test_kernels_of_an_event_are_unknown() -> None:
    """Kernels are counted from operators, which are counted only in steps, and not in events."""
    saved = {"save checkpoint": Counts(bytes_written=2**30)}
    row = of(launch(Counts(spans=saved), spans=EVENTS))["save checkpoint"]
    assert (row.kernels, row.host_reads, row.collectives, row.peak_bytes) == (None,) * 4


def test_kernels_of_a_compiled_step_are_unknown() -> None:
    """Kernels are unknown in all steps, although only the counts of step 4 mention the compilation."""
    done = make_counts(compiled=make_compiled(), memory=None)
    rows = of(launch(done.with_step(make_counts(step=10, memory=None)), window=(4, 9)))
    assert rows["step 4"].kernels is None
    assert rows["step 10 (after the window)"].kernels is None


def test_the_start_up_has_its_modules() -> None:
    done = make_counts(spans={"start-up": Counts(modules={"torch": 1_200, "numpy": 4})})
    assert of(launch(done))["start-up"].modules == 1_204


def test_steps_that_do_the_same_are_one_row() -> None:
    row = of(stepping({}))["step 4"]
    assert row.times == 12


def test_names_periodic_steps_by_their_period() -> None:
    more = {"host_reads": {"forward": 9}}
    rows = of(stepping({5: more, 10: more, 15: more}))
    assert rows["every 5th step (5, 10, 15)"].host_reads == 9
    assert (rows["every 5th step (5, 10, 15)"].times, rows["step 4"].times) == (3, 9)


@pytest.mark.parametrize(
    ("changed", "name"),
    [([10], "step 10"), ([8, 11], "steps 8,11"), (list(range(9, 16)), "from step 9 on")],
)
def test_other_steps_are_named_by_their_numbers(changed: list[int], name: str) -> None:
    assert of(stepping({step: {"kernels": {"forward": 1}} for step in changed}))[name].kernels == 1


def test_chance_python_calls_make_no_other_step() -> None:
    def python(calls: int) -> dict[str, Any]:
        return {"python": PythonCalls(version="3.11", calls={"forward": calls}, functions={})}

    done = make_counts(memory=None, **python(1_000))
    for step, calls in ((5, 2_000), (6, 2_030), (7, 2_100)):
        done = done.with_step(make_counts(memory=None, step=step, **python(calls)))
    assert [*of(launch(done, dry=True))] == ["step 4", "steps 5-6", "step 7"]


def test_memory_after_the_window_is_unknown() -> None:
    done = make_counts().with_step(make_counts(step=10, memory=None))
    row = of(launch(done, window=(4, 9)))["step 10 (after the window)"]
    assert (row.kernels, row.peak_bytes) == (11_891, None)


def test_data_wait_is_a_row_of_measured_steps() -> None:
    row = of(launch(data_wait_s=(5.0,) * 4 + (0.01, 0.02, 0.03) * 2, spans={}))["data wait"]
    assert (row.times, row.median_s) == (6, 0.02)
    assert row.share == pytest.approx(0.12)


@pytest.mark.parametrize("waits", [(), (0.0,) * STEPS])
def test_a_wait_that_was_not_seen_is_unknown(waits: tuple[float, ...]) -> None:
    assert cells(launch(data_wait_s=waits))["data wait"]["median"] == NONE


def test_a_batch_of_a_worker_is_a_row() -> None:
    python = PythonCalls(version="3.11", calls={"forward": 1_234}, functions={})
    batch = WorkerBatch(python=python, ops={"aten.stack": 1, "aten.mul": 8})
    row = of(launch(make_counts(worker_batch=batch)))["batch of a loader's worker"]
    assert (row.python_calls, row.kernels, row.times) == (1_234, 9, None)


def test_a_dry_run_has_no_times() -> None:
    rows = of(stepping({}, dry=True))
    assert list(rows) == ["step 4"]
    assert (rows["step 4"].times, rows["step 4"].median_s) == (12, None)


def test_cold_start_up_comes_from_the_cold_launch() -> None:
    rows = of(launch(spans=times(COLD)), launch())
    assert list(rows)[:6] == [*WARM, *COLD]
    assert rows["cold start-up: first step"].median_s == 53.0
    assert rows["cold start-up: first step"].share == pytest.approx(53.0 / 60.9), (
        "it is the share of the cold launch"
    )


def test_uncounted_launch_gives_way_to_an_older() -> None:
    assert "step 4" in of(launch(make_counts()), launch())


def test_rows_of_two_arms_follow_each_other() -> None:
    rows = of(launch(make_counts(kernels={"forward": 7})), before=(launch(make_counts()),))
    assert (rows["step 4 A"].kernels, rows["step 4 B"].kernels) == (11_891, 7)


def test_span_of_one_arm_is_unknown_in_the_other() -> None:
    rows = of(launch(spans=EVENTS), before=(launch(),))
    assert (rows["save checkpoint A"].times, rows["save checkpoint B"].times) == (None, 3)


def test_steps_of_two_arms_are_grouped_together() -> None:
    """If step 10 differs only in arm B, arm A also gets a row for step 10, with the counts of arm A."""
    rows = of(stepping({10: {"kernels": {"forward": 1}}}), before=(stepping({}),))
    assert (rows["step 10 A"].kernels, rows["step 10 B"].kernels) == (11_891, 1)


def test_steps_without_a_finite_time_are_left_out() -> None:
    run = launch(step_s=(0.1, float("nan"), *[0.1] * 8))
    assert of(run)["measured steps"].share == pytest.approx(0.6 / 8.8)


def test_cells_have_units() -> None:
    calls = make_collective(count=3, bytes=2 * MIB)
    row = cells(launch(make_counts(collectives=(calls,))))["step 4"]
    assert (row["median"], row["collectives"], row["peak"]) == ("100.0 ms", "3, 2.00 MiB", "41.0 GiB")


def test_zero_is_shown_as_0() -> None:
    row = cells(launch(make_counts(collectives=(), host_reads={})))["step 4"]
    assert (row["collectives"], row["host reads"]) == ("0", "0")


def test_omits_a_column_without_known_values() -> None:
    assert spans.table(spans.rows([launch()])).headers == ("span", "times", "median", "share")


@pytest.mark.parametrize("runs", [[], [launch(spans={})]])
def test_steps_alone_make_no_table(runs: list[Run]) -> None:
    """A table with only steps would repeat other tables."""
    assert not spans.table(spans.rows(runs))


def test_a_baseline_has_the_spans_of_its_counts() -> None:
    table = spans.of_counts(stepping({}).counts)
    assert [row[:2] for row in table.rows] == [(step_name(4), "12")]


def test_the_table_of_cases_begins_with_the_case() -> None:
    result = make_result(launch())
    table = spans.of_cases([result, result])
    assert table.rows[0][:2] == (result.case_id, "start-up")
    assert len(table.rows) == 2 * 5


def test_a_comparison_names_its_arms() -> None:
    result = make_compared()
    result = result.replace(runs=(launch(),), before=(launch(),))
    assert spans.table(spans.of_result(result)).headers[:2] == ("span", "arm")


def test_all_reports_show_the_table() -> None:
    result = make_result(launch(spans={**EVENTS, **times(WARM)}))
    session = make_session_file(result)
    assert "  spans of the run:\n" in explanation(result)
    assert "<summary>Spans of the runs: 8</summary>" in render([session])
    assert "start-up: imports" in page.render([session])


def test_longest_event_of_a_step_names_the_step() -> None:
    """Events in other steps are not named, nor are events that most steps contain."""
    steps = (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 3.1, 0.1, 1.3, 0.1)
    run = launch(step_s=steps, spans={**EVENTS, **times(WARM)})
    assert spans.held([run]) == ["step 7 contained: save checkpoint 3.0 s"]


def test_a_phase_of_several_steps_is_in_no_step() -> None:
    epoch = {"epoch": SpanTimes(seconds=(0.4,), steps=(6,))}
    assert spans.held([launch(spans=epoch)]) == []


def test_a_short_event_makes_no_step_long() -> None:
    short = {"save checkpoint": SpanTimes(seconds=(0.009,), steps=(6,))}
    assert spans.held([launch(spans=short)]) == []


def test_a_launch_without_steps_held_nothing() -> None:
    assert spans.held([launch(step_s=(), window=(0, 0), spans=EVENTS)]) == []
    assert spans.held([]) == []


def test_rows_of_steps_show_their_input() -> None:
    usual = make_counts(inputs={"int64[4, 128]": 2, "int64[1, 128]": 1})
    shorter = make_counts(step=5, inputs={"int64[4, 64]": 1})
    rows = cells(launch(usual.with_step(shorter)))
    assert {row["input"] for row in rows.values()} == {
        "2 x int64[4, 128] and 1 x int64[1, 128]",
        "1 x int64[4, 64]",
        NONE,
    }
    assert all("input" not in row for row in cells(launch(make_counts())).values())
