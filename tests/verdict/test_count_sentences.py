from typing import Any

import pytest

from perfsuite.results.counts import Collective, Counts, InCycles
from perfsuite.results.quantities import quantities
from perfsuite.verdict.count_sentences import sentence
from tests.samples import known
from tests.twin_counts import (
    BYTES,
    GATHERED,
    GATHERED_AGAIN,
    collective,
    compiled,
    counts,
    keeps,
    memory,
    python,
)

BIG = collective("reduce_scatter", ranks=64, phase="backward", count=33, bytes=32_105_113_190)
HALF = BIG.replace(dtype="bfloat16", bytes=BIG.bytes // 2)
BARRIER = collective("barrier", dtype="", bytes=0, count=1)
MORE_OF_BIG = BIG.replace(count=66)
WHOLE = BIG.replace(dtype="int64", bytes=64, count=1)
LESS = HALF.replace(count=1, bytes=HALF.bytes - 1)
BOTH = [GATHERED, GATHERED_AGAIN]
MORE_AGAIN = GATHERED_AGAIN.replace(count=7, bytes=2 * BYTES)
SIX_AGAIN = GATHERED_AGAIN.replace(count=6)


def sentences_of(before: Counts, now: Counts) -> list[str]:
    """Return a sentence for each quantity that changed."""
    return [
        sentence(quantity, changes, before, now)
        for quantity in quantities((before, now))
        if (changes := quantity.changes(before, now))
    ]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([HALF], [BIG], "15.0 -> 29.9 GiB a step in backward: float32 instead of bfloat16"),
        ([HALF], [MORE_OF_BIG], "15.0 -> 29.9 GiB a step in backward: float32 instead of bfloat16"),
        (
            [HALF, WHOLE],
            [MORE_OF_BIG, WHOLE],
            "15.0 -> 29.9 GiB a step in backward: float32 instead of bfloat16",
        ),
        ([HALF], [MORE_OF_BIG, LESS], "34 more calls a step in backward (+29.9 GiB)"),
        (BOTH, [GATHERED, MORE_AGAIN], "2 more calls a step in backward (+3.50 MiB)"),
        (BOTH, [GATHERED], "5 fewer calls a step in backward (-3.50 MiB)"),
        (BOTH, [GATHERED, collective(dtype="int64", bytes=8, count=1)], "4 fewer calls a step (-3.50 MiB)"),
        ([GATHERED], [GATHERED.replace(bytes=2 * BYTES)], "3.5 -> 7.0 MiB a step in forward"),
        ([], [GATHERED.replace(count=1, bytes=16)], "1 more call a step in forward (+16 bytes)"),
        (BOTH, [collective(count=6, bytes=BYTES + 8), SIX_AGAIN], "2 more calls a step (+8 bytes)"),
        ([GATHERED], [GATHERED.replace(count=20)], "5 -> 20 calls a step, with the same bytes"),
        ([BARRIER], [BARRIER.replace(count=1200)], "1 -> 1,200 calls a step"),
    ],
)
def test_collectives(before: list[Collective], now: list[Collective], said: str) -> None:
    kind = now[0].kind
    ranks = now[0].ranks
    assert sentences_of(counts(collectives=before), counts(collectives=now)) == [
        f"{kind} of {ranks} ranks: {said}"
    ]


HELD = {**memory().at_peak, "kept": BYTES}
OPS = {"aten.mm": 87, "aten.add": 41, "aten._log_softmax": 2, "a": 1, "b": 1, "c": 1}
NAMED = " (aten._log_softmax +2, aten.add +1, a +1, b +1, ...)"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"flops": {**counts().flops, "recompute": 0}}, "recompute: 335.5 MFLOP -> 0"),
        (
            {"flops": {"forward": 1, "recompute": 0, "backward": 956_301_312}},
            "forward: 469,762,048 -> 1 FLOP, recompute: 335.5 MFLOP -> 0",
        ),
        ({"host_reads": {"forward": 2, "optimizer": 39}}, "host reads in forward: 1 -> 2 a step"),
        (
            {"host_reads": {"backward": 1, "optimizer": 0}},
            "host reads in forward: 1 -> 0, in backward: 0 -> 1, in optimizer: 39 -> 0 a step",
        ),
        ({"device_copies": {"cpu to cuda": 2}}, "copies cpu to cuda: 0 -> 2 a step"),
        ({"stalls": {"gc.collect": 1}}, "calls of gc.collect: 0 -> 1 a step"),
        ({"blocking_copies": {"x": 2}, "device_copies": {"x": 0}}, "blocking copies x: 0 -> 2 a step"),
        (
            {"kernels": {**known(counts().kernels), "forward": 181}, "ops": OPS},
            f"kernels in forward: 177 -> 181 a step{NAMED}",
        ),
        (
            {"kernels": {**known(counts().kernels), "forward": 178}, "ops": {**OPS, "aten.add": 40}},
            "kernels in forward: 177 -> 178 a step (aten._log_softmax +2, a +1, b +1, c +1)",
        ),
        ({"kernels": {**known(counts().kernels), "optimizer": 2}}, "kernels in optimizer: 351 -> 2 a step"),
        (
            {"memory": memory(peak=12_900_000 + BYTES, at_peak=HELD)},
            "peak of live tensors: 12.3 -> 15.8 MiB (kept +3.50 MiB)",
        ),
        ({"memory": memory(peak=12_900_008)}, "peak of live tensors: 12,900,000 -> 12,900,008 bytes"),
        ({"memory": memory(growth=131_076)}, "growth in a step: 4 -> 131,076 bytes"),
        ({"memory": memory(saved_for_backward=0, at_peak=HELD)}, "saved for backward: 3.8 MiB -> 0"),
        (
            {"memory": memory(in_cycles=InCycles(bytes=2**20, holders=("`Output.tensor`",)))},
            "tensors in reference cycles: 0 -> 1.0 MiB, held by `Output.tensor`",
        ),
        (
            {"collectives": (*counts().collectives, GATHERED.replace(count=2, bytes=0))},
            "empty all_gather of 2 ranks: 0 -> 2 a step",
        ),
    ],
)
def test_other_quantities(changes: dict[str, Any], expected: str) -> None:
    assert sentences_of(counts(), counts(**changes)) == [expected]


def test_describes_calls_of_python() -> None:
    calls = "Python 3.11 calls in forward: 6,000 -> 66,000 a step (library.module.in_forward +60,000)"
    more = python(forward=66_000, backward=4_000)
    assert sentences_of(python(), more) == [calls]
    reads = more.replace(host_reads={"forward": 2, "optimizer": 39})
    assert sentences_of(python(), reads) == ["host reads in forward: 1 -> 2 a step", calls]


def test_describes_changes_of_compiled_models() -> None:
    assert sentences_of(compiled(), compiled(graphs=0)) == ["nothing is compiled any more (before: 2 graphs)"]
    assert sentences_of(compiled(), compiled(graphs=4, breaks={"call of print": 2}, extern_calls=15)) == [
        *("compiled graphs: 2 -> 4", "graph breaks: 0 -> 2 (call of print +2)"),
        "extern calls of compiled code: 14 -> 15",
    ]


def test_kept_objects_have_types_and_holders() -> None:
    leak = keeps("`op._cache`", "`Net.seen`", tuple=34, DTensorSpec=16)
    assert sentences_of(keeps(), leak) == [
        "objects kept per step: 0 -> 50 (tuple +34, DTensorSpec +16), held by `op._cache` and `Net.seen`"
    ]
    assert sentences_of(leak, keeps()) == ["objects kept per step: 50 -> 0 (tuple -34, DTensorSpec -16)"]
