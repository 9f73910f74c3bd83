from __future__ import annotations

from typing import Any

import pytest

from perfsuite.report import counts
from perfsuite.report.text import NONE, Table
from perfsuite.results.counts import Counts, RankCounts
from tests.counted import (
    BUCKETS,
    GIB,
    HOST_READ,
    make_check,
    make_collective,
    make_compiled,
    make_counts,
    make_entries,
    make_finding,
    make_memory,
)

NO_FINDINGS = make_check(outcome="passed").replace(findings=())


def columns(table: Table) -> list[dict[str, str]]:
    """Each row by heading."""
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def line(begin: str, **changes: Any) -> str:
    [found] = [each for each in counts.lines(make_entries(make_counts(**changes))) if begin in each]
    return found.strip()


# Amounts and names


def test_amounts_are_sums_over_phases_and_groups() -> None:
    step = make_counts()
    assert counts.flops(step) == 551 * 10**12
    assert counts.moved(step) == 30 * GIB + int(29.9 * GIB) + 4
    assert counts.peak(step) == 41 * GIB
    assert counts.peak(make_counts(memory=None)) is None


def test_bytes_by_kind_put_phases_and_groups_together_and_dtypes_apart() -> None:
    collectives = (
        make_collective(bytes=10),
        make_collective(bytes=10, phase="backward"),
        make_collective(bytes=10, ranks=8, apart=8),
        make_collective(bytes=50, dtype="float32"),
        make_collective(bytes=0, kind="barrier", dtype=""),
    )
    assert list(counts.bytes_by_kind(make_counts(collectives=collectives)).items()) == [
        ("all_gather float32", 50),
        ("all_gather bfloat16", 30),
        ("barrier", 0),
    ]


def test_the_peak_by_part_says_when_nameless_tensors_were_made() -> None:
    at_peak = {"kept": 3, "recompute": 5, "gradient": 0, "unsharded": 4}
    parts = counts.peak_by_part(make_memory(at_peak=at_peak))
    assert list(parts.items()) == [("made in recompute", 5), ("unsharded", 4), ("kept from before", 3)]


def test_ranks_have_a_plural() -> None:
    assert counts.ranks(RankCounts(ranks=(3,), counts=Counts())) == "rank 3"
    assert counts.ranks(RankCounts(ranks=(0, 1, 3), counts=Counts())) == "ranks 0-1,3"


# What a step did


def test_a_step_in_one_line() -> None:
    assert counts.in_short(make_counts()) == "551.0 TFLOP, 59.9 GiB in collectives, at most 41.0 GiB live"
    assert counts.in_short(make_counts(memory=None)) == "551.0 TFLOP, 59.9 GiB in collectives"


def test_a_step_in_lines() -> None:
    assert counts.lines(make_entries()) == [
        "step 4 of ranks 0-63, counted:",
        "  collectives: all_gather bfloat16 30.0 GiB in 65 calls, "
        "reduce_scatter float32 29.9 GiB in 33 calls, "
        "all_reduce float32 4 bytes in 1 call, barrier in 1 call",
        "  computed: 551.0 TFLOP: forward 158.0 TFLOP, recompute 59.0 TFLOP, backward 334.0 TFLOP",
        "  called: 11,891 kernels, 1 host read, copied cpu to cuda 2 times",
        "  live tensors: at most 41.0 GiB, in backward: made in forward 29.0 GiB, "
        "made in backward 8.00 GiB, unsharded 2.00 GiB, optimizer state 1.00 GiB, "
        "parameter 512.0 MiB, kept from before 512.0 MiB",
    ]


def test_a_step_that_keeps_memory_says_how_much() -> None:
    kept = make_memory(growth=131072, peak_in="start", at_peak={"parameter": 5})
    assert line("live", memory=kept) == (
        "live tensors: at most 41.0 GiB, at the start: parameter 5 bytes; 128.0 KiB more after the step"
    )


def test_a_compiled_step_tells_what_was_compiled() -> None:
    assert line("compiled", compiled=make_compiled()) == (
        "compiled: 2 graphs, 1 graph break (1 x data-dependent branch), 1 recompilation, 31 kernels generated"
    )
    assert ", 0 graph breaks, " in line("compiled", compiled=make_compiled(breaks={}))


def test_a_step_that_did_nothing_has_no_empty_lists() -> None:
    assert counts.lines(make_entries(Counts())) == [
        "step 4 of ranks 0-63, counted:",
        "  collectives: none",
        "  computed: 0 FLOP",
        "  called: 0 kernels, 0 host reads",
    ]


def test_of_many_entries_the_first_are_told_and_the_others_counted() -> None:
    told = counts.lines(make_entries(*[make_counts(host_reads={"forward": rank}) for rank in range(5)]))
    assert [each for each in told if "step" in each] == [
        "step 4 of rank 0, counted:",
        "step 4 of rank 1, counted:",
        "the step of 3 ranks more: the HTML report tells",
    ]


def test_operators_without_a_formula_are_named_beside_the_flops() -> None:
    missing = {"ours.fused_mlp": 4, "aten._new_mm": 1}
    told = "without those of ours.fused_mlp in 4 calls, aten._new_mm in 1 call: no formula"
    assert told in line("computed", without_flops=missing)
    assert f"FLOPs are {told}." in counts.tables(make_counts(without_flops=missing))[1].caption


def test_a_step_in_tables() -> None:
    tables = counts.tables(make_counts())
    collectives, work, memory = map(columns, tables)
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
    assert "Copied cpu to cuda: 2 times." in tables[1].caption
    assert {row["memory"]: row["of the step"] for row in memory} == {
        "peak, in backward": "41.0 GiB",
        "saved for backward": "30.0 GiB",
        "more after the step than before": "0 bytes",
        "allocations": "5,309",
    }


def test_a_step_without_collectives_has_no_table_of_them() -> None:
    assert [table.headers[0] for table in counts.tables(make_counts(collectives=()))] == ["phase", "memory"]


def test_a_compiled_step_has_a_table_of_what_was_compiled_and_none_of_memory() -> None:
    _, work, compiled = counts.tables(make_counts(memory=None, compiled=make_compiled()))
    assert work.caption.endswith("Kernels are those outside of compiled code. Copied cpu to cuda: 2 times.")
    assert {row["compiled"]: row["number"] for row in columns(compiled)} == {
        "graphs": "2",
        "recompilations": "1",
        "generated kernels": "31",
        "calls of other kernels": "28",
        "graph break: data-dependent branch": "1",
    }


# What a verdict says of it


def test_judged_findings_are_told_apart_from_those_only_listed() -> None:
    assert counts.sentences(make_check(), judged=True, by_rank=False) == [
        f"regressed: {make_finding().sentence}",
        "regressed: host reads in forward 1 -> 2",
    ]
    listed = counts.sentences(make_check(), judged=False, by_rank=False)
    assert listed == [f"not judged: {BUCKETS.sentence}"]


def test_findings_name_their_ranks_where_ranks_differ() -> None:
    other = HOST_READ.replace(sentence="host reads in forward 1 -> 3", ranks="0-2,5")
    check = make_check(HOST_READ.replace(ranks="3"), other)
    assert counts.sentences(check, judged=True, by_rank=True) == [
        "regressed: host reads in forward 1 -> 2 (rank 3)",
        "regressed: host reads in forward 1 -> 3 (ranks 0-2,5)",
    ]


def test_one_sentence_that_is_true_of_several_ranks_is_told_once() -> None:
    """The bytes behind it may differ by rank, where the sentence rounds them."""
    found = [HOST_READ.replace(ranks=ranks, now=2 + number) for number, ranks in enumerate(("3", "0-2,5"))]
    told, check = "regressed: host reads in forward 1 -> 2", make_check(*found)
    assert counts.sentences(check, judged=True, by_rank=True) == [f"{told} (ranks 0-3,5)"]
    assert counts.sentences(check, judged=True, by_rank=False) == [told]


def test_remarks_are_unsteady_fields_and_notes() -> None:
    assert counts.remarks(make_check()) == [
        "differs between launches, not judged: live peak of rank 1",
        "kernels are not judged: torch 2.13.0 -> 2.14.0",
    ]
    assert counts.remarks(make_check(unsteady=(), notes=())) == []
    [many] = counts.remarks(make_check(unsteady=tuple("abcdefg"), notes=()))
    assert many == "differs between launches, not judged: a, b, c, d, e, and 2 more"


@pytest.mark.parametrize(
    ("check", "alone", "beside_an_arm"),
    [
        (make_check(), "regressed", "not as in arm A"),
        (make_check(outcome="recorded"), "recorded", "not as in arm A"),
        (
            make_check(BUCKETS, outcome="passed"),
            "passed, with changes that are not judged",
            "not as in arm A",
        ),
        (NO_FINDINGS, "as in the baseline", "as in arm A"),
        (NO_FINDINGS.replace(compared=False), "not judged", "not judged"),
    ],
)
def test_the_verdict_of_the_counts_in_words(check: Any, alone: str, beside_an_arm: str) -> None:
    assert (counts.judged(check), counts.judged(check, "arm A")) == (alone, beside_an_arm)


def test_a_step_that_was_not_counted_says_why() -> None:
    check = make_check(outcome="not counted", compared=False, unsteady=(), notes=("a", "b"), findings=())
    assert counts.judged(check) == counts.judged(check, "arm A") == "not counted: a; b"
    assert counts.remarks(check) == []
    vanished = check.replace(compared=True)
    assert (counts.judged(vanished), counts.remarks(vanished)) == ("not counted", ["a", "b"])


def test_findings_stand_beside_the_baseline() -> None:
    table = counts.table_of_findings(make_check(), None)
    first, _, listed = columns(table)
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
    assert [column for column in range(7) if table.is_figure(column)] == [2, 3, 4]
    assert not counts.table_of_findings(NO_FINDINGS, None)


def test_many_findings_are_cut_and_the_rest_is_said_to_be_elsewhere() -> None:
    many = counts.table_of_findings(make_check(*[HOST_READ] * (counts.MOST_FINDINGS + 3)), None)
    assert len(many.rows) == counts.MOST_FINDINGS
    assert many.caption.endswith(" 3 more are in results.json.")
    assert "results.json" not in counts.table_of_findings(make_check(HOST_READ, BUCKETS), None).caption
