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
TERA = Counts(flops={"forward": 10**12})


def of(
    *counts: Counts, nodes: int = 1, ranks: int = 8, machine: Machine | None = None, **case: Any
) -> Roofline | None:
    entries = [RankCounts(ranks=(rank,), counts=rank_counts) for rank, rank_counts in enumerate(counts)]
    made = make_case(topology=Topology(nodes=nodes, processes_per_node=ranks), **case)
    return roofline(entries, made, machine or make_gpu_machine(), tokens=1000)


def roofline_of(*counts: Counts, **changes: Any) -> Roofline:
    limit = of(*counts, **changes)
    assert limit is not None
    return limit


def sent(kind: str = "all_gather", size: int = 8 * GB, ranks: int = 8, apart: int = 1) -> Counts:
    return TERA.replace(collectives=(twin_counts.collective(kind, ranks=ranks, apart=apart, bytes=size),))


def test_compute_time_is_flops_over_peak() -> None:
    counts = Counts(flops={"forward": 6 * 10**12, "recompute": 10**12, "backward": 12 * 10**12})
    half, full = (roofline_of(counts, precision=precision) for precision in ("bf16-mixed", "fp32"))
    assert half.compute_s == pytest.approx(19 / 989.5)
    assert full.compute_s == pytest.approx(19 / 67)
    assert half.bound_by == "computation"
    assert half.tokens_per_s == pytest.approx(1000 * 989.5 / 19)
    assert half.share(half.tokens_per_s / 4) == pytest.approx(0.25)


def test_the_flops_are_those_of_the_busiest_rank() -> None:
    several = roofline_of(*(Counts(flops={"forward": flops}) for flops in (2, 5, 3)))
    assert several.flops == 5


@pytest.mark.parametrize("operator", ["aten._scaled_mm", "aten._scaled_grouped_mm_v2"])
def test_scaled_products_need_a_gpu_with_float8(operator: str) -> None:
    counts = TERA.replace(ops={"aten.mm": 3, operator: 1})
    assert roofline_of(counts).compute_s == pytest.approx(1 / (2 * 989.5))
    assert of(counts, machine=make_gpu_machine("NVIDIA A100-SXM4-80GB")) is None


def test_attention_in_fp32_has_the_peak_of_fp32() -> None:
    attention = TERA.replace(ops={"aten._scaled_dot_product_cudnn_attention": 1})
    assert roofline_of(attention).compute_s == pytest.approx(1 / 67)


@pytest.mark.parametrize(
    ("kind", "passed"),
    [
        ("all_reduce", 14 * GB),
        *((kind, 7 * GB) for kind in ("all_gather", "reduce_scatter", "all_to_all")),
        *((kind, 8 * GB) for kind in ("broadcast", "send")),
        *((kind, 0) for kind in ("recv", "barrier")),
    ],
)
def test_each_kind_of_collective_has_its_wire_bytes(kind: Any, passed: float) -> None:
    limit = roofline_of(sent(kind))
    assert (limit.wire_bytes, limit.wire_s) == pytest.approx((passed, passed / 450e9))
    assert roofline_of(sent(kind, ranks=1, apart=0)).wire_bytes == 0, "a single rank sends nothing"


def test_wire_bytes_determine_the_binding_limit() -> None:
    limit = roofline_of(sent(size=800 * GB))
    assert limit.bound_by == "communication"
    assert limit.step_s == limit.wire_s == pytest.approx(700 / 450)
    assert limit.compute_s < limit.wire_s


@pytest.mark.parametrize(
    ("ranks", "apart", "processes", "is_inside"),
    [
        *((8, 1, 8, True), (2, 4, 8, True), (4, 2, 8, True)),
        *((2, 8, 8, False), (16, 1, 8, False), (8, 8, 8, False)),
        # Each machine has 12 ranks. Of the pairs (0, 4), (8, 12), ..., the second spans two machines.
        (2, 4, 12, False),
    ],
)
def test_groups_that_span_machines_use_their_network(
    ranks: int, apart: int, processes: int, is_inside: bool
) -> None:
    limit = roofline_of(sent(ranks=ranks, apart=apart), nodes=8, ranks=processes)
    assert (limit.wire_bytes > 0, limit.between_machines_bytes > 0) == (is_inside, not is_inside)


def test_unknown_links_take_no_time() -> None:
    limit = roofline_of(sent(), machine=make_gpu_machine("NVIDIA A10G"))
    assert (limit.link_bytes_per_s, limit.wire_s, limit.bound_by) == (None, 0, "computation")


def test_no_limit_without_all_flops_and_a_peak() -> None:
    assert of() is of(Counts()) is None
    assert of(ONE.replace(compiled=twin_counts.COMPILED)) is None
    assert of(ONE.replace(compiled=twin_counts.COMPILED, kernels=None)) is not None, (
        "a dry run sees all FLOPs"
    )
    assert of(ONE, machine=make_machine()) is None
    assert of(ONE, machine=make_gpu_machine("NVIDIA A100-SXM-64GB")) is None


def test_the_range_of_a_need() -> None:
    """The case needs at least its live tensors, and at most what the allocator would hold.

    Memory outside of the allocator is added to both bounds.
    """
    a, b = (MemoryPart(name="x", low=low, high=high, source="s") for low, high in ((5, 10), (1, 4)))
    fit = FIT.replace(allocated=100, reserved=120, reserved_upper=130, outside=(a, b))
    assert (fit.least, fit.most) == (106, 144)
    assert fit.replace(reserved_upper=135).most == 149
