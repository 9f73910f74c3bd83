from __future__ import annotations

from typing import Any

import pytest

from perfsuite.case.case import Topology
from perfsuite.case.hardware import Machine
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.dry_facts import MemoryPart, Roofline, roofline
from tests import twin_counts
from tests.counted import FIT
from tests.samples import make_case, make_gpu_machine, make_machine

GB = 10**9
ONE = Counts(flops={"forward": 1})


def of(
    *counts: Counts, topology: Topology | None = None, machine: Machine | None = None, **changes: Any
) -> Roofline | None:
    entries = [RankCounts(ranks=(rank,), counts=each) for rank, each in enumerate(counts)]
    case = make_case(topology=topology or Topology(processes_per_node=8), **changes)
    return roofline(entries, case, machine or make_gpu_machine(), tokens=1000)


def known(*counts: Counts, **changes: Any) -> Roofline:
    limit = of(*counts, **changes)
    assert limit is not None
    return limit


def sent(kind: str = "all_gather", size: int = 8 * GB, ranks: int = 8, apart: int = 1) -> Counts:
    message = twin_counts.collective(kind, ranks=ranks, apart=apart, bytes=size)
    return Counts(flops={"forward": 10**12}, collectives=(message,))


def test_computation_is_all_flops_over_the_peak_of_the_precision() -> None:
    counts = Counts(flops={"forward": 6 * 10**12, "recompute": 10**12, "backward": 12 * 10**12})
    half, full = (known(counts, precision=precision) for precision in ("bf16-mixed", "fp32"))
    assert half.compute_s == pytest.approx(19 / 989.5)
    assert full.compute_s == pytest.approx(19 / 67)
    assert half.bound_by == "computation"
    assert half.tokens_per_s == pytest.approx(1000 * 989.5 / 19)
    assert half.share(half.tokens_per_s / 4) == pytest.approx(0.25)


@pytest.mark.parametrize("operator", ["aten._scaled_mm", "aten._scaled_grouped_mm_v2"])
def test_a_step_with_products_in_float8_is_limited_by_their_peak(operator: str) -> None:
    counts = Counts(flops={"forward": 10**12}, ops={"aten.mm": 3, operator: 1})
    assert known(counts).compute_s == pytest.approx(1 / (2 * 989.5))
    attention = Counts(flops={"forward": 10**12}, ops={"aten._scaled_dot_product_cudnn_attention": 1})
    assert known(attention).compute_s == pytest.approx(1 / 67)
    assert of(counts, machine=make_gpu_machine("NVIDIA A100-SXM4-80GB")) is None


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
    limit = known(sent(kind))
    assert limit.wire_bytes == pytest.approx(passed)
    assert limit.wire_s == pytest.approx(passed / 450e9)
    assert known(sent(kind, ranks=1, apart=0)).wire_bytes == 0, "a rank alone passes nothing"


def test_the_larger_limit_counts_because_communication_may_overlap() -> None:
    limit = known(sent(size=800 * GB))
    assert limit.bound_by == "communication"
    assert limit.step_s == limit.wire_s == pytest.approx(700 / 450)
    assert limit.compute_s < limit.wire_s


@pytest.mark.parametrize(
    ("ranks", "apart", "processes", "is_in_one_machine"),
    [
        *((ranks, apart, 8, True) for ranks, apart in ((8, 1), (2, 4), (4, 2))),
        *((ranks, apart, 8, False) for ranks, apart in ((2, 8), (16, 1), (8, 8))),
        (2, 4, 12, False),  # of the pairs (0, 4), (8, 12), ... the second is on two machines of 12 ranks
    ],
)
def test_groups_that_span_machines_take_no_time(
    ranks: int, apart: int, processes: int, is_in_one_machine: bool
) -> None:
    topology = Topology(nodes=8, processes_per_node=processes)
    limit = known(sent(ranks=ranks, apart=apart), topology=topology)
    assert bool(limit.wire_bytes) == is_in_one_machine
    assert bool(limit.between_machines_bytes) != is_in_one_machine


def test_an_unknown_link_takes_no_time() -> None:
    limit = known(sent(), machine=make_gpu_machine("NVIDIA A10G"))
    assert (limit.link_bytes_per_s, limit.wire_s) == (None, 0)
    assert limit.bound_by == "computation"


def test_the_rank_that_needs_most_is_the_limit() -> None:
    assert known(*(Counts(flops={"forward": flops}) for flops in (2, 5, 3))).flops == 5


def test_without_all_flops_or_a_peak_there_is_no_limit() -> None:
    assert of() is of(Counts()) is None
    assert of(ONE.replace(compiled=twin_counts.COMPILED)) is None
    assert of(ONE, machine=make_machine()) is None
    assert of(ONE, machine=make_gpu_machine("NVIDIA A100-SXM-64GB")) is None


def test_the_range_of_a_need() -> None:
    """At least what lives at once, at most what the allocator would hold; each with what lies beside it."""
    a, b = (MemoryPart(name="x", low=low, high=high, source="s") for low, high in ((5, 10), (1, 4)))
    fit = FIT.replace(allocated=100, reserved=130, outside=(a, b))
    assert (fit.least, fit.most) == (106, 144)
