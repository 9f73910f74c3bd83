from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.frameworks.script import Script
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import PHASES, Counts, KeptObjects, PythonCalls, StepMemory, WorkerBatch, merged
from perfsuite.results.outcome import CountCheck
from perfsuite.results.rank_report import Failure, Flops
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from tests.samples import DISTURBED, deterministic, make_case, make_gpu_machine
from tests.twin_counts import (
    BYTES,
    GATHERED,
    GATHERED_AGAIN,
    REDUCED,
    WORSE,
    baseline_of,
    collective,
    compiled,
    counts,
    keeps,
    launch,
    memory,
    python,
)


def judged(*launches: Run | Counts, before: Run | Counts | None = None) -> CountCheck:
    """Compare the counts of launches with a baseline of one launch."""
    runs = [launched if isinstance(launched, Run) else launch(launched) for launched in launches]
    check = exact.check(runs, baseline_of(*[earlier for earlier in (before,) if earlier is not None]))
    assert check is not None
    return check


def findings(check: CountCheck) -> list[tuple[str, str]]:
    return [(finding.outcome, finding.field) for finding in check.findings]


def reads(forward: int, optimizer: int = 39) -> Counts:
    return counts(host_reads={"forward": forward, "optimizer": optimizer})


CALLS = GATHERED.count + GATHERED_AGAIN.count


def called(times: int) -> Counts:
    """Return counts in which `times` calls gather the usual number of bytes."""
    more = GATHERED.replace(count=times - GATHERED_AGAIN.count)
    return counts(collectives=(more, GATHERED_AGAIN, REDUCED))


def reduced(count: int, sent: int, *, ranks: int = 8) -> Counts:
    """Return counts of a step that all-reduces `sent` bytes among `ranks` ranks, in `count` calls."""
    rows = (
        [collective("all_reduce", ranks=ranks, apart=min(ranks - 1, 1), count=count, bytes=sent)]
        if count
        else []
    )
    return counts(collectives=(GATHERED, *rows))


@pytest.mark.parametrize(
    ("before", "now", "outcome"),
    [
        (reduced(1, 10_000_000), reduced(1, 10_065_536), "passed"),  # 64 KiB are allowed
        (reduced(1, 10_000_000), reduced(1, 10_065_537), "regressed"),
        (reduced(1, 10_000_000), reduced(1, 9_934_464), "passed"),
        (reduced(1, 10_000_000), reduced(1, 9_934_463), "improved"),
        (reduced(1, 10_000), reduced(1, 10_101), "regressed"),  # more than 1%
        (reduced(1, 10_000), reduced(1, 10_100), "passed"),
        # Every call takes time, even if it sends few bytes.
        (reduced(1, 10_000_000), reduced(2, 10_000_004), "regressed"),
        (reduced(0, 0), reduced(1, 4), "regressed"),
        (reduced(2, 10_000_004), reduced(1, 10_000_000), "improved"),
        # A collective within a group of one rank moves no data.
        (reduced(0, 0, ranks=1), reduced(1, 2_048, ranks=1), "passed"),
        (reduced(1, 2_048, ranks=1), reduced(9, 16_000_000_000, ranks=1), "passed"),
        (reduced(9, 16_000_000_000, ranks=1), reduced(0, 0, ranks=1), "passed"),
        (reduced(1, 0, ranks=1), reduced(2, 0, ranks=1), "passed"),
        (reduced(1, 0), reduced(2, 0), "regressed"),
    ],
)
def test_collective_floor_hides_no_call(before: Counts, now: Counts, outcome: str) -> None:
    check = judged(now, before=before)
    assert check.outcome == outcome
    assert [finding.outcome for finding in check.findings] == [outcome]


@pytest.mark.parametrize(("field", "more"), WORSE.items(), ids=list(WORSE))
def test_more_is_regressed(field: str, more: Counts) -> None:
    same = counts() if more.python is None else python()
    check = judged(more, more, before=same)
    assert (check.outcome, check.compared) == ("regressed", True)
    assert findings(check) == [("regressed", field)]
    (finding,) = check.findings
    assert finding.now > finding.before
    assert (finding.ranks, check.unsteady, check.notes) == ("0-1", (), ())


@pytest.mark.parametrize(("field", "more"), WORSE.items(), ids=list(WORSE))
def test_fewer_is_improved(field: str, more: Counts) -> None:
    same = counts() if more.python is None else python()
    better = judged(same, before=more)
    assert (better.outcome, findings(better)) == ("improved", [("improved", field)])


@pytest.mark.parametrize(
    "now",
    [
        called(2 * CALLS),
        counts(collectives=(GATHERED.replace(bytes=2 * BYTES), REDUCED)),
        counts(flops={"forward": 469_762_048 + 335_544_320, "backward": 956_301_312}),
        reads(39, optimizer=1),
        counts(kernels={"forward": 177 + 327, "optimizer": 351}),
        counts(memory=memory(peak=12_900_000 + 65_536, saved_for_backward=4_000_000 + 65_536)),
        counts(flops={**counts().flops, "forward": 469_762_048 + 1_761_000}),
    ],
)
def test_lists_other_splits_and_tiny_changes(now: Counts) -> None:
    """A change of 64 KiB, or of 0.1% of the FLOPs, is listed but passes.

    The same holds for a dry run, although a dry run has no noise.
    """
    dry = judged(launch(now, dry=True), before=launch(dry=True))
    check = judged(now)
    assert (dry.outcome, {outcome for outcome, _ in findings(dry)}) == ("passed", {"passed"})
    assert (check.outcome, findings(check)) == ("passed", findings(dry))
    assert len(check.findings) == (1 if now.memory == counts().memory else 2)


def test_doubled_calls_regress_at_equal_bytes() -> None:
    check = judged(called(2 * CALLS + 1))
    assert (check.outcome, findings(check)) == ("regressed", [("regressed", "all_gather of 2 ranks: calls")])
    assert "calls a step, with the same bytes" in check.findings[0].sentence
    assert judged(counts(), before=called(2 * CALLS + 1)).outcome == "passed", (
        "fewer calls with the same bytes are not an improvement"
    )


@pytest.mark.parametrize(
    ("now", "fields"),
    [
        # Memory grew by these amounts in launches of one script with loader workers.
        *((memory(growth=growth), ["growth in a step"]) for growth in (6148, 12292, 64_400)),
        *((memory(growth=growth), []) for growth in (-6140, -524_796)),
        (memory(peak=12_964_000, saved_for_backward=4_019_000, growth=5), ["growth in a step"]),
        # These fields are not judged. They only explain a change.
        (memory(allocations=900, at_peak={"kept": 1}, peak_in="forward"), []),
    ],
)
def test_memory_may_vary_except_in_a_dry_run(now: StepMemory, fields: list[str]) -> None:
    more = counts(memory=now, ops={"aten.mm": 1})
    assert (judged(more).outcome, judged(more).findings) == ("passed", ())
    assert judged(counts(), before=more).outcome == "passed"
    assert judged(more, counts()).unsteady == ()
    dry = findings(judged(launch(more, dry=True), before=launch(dry=True)))
    assert [field for outcome, field in dry if outcome == "regressed"] == fields


@pytest.mark.parametrize(("now", "outcome"), [(3, "regressed"), (1, "improved")])
def test_a_single_kept_object_is_judged(now: int, outcome: str) -> None:
    check = judged(keeps(tuple=now), before=keeps(tuple=2))
    assert findings(check) == [(outcome, "objects kept per step")]
    assert judged(keeps(list=2), before=keeps(tuple=2)).outcome == "passed"


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


# Differences between ranks


NEW = "not judged, not in the baseline"


def test_finding_names_all_ranks_it_holds_for() -> None:
    check = judged(launch(reads(3), reads(4)), before=launch(reads(1), reads(2)))
    changes = [(finding.ranks, finding.before, finding.now) for finding in check.findings]
    assert changes == [("0", 1, 3), ("1", 2, 4)]
    now, before = (launch(reads(n), reads(n).replace(kernels={"forward": 90})) for n in (2, 1))
    assert [finding.ranks for finding in judged(now, before=before).findings] == ["0-1"]


def test_change_is_that_of_the_most_affected_rank() -> None:
    def sends(gathered: int, reduced: int, others: int = 0) -> Counts:
        rest = collective("broadcast", bytes=others)
        return counts(collectives=(GATHERED.replace(bytes=gathered), REDUCED.replace(bytes=reduced), rest))

    before, now = (launch(sends(n, n // 2), sends(n, 50, others=10**9)) for n in (100, 150))
    both, alone = judged(now, before=before).findings
    assert (both.field, both.ranks) == ("all_gather of 2 ranks: bytes", "0-1")
    assert (alone.field, alone.ranks) == ("reduce_scatter of 2 ranks: bytes", "0")


def test_judges_shared_ranks_and_names_others() -> None:
    lost = "not judged: not counted in these launches"
    new = "not judged: not in the baseline"
    for now, before, notes in (
        ((1,), (0, 1), [f"rank 0 is {lost}"]),
        ((0, 1), (1,), [f"rank 0 is {new}"]),
        ((0,), (4, 5), [f"ranks 4-5 are {lost}", f"rank 0 is {new}"]),
    ):
        today, then = (
            launch(dry=True).replace(counts=merged(dict.fromkeys(ranks, reads(forward))))
            for ranks, forward in ((now, 2), (before, 1))
        )
        check = judged(today, before=then)
        assert (check.compared, [*check.notes]) == (len(notes) == 1, notes)
        assert findings(check) == ([("regressed", "host reads in forward")] if check.compared else [])


def test_equal_change_of_dry_steps_is_said_once() -> None:
    before, now = (
        launch(reads(forward).with_step(Counts(step=5, host_reads={"forward": forward})), dry=True)
        for forward in (1, 2)
    )
    assert findings(judged(now, before=before)) == [("regressed", "host reads in forward")]


# Differences between launches


def test_ignores_what_differs_between_launches() -> None:
    baseline = baseline_of(reads(1), reads(2), reads(1))
    for optimizer, expected in ((39, []), (40, [("regressed", "host reads in optimizer")])):
        check = exact.check([launch(reads(99, optimizer))], baseline)
        assert check is not None
        assert (findings(check), check.unsteady) == (expected, ("host reads in forward",))
    today = judged(reads(2, optimizer=38), reads(1))
    assert (today.outcome, today.findings) == ("passed", ())
    assert today.unsteady == ("host reads in forward", "host reads in optimizer")


def test_unsteady_if_one_launch_is_within_the_allowed() -> None:
    some = judged(counts(memory=memory(growth=64_400)), counts(memory=memory(growth=200_000)))
    assert (some.findings, some.unsteady) == ((), ("growth in a step",)), (
        "one launch changed no more than allowed"
    )


phases = st.fixed_dictionaries({phase: st.integers(0, 6) for phase in PHASES})


@given(phases, st.lists(phases, min_size=1, max_size=4))
@deterministic
def test_the_rule_for_any_counts(before: dict[str, int], today: list[dict[str, int]]) -> None:
    """The sum over the phases must change in the same direction in all launches."""
    check = judged(*(counts(host_reads=by_phase) for by_phase in today), before=counts(host_reads=before))
    by = [sum(by_phase.values()) - sum(before.values()) for by_phase in today]
    expected = "regressed" if min(by) > 0 else "improved" if max(by) < 0 else "passed"
    assert check.outcome == expected
    if expected != "passed":
        (finding,) = check.findings
        assert finding.now - finding.before == min(by, key=abs)


@pytest.mark.parametrize("order", [*permutations([reads(1), reads(3), reads(2)])])
def test_the_order_of_launches_changes_nothing(order: tuple[Counts, ...]) -> None:
    assert judged(*order, before=reads(0)) == judged(reads(1), reads(2), reads(3), before=reads(0))


# Launches that count as evidence


def test_failed_or_uncounted_launch_is_no_evidence() -> None:
    runs = [launch(reads(9), failure=CRASHED), launch(counts=()), launch(reads(2), health=DISTURBED)]
    assert exact.counted(runs) == runs[2:]
    assert findings(judged(*runs)) == [("regressed", "host reads in forward")]


CRASHED = Failure(kind="crash", message="x")
HIDDEN = launch(counts=(), hidden=("a CUDA graph was replayed",))
NOT_COMPARED = CountCheck(outcome="not counted", compared=False)


@pytest.mark.parametrize(
    ("runs", "baseline", "expected"),
    [
        ([launch()], None, NOT_COMPARED.replace(outcome="recorded")),
        ([launch(counts=())], None, None),
        ([launch(failure=CRASHED)], None, None),
        ([launch(failure=CRASHED)], baseline_of(), None),
        ([], baseline_of(), None),
        ([launch(counts=())], baseline_of(), NOT_COMPARED.replace(notes=("no launch was counted",))),
        ([HIDDEN, launch()], baseline_of(), NOT_COMPARED.replace(notes=HIDDEN.hidden)),
        ([HIDDEN], None, NOT_COMPARED.replace(notes=HIDDEN.hidden)),
        ([HIDDEN.replace(failure=CRASHED), launch()], None, NOT_COMPARED.replace(outcome="recorded")),
        ([launch(counts(method="x"))], baseline_of(), NOT_COMPARED.replace(outcome="passed")),
    ],
)
def test_says_why_counts_cannot_be_compared(
    runs: list[Run], baseline: CountBaseline | None, expected: CountCheck | None
) -> None:
    assert exact.check(runs, baseline) == expected


def test_refuses_counts_of_another_method() -> None:
    assert exact.unlike([launch()], baseline_of()) is None
    assert exact.unlike([launch(counts(method="hooks-1", host_reads={}))], baseline_of()) == (
        "cannot be compared: the baseline was counted with the method 'dispatch-2', this step with "
        "'hooks-1'. Accept the counts again (perfsuite baseline accept --only-counts), or delete the baseline"
    )


def test_old_method_compares_all_but_host_reads() -> None:
    """The old method also counted reads of the host's own tensors.

    Fewer reads are not an improvement, but more reads are a regression.
    """
    reads = {"forward": 1, "optimizer": 39}
    old = counts(method="dispatch-1", host_reads=reads, kernels={"forward": 180})
    for today in ({}, {"forward": 50}):
        now = counts(host_reads=today, kernels={"forward": 181})
        check = exact.check([launch(now)], baseline_of(old))
        assert check is not None
        assert [(finding.quantity, finding.outcome) for finding in check.findings] == [
            ("kernels", "regressed")
        ]
        assert [note for note in check.notes if note.startswith("host reads: not judged, because an older")]
    now = counts(host_reads={"forward": 1}, kernels={"forward": 180})
    none = exact.check([launch(now)], baseline_of(old.replace(host_reads={})))
    assert none is not None
    assert [finding.outcome for finding in none.findings] == ["regressed"], (
        "without any reads, the method does not matter"
    )


# Other versions, missing ranks, and compiled models


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


def test_compiled_models() -> None:
    models: tuple[tuple[dict[str, Any], str, str], ...] = (
        *(({"graphs": n}, said, "compiled graphs") for n, said in ((3, "regressed"), (1, "improved"))),
        ({"graphs": 0}, "regressed", "compiled graphs"),  # nothing is compiled any more
        ({"breaks": {"print": 1}}, "regressed", "graph breaks"),
        ({"kernels": 32}, "regressed", "generated kernels"),
        ({"recompilations": 1}, "regressed", "recompilations"),
        ({"extern_calls": 13}, "improved", "extern calls of compiled code"),
    )
    for changes, outcome, field in models:
        assert findings(judged(compiled(**changes), before=compiled())) == [(outcome, field)]
    assert judged(compiled(graphs=0), compiled(), before=compiled()).findings == (), "one launch did compile"
    assert findings(judged(compiled(graphs=0), compiled(graphs=1), before=compiled())) == [
        ("improved", "compiled graphs")
    ]
    check = judged(counts(), before=compiled())
    assert findings(check) == [("regressed", "compiled graphs")]
    assert "graph breaks: not judged, not counted in these launches" in check.notes
    assert "peak of live tensors: not judged, not in the baseline" in check.notes
    assert len(check.notes) == len(set(check.notes)) == 7
    assert judged(counts(), compiled()).notes == judged(compiled(), counts()).notes
    assert f"peak of live tensors: {NEW}" not in judged(counts(), compiled()).notes
    assert (
        "peak of live tensors: not judged, not counted in these launches"
        in judged(counts(), compiled()).notes
    )


# Work that might still be done, but uncounted


NO_FORMULA = "whose FLOPs are unknown because there is no formula"
FEW_FLOPS = counts(flops={"forward": 1_700_000_000})
FEWER = "FLOPs 1.76 -> 1.70 GFLOP"


@pytest.mark.parametrize(
    ("before", "now", "outcome"), [(0, 1, "regressed"), (1, 1, "improved"), (0, 0, "improved")]
)
def test_newly_kept_graphs_outweigh_fewer_objects(before: int, now: int, outcome: str) -> None:
    """One tensor with its graph can take more memory than many other objects."""
    many = counts(kept=KeptObjects(by_type={"weakref": 16}, graphs=before))
    one = counts(kept=KeptObjects(by_type={"Tensor": 1}, graphs=now, graph_holders=("`losses`",)))
    check = judged(one, before=many)
    assert check.outcome == outcome
    said = "tensors with an autograd graph kept per step: 0 -> 1, held by `losses`"
    worse = [finding.sentence for finding in check.findings if finding.outcome == "regressed"]
    assert worse == ([said] if outcome == "regressed" else [])


@pytest.mark.parametrize("graphs", [0, 1])
def test_a_baseline_without_graphs_judges_none(graphs: int) -> None:
    """Older baselines lack them. A note says so if there is something to judge."""
    older = counts(kept=KeptObjects(by_type={"Tensor": 1}))
    check = judged(counts(kept=KeptObjects(by_type={"Tensor": 1}, graphs=graphs)), before=older)
    assert check.outcome == "passed"
    said = "tensors with an autograd graph kept per step: not judged, not in the baseline"
    assert (said in check.notes) == (graphs > 0)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (
            counts(flops={}),
            "FLOPs 1.8 GFLOP -> 0 a step: less than half, so the rest might be done without being counted. "
            "If the work is no longer done, accept the counts (perfsuite baseline accept --only-counts)",
        ),
        (counts(collectives=()), f"collectives {3 * BYTES / 2**20:.1f} MiB -> 0 a step: less than half"),
        (
            counts(collectives=(REDUCED,)),
            f"collectives {3 * BYTES / 2**20:.1f} -> {BYTES / 2**20:.1f} MiB a step",
        ),
        (FEW_FLOPS.replace(ops={"ours.mlp": 4}), f"{FEWER}: the rest might be in ours.mlp, {NO_FORMULA}"),
        (
            FEW_FLOPS.replace(without_flops={"aten.x": 4}),
            f"{FEWER}: the rest might be in aten.x, {NO_FORMULA}",
        ),
    ],
)
def test_what_vanished_is_not_improved(now: Counts, reason: str) -> None:
    check = judged(now)
    assert check.outcome == "not counted"
    assert {finding.outcome for finding in check.findings} == {"passed"}
    assert check.notes[0].startswith(reason)
    assert judged(now, counts()).notes == (), "one launch with all of the work is enough"
    more = judged(now.replace(host_reads={"forward": 99}))
    assert more.outcome == "regressed"
    assert "improved" not in {finding.outcome for finding in more.findings}


def test_fewer_known_flops_are_improved() -> None:
    flops = Flops(formula="palm-1", per_token=6, parameters=1, matmul_parameters=1)
    few = counts(flops={"forward": 1_000})
    assert judged(launch(few, flops=flops)).outcome == "improved"
    varying = make_case(framework=Script(path="train.py", tokens="vary"))
    assert judged(launch(few, flops=flops, case=varying)).outcome == "not counted"
    before = counts(ops={"ours.fused_mlp": 4})
    assert judged(before.replace(flops={"forward": 1_700_000_000}), before=before).outcome == "improved"


# Order of the findings


def test_sorts_findings_by_outcome_and_share() -> None:
    """A new collective of a few bytes is a smaller change than a large collective that doubled."""
    tiny = collective("broadcast", count=1, bytes=128)
    now = counts(
        collectives=(tiny, GATHERED, GATHERED_AGAIN, REDUCED.replace(bytes=2 * BYTES)),
        flops={"forward": 1_000_000_000},
        kernels={"forward": 177, "backward": 328, "optimizer": 351},
        host_reads={"forward": 40},
    )
    assert findings(judged(now)) == [
        ("regressed", "reduce_scatter of 2 ranks: bytes"),
        ("regressed", "broadcast of 2 ranks: bytes"),
        ("regressed", "kernels in backward"),
        ("improved", "FLOPs"),
        ("passed", "host reads"),
    ]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_costs_of_time_precede_those_of_memory(on_gpu: bool) -> None:
    """Findings that cost time come first, although memory and calls change by much larger shares.

    On a CPU, host reads come last, because no device waits for the host.
    """
    now = python(forward=60_000).replace(
        collectives=(*counts().collectives, GATHERED.replace(count=1, bytes=0)),
        flops={**counts().flops, "forward": 480_000_000},
        kernels={"forward": 900},
        host_reads={"forward": 400},
        device_copies={"cuda to cpu": 1},
        blocking_copies={"cuda to cpu": 1},
        memory=memory(peak=40_000_000, saved_for_backward=20_000_000),
    )
    machine = make_gpu_machine() if on_gpu else launch().machine
    check = judged(launch(now, machine=machine), before=launch(python(), machine=machine))
    waits = ["host reads"] if on_gpu else []
    assert [finding.quantity for finding in check.findings] == [
        *("FLOPs", *waits, "blocking copies between devices", "copies between devices"),
        *("saved for backward", "peak of live tensors", "empty all_gather of 2 ranks", "kernels"),
        *("Python 3.11 calls", *(["host reads"] if not on_gpu else [])),
    ]


def test_more_stalls_regress_and_fewer_improve() -> None:
    stalled = counts(stalls={"torch.cuda.synchronize": 2})
    quiet = counts(stalls={})
    assert findings(judged(stalled, before=quiet)) == [("regressed", "calls of torch.cuda.synchronize")]
    assert findings(judged(quiet, before=stalled)) == [("improved", "calls of torch.cuda.synchronize")]


def test_does_not_judge_stalls_without_a_baseline() -> None:
    check = judged(counts(stalls={"gc.collect": 1}), before=counts())
    assert check.outcome == "passed"
    assert check.notes == ("stalling calls: not judged, not in the baseline",)
    assert judged(counts(stalls={}), before=counts()).notes == (), "without stalls, nothing is judged"
    lost = judged(counts(), before=counts(stalls={}))
    assert lost.notes == ("stalling calls: not judged, not counted in these launches",)


def test_python_calls_are_listed_up_to_a_fifth() -> None:
    """Changes below 2% are not listed.

    Python calls vary a little: for example, how often a progress bar is drawn depends on the time.
    """
    field = "Python 3.11 calls in forward"
    for forward, listed, unsteady in ((6_200, [], ()), (8_000, [field], ()), (9_000, [field], (field,))):
        now = python(forward=forward, backward=4_000)
        check = judged(now, before=python())
        assert check.outcome == ("regressed" if forward == 9_000 else "passed")
        assert [sentence for _, sentence in findings(check)] == listed
        assert judged(now, python(), before=python()).unsteady == unsteady
    newer = python(version="3.12", forward=99_999)
    lost = "not judged, not counted in these launches"
    for now, before, notes in (
        (python(), counts(), (f"Python 3.11 calls: {NEW}",)),
        (counts(), python(), (f"Python 3.11 calls: {lost}",)),
        (
            newer,
            python(),
            (f"Python 3.11 calls: {lost}", "Python 3.12 calls: not judged, not in the baseline"),
        ),
    ):
        check = judged(now, before=before)
        assert (check.outcome, check.findings, check.notes) == ("passed", (), notes)


def worker(calls: int, kernels: int = 24, version: str = "3.11") -> Counts:
    functions = {"train.tokenize": calls - 100, "train.collate": 100}
    python = PythonCalls(version=version, calls={"forward": calls}, functions=functions)
    return counts(worker_batch=WorkerBatch(python=python, ops={"aten.stack": kernels}))


@pytest.mark.parametrize(
    ("before", "now", "outcome"),
    [
        ((5_000,), (5_000,), []),
        ((5_000,), (9_000,), ["regressed"]),
        ((9_000,), (5_000,), ["improved"]),
        ((5_000,), (5_900,), ["passed"]),
        ((5_000, 24), (5_000, 48), ["regressed"]),
        ((5_000, 24), (5_000, 26), ["passed"]),
    ],
    ids=["same", "calls", "fewer calls", "few calls", "kernels", "few kernels"],
)
def test_what_a_worker_does_for_a_batch_is_judged(before: Any, now: Any, outcome: list[str]) -> None:
    check = judged(worker(*now), before=worker(*before))
    assert [finding.outcome for finding in check.findings] == outcome
    assert check.notes == ()


def test_a_worker_s_calls_are_named_per_batch() -> None:
    (finding,) = judged(worker(9_000), before=worker(5_000)).findings
    name = "Python 3.11 calls of a loader's worker per batch"
    assert finding.sentence == f"{name}: 5,000 -> 9,000 (train.tokenize +4,000)"
    (finding,) = judged(worker(5_000, 48), before=worker(5_000)).findings
    assert finding.sentence == "kernels of a loader's worker per batch: 24 -> 48 (aten.stack +24)"


def test_counts_without_worker_are_one_note() -> None:
    name = "Python 3.11 calls of a loader's worker per batch"
    old = judged(worker(5_000), before=counts())
    new = judged(counts(), before=worker(5_000))
    assert (old.outcome, old.findings) == (new.outcome, new.findings) == ("passed", ())
    assert old.notes == (f"{name}: not judged, not in the baseline",)
    assert new.notes == (f"{name}: not judged, not counted in these launches",)
