from typing import Any

import pytest

from perfsuite.report.explained import explained, prediction
from perfsuite.report.summary import IF_MEANT
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from tests.counted import (
    EXPLAINED,
    FIT,
    NOT_COUNTED,
    limit,
    make_counted,
    make_dry,
    make_entries,
    make_expected,
)
from tests.samples import judged, make_compared, make_result, make_run, make_shared, never_run, now
from tests.sessions import make_explained, make_gpu_result

SLOWER = make_explained(make_gpu_result(2, "regressed"))


def test_words_give_the_predicted_memory() -> None:
    assert prediction(DryFacts()) == []
    assert prediction(DryFacts(fit=FIT)) == [
        "tight: rank 7 needs 61.2 GiB to 64.5 GiB of 80.0 GiB",
        "reserved by the caching allocator 64.0 GiB, at most 64.0 GiB (62.0 GiB with expandable segments), "
        "allocated 61.0 GiB, live tensors 60.0 GiB",
        "outside the allocator: CUDA context 256.0 MiB to 512.0 MiB",
    ]
    above = prediction(DryFacts(fit=FIT.replace(reserved_upper=65 * 2**30)))
    assert above[0] == "tight: rank 7 needs 61.2 GiB to 65.5 GiB of 80.0 GiB"
    assert above[1].startswith("reserved by the caching allocator 64.0 GiB, at most 65.0 GiB (62.0 GiB with")
    built = prediction(DryFacts(fit=FIT.replace(built=70 * 2**30)))
    assert built[1] == "the model before it is sharded: 70.0 GiB"


@pytest.mark.parametrize(("gib", "is_named"), [(61, False), (70, True)])
def test_words_name_a_later_step_that_needs_more(gib: int, is_named: bool) -> None:
    said = prediction(DryFacts(fit=FIT.replace(later=gib * 2**30, later_step=8)))
    assert ("live tensors in step 8: 70.0 GiB" in said) == is_named
    assert said[0].startswith(f"tight: rank 7 needs {gib}.2 GiB to {max(gib, 64)}.5 GiB")


COMPUTED = "551 TFLOP at 989.5 TFLOP/s take 556.8 ms"
SLOWEST = "a step takes at least 556.8 ms, limited by computation: at most 941,530"
NO_SPEED = ", not included because the speed of the link is unknown"


def test_words_give_the_least_time_of_a_step() -> None:
    sent = "45.0 GiB between GPUs of a machine at 483 GB/s take 100.0 ms"
    assert prediction(DryFacts(roofline=limit())) == [f"{SLOWEST} tokens/s", COMPUTED, sent]
    assert prediction(DryFacts(roofline=limit()), "samples")[0] == f"{SLOWEST} samples/s"


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"wire_bytes": 0}, COMPUTED),
        ({"link_bytes_per_s": None}, f"45.0 GiB between GPUs of a machine{NO_SPEED}"),
        ({"wire_bytes": 0, "between_machines_bytes": 63 * 2**30}, f"63.0 GiB between machines{NO_SPEED}"),
    ],
    ids=["nothing sent", "unknown link", "between machines"],
)
def test_words_name_a_link_of_unknown_speed(changes: dict[str, Any], last: str) -> None:
    assert prediction(DryFacts(roofline=limit(**changes)))[-1] == last


EXPECTED = make_expected(
    matmul_s=0.5, attention_s=0.1, memory_s=0.2, host_s=0.2, by_host=((0.0, 0.8), (1.0, 1.0))
)


def test_words_give_the_expected_time_of_a_step() -> None:
    parts = "matmuls 500.0 ms, attention 100.0 ms, other kernels 200.0 ms, waiting for the host 200.0 ms"
    published = "published steps on this accelerator reach 87% to 93% of this speed"
    assert prediction(DryFacts(expected=EXPECTED.replace(published=(0.87, 0.93)))) == [
        f"a step is expected to take 1,000.0 ms (1,000 tokens/s): {parts}",
        published,
    ]
    assert "too few steps are published" in prediction(DryFacts(expected=EXPECTED))[1]
    why = DryFacts(no_expected="the model is compiled")
    assert prediction(why) == ["no expected time of a step: the model is compiled"]


def test_a_step_of_no_work_has_no_bound_on_speed() -> None:
    """For a tiny model, the bound would be higher than any machine's speed, so no bound is shown."""
    toy = limit(flops=7 * 10**7, wire_bytes=0)
    why = "7e-05 TFLOP at 989.5 TFLOP/s take less time than launching the kernels of a step"
    assert prediction(DryFacts(roofline=toy)) == [f"no bound on speed: {why}"]
    assert limit(flops=10**11, wire_bytes=0).is_bound, "the step takes 101 µs"


def test_decisive_checks_precede_all_others() -> None:
    sections = explained(SLOWER)
    assert (sections.verdict, sections.why) == ("regressed after 3 launches", [EXPLAINED])
    assert [line.split(":")[0] for line in sections.decisive] == ["tokens/s", "tokens/s with stalls"]
    assert [line.split(":")[0] for line in sections.checks] == [
        "tokens/s",
        "tokens/s with stalls",
        "peak memory",
    ]


def test_counts_and_changes_explain_a_regression() -> None:
    sections = explained(SLOWER)
    assert sections.findings[0] == f"regressed: {EXPLAINED}"
    assert sections.changed == ["changed since the baseline: torch: 2.12.1 -> 2.13.0"]
    assert (sections.counts, sections.not_counted, sections.excuses) == ("regressed", [], [])


def test_a_finding_of_some_ranks_names_them() -> None:
    unlike = [*make_entries(ranks=1), *make_entries(ranks=2)]
    assert explained(make_counted(counts=unlike)).findings[0] == f"regressed: {EXPLAINED} (ranks 0-63)"


@pytest.mark.parametrize("failure", ["unlike", "loss"])
def test_regressed_checks_decide_an_unlike_case(failure: Any) -> None:
    sections = explained(judged(SLOWER.replace(baseline_file="b.json"), outcome="failed", failure=failure))
    assert [line.split(":")[0] for line in sections.decisive] == ["tokens/s", "tokens/s with stalls"]
    assert sections.files["baseline"] == f"b.json{IF_MEANT}"


def test_explains_a_shared_machine() -> None:
    assert explained(make_shared()).excuses[0].startswith("shared: other jobs used the machine")


def test_explains_what_was_not_counted() -> None:
    sections = explained(judged(make_counted(), counts=NOT_COUNTED))
    assert sections.not_counted == ["counts: not counted: a CUDA graph was replayed"]


def test_names_the_files_of_a_case() -> None:
    assert explained(never_run()).files == {"files of the launches": "/tmp/runs/x"}
    assert list(explained(make_counted()).files) == ["baseline of the counts", "files of the launches"]
    assert explained(make_dry()).files["files of the dry run"] == "/tmp/runs/dry"
    assert explained(make_result(now(), baseline_file="b.json")).files["baseline"] == "b.json"


CRASH = Failure(kind="crash", message="x", rank=3, traceback="line 1\n")


def test_traceback_names_its_launch_and_rank() -> None:
    failed = make_run(failure=CRASH)
    assert explained(make_result(now(), failed)).tracebacks == [("launch 2, traceback of rank 3", "line 1")]


@pytest.mark.parametrize(
    ("changes", "titles"), [({"rank": None}, ["launch 1, traceback"]), ({"traceback": None}, [])]
)
def test_rank_and_traceback_of_a_failure_are_optional(changes: dict[str, Any], titles: list[str]) -> None:
    sections = explained(make_result(make_run(failure=CRASH.replace(**changes))))
    assert [title for title, _ in sections.tracebacks] == titles


def test_traceback_names_its_arm() -> None:
    crash = Failure(kind="crash", message="x", rank=3, traceback="line 1\n")
    failed = make_run(failure=crash)
    both = explained(make_compared().replace(before=(failed,), runs=(failed,)))
    titles = [f"arm {arm}, launch 1, traceback of rank 3" for arm in "AB"]
    assert [title for title, _ in both.tracebacks] == titles
    assert both.verdict == "regressed after 1 pair of launches"


def tuned(**choices: str) -> Run:
    return make_run(autotuned=choices)


def test_names_kernels_tuned_differently() -> None:
    both = make_compared().replace(
        before=(tuned(mm="extern_mm", bmm="a", softmax="XBLOCK=1"),),
        runs=(tuned(mm="cpp_gemm", bmm="a", sum="b"),),
    )
    assert explained(both).changed[-1] == (
        "autotuning chose differently for 1 of 2 kernels: mm: extern_mm -> cpp_gemm"
    )


def test_equal_choices_are_left_out() -> None:
    both = make_compared().replace(before=(tuned(mm="a"),), runs=(tuned(mm="a"),))
    assert not [line for line in explained(both).changed if "autotuning" in line]


def test_a_sentence_names_three_kernels_at_most() -> None:
    before, now = ({f"mm{number}": choice for number in range(4)} for choice in "ab")
    both = make_compared().replace(before=(tuned(**before),), runs=(tuned(**now),))
    assert explained(both).changed[-1].count("->") == 3
    assert explained(both).changed[-1].endswith("; ...")
