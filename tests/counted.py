"""Helpers: handmade counts of a step, and cases with these counts."""

from typing import Any

from perfsuite.case.case import Case, Topology
from perfsuite.case.catalog import MODELS
from perfsuite.frameworks.fake import Fake
from perfsuite.results.counts import Collective, Compiled, Counts, RankCounts, StepMemory
from perfsuite.results.dry_facts import DryFacts, Expected, Fit, MemoryPart, Roofline
from perfsuite.results.outcome import CountCheck, Finding, Verdict
from perfsuite.results.run import Figures
from perfsuite.results.session_file import Measurement
from tests.samples import judged, make_gpu_machine, make_result, make_run

MIB = 2**20
GIB = 2**30


def make_collective(**changes: Any) -> Collective:
    """Return 33 all-gathers of the blocks of a Llama-3-8B in forward, over 64 ranks."""
    return Collective(
        kind="all_gather", ranks=64, apart=1, dtype="bfloat16", phase="forward", count=33, bytes=15 * GIB
    ).replace(**changes)


def make_memory(**changes: Any) -> StepMemory:
    return StepMemory(
        peak=41 * GIB,
        peak_in="backward",
        at_peak={"parameter": GIB // 2, "optimizer state": GIB, "forward": 29 * GIB, "backward": 8 * GIB}
        | {"unsharded": 2 * GIB, "kept": GIB // 2, "gradient": 0},
        saved_for_backward=30 * GIB,
        growth=0,
        allocations=5309,
    ).replace(**changes)


def make_counts(**changes: Any) -> Counts:
    """Return the counts of a step of Llama-3-8B with FSDP2 on 64 ranks, in round numbers."""
    return Counts(
        collectives=(
            make_collective(),
            make_collective(phase="backward", count=32),
            make_collective(kind="reduce_scatter", dtype="float32", phase="backward", bytes=int(29.9 * GIB)),
            make_collective(kind="all_reduce", ranks=8, apart=8, dtype="float32", count=1, bytes=4),
            make_collective(kind="barrier", dtype="", phase="optimizer", count=1, bytes=0),
        ),
        flops={"forward": 158 * 10**12, "recompute": 59 * 10**12, "backward": 334 * 10**12},
        kernels={"forward": 3907, "recompute": 1580, "backward": 6402, "optimizer": 2},
        host_reads={"forward": 1},
        device_copies={"cpu to cuda": 2},
        memory=make_memory(),
        ops={"aten.mm": 675},
    ).replace(**changes)


def make_compiled(**changes: Any) -> Compiled:
    return Compiled(
        graphs=2, breaks={"data-dependent branch": 1}, recompilations=1, kernels=31, extern_calls=28
    ).replace(**changes)


def make_expected(**changes: Any) -> Expected:
    """Return the expected time of a step on one GPU: 1 s of matmuls, for 1,000 tokens."""
    times = {"matmul_s": 1, "attention_s": 0, "memory_s": 0, "slowed_s": 0, "exposed_s": 0, "host_s": 0}
    others = {"tokens": 1000, "parallelism": "none", "by_host": ((0, 1), (1, 1))}
    return Expected(**{**times, **others, **changes})


def make_finding(**changes: Any) -> Finding:
    """Return the finding that gradients are reduced in float32 instead of bfloat16."""
    return Finding(
        field="reduce_scatter of 64 ranks: bytes",
        quantity="reduce_scatter of 64 ranks",
        unit="bytes",
        before=int(29.9 * GIB),
        now=int(59.8 * GIB),
        ranks="0-63",
        outcome="regressed",
        sentence=EXPLAINED,
    ).replace(**changes)


EXPLAINED = "reduce_scatter of 64 ranks 29.9 -> 59.8 GiB a step: float32 instead of bfloat16"
HOST_READ = make_finding(
    field="host reads in forward",
    quantity="host reads",
    unit="calls",
    before=1,
    now=2,
    sentence="host reads in forward 1 -> 2",
)
BUCKETS = make_finding(
    field="all_reduce of 8 ranks: calls",
    quantity="all_reduce of 8 ranks",
    unit="calls",
    before=4,
    now=1,
    outcome="passed",
    sentence="all_reduce of 8 ranks in 1 call instead of 4, bytes equal",
)


def make_check(*findings: Finding, **changes: Any) -> CountCheck:
    """Return a check in which two counts regressed, and a third finding is only listed."""
    return CountCheck(
        outcome="regressed",
        findings=findings or (make_finding(), HOST_READ, BUCKETS),
        unsteady=("live peak of rank 1",),
        notes=("kernels are not judged: torch 2.13.0 -> 2.14.0",),
        baseline_file="baselines/counts/sm90/x.json",
    ).replace(**changes)


NOT_COUNTED = CountCheck(outcome="not counted", compared=False, notes=("a CUDA graph was replayed",))


def make_entries(*counts: Counts, ranks: int = 64) -> tuple[RankCounts, ...]:
    """Return the counts of ranks. If only one object is given (by default `make_counts`), all ranks share it.

    If several objects are given, each of them has the counts of one rank.
    """
    if len(counts) > 1:
        return tuple(RankCounts(ranks=(rank,), counts=rank_counts) for rank, rank_counts in enumerate(counts))
    return (RankCounts(ranks=tuple(range(ranks)), counts=counts[0] if counts else make_counts()),)


def make_counted(check: CountCheck | None = None, **changes: Any) -> Measurement:
    """Return a launch whose speed passed, and the verdict `check` on its counts, by default a regression."""
    check = make_check() if check is None else check
    run = make_run(counts=make_entries()).replace(**changes)
    return judged(make_result(run, before=None), outcome=check.outcome, counts=check)


FULL_SIZE = Case(
    model=MODELS["llama-3-8b"],
    framework=Fake(),
    sequence_length=8192,
    micro_batch=1,
    precision="bf16-mixed",
    topology=Topology(nodes=8, processes_per_node=8),
    hardware="h100",
)


def make_dry(check: CountCheck | None = None, **changes: Any) -> Measurement:
    """Return a dry run of a case of 64 GPUs. `check` is its verdict, by default a regression."""
    run = make_run(
        case=FULL_SIZE,
        machine=make_gpu_machine(),
        dry=True,
        figures=Figures(),
        step_s=(),
        loss=(),
        window=(0, 0),
        counts=make_entries(),
    ).replace(**changes)
    check = make_check() if check is None else check
    return Measurement(
        nodeid="bench_cases/test_llama.py::test_llama[a]",
        case_id=run.case.id,
        framework=run.case.framework.name,
        runs=(run,),
        verdict=Verdict(outcome=check.outcome, launches=1, counts=check),
        baseline_file=None,
        directory="/tmp/runs/dry",
    )


FIT = Fit(
    rank=7,
    live=60 * GIB,
    allocated=61 * GIB,
    reserved=64 * GIB,
    reserved_upper=64 * GIB,
    reserved_expandable=62 * GIB,
    outside=(MemoryPart(name="CUDA context", low=GIB // 4, high=GIB // 2, source="s"),),
    card=80 * GIB,
    verdict="tight",
)


def limit(**changes: Any) -> Roofline:
    values: dict[str, Any] = {
        "flops": 551 * 10**12,
        "peak_flops": 989.5e12,
        "wire_bytes": 45 * GIB,
        "link_bytes_per_s": 450 * GIB,
        "between_machines_bytes": 0,
        "tokens": 524_288,
    }
    return Roofline(**{**values, **changes})


FACTS = DryFacts(fit=FIT, roofline=limit())
