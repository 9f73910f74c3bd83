from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import FSDP, documents
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import Failure
from tests.cli.baseline.launches import CASE, MACHINE, REVIEWED, measured, told
from tests.samples import DISTURBED, make_gpu_machine
from tests.synthetic import commit
from tests.twin_counts import BYTES, GATHERED, GATHERED_AGAIN, REDUCED, compiled, counts, launch, memory

FILE = REVIEWED.counts.reviewed_file("cpu", CASE.id)
MORE = counts(collectives=(GATHERED, GATHERED_AGAIN.replace(count=7, bytes=2 * BYTES), REDUCED))


def seen(*ranks: Counts, **changes: Any) -> dict[str, Any]:
    """What a launch has beyond the usual, where it was counted."""
    run = launch(*ranks)
    return {"counts": run.counts, "observed": run.observed, **changes}


def counted(session: str, count: int, *options: str, status: int = 0, **launches: Any) -> str:
    """What is said where the counts of so many launches are accepted."""
    measured(session, count, **launches)
    return told("accept", "--counts", *options, status=status)


def accepted(file: Path = FILE) -> CountBaseline:
    return documents.read(file, CountBaseline)


def test_counts_are_accepted_with_the_times(repository: Path) -> None:
    measured("1", 5, **seen())
    result = told("accept", "--reason", "first")
    assert f"git add baselines/{MACHINE.hardware_class}/{CASE.id}.json {FILE}" in " ".join(result.split())
    assert f"{CASE.id} counted on cpu\n  launches: new -> 5\n" in result
    held = accepted()
    assert (held.counts, held.launches) == (launch().counts, 5)
    assert held.accepted is not None
    assert (held.accepted.by, held.accepted.reason) == ("Ada", "first")


def test_counts_alone_are_accepted_from_one_launch_on_any_machine(repository: Path) -> None:
    measured("1", 1, **seen(health=DISTURBED, machine=make_gpu_machine()))
    told("accept", status=1)  # too few healthy launches
    told("accept", "--counts")
    assert [str(file) for file in Path("baselines").rglob("*.json")] == [
        f"baselines/counts/sm90/{CASE.id}.json"
    ]


def test_a_dry_run_is_accepted_by_its_own_target_and_never_for_its_times(repository: Path) -> None:
    measured("1", 5, **seen(dry=True))
    told("accept", status=2)
    told("accept", "--counts")
    held = accepted(REVIEWED.counts.reviewed_file("dry-cpu", CASE.id))
    assert (held.target, held.launches) == ("dry-cpu", 5)


def test_a_dry_run_of_another_rank_alone_is_never_accepted(repository: Path) -> None:
    run = launch(counts(), MORE)
    assert "no counted launch of a case" in counted(
        "1", 1, status=2, counts=run.counts[1:], observed=run.observed, dry=True
    )


def test_a_dry_run_of_the_first_rank_alone_is_no_baseline_where_ranks_differ(repository: Path) -> None:
    whole = seen(counts(), MORE, case=CASE.replace(framework=FSDP(sharding_strategy="FULL_SHARD")), dry=True)
    alone = {**whole, "counts": whole["counts"][:1]}
    measured("1", 1, **whole)
    result = counted("2", 1, status=1, **alone)
    assert "some ranks only: run it again without --rank" in " ".join(result.split())
    counted("3", 1, **whole)
    counted("4", 1, **{**alone, "case": CASE})


def test_a_rank_that_the_baseline_has_is_never_lost(repository: Path) -> None:
    whole = seen(counts(), MORE)
    counted("1", 1, **whole)
    result = counted("2", 1, "--reason", "why not", status=1, **{**whole, "counts": whole["counts"][:1]})
    assert "rank 1 is not counted in the newest session, but in the baseline" in " ".join(result.split())
    assert len(accepted().counts) == 2


@pytest.mark.parametrize(
    "changes", [seen(inject="leak=20%"), seen(failure=Failure(kind="crash", message="x")), {}]
)
def test_what_was_injected_failed_or_not_counted_is_never_accepted(
    repository: Path, changes: dict[str, Any]
) -> None:
    result = counted("1", 5, status=2, **changes)
    assert "no counted launch of a case matching '*' in .perfsuite/runs" in result
    assert "Measure first, without --perf-no-counts" in result


def test_times_that_were_not_counted_leave_the_counts_as_they_are(repository: Path) -> None:
    measured("1", 5, **seen())
    told("accept")
    before = FILE.read_text()
    measured("2", 5)
    assert f"written: {FILE}" not in told("accept")
    assert FILE.read_text() == before


def test_more_work_needs_a_reason_and_without_one_nothing_is_written(repository: Path) -> None:
    measured("1", 5, **seen())
    told("accept")
    before = {file: file.read_text() for file in Path("baselines").rglob("*.json")}
    measured("2", 5, tokens_per_s=60_000, **seen(MORE))
    for options in ([], ["--counts"]):
        refused = told("accept", *options, status=1)
        why = "all_gather of 2 ranks: 2 more calls a step in backward (+3.50 MiB)"
        assert f"a step does more ({why}): say why with --reason" in refused
        assert {file: file.read_text() for file in Path("baselines").rglob("*.json")} == before
    told("accept", "--counts", "--reason", "gathers twice")
    assert accepted().counts == launch(MORE).counts


def test_how_much_else_is_worse_is_said(repository: Path) -> None:
    counted("1", 1, **seen())
    assert "2 counts more: say why with --reason" in counted(
        "2", 1, status=1, **seen(MORE.replace(host_reads={"forward": 99}, device_copies={"cpu to cuda": 1}))
    )


def test_less_work_and_another_split_need_none(repository: Path) -> None:
    counted("1", 1, **seen(MORE))
    counted("2", 1, **seen())
    assert "\n  host reads in forward: 1 -> 40, in optimizer: 39 -> 0 a step\n" in counted(
        "3", 1, **seen(counts(host_reads={"forward": 40}))
    )


def test_launches_of_other_versions_than_the_newest_are_left_out(repository: Path) -> None:
    old = launch(counts(host_reads={}), torch="2.12.0")
    measured("1", 2, counts=old.counts, observed=old.observed)
    counted("2", 3, "--sessions", "2", **seen())
    assert (accepted().launches, accepted().unsteady) == (3, ())


def test_what_an_earlier_session_did_otherwise_makes_no_count_unsteady(repository: Path) -> None:
    measured("1", 5, **seen(MORE))
    measured("2", 5, **seen())
    told("accept", "--sessions", "2", "--reason", "first")
    assert (accepted().launches, accepted().unsteady) == (5, ())


def test_another_method_needs_a_reason(repository: Path) -> None:
    counted("1", 1, **seen(counts(method="dispatch-0")))
    refused = counted("2", 1, status=1, **seen())
    said = "counted by the method 'dispatch-1', before by 'dispatch-0': not comparable"
    assert f"{said}: say why with --reason" in refused
    told("accept", "--counts", "--reason", "counts streams, too")
    assert accepted().method == "dispatch-1"


def test_a_file_of_another_schema_refuses_its_own_case(repository: Path) -> None:
    counted("1", 1, **seen())
    FILE.write_text(FILE.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    refused = told("accept", "--counts", status=1)
    assert f"not accepted: {CASE.id} counted on cpu: {FILE}: field schema_version" in refused


def test_list_and_show(repository: Path) -> None:
    counted("1", 1, "--reason", "first", **seen(counts(), counts(host_reads={"forward": 2})))
    listed = " ".join(told("list").split())
    assert "counts on case collectives FLOP kernels live tensors launches from accepted" in listed
    assert f"cpu {CASE.id} 10.5 MiB 1.76 GFLOP 855 12.3 MiB 1 2026-01-02 by Ada" in listed
    shown = told("show", CASE.id)
    assert f"{CASE.id} counted on cpu\n  file: {FILE}\n  accepted by Ada" in shown
    assert "  of 1 launch; versions: torch 2.13.0, transformers 5.23.0\n" in shown
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    for row in (
        "step 4 of rank 0, counted:",
        "collective group dtype phase calls bytes",
        "all_gather 2 ranks float32 backward 5 3.50 MiB",
        "phase FLOPs kernels host reads",
    ):
        assert row in rows
    assert any(row.startswith("recompute 335.5 MFLOP") for row in rows)
    assert any(row.startswith("peak, in ") and row.endswith(" 12.3 MiB") for row in rows)
    assert "Copied" not in shown


def test_what_is_unsteady_is_shown(repository: Path) -> None:
    first, _ = measured("1", 2, **seen())
    second = Path(".perfsuite/runs/1", CASE.id, "launch-2", "run.json")
    documents.write(second, first.replace(counts=launch(MORE).counts))
    unsteady = "not judged, because its launches differ: all_gather of 2 ranks: bytes\n"
    assert unsteady in told("accept", "--counts")
    assert unsteady in told("show", "*")


def test_compiled_models_have_no_live_tensors(repository: Path) -> None:
    counted("1", 1, **seen(compiled()))
    assert "855 not counted 1 2026" in " ".join(told("list").split())
    assert "generated kernels 31" in " ".join(told("show", "*").split())


def test_diff_says_in_words_what_a_branch_changes(repository: Path) -> None:
    counted("1", 1, **seen())
    assert f"{CASE.id} counted on cpu\n  launches: new -> 1\n" in told("diff")
    commit(repository)
    assert "no baseline changed since HEAD" in told("diff")
    newer = launch(MORE, torch="2.14.0")
    counted("2", 3, "--reason", "torch 2.14", counts=newer.counts, observed=newer.observed)
    assert told("diff") == (
        f"{CASE.id} counted on cpu\n"
        "  launches: 1 -> 3\n"
        "  versions: torch 2.13.0 -> 2.14.0\n"
        "  all_gather of 2 ranks: 2 more calls a step in backward (+3.50 MiB)\n"
    )
    FILE.unlink()
    assert f"{CASE.id} counted on cpu\n  launches: 1 -> removed\n" in told("diff")


def test_diff_says_once_what_is_true_of_several_ranks(repository: Path) -> None:
    """Their bytes differ in a digit that is not shown."""
    counted("1", 1, **seen(counts(), counts(host_reads={"forward": 2})))
    commit(repository)
    larger = [counts(memory=memory(peak=memory().peak + 2**20 + more)) for more in (0, 8)]
    larger[1] = larger[1].replace(host_reads={"forward": 3})
    counted("2", 1, "--reason", "larger", **seen(*larger))
    assert told("diff").splitlines()[2:] == [
        "  peak of live tensors: 12.3 -> 13.3 MiB (ranks 0-1)",
        "  host reads in forward: 2 -> 3 a step (rank 1)",
    ]


def test_diff_says_where_only_the_launches_changed_and_where_methods_differ(repository: Path) -> None:
    counted("1", 1, **seen())
    commit(repository)
    REVIEWED.counts.write_reviewed(accepted().replace(launches=2))
    assert "  launches: 1 -> 2\n  the counts are the same\n" in told("diff")
    held = accepted()
    other = [entry.replace(counts=entry.counts.replace(method="hooks-1")) for entry in held.counts]
    REVIEWED.counts.write_reviewed(held.replace(counts=other))
    assert "counted by the method 'hooks-1', before by 'dispatch-1': not comparable" in told("diff")
