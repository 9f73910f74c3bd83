from pathlib import Path
from typing import Any

import pytest

from perfsuite import FSDP, documents
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import Failure
from tests.cli.commands import flat
from tests.samples import DISTURBED, make_gpu_machine, make_run
from tests.session.review.launches import CASE, MACHINE, REVIEWED, accept, keep, measured, told
from tests.synthetic import commit
from tests.twin_counts import (
    BYTES,
    GATHERED,
    GATHERED_AGAIN,
    REDUCED,
    compiled,
    counts,
    keeps,
    launch,
    memory,
    python,
)

FILE = REVIEWED.counts.reviewed_file("cpu", CASE.id)
MORE = counts(collectives=(GATHERED, GATHERED_AGAIN.replace(count=7, bytes=2 * BYTES), REDUCED))


def seen(*ranks: Counts, **changes: Any) -> dict[str, Any]:
    """Return the fields of a counted launch that other launches do not have."""
    run = launch(*ranks)
    return {"counts": run.counts, "observed": run.observed, **changes}


def counted(session: str, count: int, *options: str, status: int = 0, **launches: Any) -> str:
    """Write `count` launches, accept their counts, and return the output in one line."""
    return flat(accept(session, count, "--only-counts", *options, status=status, **launches))


def accepted(file: Path = FILE) -> CountBaseline:
    return documents.read(file, CountBaseline)


def written() -> dict[str, str]:
    return {str(file): file.read_text() for file in Path("baselines").rglob("*.json")}


def test_counts_are_accepted_with_the_times(repository: Path) -> None:
    result = accept("1", 5, "--reason", "first", **seen())
    assert f"git add baselines/{MACHINE.hardware_class}/{CASE.id}.json {FILE}" in flat(result)
    assert f"{CASE.id} counted on cpu\n  launches: new -> 5\n" in result
    before = accepted()
    assert (before.counts, before.launches) == (launch().counts, 5)
    assert before.accepted is not None
    assert (before.accepted.by, before.accepted.reason) == ("Ada", "first")
    assert f"written: {FILE}" not in accept("2", 5), "the new launches were not counted"
    assert accepted() == before


def test_one_launch_or_dry_run_gives_counts(repository: Path) -> None:
    accept("1", 5, status=2, **seen(dry=True))  # a dry run has no times to accept
    told("accept", "--only-counts")
    held = accepted(REVIEWED.counts.reviewed_file("dry-cpu", CASE.id))
    assert (held.target, held.launches) == ("dry-cpu", 5)
    accept("2", 1, status=1, **seen(health=DISTURBED, machine=make_gpu_machine()))  # too few healthy launches
    told("accept", "--only-counts")
    assert sorted(written()) == [
        f"baselines/counts/{target}/{CASE.id}.json" for target in ("dry-cpu", "sm90")
    ]


def test_refuses_partial_dry_run_baselines(repository: Path) -> None:
    whole = seen(counts(), MORE, case=CASE.replace(framework=FSDP(sharding_strategy="FULL_SHARD")), dry=True)
    alone = {**whole, "counts": whole["counts"][:1]}
    measured("1", 1, **whole)
    assert "only some ranks: run it again without --rank" in counted("2", 1, status=1, **alone)
    counted("3", 1, **whole)
    counted("4", 1, **{**alone, "case": CASE})


def test_keeps_every_rank_of_the_baseline(repository: Path) -> None:
    whole = seen(counts(), MORE)
    counted("1", 1, **whole)
    result = counted("2", 1, "--reason", "why not", status=1, **{**whole, "counts": whole["counts"][:1]})
    assert (
        "rank 1 is not counted in the newest session, although the baseline contains these counts" in result
    )
    assert len(accepted().counts) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        seen(inject="leak=20%"),
        seen(failure=Failure(kind="crash", message="x")),
        {**seen(dry=True), "counts": launch(counts(), MORE).counts[1:]},
    ],
    ids=["not counted", "injected", "failed", "a dry run of another rank alone"],
)
def test_never_accepts_what_says_nothing(repository: Path, changes: dict[str, Any]) -> None:
    result = counted("1", 5, status=2, **changes)
    assert "no counted launch of a case matching '*' in .perfsuite/runs" in result
    assert "Measure first, without --perf-no-counts" in result


def test_more_work_needs_a_reason(repository: Path) -> None:
    accept("1", 5, **seen())
    before = written()
    measured("2", 5, tokens_per_s=60_000, **seen(MORE))
    why = "a step does more work (all_gather of 2 ranks: 2 more calls a step in backward (+3.50 MiB))"
    for options, on in (([], MACHINE.hardware_class), (["--only-counts"], "cpu")):
        refused = told("accept", *options, status=1)
        assert f"{on}: {why}. To accept it anyway, give --reason" in refused
        assert written() == before
    more = MORE.replace(host_reads={"forward": 99}, device_copies={"cpu to cuda": 1})
    assert "2 counts more). To accept it anyway, give --reason" in counted("3", 1, status=1, **seen(more))
    counted("4", 1, "--reason", "gathers twice", **seen(MORE))
    assert accepted().counts == launch(MORE).counts
    counted("5", 1, **seen())  # less work needs no reason, nor does a different split over phases
    split = counted("6", 1, **seen(counts(host_reads={"forward": 40})))
    assert " host reads in forward: 1 -> 40, in optimizer: 39 -> 0 a step " in split


OTHER_COMPUTATION = [
    ({"loss": tuple(4 * value for value in make_run().loss)}, "loss x 4.000 in every step"),
    ({"loss": tuple(value + 1 for value in make_run().loss)}, "the loss between 0% and 10% of the steps: "),
    (
        {"dtypes": {"optimizer state": {"bfloat16": 1000}}},
        "less precise than in the old baseline: optimizer ",
    ),
]


@pytest.mark.parametrize(("changes", "why"), OTHER_COMPUTATION)
def test_another_computation_needs_a_reason(repository: Path, changes: dict[str, Any], why: str) -> None:
    whole = seen(dtypes={"optimizer state": {"float32": 1000}})
    counted("1", 2, **whole)
    refused = counted("2", 2, status=1, **{**whole, **changes})
    assert f"counted on cpu: {why}" in refused
    assert refused.rstrip().endswith("To accept it anyway, give --reason")


@pytest.mark.parametrize(("changes", "why"), OTHER_COMPUTATION)
def test_accepts_another_computation_with_a_reason(
    repository: Path, changes: dict[str, Any], why: str
) -> None:
    whole = seen(dtypes={"optimizer state": {"float32": 1000}})
    counted("1", 2, **whole)
    counted("2", 2, "--reason", "meant", **{**whole, **changes})


def test_the_same_computation_needs_no_reason(repository: Path) -> None:
    whole = seen(dtypes={"optimizer state": {"float32": 1000}})
    counted("1", 2, **whole)
    counted("2", 2, **whole)


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        (keeps(dict=1), counts(), "objects kept per step"),
        (counts(), counts(memory=None), "peak of live tensors, saved for backward, growth in a step, "),
    ],
)
def test_keeps_every_quantity_of_the_baseline(
    repository: Path, before: Counts, now: Counts, lost: str
) -> None:
    counted("1", 1, **seen(before))
    refused = counted("2", 1, "--reason", "why not", status=1, **seen(now))
    assert f"counted on cpu: {lost}" in refused
    assert f"Count them first, or delete {FILE}" in refused
    assert accepted().counts == launch(before).counts


@pytest.mark.parametrize(
    "before",
    [
        python(version="3.11"),
        counts(method="dispatch-0", kept=keeps(dict=1).kept),
    ],
    ids=["another Python", "another method"],
)
def test_other_versions_lose_no_quantity(repository: Path, before: Counts) -> None:
    counted("1", 1, **seen(before))
    counted("2", 1, "--reason", "upgrade", **seen())


def test_ignores_earlier_sessions_and_versions(repository: Path) -> None:
    measured("1", 5, **seen(MORE))
    old = launch(counts(host_reads={}), torch="2.12.0")
    keep("2", [*measured("2", 2, counts=old.counts, observed=old.observed), *measured("2", 5, **seen())])
    told("accept", "--sessions", "2", "--reason", "first")
    assert (accepted().launches, accepted().unsteady) == (5, ())


def test_another_method_needs_a_reason(repository: Path) -> None:
    counted("1", 1, **seen(counts(method="dispatch-0")))
    refused = counted("2", 1, status=1, **seen())
    said = "the new counts are from the method 'dispatch-2', the old ones from 'dispatch-0': not comparable"
    assert f"{said}. To accept it anyway, give --reason" in refused
    told("accept", "--only-counts", "--reason", "counts streams, too")
    assert accepted().method == "dispatch-2"
    FILE.write_text(FILE.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    refused = told("accept", "--only-counts", status=1)
    assert f"not accepted: {CASE.id} counted on cpu: {FILE}: field schema_version" in refused


def test_list_and_show(repository: Path) -> None:
    counted("1", 1, "--reason", "first", **seen(counts(), counts(host_reads={"forward": 2})))
    listed = flat(told("list"))
    assert "counts on case collectives FLOP kernels live tensors launches from accepted" in listed
    assert f"cpu {CASE.id} 10.5 MiB 1.76 GFLOP 855 12.3 MiB 1 2026-01-02 by Ada" in listed
    shown = told("show", CASE.id)
    assert f"{CASE.id} counted on cpu\n  file: {FILE}\n  accepted by Ada" in shown
    assert "  of 1 launch; versions: torch 2.13.0, transformers 5.23.0\n" in shown
    assert "\nspans of the run:\n" in shown
    assert "\nstep 4 of rank 0, counted:\n" in shown
    assert " all_gather 2 ranks float32 backward 5 3.50 MiB " in flat(shown)


def test_list_and_show_of_compiled_models(repository: Path) -> None:
    counted("2", 1, "--reason", "compiled models have no live tensors", **seen(compiled()))
    assert "855 not counted 1 2026" in flat(told("list"))
    assert "generated kernels 31" in flat(told("show", "*"))


def test_what_is_unsteady_is_shown(repository: Path) -> None:
    first, _ = measured("1", 2, **seen())
    second = Path(".perfsuite/runs/1", CASE.id, "launch-2", "run.json")
    documents.write(second, first.replace(counts=launch(MORE).counts))
    unsteady = "not judged, because the launches differ: all_gather of 2 ranks: bytes\n"
    assert unsteady in told("accept", "--only-counts")
    assert unsteady in told("show", "*")


def test_diff_says_in_words_what_a_branch_changes(repository: Path) -> None:
    counted("1", 1, **seen())
    assert f"{CASE.id} counted on cpu\n  launches: new -> 1\n" in told("diff")
    commit(repository)
    newer = seen(MORE, observed=launch(torch="2.14.0").observed)
    counted("2", 3, "--reason", "torch 2.14", **newer)
    assert told("diff") == (
        f"{CASE.id} counted on cpu\n"
        "  launches: 1 -> 3\n"
        "  versions: torch 2.13.0 -> 2.14.0\n"
        "  all_gather of 2 ranks: 2 more calls a step in backward (+3.50 MiB)\n"
    )
    commit(repository)
    REVIEWED.counts.write_reviewed(accepted().replace(launches=2))
    assert "  launches: 3 -> 2\n  the counts are the same\n" in told("diff")
    entries = [entry.replace(counts=entry.counts.replace(method="hooks-1")) for entry in accepted().counts]
    REVIEWED.counts.write_reviewed(accepted().replace(counts=entries))
    assert "from the method 'hooks-1', the old ones from 'dispatch-2': not comparable" in told("diff")
    FILE.unlink()
    assert f"{CASE.id} counted on cpu\n  launches: 3 -> removed\n" in told("diff")


def test_diff_merges_what_several_ranks_share(repository: Path) -> None:
    """The bytes of the two ranks differ only by an amount that is too small to be shown."""
    counted("1", 1, **seen(counts(), counts(host_reads={"forward": 2})))
    commit(repository)
    larger = [counts(memory=memory(peak=memory().peak + 2**20 + more)) for more in (0, 8)]
    larger[1] = larger[1].replace(host_reads={"forward": 3})
    counted("2", 1, "--reason", "larger", **seen(*larger))
    assert told("diff").splitlines()[2:] == [
        "  peak of live tensors: 12.3 -> 13.3 MiB (ranks 0-1)",
        "  host reads in forward: 2 -> 3 a step (rank 1)",
    ]
