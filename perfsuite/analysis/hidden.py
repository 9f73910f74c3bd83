"""Tells of a counted step that did more than was counted, by what all ranks together show. Pure.

A count that is too low would look like an improvement, so such a step is not counted. What a rank finds by
itself is in its report (`perfsuite.worker.hidden`). Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfsuite.case.case import Case
from perfsuite.results.counts import Counts, spans
from perfsuite.results.rank_report import RankReport

OF_THE_FORMULA = 0.9
"""Share of the forward's FLOPs by formula that must be counted. The counts in this repository's baselines
have 1.00 or more of forward and backward together."""
OF_THE_GRADIENTS = 1e-4
"""Share of the gradients' bytes that ranks must exchange in a step. Compression sends more: PowerSGD of rank
1 does so for matrices up to 20,000 wide. The norm of the gradients, or a loss, is less from 20,000 parameters
on."""


def hidden(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Why the counted step of a launch did more than was counted; empty where nothing shows that."""
    counts = [report.counts for report in reports if report.counts is not None]
    if len(counts) < len(reports):
        return ()  # what is missing is told otherwise
    ranks_of: dict[str, list[int]] = {}
    for report in reports:
        for why in report.hidden:
            ranks_of.setdefault(why, []).append(report.rank)
    by_rank = {why: f"rank{'s' * (len(ranks) > 1)} {spans(sorted(ranks))}" for why, ranks in ranks_of.items()}
    return (
        *(why if len(ranks_of[why]) == len(reports) else f"{who}: {why}" for why, who in by_rank.items()),
        *_less_than_the_formula(reports, counts, case),
        *_less_than_the_gradients(reports, counts, case),
    )


def _less_than_the_formula(
    reports: Sequence[RankReport], counts: Sequence[Counts], case: Case
) -> Iterator[str]:
    """Why, if all ranks together were seen to compute less than a forward of the model takes.

    Operators without a formula explain that. Forward is 2 N + 4 L H Q S a token (`perfsuite.worker.flops`),
    whatever is frozen and however ranks share it.
    """
    flops = reports[0].flops
    if flops is None or case.framework.promises.tokens_vary or any(each.without_flops for each in counts):
        return
    trained = flops.matmul_parameters if flops.trained_parameters is None else flops.trained_parameters
    per_token = (flops.per_token + 2 * (flops.matmul_parameters - trained)) / 3
    takes = per_token * reports[0].tokens_per_step
    seen = sum(each.flops.get("forward", 0) for each in counts)
    if seen < OF_THE_FORMULA * takes:
        yield (
            f"all ranks together were seen to compute {seen:.4g} FLOP in forward, which takes {takes:.4g} by "
            f"the formula {flops.formula}"
        )


def _less_than_the_gradients(
    reports: Sequence[RankReport], counts: Sequence[Counts], case: Case
) -> Iterator[str]:
    """Why, if data-parallel ranks keep equal parameters that train, and sent next to nothing."""
    evidence = [report.evidence for report in reports if report.evidence is not None]
    replicas_differ = case.framework.promises.replicas_differ
    if len(evidence) < len(reports) or evidence[0].data_parallel < 2 or replicas_differ:
        return
    moved = any(begin != end for each in evidence for begin, end in each.replicated.values())
    intervals = len(reports[0].step_s) - 1  # fewer collectives: replicas that are averaged now and then
    if not moved or any(each.collectives is None or each.collectives < intervals for each in evidence):
        return
    gradients = max(each.replicated_bytes for each in evidence)
    sent = max(sum(each.bytes for each in its.collectives if each.ranks > 1) for its in counts)
    if sent < OF_THE_GRADIENTS * gradients:
        yield (
            f"the ranks train one model, whose gradients have {gradients:,} bytes, and were seen to send "
            f"{sent:,}: gradients were exchanged out of sight, or all ranks are given the same data"
        )
