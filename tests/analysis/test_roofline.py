from __future__ import annotations

import pytest

from perfsuite.analysis.roofline import roofline
from perfsuite.case.case import Topology
from perfsuite.case.hardware import Machine
from perfsuite.results.counts import Collective, Compiled, Counts, RankCounts
from perfsuite.results.dry_facts import Roofline
from tests.samples import make_case, make_gpu_machine, make_machine

GB = 10**9


def collective(kind: str = "all_gather", ranks: int = 8, apart: int = 1, size: int = 8 * GB) -> Collective:
    return Collective(
        kind=kind, ranks=ranks, apart=apart, dtype="float32", phase="forward", count=1, bytes=size
    )


def of(
    *counts: Counts,
    nodes: int = 1,
    processes: int = 8,
    precision: str = "bf16-mixed",
    machine: Machine | None = None,
) -> Roofline | None:
    entries = [RankCounts(ranks=(rank,), counts=each) for rank, each in enumerate(counts)]
    topology = Topology(nodes=nodes, processes_per_node=processes)
    case = make_case(precision=precision, topology=topology)
    return roofline(entries, case, machine or make_gpu_machine(), tokens=1000)


def known(*collectives: Collective, flops: int = 10**12, nodes: int = 1, processes: int = 8) -> Roofline:
    counts = Counts(flops={"forward": flops}, collectives=collectives)
    limit = of(counts, nodes=nodes, processes=processes)
    assert limit is not None
    return limit


def test_computation_is_all_flops_over_the_peak_of_the_precision() -> None:
    counts = Counts(flops={"forward": 6 * 10**12, "recompute": 10**12, "backward": 12 * 10**12})
    half, full = of(counts), of(counts, precision="fp32")
    assert half is not None
    assert full is not None
    assert half.compute_s == pytest.approx(19 / 989.5)
    assert full.compute_s == pytest.approx(19 / 67)
    assert half.bound_by == "computation"
    assert half.tokens_per_s == pytest.approx(1000 * 989.5 / 19)
    assert half.share(half.tokens_per_s / 4) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("kind", "passed"),
    [
        ("all_reduce", 14 * GB),
        ("all_gather", 7 * GB),
        ("reduce_scatter", 7 * GB),
        ("all_to_all", 7 * GB),
        ("broadcast", 8 * GB),
        ("send", 8 * GB),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_the_bytes_on_the_wire_of_8_gb_among_8_ranks(kind: str, passed: float) -> None:
    limit = known(collective(kind))
    assert limit.wire_bytes == pytest.approx(passed)
    assert limit.wire_s == pytest.approx(passed / 450e9)


def test_a_rank_alone_passes_nothing() -> None:
    assert known(collective(ranks=1, apart=0)).wire_bytes == 0


def test_the_larger_limit_counts_because_communication_may_overlap() -> None:
    limit = known(collective(size=800 * GB))
    assert limit.bound_by == "communication"
    assert limit.step_s == limit.wire_s == pytest.approx(700 / 450)
    assert limit.compute_s < limit.wire_s


@pytest.mark.parametrize(
    ("ranks", "apart", "is_in_one_machine"),
    [(8, 1, True), (2, 4, True), (4, 2, True), (2, 8, False), (16, 1, False), (8, 8, False)],
)
def test_groups_that_span_machines_take_no_time(ranks: int, apart: int, is_in_one_machine: bool) -> None:
    limit = known(collective(ranks=ranks, apart=apart), nodes=8)
    assert bool(limit.wire_bytes) == is_in_one_machine
    assert bool(limit.between_machines_bytes) != is_in_one_machine


def test_a_distance_that_does_not_divide_the_machine_spans_two() -> None:
    """Of the pairs (0, 4), (8, 12), ... on machines of 12 ranks, the second is on two."""
    assert known(collective(ranks=2, apart=4), nodes=2, processes=12).wire_bytes == 0


def test_an_unknown_link_takes_no_time() -> None:
    counts = Counts(flops={"forward": 1}, collectives=(collective(),))
    limit = of(counts, machine=make_gpu_machine("NVIDIA A10G"))
    assert limit is not None
    assert (limit.link_bytes_per_s, limit.wire_s) == (None, 0)
    assert limit.bound_by == "computation"


def test_the_rank_that_needs_most_is_the_limit() -> None:
    limit = of(*(Counts(flops={"forward": flops}) for flops in (2, 5, 3)))
    assert limit is not None
    assert limit.flops == 5


@pytest.mark.parametrize(
    "counts",
    [
        Counts(),
        Counts(
            flops={"forward": 1}, compiled=Compiled(graphs=1, recompilations=0, kernels=9, extern_calls=2)
        ),
    ],
)
def test_without_all_flops_there_is_no_limit(counts: Counts) -> None:
    assert of(counts) is None


def test_without_counts_or_a_peak_there_is_no_limit() -> None:
    assert of() is None
    assert of(Counts(flops={"forward": 1}), machine=make_machine()) is None
    assert of(Counts(flops={"forward": 1}), machine=make_gpu_machine("NVIDIA A100-SXM-64GB")) is None
