from typing import Any

import pytest

from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import Counts, InCycles, KeptObjects, merged
from perfsuite.results.outcome import CountCheck
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from perfsuite.verdict.evidence import counted
from tests.samples import DISTURBED
from tests.twin_counts import (
    baseline_of,
    compiled,
    counts,
    keeps,
    launch,
    memory,
)
from tests.verdict.counting import NEW, findings, judged, reads, worker

NOT_COMPARED = CountCheck(outcome="not counted", compared=False)
HIDDEN = launch(counts=(), hidden=("a CUDA graph was replayed",))
CRASHED = Failure(kind="crash", message="x")


@pytest.mark.parametrize(
    ("now", "before", "where"),
    [
        (keeps(tuple=2), counts(), "not in the baseline"),
        (counts(), keeps(tuple=2), "not counted in these launches"),
    ],
)
def test_unknown_growth_is_noted_never_better(now: Counts, before: Counts, where: str) -> None:
    check = judged(now, before=before)
    assert (check.outcome, check.findings) == ("passed", ())
    assert check.notes == (f"objects kept per step: not judged, {where}",)


LOST = "not judged: not counted in these launches"
NOT_BEFORE = "not judged: not in the baseline"


@pytest.mark.parametrize(
    ("now", "before", "notes"),
    [
        ((1,), (0, 1), [f"rank 0 is {LOST}"]),
        ((0, 1), (1,), [f"rank 0 is {NOT_BEFORE}"]),
        ((0,), (4, 5), [f"ranks 4-5 are {LOST}", f"rank 0 is {NOT_BEFORE}"]),
    ],
    ids=["one lost", "one new", "none shared"],
)
def test_judges_shared_ranks_and_names_others(
    now: tuple[int, ...], before: tuple[int, ...], notes: list[str]
) -> None:
    today, then = (
        launch(dry=True).replace(counts=merged(dict.fromkeys(ranks, reads(forward))))
        for ranks, forward in ((now, 2), (before, 1))
    )
    check = judged(today, before=then)
    assert (check.compared, [*check.notes]) == (len(notes) == 1, notes)
    assert findings(check) == ([("regressed", "host reads in forward")] if check.compared else [])


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(39, []), (40, [("regressed", "host reads in optimizer")])],
    ids=["same", "one more"],
)
def test_ignores_what_differs_between_launches(optimizer: int, expected: list[tuple[str, str]]) -> None:
    baseline = baseline_of(reads(1), reads(2), reads(1))
    check = exact.check([launch(reads(99, optimizer))], baseline)
    assert check is not None
    assert (findings(check), check.unsteady) == (expected, ("host reads in forward",))


def test_a_value_within_two_launches_is_unsteady() -> None:
    today = judged(reads(2, optimizer=38), reads(1))
    assert (today.outcome, today.findings) == ("passed", ())
    assert today.unsteady == ("host reads in forward", "host reads in optimizer")


def test_failed_or_uncounted_launch_is_no_evidence() -> None:
    runs = [launch(reads(9), failure=CRASHED), launch(counts=()), launch(reads(2), health=DISTURBED)]
    assert counted(runs) == runs[2:]
    assert findings(judged(*runs)) == [("regressed", "host reads in forward")]


@pytest.mark.parametrize(
    ("runs", "baseline", "expected"),
    [
        ([launch()], None, NOT_COMPARED.replace(outcome="recorded")),
        ([launch(counts=())], None, None),
        ([launch(failure=CRASHED)], None, None),
        ([launch(failure=CRASHED)], baseline_of(), None),
        ([], baseline_of(), None),
        ([launch(counts=())], baseline_of(), NOT_COMPARED.replace(notes=("no launch was counted",))),
        ([HIDDEN, launch()], baseline_of(), CountCheck(outcome="not counted", notes=HIDDEN.hidden)),
        ([HIDDEN], None, NOT_COMPARED.replace(notes=HIDDEN.hidden)),
        ([HIDDEN.replace(failure=CRASHED), launch()], None, NOT_COMPARED.replace(outcome="recorded")),
        ([launch(counts(method="x"))], baseline_of(), NOT_COMPARED.replace(outcome="passed")),
    ],
)
def test_says_why_counts_cannot_be_compared(
    runs: list[Run], baseline: CountBaseline | None, expected: CountCheck | None
) -> None:
    assert exact.check(runs, baseline) == expected


def test_unseen_work_does_not_hide_a_regression() -> None:
    worse = [launch(reads(9)), launch(reads(9)), HIDDEN]
    check = judged(*worse)
    assert (check.outcome, check.notes) == ("regressed", HIDDEN.hidden)


def test_unseen_work_hides_an_improvement() -> None:
    check = judged(launch(reads(0)), HIDDEN)
    assert check.outcome == "not counted"
    assert {finding.outcome for finding in check.findings} == {"passed"}


@pytest.mark.parametrize(
    ("dry", "outcome"), [(False, "not counted"), pytest.param(True, "passed", id="ranks were chosen")]
)
def test_a_rank_without_counts_is_no_pass(dry: bool, outcome: str) -> None:
    run = launch(dry=dry)
    alone = run.replace(counts=tuple(entry.replace(ranks=(0,)) for entry in run.counts))
    check = judged(alone, before=run)
    assert check.outcome == outcome
    assert check.one_sided == ("rank 1 is not judged: not counted in these launches",)


SAVING = counts(spans={"save checkpoint": Counts(occurrences=1)})
STARTED = counts(spans={"start-up": Counts()}, also_counted=(70,), kept=KeptObjects())


@pytest.mark.parametrize(
    ("now", "before", "one_sided"),
    [
        (SAVING, counts(), ("save checkpoint: not judged, not in the baseline",)),
        (counts(), SAVING, ("save checkpoint: not judged, not counted in these launches",)),
        (STARTED, counts(), ()),
        (counts(memory=None), counts(), ("peak of live tensors: not judged, not counted in these launches",)),
    ],
    ids=["new event", "lost event", "older baseline", "lost memory"],
)
def test_names_work_that_might_have_changed(now: Counts, before: Counts, one_sided: tuple[str, ...]) -> None:
    assert judged(now, before=before).one_sided[:1] == one_sided


def test_more_work_of_one_rank_is_a_regression() -> None:
    run = launch(reads(9))
    alone = run.replace(counts=tuple(entry.replace(ranks=(0,)) for entry in run.counts))
    assert judged(alone).outcome == "regressed"


UNKNOWN_MEMORY = counts(memory=None)


@pytest.mark.parametrize("launches", [(counts(), UNKNOWN_MEMORY, counts()), (counts(), counts())])
def test_an_unknown_value_is_not_unsteady(launches: tuple[Counts, ...]) -> None:
    check = exact.check([launch(counts(memory=memory(peak=25_000_000)))], baseline_of(*launches))
    assert check is not None
    assert (check.outcome, check.unsteady) == ("regressed", ())


@pytest.mark.parametrize(("today", "grown"), [(2, ()), (3, ("host reads in forward",))])
def test_unsteady_work_can_be_more_than_ever(today: int, grown: tuple[str, ...]) -> None:
    check = exact.check([launch(reads(today))], baseline_of(reads(1), reads(2), reads(1)))
    assert check is not None
    assert (check.outcome, check.grown) == ("passed", grown)


@pytest.mark.parametrize("baseline", [baseline_of(reads(2), reads(2)), baseline_of(reads(9), reads(3))])
def test_unsteady_work_within_the_baseline_has_not_grown(baseline: CountBaseline) -> None:
    check = exact.check([launch(reads(2)), launch(reads(1))], baseline)
    assert check is not None
    assert check.unsteady == ("host reads in forward",)
    assert check.grown == ()


def test_an_older_baseline_does_not_know_what_has_grown() -> None:
    older = baseline_of(reads(9), reads(3)).replace(largest={})
    check = exact.check([launch(reads(3))], older)
    assert check is not None
    assert check.grown == ()


def test_refuses_counts_of_another_method() -> None:
    assert exact.unlike([launch()], baseline_of()) is None
    assert exact.unlike([launch(counts(method="hooks-1", host_reads={}))], baseline_of()) == (
        "cannot be compared: the baseline was counted with the method 'dispatch-2', this step with "
        "'hooks-1'. Accept the counts again (perfsuite baseline accept --only-counts), or delete the baseline"
    )


@pytest.mark.parametrize("today", [{}, {"forward": 50}], ids=["fewer", "more"])
def test_old_method_compares_all_but_host_reads(today: dict[str, int]) -> None:
    """The old method also counted reads of the host's own tensors.

    Fewer reads are not an improvement, but more reads are a regression.
    """
    reads = {"forward": 1, "optimizer": 39}
    old = counts(method="dispatch-1", host_reads=reads, kernels={"forward": 180})
    now = counts(host_reads=today, kernels={"forward": 181})
    check = exact.check([launch(now)], baseline_of(old))
    assert check is not None
    assert [(finding.quantity, finding.outcome) for finding in check.findings] == [("kernels", "regressed")]
    assert [note for note in check.notes if note.startswith("host reads: not judged, because an older")]


def test_old_method_without_host_reads_compares_all() -> None:
    reads = {"forward": 1, "optimizer": 39}
    old = counts(method="dispatch-1", host_reads=reads, kernels={"forward": 180})
    now = counts(host_reads={"forward": 1}, kernels={"forward": 180})
    none = exact.check([launch(now)], baseline_of(old.replace(host_reads={})))
    assert none is not None
    assert [finding.outcome for finding in none.findings] == ["regressed"], (
        "without any reads, the method does not matter"
    )


def test_judges_another_version_and_names_it() -> None:
    now = counts(kernels={"forward": 181}, memory=memory(peak=1), host_reads={"forward": 2, "optimizer": 39})
    check = judged(launch(now, torch="2.14.0"))
    assert findings(check) == [
        ("regressed", "host reads in forward"),
        ("improved", "peak of live tensors"),
        ("improved", "kernels"),
    ]
    assert check.notes == ("counted with other versions: torch 2.13.0 -> 2.14.0",)
    assert judged(launch(torch="2.14.0")).notes == ()
    assert judged(launch(reads(2), observed=None)).notes == (
        "counted with other versions: torch 2.13.0 -> unknown, transformers 5.23.0 -> unknown",
    )


def test_names_ranks_missing_in_a_baseline() -> None:
    more = baseline_of(launch(counts(kernels={"forward": 9999}), torch="2.14.0"))
    one = more.replace(counts=merged({1: counts()}))
    assert [exact.missing_ranks(*pair) for pair in ((more, one), (one, more))] == ["rank 0 is", None]


def test_baselines_of_other_versions_are_compared() -> None:
    more = baseline_of(launch(counts(kernels={"forward": 9999}), torch="2.14.0"))
    (finding,) = exact.count_differences(baseline_of(), more)
    assert (finding.outcome, finding.field) == ("regressed", "kernels")


@pytest.mark.parametrize(
    ("changes", "outcome", "field"),
    [
        *(({"graphs": n}, said, "compiled graphs") for n, said in ((3, "regressed"), (1, "improved"))),
        ({"graphs": 0}, "regressed", "compiled graphs"),  # nothing is compiled any more
        ({"breaks": {"print": 1}}, "regressed", "graph breaks"),
        ({"kernels": 32}, "regressed", "generated kernels"),
        ({"recompilations": 1}, "regressed", "recompilations"),
        ({"extern_calls": 13}, "improved", "extern calls of compiled code"),
    ],
    ids=[
        "more graphs",
        "fewer graphs",
        "no graphs",
        "breaks",
        "kernels",
        "recompilations",
        "fewer extern calls",
    ],
)
def test_judges_each_count_of_a_compiled_model(changes: dict[str, Any], outcome: str, field: str) -> None:
    assert findings(judged(compiled(**changes), before=compiled())) == [(outcome, field)]


def test_launches_that_compiled_decide_about_graphs() -> None:
    assert judged(compiled(graphs=0), compiled(), before=compiled()).findings == (), "one launch did compile"
    assert findings(judged(compiled(graphs=0), compiled(graphs=1), before=compiled())) == [
        ("improved", "compiled graphs")
    ]


def test_a_model_that_is_no_longer_compiled_regresses() -> None:
    check = judged(counts(), before=compiled())
    assert findings(check) == [("regressed", "compiled graphs")]
    assert "graph breaks: not judged, not counted in these launches" in check.notes
    assert "peak of live tensors: not judged, not in the baseline" in check.notes
    assert len(check.notes) == len(set(check.notes)) == 7


def test_order_of_compiled_launches_changes_no_note() -> None:
    assert judged(counts(), compiled()).notes == judged(compiled(), counts()).notes
    assert f"peak of live tensors: {NEW}" not in judged(counts(), compiled()).notes
    assert (
        "peak of live tensors: not judged, not counted in these launches"
        in judged(counts(), compiled()).notes
    )


@pytest.mark.parametrize("size", [0, 2**20])
def test_a_baseline_without_cycles_judges_none(size: int) -> None:
    check = judged(
        counts(memory=memory(in_cycles=InCycles(bytes=size))), before=counts(memory=memory(in_cycles=None))
    )
    assert check.outcome == "passed"
    assert (f"tensors in reference cycles: {NEW}" in check.notes) is (size > 0)


@pytest.mark.parametrize("graphs", [0, 1])
def test_a_baseline_without_graphs_judges_none(graphs: int) -> None:
    """Older baselines lack them. A note says so if there is something to judge."""
    older = counts(kept=KeptObjects(by_type={"Tensor": 1}))
    check = judged(counts(kept=KeptObjects(by_type={"Tensor": 1}, graphs=graphs)), before=older)
    assert check.outcome == "passed"
    said = "tensors with an autograd graph kept per step: not judged, not in the baseline"
    assert (said in check.notes) == (graphs > 0)


def test_does_not_judge_stalls_without_a_baseline() -> None:
    check = judged(counts(stalls={"gc.collect": 1}), before=counts())
    assert check.outcome == "passed"
    assert check.notes == ("stalling calls: not judged, not in the baseline",)
    assert judged(counts(stalls={}), before=counts()).notes == (), "without stalls, nothing is judged"
    lost = judged(counts(), before=counts(stalls={}))
    assert lost.notes == ("stalling calls: not judged, not counted in these launches",)


def test_counts_without_worker_are_one_note() -> None:
    name = "Python 3.11 calls of a loader's worker per batch"
    old = judged(worker(5_000), before=counts())
    new = judged(counts(), before=worker(5_000))
    assert (old.outcome, old.findings) == (new.outcome, new.findings) == ("passed", ())
    assert old.notes == (f"{name}: not judged, not in the baseline",)
    assert new.notes == (f"{name}: not judged, not counted in these launches",)
