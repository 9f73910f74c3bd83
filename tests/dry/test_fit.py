from collections.abc import Sequence

import pytest

from perfsuite.case.case import Topology
from perfsuite.dry.fit import facts_of, judge, predict, workspace_bytes
from perfsuite.dry.machine import pretended_gpu
from perfsuite.report.explained import prediction
from perfsuite.results.counts import Collective, Counts
from perfsuite.results.device_log import (
    Allocate,
    EmptyCache,
    EndOfStep,
    Entry,
    Free,
    HostWait,
    UseIn,
    Workspace,
)
from perfsuite.results.dry_facts import DryFacts, Fit
from tests.counted import make_collective, make_compiled, make_memory
from tests.samples import known, make_case, make_gpu_machine, make_machine, make_report

MIB = 1 << 20
GIB = 1 << 30
LOG = (Workspace(0), Workspace(0), Allocate(0, 10 * GIB, 0), Allocate(1, 4 * GIB, 0), Free(1))


def held(size: int) -> tuple[Entry, ...]:
    """Return the log of a process in which one storage of this many GiB is alive."""
    return (Allocate(0, size * GIB, 0),)


def gather(ranks: int, apart: int) -> Collective:
    return make_collective(ranks=ranks, apart=apart, count=1, bytes=8 * GIB)


def predicted(*collectives: Collective, log: Sequence[Entry] = LOG, built: int = 0) -> Fit:
    return known(predict(log, Counts(collectives=collectives), make_gpu_machine(), rank=3, built=built))


def test_a_prediction_is_for_one_rank_and_its_card() -> None:
    fit = predicted()
    assert (fit.rank, fit.live, fit.card) == (3, 14 * GIB, 80 * GIB)
    assert fit.verdict == "fits"


def test_workspaces_are_allocated_beside_live_tensors() -> None:
    assert predicted().allocated == 14 * GIB + 2 * 32 * MIB  # Hopper: 32 MiB for each cuBLAS handle


def test_reserved_memory_has_whole_pages() -> None:
    fit = predicted()
    assert fit.reserved == fit.reserved_expandable == fit.allocated == 14400 * MIB  # 720 pages of 20 MiB
    assert fit.reserved_upper == fit.reserved


def test_the_cuda_context_is_outside_the_allocator() -> None:
    fit = predicted()
    assert [part.name for part in fit.outside] == ["CUDA context"]
    (context,) = fit.outside
    assert fit.least == fit.allocated + context.low
    assert fit.most == fit.reserved + context.high


@pytest.mark.parametrize(("name", "nominal"), [("NVIDIA H100 80GB HBM3", False), ("NVIDIA H800", True)])
def test_says_if_the_memory_of_the_card_is_nominal(name: str, nominal: bool) -> None:
    fit = known(predict(LOG, Counts(), pretended_gpu(name, Topology(processes_per_node=1)), rank=0))
    assert fit.card_is_nominal is nominal
    said = "of 80.0 GiB (nominal; the usable memory of this GPU is less, but unknown)"
    assert prediction(DryFacts(fit=fit))[0].endswith(said if nominal else "of 79.1 GiB")


def test_the_bound_counts_blocks_that_streams_share() -> None:
    lent = (Allocate(0, GIB, 0), UseIn(0, 1), Free(0))
    waited = (*lent, HostWait(None), Allocate(1, GIB, 0), EndOfStep(2))
    fit = predicted(log=waited)
    assert (fit.reserved, fit.reserved_upper) == (GIB, 2 * GIB)
    assert fit.most == 2 * GIB + fit.outside[0].high


def test_each_group_has_a_communicator() -> None:
    alone = predicted(gather(1, 0))
    one = predicted(gather(8, 1), gather(8, 1))
    two = predicted(gather(8, 1), gather(8, 8))
    assert [part.name for part in alone.outside] == ["CUDA context"]
    assert one.outside[1].name == "NCCL, 1 communicator"
    assert two.outside[1].name == "NCCL, 2 communicators"
    assert two.most - two.reserved - (one.most - one.reserved) == one.outside[1].high


def test_cpu_has_no_caching_allocator() -> None:
    assert predict(LOG, Counts(), make_machine(), rank=0) is None
    facts = facts_of([make_report(counts=Counts())], make_case(), make_machine())
    assert (facts.fit, facts.roofline) == (None, None)


@pytest.mark.parametrize(
    ("least", "most", "verdict"),
    [(100, 100, "tight"), (101, 101, "does not fit"), (60, 81, "tight"), (60, 80, "fits")],
)
def test_bounds_are_judged_against_the_card(least: int, most: int, verdict: str) -> None:
    assert judge(least=least, most=most, card=100) == verdict


@pytest.mark.parametrize(("lives", "verdict"), [(70, "tight"), (80, "does not fit")])
def test_a_card_must_hold_all_live_tensors(lives: int, verdict: str) -> None:
    assert predicted(log=held(lives)).verdict == verdict


def test_unsharded_model_must_fit_whole() -> None:
    small, large = (predicted(built=size * GIB) for size in (13, 80))
    assert (small.verdict, small.least) == ("fits", predicted().least)
    assert (large.verdict, large.least - small.least) == ("does not fit", 80 * GIB - small.allocated)
    assert "before it is sharded" not in " ".join(prediction(DryFacts(fit=small)))


@pytest.mark.parametrize(("as_launched", "verdict"), [(False, "fits"), (True, "does not fit")])
def test_a_card_must_hold_what_a_script_builds(as_launched: bool, verdict: str) -> None:
    """The script builds 120 GiB, and shards this model before the first step."""
    log = (Allocate(1, 120 * GIB, 0), Free(1), EmptyCache(), *held(10), EndOfStep(1))
    machine = make_gpu_machine()
    fit = known(predict(log, Counts(), machine, rank=0, builds_as_launched=as_launched))
    assert (fit.verdict, fit.allocated) == (verdict, 10 * GIB)
    said = "allocated up to the end of the first step: 120.0 GiB" in prediction(DryFacts(fit=fit))
    assert said == as_launched


def with_peaks(**peaks: int) -> Counts:
    """Return counts of steps 4 to 6, in which these steps have these peaks in GiB, and the others 10 GiB."""
    small = make_memory(peak=10 * GIB)
    steps = {number: small.replace(peak=peaks.get(f"step_{number}", 10) * GIB) for number in (4, 5, 6)}
    counts = Counts(memory=steps[4])
    for number in (5, 6):
        counts = counts.with_step(Counts(step=number, memory=steps[number]))
    return counts


@pytest.mark.parametrize(("peak", "verdict"), [(13, "fits"), (70, "tight"), (80, "does not fit")])
def test_a_card_must_hold_each_counted_step(peak: int, verdict: str) -> None:
    """The log ends before these steps."""
    fit = known(predict(LOG, with_peaks(step_5=12, step_6=peak), make_gpu_machine(), rank=0))
    assert (fit.verdict, fit.later, fit.later_step) == (verdict, peak * GIB, 6)


def test_no_later_step_was_counted() -> None:
    fit = predicted()
    assert (fit.later, fit.later_step) == (0, None)


def test_cublas_has_more_memory_from_hopper_on() -> None:
    small = ("Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB")
    large = ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090")
    assert {workspace_bytes(make_gpu_machine(product)) for product in small} == {8_519_680}
    assert {workspace_bytes(make_gpu_machine(product)) for product in large} == {33_554_432}


def test_facts_are_the_neediest_ranks() -> None:
    machine = make_gpu_machine()
    small = predicted()
    large = predicted(log=held(30))
    counts = [Counts(flops={"forward": flops}) for flops in (10**12, 3 * 10**12)]
    reports = [
        make_report(rank=rank, counts=its, fit=fit, tokens_per_step=1000)
        for rank, its, fit in zip((0, 1), counts, (large, small), strict=True)
    ]
    facts = facts_of(reports, make_case(precision="bf16-mixed"), machine)
    assert facts.fit == large
    roofline = known(facts.roofline)
    assert (roofline.flops, roofline.tokens) == (3 * 10**12, 1000)


def test_a_compiled_model_is_at_worst_tight() -> None:
    """With fusion, a compiled model might need less memory."""
    log = held(100)
    compiled = Counts(kernels=None, compiled=make_compiled(kernels=None, extern_calls=None))
    verdicts = [
        known(predict(log, counts, make_gpu_machine(), rank=0)).verdict for counts in (Counts(), compiled)
    ]
    assert verdicts == ["does not fit", "tight"]
