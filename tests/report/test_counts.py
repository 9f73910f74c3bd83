import pytest

from perfsuite.report import counts
from perfsuite.report.text import NONE
from perfsuite.results.cost import Cost
from perfsuite.results.counts import InCycles, KeptObjects, PythonCalls
from perfsuite.results.outcome import CountCheck
from tests.counted import (
    BUCKETS,
    HOST_READ,
    make_check,
    make_compiled,
    make_counts,
    make_finding,
    make_memory,
)

FIRST = make_check().findings[0]
SMALL = make_check(make_finding(outcome="passed"), outcome="passed")
NO_FINDINGS = make_check(outcome="passed").replace(findings=())
NOT_COUNTED = CountCheck(outcome="not counted", compared=False, notes=("a", "b"))


def test_amounts_are_sums_over_phases_and_groups() -> None:
    step = make_counts()
    bare = make_counts(memory=None)
    assert (counts.flops(step), counts.moved(step)) == (551 * 10**12, int(59.9 * 2**30) + 4)
    assert (counts.peak(step), counts.peak(bare)) == (41 * 2**30, None)
    assert counts.in_short(bare) == "551.0 TFLOP, 59.9 GiB in collectives"
    assert counts.in_short(step) == f"{counts.in_short(bare)}, at most 41.0 GiB live"


def test_tables_show_collectives_work_and_memory() -> None:
    collectives, done, memory = (list(table.rows) for table in counts.tables(make_counts()))
    assert collectives == [
        ("reduce_scatter", "64 ranks", "float32", "backward", "33", "29.9 GiB"),
        ("all_gather", "64 ranks", "bfloat16", "forward", "33", "15.0 GiB"),
        ("all_gather", "64 ranks", "bfloat16", "backward", "32", "15.0 GiB"),
        ("all_reduce", "8 ranks, 8 apart", "float32", "forward", "1", "4 bytes"),
        ("barrier", "64 ranks", NONE, "optimizer", "1", "0 bytes"),
    ]
    assert done == [
        ("forward", "158.0 TFLOP", "3,907", "1"),
        ("recompute", "59.0 TFLOP", "1,580", "0"),
        ("backward", "334.0 TFLOP", "6,402", "0"),
        ("optimizer", "0 FLOP", "2", "0"),
        ("step", "551.0 TFLOP", "11,891", "1"),
    ]
    assert memory[:2] == [
        ("peak, in backward", "41.0 GiB"),
        ("at the peak: allocated in forward", "29.0 GiB"),
    ]
    others = {"saved for backward": "30.0 GiB", "growth over the step": "0 bytes"}
    assert {row[0]: row[1] for row in memory[-3:]} == {**others, "allocations": "5,309"}
    assert [table.headers[0] for table in counts.tables(make_counts(collectives=()))] == ["phase", "memory"]


@pytest.mark.parametrize(("size", "rows"), [(0, []), (2**20, [("in reference cycles", "1.00 MiB")])])
def test_shows_memory_in_reference_cycles(size: int, rows: list[tuple[str, str]]) -> None:
    memory = make_memory(in_cycles=InCycles(bytes=size))
    shown = counts.tables(make_counts(memory=memory))[-1]
    assert [row for row in shown.rows if "cycles" in row[0]] == rows


def test_names_periodic_work_beside_its_memory() -> None:
    at_peak = {"kept": 3, "recompute": 5, "gradient": 0, "unsharded": 4}
    at_start = make_memory(peak_in="start", at_peak=at_peak)
    missing = {"ours.fused_mlp": 4, "aten._new_mm": 1}
    python = PythonCalls(version="3.11", calls={"forward": 1_000, "backward": 200}, functions={"a.b": 9})
    changes = {"blocking_copies": {"cpu to cuda": 1}, "without_flops": missing, "python": python}
    _, work, kept = counts.tables(make_counts(memory=at_start, **changes))
    assert (
        "do not include ours.fused_mlp in 4 calls, aten._new_mm in 1 call, for which there is no formula."
        in work.caption
    )
    assert work.caption.endswith(" Copied cpu to cuda 2 times, 1 of them blocking.")
    assert work.headers == ("phase", "FLOPs", "kernels", "host reads", "Python calls")
    assert (work.rows[0][-1], work.rows[-1][-1]) == ("1,000", "1,200")
    parts = [
        "peak, at the start",
        *(f"at the peak: {part}" for part in ("allocated in recompute", "unsharded")),
    ]
    assert [name for name, _ in kept.rows[:-3]] == [*parts, "at the peak: allocated before the step"]


def test_tables_list_compiled_code() -> None:
    _, work, compiled = counts.tables(make_counts(memory=None, compiled=make_compiled()))
    assert work.caption.endswith("Kernels in compiled code are not included. Copied cpu to cuda 2 times.")
    made = {"graphs": "2", "recompilations": "1", "generated kernels": "31", "calls of other kernels": "28"}
    assert {row[0]: row[1] for row in compiled.rows} == {**made, "graph break: data-dependent branch": "1"}


def test_tables_of_a_compiled_dry_run_say_what_is_unknown() -> None:
    compiled = make_compiled(kernels=None, extern_calls=None)
    step = make_counts(kernels=None, memory=make_memory(), compiled=compiled)
    _, work, memory, made = counts.tables(step)
    assert "kernels" not in work.headers
    assert "The number of kernels is unknown, because a dry run generates no kernels." in work.caption
    assert memory.caption.endswith(
        "The peak is that of operators before they are fused, and fusion can lower it."
    )
    numbers = {row[0]: row[1] for row in made.rows}
    assert numbers["generated kernels"] == numbers["calls of other kernels"] == "unknown"
    assert numbers["graphs"] == "2"


def test_separates_judged_findings_from_listed() -> None:
    """Findings with the same sentence are merged, with all of their ranks, even if their values differ."""
    sentence = "regressed: host reads in forward 1 -> 2"
    other = "host reads in forward 1 -> 3"
    judged = [f"regressed: {FIRST.sentence}", sentence]
    assert counts.sentences(make_check(), judged=True, by_rank=False) == judged
    assert counts.sentences(make_check(), judged=False, by_rank=False) == [f"not judged: {BUCKETS.sentence}"]
    findings = [HOST_READ.replace(ranks=ranks, now=2 + number) for number, ranks in enumerate(("3", "0-2,5"))]
    check = make_check(*findings, HOST_READ.replace(sentence=other, ranks="4"))
    by_rank = [f"{sentence} (ranks 0-3,5)", f"regressed: {other} (rank 4)"]
    assert counts.sentences(check, judged=True, by_rank=True) == by_rank
    assert counts.sentences(check, judged=True, by_rank=False) == [sentence, f"regressed: {other}"]


PREDICTED = Cost(least_s=0.0, most_s=0.1, step_s=1.0)
NAIVE = Cost(least_s=0.0, most_s=0.1, why_naive="why")
UNKNOWN = Cost(why_naive="why")
OF_THREE = "a price is predicted for 1 of 3 changes"


@pytest.mark.parametrize(
    ("costs", "lines"),
    [
        ((PREDICTED, None, None), []),
        ((NAIVE, UNKNOWN, None), []),
        ((PREDICTED, NAIVE, PREDICTED), [
            "a price is predicted for 2 of 3 changes; "
            "for 1, only the time that the work takes by itself is known"
        ]),
        ((NAIVE, PREDICTED, NAIVE), [
            f"{OF_THREE}; for 2, only the time that the work takes by itself is known"
        ]),
        ((UNKNOWN, PREDICTED, None), [f"{OF_THREE}; for 2, no price is known"]),
        ((NAIVE, PREDICTED, Cost(hidden_above=1e9)), [
            f"{OF_THREE}; for 1, only the time that the work takes by itself is known; "
            "for 1, no price is known"
        ]),
    ],
)  # fmt: skip
def test_says_how_many_changes_have_a_price(costs: tuple[Cost | None, ...], lines: list[str]) -> None:
    check = make_check(*(FIRST.replace(cost=cost) for cost in costs), BUCKETS)
    assert counts.prices(check) == lines


def test_remarks_are_unsteady_fields_and_notes() -> None:
    unsteady = "not judged, because the launches differ in:"
    notes = ["kernels are not judged: torch 2.13.0 -> 2.14.0"]
    assert counts.remarks(make_check()) == [f"{unsteady} live peak of rank 1", *notes]
    assert counts.remarks(make_check(unsteady=(), notes=())) == counts.remarks(NOT_COUNTED) == []
    assert counts.remarks(NOT_COUNTED.replace(compared=True)) == ["a", "b"]


def test_remarks_cut_many_unsteady_fields() -> None:
    unsteady = "not judged, because the launches differ in:"
    many = make_check(unsteady=tuple("abcdefg"), notes=())
    assert counts.remarks(many) == [f"{unsteady} a, b, c, d, e, and 2 more"]


@pytest.mark.parametrize(
    ("check", "alone", "next_to_an_arm"),
    [
        (make_check(), "regressed", "different from arm A"),
        (make_check(outcome="recorded"), "recorded", "different from arm A"),
        (SMALL, "passed, with changes that are not judged", "different from arm A, but not judged"),
        (NO_FINDINGS, "the same as in the baseline", "the same as in arm A"),
        (NO_FINDINGS.replace(compared=False), "not judged", "not judged"),
        (NOT_COUNTED, "not counted: a; b", "not counted: a; b"),
        (NOT_COUNTED.replace(compared=True), "not counted", "the same as in arm A"),
    ],
    ids=["regressed", "recorded", "small", "equal", "not compared", "not counted", "compared, not counted"],
)
def test_words_give_the_verdict_of_the_counts(check: CountCheck, alone: str, next_to_an_arm: str) -> None:
    assert counts.outcome_of_counts(check) == alone
    assert counts.outcome_of_counts(check, "arm A") == next_to_an_arm


def test_findings_appear_beside_the_baseline() -> None:
    table = counts.table_of_findings(make_check(), None)
    assert table.headers == ("count", "verdict", "change", "baseline", "now", "ranks", "in words")
    first, _, listed = table.rows
    amounts = ("+29.9 GiB", "29.9 GiB", "59.8 GiB", "0-63")
    assert first == ("reduce_scatter of 64 ranks: bytes", "regressed", *amounts, FIRST.sentence)
    assert listed[1:5] == ("listed", "-3", "4", "1")


def test_amounts_of_findings_are_figures() -> None:
    table = counts.table_of_findings(make_check(), None)
    assert [column for column in range(7) if table.is_figure(column)] == [2, 3, 4]


def test_without_findings_there_is_not_a_table() -> None:
    assert not counts.table_of_findings(NO_FINDINGS, None)


def test_the_caption_counts_findings_left_out() -> None:
    few = counts.table_of_findings(make_check(), None)
    assert "results.json" not in few.caption
    many = counts.table_of_findings(make_check(*[HOST_READ] * (counts.MOST_FINDINGS + 3)), None)
    assert len(many.rows) == counts.MOST_FINDINGS
    assert many.caption.endswith(" 3 more are in results.json.")


LEAK = KeptObjects(by_type={f"T{number:02}": 12 - number for number in range(12)}, holders=("`net.seen`",))


@pytest.mark.parametrize(
    ("kept", "rows"),
    [(KeptObjects(), [("all types", "0")]), (LEAK, [("all types", "78"), ("T00", "12")])],
    ids=["none", "leak"],
)
def test_kept_objects_are_a_table_also_of_none(kept: KeptObjects, rows: list[tuple[str, str]]) -> None:
    table = counts.tables(make_counts(kept=kept))[-1]
    assert list(table.rows)[:2] == rows
    assert ("held by `net.seen`" in table.caption) == bool(kept.holders)


def test_kept_objects_of_rare_types_are_left_out() -> None:
    assert len(counts.tables(make_counts(kept=LEAK))[-1].rows) == 1 + counts.MOST_TYPES
