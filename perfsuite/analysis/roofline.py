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

from collections.abc import Iterable

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.results.counts import Collective, RankCounts
from perfsuite.results.dry_facts import Roofline

OF_OTHERS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
"""Kinds of which a rank passes the share of the message that is not its own; of `all_reduce`, twice."""
OF_ALL = frozenset({"broadcast", "reduce", "send"})
"""Kinds of which a rank passes the whole message. What is not named takes no time: a barrier has no bytes,
and what is received comes in the other direction, while as much is sent."""


def roofline(counts: Iterable[RankCounts], case: Case, machine: Machine, tokens: int) -> Roofline | None:
    """Return what a step takes at least, `tokens` as in `Roofline`.

    None where the accelerator's peak is unknown, where nothing was counted, and for a compiled model, most of
    whose FLOPs are not seen.
    """
    peak = machine.peak_flops(case.precision)
    of_ranks = []
    for its in (entry.counts for entry in counts):
        flops = sum(its.flops.values())
        if peak is None or its.compiled is not None or not flops:
            return None
        passed = {True: 0.0, False: 0.0}  # by whether it stays in one machine
        for each in its.collectives:
            # No group of this size and distance has ranks on two machines.
            is_inside = each.ranks == 1 or case.topology.processes_per_node % (each.ranks * each.apart) == 0
            passed[is_inside] += _passed(each)
        limit = Roofline(
            flops=flops,
            peak_flops=peak,
            wire_bytes=passed[True],
            link_bytes_per_s=machine.link_bytes_per_s,
            between_machines_bytes=passed[False],
            tokens=tokens,
        )
        of_ranks.append(limit)
    return max(of_ranks, key=lambda of_rank: of_rank.step_s, default=None)


def _passed(each: Collective) -> float:
    """Bytes that a rank has at least to pass in one direction."""
    if each.kind in OF_ALL:
        return each.bytes if each.ranks > 1 else 0
    times = 2 if each.kind == "all_reduce" else int(each.kind in OF_OTHERS)
    return times * (each.ranks - 1) / each.ranks * each.bytes
