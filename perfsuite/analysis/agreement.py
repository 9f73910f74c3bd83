"""Check facts that only all ranks together show: one model, the claimed tokens, nothing hidden."""

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from perfsuite.case.case import Case
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import Evidence, RankReport

OF_THE_MOVE = 0.01  # share of training's change of a norm by which norms of replicas may differ
ROUNDING = 5e-7  # relative difference of norms due to rounding, as devices sum in different orders
TOKENS_OFF = 0.02  # share by which the tokens given to a model may differ from those claimed

CLOCK_OFF = 0.05
CLOCK_SLACK_S = 0.3
"""Allowed difference of a clock from the kernel's: a share, and the time of two interrupted readings."""
OF_THE_FORMULA = 0.9
"""Least share of the forward's FLOPs that must be counted. Baselines here have 1.00 or more for the step."""
OF_THE_GRADIENTS = 1e-4
"""Least share of the gradients' bytes that ranks must exchange in a step. Compression sends more: PowerSGD of
rank 1 does so for matrices up to 20,000 wide. A gradient norm, or a loss, is less for 20,000 parameters."""


def trained_apart(reports: Sequence[RankReport], case: Case) -> str | None:
    """Return the message of a `mismatch` if the ranks do not train one model, or None."""
    evidence = [report.evidence for report in reports if report.evidence is not None]
    # pragma: no mutate evidence[0]: the case says it for all ranks
    if len(evidence) < 2 or len(evidence) < len(reports) or evidence[0].data_parallel < 2:
        return None
    if all(each.collectives == 0 for each in evidence):
        return (
            f"the {len(evidence)} ranks trained apart: no collective ran after the first step. "
            f"{_WRAP}{_by_accelerate(reports)}"
        )
    if case.framework.promises.replicas_differ:
        return None
    common = set.intersection(*(set(each.replicated) for each in evidence))
    apart = sorted(name for name in common if _differ([each.replicated[name] for each in evidence]))
    if not apart:
        return None
    return (
        f"the {len(evidence)} ranks trained apart: {len(apart)} of {len(common)} parameters are not the "
        f"same on all of them after the last step, as {apart[0]}. {_WRAP} If they are not to be the same: "
        "with tensor or pipeline parallelism, say data_parallel=, the number of ranks that see different "
        "data; with experts of each rank, or replicas averaged at times, say Script(replicas='differ')"
    )


_WRAP = "Their gradients are not exchanged: wrap the whole model in DDP or FSDP, or all-reduce its gradients."


def _by_accelerate(reports: Sequence[RankReport]) -> str:
    """Return more advice if accelerate should wrap the model on a CPU, and was not told to use it."""
    observed = [report.observed for report in reports if report.observed is not None]
    is_imported = any("accelerate" in each.environment for each in observed)
    if not is_imported or any(each.settings.get("device") != "cpu" for each in observed):
        return ""
    return (
        " This script imports accelerate, which wraps no model on a CPU unless it is told to use it: say "
        "Script(env={'ACCELERATE_USE_CPU': 'true'}), or give --use_cpu to a script that takes the arguments "
        "of transformers' Trainer"
    )


def _differ(norms: Sequence[tuple[float, float]]) -> bool:
    after = [end for _, end in norms]
    moved = max(abs(end - begin) for begin, end in norms)
    return max(after) - min(after) > max(OF_THE_MOVE * moved, ROUNDING * max(after))


def clock_differs(reports: Sequence[RankReport]) -> str | None:
    """Return the message of a `mismatch` if a rank's clock disagrees with the kernel's uptime, or None."""
    for report in reports:
        took = report.elapsed_s
        uptime = report.uptime_s
        if uptime is not None and abs(uptime - took) > CLOCK_OFF * uptime + CLOCK_SLACK_S:
            return (
                f"rank {report.rank}: its clock says that the training took {took:.2f} s, the kernel's "
                f"uptime {uptime:.2f} s. Something replaces the clock (libfaketime, a scaler of time), or "
                "the machine was suspended: no time that was measured is one"
            )
    return None


TOKENS_DIFFER = re.compile(r"^tokens: the case claims (\d+) a step\b.* the model was given (\d+)\b")
"""Matches the message of `tokens_differ`, with the tokens that a case claims and those given to its model."""


def tokens_differ(reports: Sequence[RankReport], case: Case) -> str | None:
    """Return the message of a `mismatch` if the model was not given the claimed tokens, or None."""
    seen = _tokens(reports, case)
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    claimed = reports[0].tokens_per_step
    if seen is None or case.framework.promises.tokens_vary:
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


def tokens_given(reports: Sequence[RankReport], case: Case) -> float | None:
    """Return the tokens given to the model in the second step, over all ranks; None if unknown or varying."""
    seen = None if case.framework.promises.tokens_vary else _tokens(reports, case)
    return None if seen is None else seen.tokens


def token_notes(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Return notes on tokens/s if the tokens differ from the claimed ones without being a mismatch."""
    if case.unit == "samples":
        return _sample_notes(reports)
    seen = _tokens(reports, case)
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    claimed = reports[0].tokens_per_step
    if seen is None or (seen.tokens == claimed and not seen.padding) or tokens_differ(reports, case):
        return ()
    if not case.framework.promises.tokens_vary and not _is_near(seen.tokens, claimed):
        return (
            f"tokens/s counts {claimed} tokens a step; the model was given that in the second step where "
            f"each of the {seen.world_size} ranks has its own part of them, as with context or sequence "
            "parallelism",
        )
    vary = ", which the case says vary" if case.framework.promises.tokens_vary else ""
    return (f"tokens/s counts {claimed} tokens a step{vary}; the model was given {seen} in the second step",)


def not_checked(
    case: Case, settings: Mapping[str, str], *, has_tokens: bool, recomputes: bool
) -> Iterator[str]:
    """Yield the claims of a case about a script that no observation can confirm, with the reason.

    `has_tokens`: the model was given integers. `recomputes`: a recomputation of the forward was counted.
    """
    if case.unit == "tokens" and not has_tokens:
        yield f"sequence_length={case.sequence_length} (the model was given no whole numbers)"
    blocks = settings.get("recomputing_blocks", "")
    has_blocks = re.fullmatch(r"\d+ of [1-9]\d*", blocks) is not None
    if not has_blocks and (recomputes or case.activation_checkpointing != "none"):
        seen = "some of the forward is" if recomputes else "nothing is seen to be"
        yield (
            f"activation_checkpointing={case.activation_checkpointing!r} ({seen} recomputed, and the blocks "
            "of the model are not known)"
        )


def claim_notes(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Return a note on the claims about a script that its launch could not confirm."""
    observed = reports[0].observed
    if case.framework.promises.builds_model or observed is None:
        return ()
    has_tokens = any(each.evidence is None or each.evidence.tokens for each in reports)
    recomputes = any(each.counts is not None and "recompute" in each.counts.flops for each in reports)
    claims = [*not_checked(case, observed.settings, has_tokens=has_tokens, recomputes=recomputes)]
    return (f"claimed, not checked: {'; '.join(claims)}",) if claims else ()


def _sample_notes(reports: Sequence[RankReport]) -> tuple[str, ...]:
    """Return a note if the number of samples looks wrong; forward calls need not correspond to samples."""
    seen = [each.evidence for each in reports if each.evidence is not None and each.evidence.samples]
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    claimed = reports[0].tokens_per_step
    if not seen:
        return ()
    # pragma: no mutate 0 for: ranks without samples are not in `seen`
    # pragma: no mutate seen[0] to seen[-1]: the case says it for all ranks
    samples = fmean(each.samples or 0 for each in seen) * seen[0].data_parallel
    if _is_near(samples, claimed):
        return ()
    return (
        f"samples/s counts {claimed} samples a step (micro_batch x gradient_accumulation on "
        # pragma: no mutate [0] to [-1]: the case says it for all ranks
        f"{seen[0].data_parallel} data-parallel ranks); the model was called with {samples:.0f} in the "
        "second step, by the first dimension of its input: correct the case if these are its samples",
    )


class _Seen:
    """The tokens that all data-parallel ranks together were given in the second step."""

    def __init__(self, of_ranks: Sequence[Evidence], world_size: int, parts: int) -> None:
        self.world_size = world_size
        # pragma: no mutate [0] to [-1]: the case says it for all ranks
        self.data_parallel = of_ranks[0].data_parallel
        # pragma: no mutate 0 for: ranks without tokens are not in `of_ranks`
        self.tokens = fmean(evidence.tokens or 0 for evidence in of_ranks) * self.data_parallel
        self.of_all_ranks = self.tokens * (parts if parts > 1 else world_size / self.data_parallel)
        """The number of tokens if no two ranks were given the same, as with sequences split among ranks."""
        self.padding = fmean(evidence.padding for evidence in of_ranks) * self.data_parallel
        self.forwards = fmean(evidence.forwards for evidence in of_ranks)

    def __str__(self) -> str:
        padding = f", {self.padding / self.tokens:.0%} of them padding" if self.padding else ""
        return f"{self.tokens:.0f}{padding}"


def _tokens(reports: Sequence[RankReport], case: Case) -> _Seen | None:
    """Return the tokens of the ranks that were given any; later stages of a pipeline are given none."""
    if case.unit == "samples":  # integer inputs are not tokens here
        return None
    given = [report.evidence for report in reports if report.evidence is not None and report.evidence.tokens]
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    return _Seen(given, reports[0].world_size, _parts(reports)) if given else None


def _parts(reports: Sequence[RankReport]) -> int:
    """Return the observed number of ranks among which context parallelism splits a sequence."""
    return int(reports[0].observed.settings.get("context_parallel", "1")) if reports[0].observed else 1


def hidden(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Return why the counted step of a launch did more than was counted; empty without signs of that.

    A count that is too low would look like an improvement, so such a step is not counted. Reasons that a rank
    finds by itself are in its report (`perfsuite.worker.counting.hidden`).
    """
    counts = [report.counts for report in reports if report.counts is not None]
    if len(counts) < len(reports):
        return ()  # missing counts are reported elsewhere
    return (
        *dict.fromkeys(why for report in reports for why in report.hidden),
        *_less_than_the_formula(reports, counts, case),
        *_less_than_the_gradients(reports, counts, case),
    )


def _less_than_the_formula(
    reports: Sequence[RankReport], counts: Sequence[Counts], case: Case
) -> Iterator[str]:
    """Yield a reason if all ranks together compute less than a forward takes: 2 N + 4 L H Q S per token."""
    flops = reports[0].flops  # pragma: no mutate [0] to [-1]: each rank has those of the whole model
    if flops is None or case.framework.promises.tokens_vary or any(each.without_flops for each in counts):
        return
    trained = flops.matmul_parameters if flops.trained_parameters is None else flops.trained_parameters
    per_token = (flops.per_token + 2 * (flops.matmul_parameters - trained)) / 3
    parts = _parts(reports)
    attention = per_token - 2 * flops.matmul_parameters
    per_token -= attention * (parts - 1) / (2 * parts)  # ring attention skips this part of causal sequences
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
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
    """Yield a reason if data-parallel ranks keep equal, changing parameters, but sent almost nothing."""
    evidence = [report.evidence for report in reports if report.evidence is not None]
    replicas_differ = case.framework.promises.replicas_differ
    # pragma: no mutate evidence[0]: the case says it for all ranks
    if len(evidence) < len(reports) or evidence[0].data_parallel < 2 or replicas_differ:
        return
    moved = any(begin != end for each in evidence for begin, end in each.replicated.values())
    intervals = len(reports[0].step_s) - 1  # with fewer collectives, replicas are averaged now and then
    is_each_step = all(each.collectives is not None and each.collectives >= intervals for each in evidence)
    gradients = max(each.replicated_bytes for each in evidence)
    sent = max(sum(each.bytes for each in its.collectives if each.ranks > 1) for its in counts)
    if moved and is_each_step and sent < OF_THE_GRADIENTS * gradients:
        yield (
            f"the ranks train one model, whose gradients have {gradients:,} bytes, and were seen to send "
            f"{sent:,}: gradients were exchanged out of sight, or all ranks are given the same data"
        )
