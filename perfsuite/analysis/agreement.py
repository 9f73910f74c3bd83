"""Check that all ranks train one model on the claimed number of tokens, and that all their work was counted.

The evidence is in the reports of the ranks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from perfsuite.case.case import Case
from perfsuite.results.counts import COUNTED_STEP, Counts, other_inputs
from perfsuite.results.rank_report import RankEvidence, RankReport

# Allowed difference between the ranks' norms of a parameter, as a share of the largest change of this norm on
# any rank.
OF_THE_MOVE = 0.01
ROUNDING = 5e-7  # relative difference of norms due to rounding: devices sum in different orders
# Allowed relative difference between the tokens given to a model and the claimed number.
TOKENS_OFF = 0.02

CLOCK_OFF = 0.05
CLOCK_SLACK_S = 0.3
"""A time on a rank's clock may differ from the kernel's time. The limit is `CLOCK_OFF` times the kernel's
time plus this many seconds. The seconds are needed if the process is interrupted between the readings of the
two clocks."""
OF_THE_FORMULA = 0.9
"""The counted FLOPs of a forward pass must be at least this share of the FLOPs according to the formula. In
this repository's baselines, the share is at least 1.00."""
OF_THE_GRADIENTS = 1e-4
"""Minimum share of the gradients' bytes that ranks must exchange in a step. Compressed gradients exceed this
minimum, even PowerSGD of rank 1 for matrices up to 20,000 wide. Ranks that exchange only a gradient norm or a
loss send less than the minimum if the model has more than 20,000 parameters."""


def phases_never_run(reports: Sequence[RankReport], case: Case) -> dict[str, str]:
    """Return phase -> function for those of the case's phases that ran on none of these ranks."""
    seen = {name for report in reports for name in report.spans}
    named = getattr(case.framework, "phases", {})
    return {phase: function for phase, function in named.items() if phase not in seen}


def phase_never_ran(reports: Sequence[RankReport], case: Case) -> str | None:
    """Return the message of a `mismatch` if one of the case's phases ran on no rank, or None."""
    missing = phases_never_run(reports, case)
    if not missing:
        return None
    phase, function = next(iter(missing.items()))
    return (
        f"phases={{{phase!r}: {function!r}}}: in the {case.total_steps} steps, no rank completed a "
        "call of this function in the thread that trains. Name a function that the script calls in "
        "these steps, with the module from which the script imports it. Or give more steps, or leave "
        "out the phase"
    )


def trained_apart(reports: Sequence[RankReport], case: Case) -> str | None:
    """Return the message of a `mismatch` if the ranks train different models, and otherwise None."""
    evidence = [report.evidence for report in reports if report.evidence is not None]
    # pragma: no mutate evidence[0]: `data_parallel` is the same on all ranks
    if len(evidence) < 2 or len(evidence) < len(reports) or evidence[0].data_parallel < 2:
        return None
    if all(rank_evidence.collectives == 0 for rank_evidence in evidence):
        return (
            f"the {len(evidence)} ranks trained apart: no collective ran after the first step. "
            f"{_WRAP}{_by_accelerate(reports)}"
        )
    if case.framework.promises.replicas_differ:
        return None
    common = set.intersection(*(set(rank_evidence.replicated) for rank_evidence in evidence))
    apart = sorted(
        name for name in common if _differ([rank_evidence.replicated[name] for rank_evidence in evidence])
    )
    if not apart:
        return None
    return (
        f"the {len(evidence)} ranks trained apart: {len(apart)} of {len(common)} parameters, such as "
        f"{apart[0]}, are not the same on all ranks after the last step. {_WRAP} If the parameters are "
        "meant to differ, declare this in the case. With tensor or pipeline parallelism, give "
        "data_parallel=, the number of ranks that get different data. If ranks have different experts, or if "
        "replicas are only averaged from time to time, give Script(replicas='differ')"
    )


_WRAP = "Their gradients are not exchanged: wrap the whole model in DDP or FSDP, or all-reduce its gradients."


def _by_accelerate(reports: Sequence[RankReport]) -> str:
    """Return additional advice if the script imports accelerate and trains on a CPU.

    On a CPU, accelerate wraps models only if it is configured to do so.
    """
    observed = [report.observed for report in reports if report.observed is not None]
    is_imported = any("accelerate" in rank_observed.environment for rank_observed in observed)
    if not is_imported or any(rank_observed.settings.get("device") != "cpu" for rank_observed in observed):
        return ""
    return (
        " This script imports accelerate, which wraps models on a CPU only if it is configured to do so. "
        "Give Script(env={'ACCELERATE_USE_CPU': 'true'}), or --use_cpu if the script takes the arguments of "
        "transformers' Trainer"
    )


def _differ(norms: Sequence[tuple[float, float]]) -> bool:
    after = [end for _, end in norms]
    moved = max(abs(end - begin) for begin, end in norms)
    return max(after) - min(after) > max(OF_THE_MOVE * moved, ROUNDING * max(after))


def clock_differs(reports: Sequence[RankReport]) -> str | None:
    """Return the message of a `mismatch` if a rank's clock disagrees with the uptime of Linux, or None."""
    for report in reports:
        took = report.elapsed_s
        uptime = report.uptime_s
        if uptime is not None and abs(uptime - took) > CLOCK_OFF * uptime + CLOCK_SLACK_S:
            return (
                f"rank {report.rank}: according to its clock, training took {took:.2f} s, but it took "
                f"{uptime:.2f} s according to the kernel's uptime. Something replaces the clock "
                "(libfaketime, a tool that scales time), or the machine was suspended. The measured "
                "times cannot be used"
            )
    return None


TOKENS_DIFFER = re.compile(r"^tokens: the case claims (\d+) a step\b.* the model was given (\d+)\b")
"""Matches the message of `tokens_differ`. The groups are the numbers of tokens that a case claims and that
its model was given."""


def tokens_differ(reports: Sequence[RankReport], case: Case) -> str | None:
    """Return the message of a `mismatch` if the model did not get the claimed number of tokens, else None."""
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
        f"{per_rank}, on {seen.data_parallel} data-parallel ranks), but in the second step the model was "
        f"given {seen}, in {seen.forwards:g} forward calls per rank. Correct the case, or give "
        "Script(tokens='vary') if the number varies from step to step. Then tokens/s counts the tokens "
        "that the case claims"
    )


def _is_near(tokens: float, claimed: int) -> bool:
    return abs(tokens - claimed) <= TOKENS_OFF * claimed


def tokens_given(reports: Sequence[RankReport], case: Case) -> float | None:
    """Return how many tokens the model was given in the second step, summed over all ranks.

    Returns None if this is unknown, or if the number of tokens varies from step to step.
    """
    seen = None if case.framework.promises.tokens_vary else _tokens(reports, case)
    return None if seen is None else seen.tokens


def token_notes(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Return a note if the model was given padding, or not as many tokens as tokens/s counts.

    There is no note if `tokens_differ` returns the message of a `mismatch`.
    """
    if case.unit == "samples":
        return _sample_notes(reports)
    seen = _tokens(reports, case)
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    claimed = reports[0].tokens_per_step
    if seen is None or (seen.tokens == claimed and not seen.padding) or tokens_differ(reports, case):
        return ()
    if not case.framework.promises.tokens_vary and not _is_near(seen.tokens, claimed):
        return (
            f"tokens/s counts {claimed} tokens a step. This number matches the second step only if each of "
            f"the {seen.world_size} ranks has its own part of the sequences, as with context or sequence "
            "parallelism",
        )
    vary = " (which vary, according to the case)" if case.framework.promises.tokens_vary else ""
    return (f"tokens/s counts {claimed} tokens a step{vary}. In the second step, the model was given {seen}",)


def input_notes(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Return a note if counted steps of a launch have different inputs, although they should not."""
    differing = next(_steps_with_other_inputs(reports), None)
    if differing is None or case.framework.promises.tokens_vary:
        return ()
    number, inputs = differing
    is_script = case.framework.name == "script"
    advice = f". If the number of {case.unit} varies, give Script(tokens='vary')" if is_script else ""
    return (
        f"{case.unit}/s counts {reports[0].tokens_per_step} {case.unit} in every step, but the input of step "
        f"{number} is {inputs}, the input of step {COUNTED_STEP}{advice}",
    )


def _steps_with_other_inputs(reports: Sequence[RankReport]) -> Iterator[tuple[int, str]]:
    """Yield each counted step whose input differs from the input of the reported step.

    A step is yielded as its number and a text with both inputs.
    """
    for counts in (report.counts for report in reports if report.counts is not None):
        for number in counts.also_counted:
            step = counts.in_step(number)
            inputs = "" if step is None else other_inputs(counts, step)
            if inputs:
                yield number, inputs


def not_checked(
    case: Case, settings: Mapping[str, str], *, has_tokens: bool, recomputes: bool
) -> Iterator[str]:
    """Yield those claims of a script's case that no observation can confirm, each with the reason.

    `has_tokens`: whether the model was given integers. `recomputes`: whether a recomputed forward was
    counted.
    """
    if case.unit == "tokens" and not has_tokens:
        yield f"sequence_length={case.sequence_length} (the model was given no integers)"
    blocks = settings.get("recomputing_blocks", "")
    has_blocks = re.fullmatch(r"\d+ of [1-9]\d*", blocks) is not None
    if not has_blocks and (recomputes or case.activation_checkpointing != "none"):
        seen = "some of the forward is recomputed" if recomputes else "no recomputation was detected"
        yield (
            f"activation_checkpointing={case.activation_checkpointing!r} ({seen}, but the blocks of the "
            "model are not known)"
        )


def claim_notes(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Return a note that lists those claims of a script's case that the launch could not confirm."""
    observed = reports[0].observed
    if case.framework.promises.builds_model or observed is None:
        return ()
    has_tokens = any(report.evidence is None or report.evidence.tokens for report in reports)
    recomputes = any(report.counts is not None and "recompute" in report.counts.flops for report in reports)
    claims = [*not_checked(case, observed.settings, has_tokens=has_tokens, recomputes=recomputes)]
    return (f"claimed, not checked: {'; '.join(claims)}",) if claims else ()


def _sample_notes(reports: Sequence[RankReport]) -> tuple[str, ...]:
    """Return a note if the number of samples looks wrong.

    It is only a note, because forward calls need not correspond to samples.
    """
    seen = [report.evidence for report in reports if report.evidence is not None and report.evidence.samples]
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    claimed = reports[0].tokens_per_step
    if not seen:
        return ()
    # pragma: no mutate 0 for: ranks without samples are not in `seen`
    # pragma: no mutate seen[0] to seen[-1]: `data_parallel` is the same on all ranks
    samples = fmean(evidence.samples or 0 for evidence in seen) * seen[0].data_parallel
    if _is_near(samples, claimed):
        return ()
    return (
        f"samples/s is computed with {claimed} per step (micro_batch x gradient_accumulation on "
        # pragma: no mutate [0] to [-1]: `data_parallel` is the same on all ranks
        f"{seen[0].data_parallel} data-parallel ranks). In the second step, the first dimension of the "
        f"model's inputs added up to {samples:.0f}. If this sum is the number of samples, correct the case",
    )


class _Seen:
    """The tokens that all data-parallel ranks together were given in the second step."""

    def __init__(self, of_ranks: Sequence[RankEvidence], world_size: int, parts: int) -> None:
        self.world_size = world_size
        # pragma: no mutate [0] to [-1]: `data_parallel` is the same on all ranks
        self.data_parallel = of_ranks[0].data_parallel
        # pragma: no mutate 0 for: ranks without tokens are not in `of_ranks`
        self.tokens = fmean(evidence.tokens or 0 for evidence in of_ranks) * self.data_parallel
        self.of_all_ranks = self.tokens * (parts if parts > 1 else world_size / self.data_parallel)
        """The number of tokens if all ranks were given different tokens, for example parts of sequences."""
        self.padding = fmean(evidence.padding for evidence in of_ranks) * self.data_parallel
        self.forwards = fmean(evidence.forwards for evidence in of_ranks)

    def __str__(self) -> str:
        padding = f", {self.padding / self.tokens:.0%} of them padding" if self.padding else ""
        return f"{self.tokens:.0f}{padding}"


def _tokens(reports: Sequence[RankReport], case: Case) -> _Seen | None:
    """Return the tokens given to the ranks. Ranks that get no tokens (later pipeline stages) are ignored."""
    if case.unit == "samples":  # here, integer inputs are not tokens
        return None
    given = [report.evidence for report in reports if report.evidence is not None and report.evidence.tokens]
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    return _Seen(given, reports[0].world_size, _parts(reports)) if given else None


def _parts(reports: Sequence[RankReport]) -> int:
    """Return the observed number of ranks that share a sequence in context parallelism."""
    # pragma: no mutate [0] to [-1]: all ranks have the same settings
    observed = reports[0].observed
    return 1 if observed is None else int(observed.settings.get("context_parallel", "1"))


def hidden_in_ranks(reports: Sequence[RankReport]) -> tuple[str, ...]:
    """Return the reasons why counts lack work, as the ranks reported them. Each reason appears once."""
    return tuple(dict.fromkeys(why for report in reports for why in report.hidden))


def hidden(reports: Sequence[RankReport], case: Case) -> tuple[str, ...]:
    """Return the signs that the counted step of a launch did more work than was counted; empty if none.

    A count that is too low would look like an improvement, so the counts of such a step are not used. The
    reports of the ranks contain the reasons that a rank can find by itself
    (`perfsuite.worker.counting.hidden`).
    """
    counts = [report.counts for report in reports if report.counts is not None]
    if len(counts) < len(reports):  # the other signs need the counts of all ranks
        return hidden_in_ranks(reports)
    return (
        *hidden_in_ranks(reports),
        *_less_than_the_formula(reports, counts, case),
        *_less_than_the_gradients(reports, counts, case),
    )


def _less_than_the_formula(
    reports: Sequence[RankReport], counts: Sequence[Counts], case: Case
) -> Iterator[str]:
    """Yield why the counts lack work, if all ranks together computed less than a forward pass needs.

    A forward pass needs 2 N + 4 L H Q S FLOPs per token. The symbols are those of
    `perfsuite.worker.counting.flops`.
    """
    flops = reports[0].flops  # pragma: no mutate [0] to [-1]: each rank has the model's FLOPs
    if (
        flops is None
        or case.framework.promises.tokens_vary
        or any(rank_counts.without_flops for rank_counts in counts)
    ):
        return
    trained = flops.matmul_parameters if flops.trained_parameters is None else flops.trained_parameters
    per_token = (flops.per_token + 2 * (flops.matmul_parameters - trained)) / 3
    parts = _parts(reports)
    attention = per_token - 2 * flops.matmul_parameters
    per_token -= attention * (parts - 1) / (2 * parts)  # ring attention skips this part of causal sequences
    # pragma: no mutate [0] to [-1]: `collect` has checked that ranks agree
    takes = per_token * reports[0].tokens_per_step
    seen = sum(rank_counts.flops.get("forward", 0) for rank_counts in counts)
    if seen < OF_THE_FORMULA * takes:
        yield (
            f"only {seen:.4g} FLOP were counted in forward on all ranks, but according to the formula "
            f"{flops.formula}, forward takes {takes:.4g}"
        )


def _less_than_the_gradients(
    reports: Sequence[RankReport], counts: Sequence[Counts], case: Case
) -> Iterator[str]:
    """Yield a reason if replicated parameters changed, but data-parallel ranks sent almost nothing."""
    evidence = [report.evidence for report in reports if report.evidence is not None]
    replicas_differ = case.framework.promises.replicas_differ
    # pragma: no mutate evidence[0]: `data_parallel` is the same on all ranks
    if len(evidence) < len(reports) or evidence[0].data_parallel < 2 or replicas_differ:
        return
    moved = any(
        begin != end for rank_evidence in evidence for begin, end in rank_evidence.replicated.values()
    )
    # If a rank ran fewer collectives than there are steps after the first, replicas are averaged only in some
    # steps.
    intervals = len(reports[0].step_s) - 1
    is_each_step = all(
        rank_evidence.collectives is not None and rank_evidence.collectives >= intervals
        for rank_evidence in evidence
    )
    gradients = max(rank_evidence.replicated_bytes for rank_evidence in evidence)
    sent = max(sum(call.bytes for call in its.collectives if call.ranks > 1) for its in counts)
    if moved and is_each_step and sent < OF_THE_GRADIENTS * gradients:
        yield (
            f"the ranks train one model, whose gradients have {gradients:,} bytes, but the ranks were "
            f"seen to send only {sent:,} bytes: gradients were exchanged without being counted, or all ranks "
            "are given the same data"
        )
