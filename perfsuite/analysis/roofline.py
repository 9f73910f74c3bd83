"""The least time that a step can take on an accelerator, from what the step does. Pure.

Two limits, the larger of which counts, because communication may run during computation:

- computation: FLOPs over the dense peak at the case's precision;
- communication: bytes over the link between the GPUs of one machine, each kind by the factor of its bus
  bandwidth (doc/PERFORMANCE.md of nccl-tests): what a rank has at least to pass in one direction. Switches
  that reduce on their way (NVLink SHARP, `NCCL_ALGO=NVLS`) let an all-reduce take less than this.

Between machines the link is unknown, so groups that span machines take no time here: the limit stays true,
and is further away. Not in it either: memory bandwidth, and all that is not a matrix product, a convolution
or attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from perfsuite.case.case import Case, Topology
from perfsuite.case.hardware import Machine
from perfsuite.results.counts import Collective, RankCounts
from perfsuite.results.dry_facts import Roofline

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1,
    "reduce": lambda ranks: 1,
    "send": lambda ranks: 1,
}
"""By how much the bytes of a call are multiplied. What is not named takes no time: a barrier has no bytes,
and what is received comes in the other direction, while as much is sent."""


def roofline(counts: Iterable[RankCounts], case: Case, machine: Machine, tokens: int) -> Roofline | None:
    """Return what a step takes at least, `tokens` as in `Roofline`.

    None where the accelerator's peak is unknown, where nothing was counted, and for a compiled model, most of
    whose FLOPs are not seen.
    """
    peak = machine.peak_flops(case.precision)
    entries = [entry.counts for entry in counts]
    if peak is None or any(its.compiled is not None or not sum(its.flops.values()) for its in entries):
        return None
    of_ranks = [
        Roofline(
            flops=sum(its.flops.values()),
            peak_flops=peak,
            wire_bytes=_passed(each for each in its.collectives if _in_one_machine(each, case.topology)),
            link_bytes_per_s=machine.link_bytes_per_s,
            between_machines_bytes=_passed(
                each for each in its.collectives if not _in_one_machine(each, case.topology)
            ),
            tokens=tokens,
        )
        for its in entries
    ]
    return max(of_ranks, key=lambda of_rank: of_rank.step_s, default=None)


def _passed(collectives: Iterable[Collective]) -> float:
    """Bytes that a rank has at least to pass in one direction."""
    return sum(
        BUS_FACTORS[each.kind](each.ranks) * each.bytes
        for each in collectives
        if each.ranks > 1 and each.kind in BUS_FACTORS
    )


def _in_one_machine(each: Collective, topology: Topology) -> bool:
    """Whether no group of this size and distance has ranks on two machines."""
    return each.ranks == 1 or topology.processes_per_node % (each.ranks * each.apart) == 0
