"""What only all ranks together can answer: do they train one model, on the tokens that the case claims?

Driver side; imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from perfsuite.case.case import Case
from perfsuite.results.rank_report import Evidence, RankReport

OF_THE_MOVE = 0.01
"""Share of what training moved a parameter's norm by, from which two replicas are two models."""
ROUNDING = 5e-7
"""Relative difference of norms that are summed up on unlike devices."""
TOKENS_OFF = 0.02
"""Share by which tokens seen may differ from those claimed before tokens/s is wrong."""


def trained_apart(reports: Sequence[RankReport], case: Case) -> str | None:
    """Why the ranks are copies that train alone, or None. In words for a `mismatch`."""
    told = [report.evidence for report in reports if report.evidence is not None]
    if len(told) < 2 or len(told) < len(reports) or told[0].data_parallel < 2:
        return None
    if all(evidence.collectives == 0 for evidence in told):
        return f"the {len(told)} ranks trained apart: no collective ran after the first step. {_WRAP}"
    if case.framework.replicas_differ:
        return None
    common = set.intersection(*(set(evidence.replicated) for evidence in told))
    apart = sorted(name for name in common if _differ([evidence.replicated[name] for evidence in told]))
    if not apart:
        return None
    return (
        f"the {len(told)} ranks trained apart: {len(apart)} of {len(common)} parameters are not the same on "
        f"all of them after the last step, as {apart[0]}. {_WRAP} If they are not to be the same: with "
        "tensor or pipeline parallelism, say data_parallel=, the number of ranks that see different data; "
        "with experts or embeddings that each rank has its own of, or replicas that are averaged now and "
        "then, say Script(replicas='differ'), and they are not compared"
    )


_WRAP = "Their gradients are not exchanged: wrap the whole model in DDP or FSDP, or all-reduce its gradients."


def _differ(norms: Sequence[tuple[float, float]]) -> bool:
    after = [end for _, end in norms]
    moved = max(abs(end - begin) for begin, end in norms)
    return max(after) - min(after) > max(OF_THE_MOVE * moved, ROUNDING * max(after))


def tokens_differ(reports: Sequence[RankReport], case: Case) -> str | None:
    """Why the case's tokens are not those that ran, or None. In words for a `mismatch`."""
    seen = _tokens(reports, case)
    claimed = reports[0].tokens_per_step
    if seen is None or case.framework.tokens_vary:
        return None
    if _is_near(seen.tokens, claimed) or _is_near(seen.of_all_ranks, claimed):
        return None
    per_rank = f"{case.sequence_length} x {case.micro_batch} x {case.gradient_accumulation}"
    return (
        f"tokens: the case claims {claimed} a step (sequence_length x micro_batch x gradient_accumulation = "
        f"{per_rank}, on {seen.data_parallel} data-parallel ranks), but the model was given {seen} in the "
        f"second step, by {seen.forwards:g} calls a rank. Correct the case; or say Script(tokens='vary') if "
        "their number varies from step to step: tokens/s then counts what the case claims"
    )


def _is_near(tokens: float, claimed: int) -> bool:
    return abs(tokens - claimed) <= TOKENS_OFF * claimed


def token_notes(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """What a reader of tokens/s should know."""
    seen, claimed = _tokens(reports, case), reports[0].tokens_per_step
    if seen is None or (seen.tokens == claimed and not seen.padding):
        return ()
    if not case.framework.tokens_vary and not _is_near(seen.tokens, claimed):
        return (
            f"tokens/s counts {claimed} tokens a step; the model was given that in the second step where "
            f"each of the {seen.world_size} ranks has its own part of them, as with context or sequence "
            "parallelism",
        )
    vary = ", which the case says vary" if case.framework.tokens_vary else ""
    return (f"tokens/s counts {claimed} tokens a step{vary}; the model was given {seen} in the second step",)


class _Seen:
    """Of the second step: what all data-parallel ranks together were given."""

    def __init__(self, told: Sequence[Evidence], world_size: int) -> None:
        self.world_size = world_size
        self.data_parallel = told[0].data_parallel
        self.tokens = fmean(evidence.tokens or 0 for evidence in told) * self.data_parallel
        self.of_all_ranks = self.tokens * world_size / self.data_parallel
        """As many where no two ranks were given the same: where sequences are split among some of them."""
        self.padding = fmean(evidence.padding for evidence in told) * self.data_parallel
        self.forwards = fmean(evidence.forwards for evidence in told)

    def __str__(self) -> str:
        padding = f", {self.padding / self.tokens:.0%} of them padding" if self.padding else ""
        return f"{self.tokens:.0f}{padding}"


def _tokens(reports: Sequence[RankReport], case: Case) -> _Seen | None:
    """By the ranks that saw any: later stages of a pipeline are given none, and split layers the same.

    None where the case counts samples: integers that a model is given are not the samples."""
    if case.unit == "samples":
        return None
    told = [report.evidence for report in reports if report.evidence is not None and report.evidence.tokens]
    return _Seen(told, reports[0].world_size) if told else None
