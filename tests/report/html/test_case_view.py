from __future__ import annotations

import math
import re

import pytest

from perfsuite.report.html.case_view import MOST_ENTRIES, CaseView, case_view, overview
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.session_file import ArmFacts, Measurement
from tests.counted import make_counted, make_counts, make_entries
from tests.samples import ARMS, BEFORE, make_compared, make_result, never_run, now
from tests.sessions import make_gpu_result, make_session


def view(result: Measurement, arms: tuple[ArmFacts, ...] = ()) -> CaseView:
    return case_view(result, make_session(0).replace(arms=arms), anchor="case-x", columns=overview("tokens"))


def test_the_overview_holds_text_and_the_number_to_sort_by() -> None:
    cells = view(make_result(now())).cells
    assert (cells["tokens/s"].text, cells["tokens/s"].number) == ("98,765", 98765)
    assert (cells["memory"].text, cells["memory"].number) == ("64.0 MiB", 67_108_900)
    assert (cells["MFU"].text, cells["launches"].text) == ("42.3%", "1")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_cannot_be_sorted_by(bad: float) -> None:
    cell = view(make_result(now(tokens_per_s=bad), before=None)).cells["tokens/s"]
    assert (cell.text, cell.number) == (str(bad), None)


def test_a_case_that_was_never_launched() -> None:
    seen = view(never_run())
    assert not any((seen.steps, seen.health, seen.told.tracebacks, seen.checks, seen.launches, seen.before))
    assert (seen.loss, seen.band, seen.findings, seen.ranks) == (None, None, None, [])


def test_the_band_is_the_baselines_step_time_and_its_tolerance() -> None:
    result = make_gpu_result(2, "regressed")
    seen, [first, *_] = view(result), result.verdict.checks
    assert seen.band is not None
    assert first.baseline is not None
    tokens_per_step = 256 * 8
    assert seen.band.baseline_s == pytest.approx(tokens_per_step / first.baseline)
    assert seen.band.allowed_s == pytest.approx(1.03 * seen.band.baseline_s)


def test_each_launch_with_steps_has_its_chart() -> None:
    seen = view(make_result(now(), now().replace(step_s=(), window=(0, 0)), now(), before=None))
    assert [figure.caption.split(":")[0] for figure in seen.steps] == ["Launch 1", "Launch 3"]


def test_captions_say_what_the_chart_cannot() -> None:
    steps = (math.nan, *[0.1] * 500, 7.5, 8.5)
    run = BEFORE.replace(step_s=steps, window=(10, len(steps)), loss=(5.0,) * 503)
    seen = view(make_result(run))
    assert seen.steps[0].caption == (
        "Launch 1: median 12.3 ms; 2 measured steps are off the scale (▲), "
        "the longest 8,500.0 ms at step 502; 1 without a finite time: a gap in the line; "
        "of every 3 steps the shortest and the longest are drawn."
    )
    assert seen.loss is not None
    assert seen.loss.caption == (
        "Loss, mean over ranks; at the end 5.0000; of every 3 steps the lowest and the highest are drawn."
    )
    assert "set aside, the machine was not well" in view(make_gpu_result(3, "throttled")).steps[0].caption


def test_bars_show_bytes_by_kind_and_what_lived_at_the_peak() -> None:
    [(_, [messages, peak])] = view(make_counted()).ranks
    assert 'id="case-x:counts-1-messages-t"' in messages.chart
    by_kind = "all_gather bfloat16: 30.0 GiB; reduce_scatter float32: 29.9 GiB; all_reduce float32: 4 bytes."
    assert f">{by_kind}<" in messages.chart
    assert "barrier" not in messages.chart
    assert peak.caption == "Live tensors at the peak of 41.0 GiB, by part."
    assert "optimizer state: 1.00 GiB; " in peak.chart


@pytest.mark.parametrize(
    ("nothing", "caption"),
    [
        ({"collectives": ()}, "Live tensors at the peak of 41.0 GiB, by part."),
        ({"memory": None}, "Bytes of collectives in a step, by kind and dtype."),
    ],
)
def test_what_there_is_not_has_no_bars(nothing: dict[str, object], caption: str) -> None:
    [(_, bars)] = view(make_counted(counts=make_entries(make_counts(**nothing)))).ranks
    assert [figure.caption for figure in bars] == [caption]


def test_of_many_unlike_ranks_the_first_are_shown() -> None:
    unlike = [make_counts(host_reads={"forward": rank}) for rank in range(MOST_ENTRIES + 2)]
    seen = view(make_counted(counts=make_entries(*unlike)))
    assert [entry.name for entry, _ in seen.ranks] == [str(rank) for rank in range(MOST_ENTRIES)]
    assert seen.ranks_left_out == 2
    keys = [re.findall('title id="([^"]*)"', bar.chart)[0] for _, bars in seen.ranks for bar in bars]
    assert len(keys) == len(set(keys)) == 2 * MOST_ENTRIES
    assert view(make_counted()).ranks_left_out == 0


def test_the_command_measures_the_same_again() -> None:
    assert view(make_result(now())).command == "pytest 'bench_cases/test_x.py::test_x[a]'"
    injected = make_result(now().replace(inject="slowdown=30%"))
    assert view(injected).command == "pytest 'bench_cases/test_x.py::test_x[a]' --perf-inject=slowdown=30%"


def test_a_comparison_with_a_tolerance_of_its_own_is_repeated_with_it() -> None:
    compared = make_compared(speed=0.93)
    assert "--tolerance" not in view(compared, ARMS).command
    checks = tuple(each.replace(allowed=TOKENS_PER_S.bound(0.03)) for each in compared.verdict.checks)
    own = compared.replace(verdict=compared.verdict.replace(checks=checks))
    again = f"perfsuite compare --against 'main X=1' --arm . --tolerance 3% {compared.case_id}"
    assert view(own, ARMS).command == again
    assert "--tolerance" not in view(own.replace(runs=()), ARMS).command, "it failed before its first launch"
