from __future__ import annotations

import re

from perfsuite.report.html.counts_view import MOST_ENTRIES, MOST_FINDINGS, CountsView, counts_view
from perfsuite.report.table import NONE
from perfsuite.results.session_file import Measurement
from tests.counted import (
    BUCKETS,
    HOST_READ,
    make_check,
    make_compiled,
    make_counted,
    make_counts,
    make_entries,
    make_finding,
)
from tests.report.html.test_tables import columns
from tests.samples import make_result, never_run, now


def view(result: Measurement) -> CountsView:
    made = counts_view(result, "case-x")
    assert made is not None
    return made


def test_without_counts_there_is_nothing_to_show() -> None:
    assert counts_view(make_result(now()), "a") is None
    assert counts_view(never_run(), "a") is None


def test_findings_stand_beside_the_baseline() -> None:
    seen = view(make_counted())
    assert seen.judged == "regressed"
    assert seen.findings is not None
    first, _, listed = columns(seen.findings)
    assert first == {
        "count": "reduce_scatter of 64 ranks: bytes",
        "verdict": "regressed",
        "baseline": "29.9 GiB",
        "now": "59.8 GiB",
        "change": "+29.9 GiB",
        "ranks": "0-63",
        "in words": make_finding().sentence,
    }
    assert [listed[name] for name in ("verdict", "baseline", "now", "change")] == ["listed", "4", "1", "-3"]
    assert [column for column in range(7) if seen.findings.is_figure(column)] == [2, 3, 4]
    assert seen.remarks == [
        "differs between launches, not judged: live peak of rank 1",
        "kernels are not judged: torch 2.13.0 -> 2.14.0",
    ]


def test_many_findings_are_cut_and_the_rest_is_said_to_be_elsewhere() -> None:
    seen = view(make_counted(make_check(*[HOST_READ] * (MOST_FINDINGS + 3)))).findings
    assert seen is not None
    assert len(seen.rows) == MOST_FINDINGS
    assert seen.caption.endswith(" 3 more are in results.json.")
    few = view(make_counted(make_check(HOST_READ, BUCKETS))).findings
    assert few is not None
    assert "results.json" not in few.caption


def test_counts_as_in_the_baseline_have_no_table_of_findings() -> None:
    equal = make_check(outcome="passed", unsteady=(), notes=()).replace(findings=())
    seen = view(make_counted(equal))
    assert (seen.judged, seen.findings, seen.remarks) == ("as in the baseline", None, [])


def test_counts_that_nobody_judged_are_shown() -> None:
    result = make_counted()
    seen = view(result.replace(verdict=result.verdict.replace(counts=None)))
    assert (seen.judged, seen.findings, seen.remarks) == (None, None, [])
    assert [each.ranks for each in seen.ranks] == ["ranks 0-63"]


def test_a_verdict_without_counts_of_launches_is_shown() -> None:
    assert view(make_counted(counts=())).ranks == []


def test_a_rank_has_tables_of_all_that_was_counted() -> None:
    [rank] = view(make_counted()).ranks
    collectives, work, memory = map(columns, rank.tables)
    assert [(row["collective"], row["group"], row["bytes"]) for row in collectives] == [
        ("reduce_scatter", "64 ranks", "29.9 GiB"),
        ("all_gather", "64 ranks", "15.0 GiB"),
        ("all_gather", "64 ranks", "15.0 GiB"),
        ("all_reduce", "8 ranks, 8 apart", "4 bytes"),
        ("barrier", "64 ranks", "0 bytes"),
    ]
    assert [(row["dtype"], row["phase"], row["calls"]) for row in collectives[-2:]] == [
        ("float32", "forward", "1"),
        (NONE, "optimizer", "1"),
    ]
    assert [tuple(row.values()) for row in work] == [
        ("forward", "158.0 TFLOP", "3,907", "1"),
        ("recompute", "59.0 TFLOP", "1,580", "0"),
        ("backward", "334.0 TFLOP", "6,402", "0"),
        ("optimizer", "0 FLOP", "2", "0"),
        ("step", "551.0 TFLOP", "11,891", "1"),
    ]
    assert "Copied cpu to cuda: 2 times." in rank.tables[1].caption
    assert {row["memory"]: row["of the step"] for row in memory} == {
        "peak, in backward": "41.0 GiB",
        "saved for backward": "30.0 GiB",
        "more after the step than before": "0 bytes",
        "allocations": "5,309",
    }
    assert rank.in_short == "551.0 TFLOP, 59.9 GiB in collectives, at most 41.0 GiB live"


def test_operators_without_a_formula_are_named_under_the_flops() -> None:
    made = make_counts(without_flops={"ours.fused_mlp": 4})
    [rank] = view(make_counted(counts=make_entries(made))).ranks
    assert "FLOPs are without those of ours.fused_mlp in 4 calls: no formula." in rank.tables[1].caption


def test_a_compiled_step_has_a_table_of_what_was_compiled_and_none_of_memory() -> None:
    [rank] = view(make_counted(counts=make_entries(make_counts(memory=None, compiled=make_compiled())))).ranks
    _, work, compiled = rank.tables
    assert work.caption.endswith("Kernels are those outside of compiled code. Copied cpu to cuda: 2 times.")
    assert {row["compiled"]: row["number"] for row in columns(compiled)} == {
        "graphs": "2",
        "recompilations": "1",
        "generated kernels": "31",
        "calls of other kernels": "28",
        "graph break: data-dependent branch": "1",
    }
    assert [figure.caption for figure in rank.bars] == ["Bytes of collectives in a step, by kind and dtype."]


def test_bars_show_bytes_by_kind_and_what_lived_at_the_peak() -> None:
    [rank] = view(make_counted()).ranks
    messages, peak = rank.bars
    assert 'id="case-x:counts-1-messages-t"' in messages.chart
    assert (
        ">all_gather bfloat16: 30.0 GiB; reduce_scatter float32: 29.9 GiB; all_reduce float32: 4 bytes.<"
        in (messages.chart)
    )
    assert "barrier" not in messages.chart
    assert peak.caption == "Live tensors at the peak of 41.0 GiB, by part."
    assert "optimizer state: 1.00 GiB; " in peak.chart


def test_one_rank_alone_has_neither_collectives_nor_their_bars() -> None:
    [rank] = view(make_counted(counts=make_entries(make_counts(collectives=()), ranks=1))).ranks
    assert rank.ranks == "rank 0"
    assert [table.headers[0] for table in rank.tables] == ["phase", "memory"]
    assert len(rank.bars) == 1


def test_of_many_unlike_ranks_the_first_are_shown() -> None:
    unlike = [make_counts(host_reads={"forward": rank}) for rank in range(MOST_ENTRIES + 2)]
    seen = view(make_counted(counts=make_entries(*unlike)))
    assert [each.ranks for each in seen.ranks] == [f"rank {rank}" for rank in range(MOST_ENTRIES)]
    assert seen.left_out == "The step of 2 ranks more is in results.json."
    keys = [re.findall('title id="([^"]*)"', figure.chart)[0] for each in seen.ranks for figure in each.bars]
    assert len(keys) == len(set(keys)) == 2 * MOST_ENTRIES
    assert view(make_counted()).left_out is None
