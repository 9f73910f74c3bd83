"""Test how the differences between the counts of two steps are found, judged and sorted."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.results.counts import PHASES, Counts, KeptObjects, StepMemory
from tests.samples import deterministic, make_gpu_machine
from tests.twin_counts import (
    BYTES,
    GATHERED,
    GATHERED_AGAIN,
    REDUCED,
    WORSE,
    collective,
    counts,
    keeps,
    launch,
    memory,
    python,
)
from tests.verdict.counting import CALLS, NEW, called, findings, judged, reads, reduced, worker


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


def test_equal_change_of_dry_steps_is_said_once() -> None:
    before, now = (
        launch(reads(forward).with_step(Counts(step=5, host_reads={"forward": forward})), dry=True)
        for forward in (1, 2)
    )
    assert findings(judged(now, before=before)) == [("regressed", "host reads in forward")]


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


@pytest.mark.parametrize(("now", "outcome"), [(2, "passed"), (3, "regressed")])
def test_graphs_left_after_a_step_have_a_floor(now: int, outcome: str) -> None:
    """A training loop's own variables can hold the loss and the output of the last step."""
    before = counts(kept=KeptObjects(graphs=0, graphs_left=0))
    left = counts(kept=KeptObjects(graphs=0, graphs_left=now, graph_holders=("`losses`",)))
    check = judged(left, before=before)
    said = f"tensors with an autograd graph after a step: 0 -> {now}, held by `losses`"
    assert [(each.sentence, each.outcome) for each in check.findings] == [(said, outcome)]


def test_graphs_left_after_other_steps_are_not_compared() -> None:
    """A buffer that the training empties regularly has another size after another step."""
    before = counts(kept=KeptObjects(graphs=0, graphs_left=0, graphs_after=(5, 14, 23)))
    left = counts(kept=KeptObjects(graphs=0, graphs_left=9, graphs_after=(16, 43, 70)))
    assert judged(left, before=before).findings == ()


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


CALLS_IN_FORWARD = "Python 3.11 calls in forward"


@pytest.mark.parametrize(
    ("forward", "listed", "unsteady"),
    [(6_200, [], ()), (8_000, [CALLS_IN_FORWARD], ()), (9_000, [CALLS_IN_FORWARD], (CALLS_IN_FORWARD,))],
    ids=["below 2%", "listed", "regressed"],
)
def test_python_calls_are_listed_up_to_a_fifth(
    forward: int, listed: list[str], unsteady: tuple[str, ...]
) -> None:
    """Changes below 2% are not listed.

    Python calls vary a little: for example, how often a progress bar is drawn depends on the time.
    """
    now = python(forward=forward, backward=4_000)
    check = judged(now, before=python())
    assert check.outcome == ("regressed" if forward == 9_000 else "passed")
    assert [sentence for _, sentence in findings(check)] == listed
    assert judged(now, python(), before=python()).unsteady == unsteady


LOST = "not judged, not counted in these launches"


@pytest.mark.parametrize(
    ("now", "before", "notes"),
    [
        (python(), counts(), (f"Python 3.11 calls: {NEW}",)),
        (counts(), python(), (f"Python 3.11 calls: {LOST}",)),
        (
            python(version="3.12", forward=99_999),
            python(),
            (f"Python 3.11 calls: {LOST}", "Python 3.12 calls: not judged, not in the baseline"),
        ),
    ],
    ids=["new", "lost", "another version"],
)
def test_python_calls_of_one_side_are_a_note(now: Counts, before: Counts, notes: tuple[str, ...]) -> None:
    check = judged(now, before=before)
    assert (check.outcome, check.findings, check.notes) == ("passed", (), notes)


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
def test_judges_the_work_of_a_worker_for_a_batch(before: Any, now: Any, outcome: list[str]) -> None:
    check = judged(worker(*now), before=worker(*before))
    assert [finding.outcome for finding in check.findings] == outcome
    assert check.notes == ()


def test_a_worker_s_calls_are_named_per_batch() -> None:
    (finding,) = judged(worker(9_000), before=worker(5_000)).findings
    name = "Python 3.11 calls of a loader's worker per batch"
    assert finding.sentence == f"{name}: 5,000 -> 9,000 (train.tokenize +4,000)"
    (finding,) = judged(worker(5_000, 48), before=worker(5_000)).findings
    assert finding.sentence == "kernels of a loader's worker per batch: 24 -> 48 (aten.stack +24)"
