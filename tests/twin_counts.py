"""Helpers: launches of a small Llama on two ranks, with counts of a step that are close to those of FSDP2."""

from typing import Any

from perfsuite.results.count_baseline import CountBaseline, from_runs
from perfsuite.results.counts import (
    Collective,
    Compiled,
    Counts,
    InCycles,
    KeptObjects,
    PythonCalls,
    StepMemory,
    merged,
)
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import Run
from tests.counted import make_collective, make_counts, make_memory
from tests.samples import known, make_run

BYTES = 3_674_624
"""The bytes of the parameters in float32."""
COMPILED = Compiled(graphs=2, recompilations=0, kernels=31, extern_calls=14)


def collective(kind: str = "all_gather", **changes: Any) -> Collective:
    """Return a collective of five calls in forward, between two ranks."""
    return make_collective(
        kind=kind, **{"ranks": 2, "dtype": "float32", "count": 5, "bytes": BYTES, **changes}
    )


GATHERED = collective()
GATHERED_AGAIN = collective(phase="backward")
REDUCED = collective("reduce_scatter", phase="backward")


def memory(**changes: Any) -> StepMemory:
    held = {"parameter": BYTES, "optimizer state": 2 * BYTES, "forward": 1_876_128}
    fields = {"peak": 12_900_000, "at_peak": held, "saved_for_backward": 4_000_000, "growth": 4}
    return make_memory(**{**fields, "allocations": 500, "in_cycles": InCycles(bytes=0), **changes})


def counts(**changes: Any) -> Counts:
    fields = {
        "collectives": (GATHERED, GATHERED_AGAIN, REDUCED),
        "flops": {"forward": 469_762_048, "recompute": 335_544_320, "backward": 956_301_312},
        "kernels": {"forward": 177, "backward": 327, "optimizer": 351},
        "host_reads": {"forward": 1, "optimizer": 39},
        "device_copies": {},
        "blocking_copies": {},
        "ops": {"aten.mm": 87, "aten.add": 40},
    }
    return make_counts(memory=memory(), **fields).replace(**changes)


def python(*, version: str = "3.11", **calls: int) -> Counts:
    """Return the counts of a step that calls 10,000 Python functions, or the given number in each phase."""
    calls = calls or {"forward": 6_000, "backward": 4_000}
    functions = {f"library.module.in_{phase}": count for phase, count in calls.items()}
    return counts(python=PythonCalls(version=version, calls=calls, functions=functions))


def keeps(*holders: str, **by_type: int) -> Counts:
    """Return the counts of steps that each keep the given number of objects of some types."""
    return counts(kept=KeptObjects(by_type=by_type, holders=holders))


def compiled(**changes: Any) -> Counts:
    """Return the counts of a step of a compiled model, whose memory cannot be observed."""
    return counts(memory=None, compiled=COMPILED.replace(**changes))


def launch(*ranks: Counts, torch: str = "2.13.0", **changes: Any) -> Run:
    """Return a launch with counts. Both ranks have the same counts, or there is one set for each rank."""
    of_ranks = ranks if len(ranks) > 1 else 2 * (ranks or (counts(),))
    environment = {"torch": f"{torch}+cpu", "transformers": "5.23.0"}
    seen = Observed(settings={}, environment=environment)
    return make_run(**{"counts": merged(dict(enumerate(of_ranks))), "observed": seen, **changes})


def baseline_of(*launches: Run | Counts) -> CountBaseline:
    """Return the baseline of these launches. Instead of a launch, its counts can be given."""
    return from_runs(
        [launched if isinstance(launched, Run) else launch(launched) for launched in launches or (launch(),)]
    )


WORSE: dict[str, Counts] = {
    "all_gather of 2 ranks: bytes": counts(
        collectives=(GATHERED, GATHERED_AGAIN.replace(count=6, bytes=BYTES + 2), REDUCED)
    ),
    "barrier of 2 ranks: calls": counts(
        collectives=(*counts().collectives, collective("barrier", dtype="", count=1, bytes=0))
    ),
    "FLOPs in recompute": counts(flops={**counts().flops, "recompute": 337_544_321}),
    "host reads in forward": counts(host_reads={"forward": 2, "optimizer": 39}),
    "copies cpu to cuda": counts(device_copies={"cpu to cuda": 1}),
    "empty all_gather of 2 ranks": counts(
        collectives=(*counts().collectives, GATHERED.replace(count=1, bytes=0))
    ),
    "Python 3.11 calls in forward": python(forward=9_000, backward=4_000),
    "kernels in forward": counts(kernels={**known(counts().kernels), "forward": 178}),
    "peak of live tensors": counts(memory=memory(peak=12_970_000)),
    "saved for backward": counts(memory=memory(saved_for_backward=4_100_000)),
    "growth in a step": counts(memory=memory(growth=64_505)),
    "tensors in reference cycles": counts(memory=memory(in_cycles=InCycles(bytes=65_537))),
}
"""For each field, counts that are worse than `counts()` in this field alone."""
