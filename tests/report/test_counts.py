from __future__ import annotations

from perfsuite.report import counts
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

# Amounts and names


def test_amounts_are_sums_over_phases_and_groups() -> None:
    step = make_counts()
    assert counts.flops(step) == 551 * 10**12
    assert counts.moved(step) == 30 * GIB + int(29.9 * GIB) + 4
    assert counts.peak(step) == 41 * GIB
    assert counts.peak(make_counts(memory=None)) is None


def test_bytes_by_kind_put_phases_and_groups_together_and_dtypes_apart() -> None:
    step = make_counts(
        collectives=(
            make_collective(bytes=10),
            make_collective(bytes=10, phase="backward"),
            make_collective(bytes=10, ranks=8, apart=8),
            make_collective(bytes=50, dtype="float32"),
            make_collective(bytes=0, kind="barrier", dtype=""),
        )
    )
    assert list(counts.bytes_by_kind(step).items()) == [
        ("all_gather float32", 50),
        ("all_gather bfloat16", 30),
        ("barrier", 0),
    ]


def test_the_peak_by_part_says_when_nameless_tensors_were_made() -> None:
    parts = counts.peak_by_part(
        make_memory(at_peak={"kept": 3, "recompute": 5, "gradient": 0, "unsharded": 4})
    )
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
    [line] = [line for line in counts.lines(make_entries(make_counts(memory=kept))) if "live" in line]
    assert (
        line
        == "  live tensors: at most 41.0 GiB, at the start: parameter 5 bytes; 128.0 KiB more after the step"
    )


def test_a_compiled_step_tells_what_was_compiled() -> None:
    told = counts.lines(make_entries(make_counts(memory=None, compiled=make_compiled())))
    assert told[-1] == (
        "  compiled: 2 graphs, 1 graph break (1 x data-dependent branch), 1 recompilation, "
        "31 kernels generated"
    )
    unbroken = make_compiled(breaks={}, graphs=1, recompilations=0)
    assert counts.breaks(unbroken) == "0 graph breaks"


def test_a_step_that_did_nothing_has_no_empty_lists() -> None:
    assert counts.lines(make_entries(Counts())) == [
        "step 4 of ranks 0-63, counted:",
        "  collectives: none",
        "  computed: 0 FLOP",
        "  called: 0 kernels, 0 host reads",
    ]


def test_of_many_entries_the_first_are_told_and_the_others_counted() -> None:
    told = counts.lines(make_entries(*[make_counts(host_reads={"forward": rank}) for rank in range(5)]))
    assert [line for line in told if "step" in line] == [
        "step 4 of rank 0, counted:",
        "step 4 of rank 1, counted:",
        "the step of 3 ranks more: the HTML report tells",
    ]


# What a verdict says of it


def test_judged_findings_are_told_apart_from_those_only_listed() -> None:
    check = make_check()
    assert counts.findings(check, by_rank=False) == [
        f"regressed: {make_finding().sentence}",
        "regressed: host reads in forward 1 -> 2",
    ]
    assert counts.listed(check, by_rank=False) == [f"not judged: {BUCKETS.sentence}"]


def test_findings_name_their_ranks_where_ranks_differ() -> None:
    other = HOST_READ.replace(sentence="host reads in forward 1 -> 3", ranks="0-2,5")
    assert counts.findings(make_check(HOST_READ.replace(ranks="3"), other), by_rank=True) == [
        "regressed: host reads in forward 1 -> 2 (rank 3)",
        "regressed: host reads in forward 1 -> 3 (ranks 0-2,5)",
    ]


def test_one_sentence_that_is_true_of_several_ranks_is_told_once() -> None:
    """The bytes behind it may differ by rank, where the sentence rounds them."""
    found = [HOST_READ.replace(ranks=ranks, now=2 + number) for number, ranks in enumerate(("3", "0-2,5"))]
    told = "host reads in forward 1 -> 2"
    assert counts.findings(make_check(*found), by_rank=True) == [f"regressed: {told} (ranks 0-3,5)"]
    assert counts.findings(make_check(*found), by_rank=False) == [f"regressed: {told}"]


def test_remarks_are_unsteady_fields_and_notes() -> None:
    assert counts.remarks(make_check()) == [
        "differs between launches, not judged: live peak of rank 1",
        "kernels are not judged: torch 2.13.0 -> 2.14.0",
    ]
    assert counts.remarks(make_check(unsteady=(), notes=())) == []
    [many] = counts.remarks(make_check(unsteady=tuple("abcdefg"), notes=()))
    assert many == "differs between launches, not judged: a, b, c, d, e, and 2 more"


def test_the_verdict_of_the_counts_in_words() -> None:
    assert counts.judged(make_check()) == "regressed"
    assert counts.judged(make_check(outcome="recorded")) == "recorded"
    assert counts.judged(make_check(BUCKETS, outcome="passed")) == "passed, with changes that are not judged"
    as_before = make_check(outcome="passed").replace(findings=())
    assert counts.judged(as_before) == "as in the baseline"
    assert counts.judged(as_before.replace(compared=False)) == "not judged"


def test_operators_without_a_formula_are_named_beside_the_flops() -> None:
    made = make_counts(without_flops={"ours.fused_mlp": 4, "aten._new_mm": 1})
    told = "without those of ours.fused_mlp in 4 calls, aten._new_mm in 1 call: no formula"
    assert any(told in line for line in counts.lines(make_entries(made)))


def test_a_step_that_was_not_counted_says_why() -> None:
    check = make_check(outcome="not counted", compared=False, unsteady=(), notes=("a", "b"), findings=())
    assert counts.judged(check) == counts.judged(check, "arm A") == "not counted: a; b"
    assert counts.remarks(check) == []
    vanished = check.replace(compared=True)
    assert (counts.judged(vanished), counts.remarks(vanished)) == ("not counted", ["a", "b"])


def test_beside_an_arm_the_counts_are_told_and_not_judged() -> None:
    assert counts.judged(make_check(BUCKETS, outcome="passed"), "arm A") == "not as in arm A"
    assert counts.judged(make_check(outcome="passed").replace(findings=()), "arm A") == "as in arm A"
    assert counts.judged(make_check(outcome="passed", compared=False), "arm A") == "not judged"
