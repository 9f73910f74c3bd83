"""Find reasons to doubt that a step with smaller counts does less work. Pure.

Work can be done without being counted: in a thread, in an operator without a formula, or in an event that is
no longer recognised. A decrease of the counts is then not called `improved`.
"""

from collections.abc import Iterator, Sequence

from perfsuite.results.amounts import arrow
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import (
    COUNTED_STEP,
    EVENTS,
    Counts,
    RankCounts,
    has_smaller_input,
    other_inputs,
    step_name,
)
from perfsuite.results.outcome import in_span
from perfsuite.results.run import Run
from perfsuite.verdict.count_findings import Launches, alike
from perfsuite.verdict.counted_spans import counted_spans
from perfsuite.verdict.evidence import counted

LATER_LESS = 0.02
"""Share of the reported step's FLOPs that a later step may lack. If a later step lacks more, a decrease of
the work does not count as `improved`."""
GONE = 0.5  # below this share of the baseline's FLOPs or bytes, work might be uncounted
_OUT_OF_SIGHT = " a step: less than half, so the rest might be done without being counted"


def reasons_to_doubt(
    runs: Sequence[Run], baseline: CountBaseline, launches: Launches, *, advice: str
) -> list[str]:
    """List reasons why counts below the baseline's do not necessarily mean less work.

    `advice` is appended to each reason that the user can remove by accepting the new counts.
    """
    reasons = list(_missing_work(runs, baseline, launches, advice=advice))
    of_runs = (does_less_later(runs, baseline.counts), _lacks_events(runs, baseline.counts, advice=advice))
    return [*dict.fromkeys(reasons), *(reason for reason in of_runs if reason is not None)]


def _missing_work(
    runs: Sequence[Run], baseline: CountBaseline, launches: Launches, *, advice: str
) -> Iterator[str]:
    """Yield sentences about FLOPs and bytes that are missing, but might only be uncounted.

    If FLOPs are missing, the step might have a smaller input, or the FLOPs might be those of new operators
    without a FLOP formula. If more than half of the FLOPs or bytes are missing, the work might be done
    without being counted. The last rule is not applied to FLOPs that have already been compared with the
    model's own formula (`perfsuite.analysis.agreement`).
    """
    is_known = all(
        run.flops is not None and not run.case.framework.promises.tokens_vary for run in counted(runs)
    )
    for _, whole_before, whole_now in alike(baseline, launches):
        for span, before, now in counted_spans(whole_before, whole_now):
            prefix = "" if span == step_name(whole_before.step) else span
            for doubt in _doubts_of_span(before, now, advice=advice, is_known=is_known):
                yield in_span(prefix, doubt)


def _doubts_of_span(before: Counts, now: list[Counts], *, advice: str, is_known: bool) -> Iterator[str]:
    then = sum(before.flops.values())
    most = max(now, key=lambda counts: sum(counts.flops.values()))
    today = sum(most.flops.values())
    new = sorted(set().union(*map(_unknown, now)) - _unknown(before))
    if today < then and has_smaller_input(before, most):
        yield f"FLOPs {arrow(then, today, 'FLOP')}: the input is {other_inputs(before, most)}{advice}"
    elif today < then and new:
        rest = f"the rest might be in {', '.join(new)}, whose FLOPs are unknown because there is no formula"
        yield f"FLOPs {arrow(then, today, 'FLOP')}: {rest}"
    elif today < GONE * then and not is_known:
        yield f"FLOPs {arrow(then, today, 'FLOP')}{_OUT_OF_SIGHT}{advice}"
    sent, *sent_now = (
        sum(row.bytes for row in counts.collectives if row.ranks > 1) for counts in (before, *now)
    )
    if max(sent_now) < GONE * sent:
        yield f"collectives {arrow(sent, max(sent_now), 'bytes')}{_OUT_OF_SIGHT}{advice}"


def _unknown(counts: Counts) -> set[str]:
    return {*counts.without_flops, *(name for name in counts.ops if not name.startswith("aten."))}


def _lacks_events(runs: Sequence[Run], before: Sequence[RankCounts], *, advice: str) -> str | None:
    """Return a reason to doubt the counts if some launch lacks an event of the other side.

    The work of this event might now be done in a way that is not recognised, such as in a thread, or with
    a function that perfsuite does not wrap. `before` has the counts of the other side: the baseline or the
    other arm. Returns None if all launches have all events of that side.
    """
    expected = _events_of(before)
    missing = {event for run in counted(runs) for event in expected - _events_of(run.counts)}
    if not missing:
        return None
    names = " and ".join(sorted(missing))
    were = "was" if len(missing) == 1 else "were"
    return f"{names} {were} not seen, and might be done in a way that is not recognised{advice}"


def _events_of(entries: Sequence[RankCounts]) -> set[str]:
    return {name for entry in entries for name in entry.counts.spans if name in EVENTS}


def does_less_later(runs: Sequence[Run], before: Sequence[RankCounts]) -> str | None:
    """Return why launches might do less work than they claim: a later step does less than the reported step.

    Every step should have the same number of tokens, but only the number in the second step is compared with
    the case. `before` has the counts of the baseline or of the other arm. Returns None if the steps in
    `before` differ just as much from each other, if only one step was counted, or if the case allows the
    number of tokens to vary.
    """
    if any(run.case.framework.promises.tokens_vary for run in runs):
        return None
    now = [entry.counts for run in counted(runs) for entry in run.counts]
    usual = [_least_share(entry.counts)[0] for entry in before if entry.counts.also_counted]
    if not now or not usual:
        return None
    counts = min(now, key=_least_share)
    share, number = _least_share(counts)
    if share >= min(usual) - LATER_LESS:
        return None
    step = counts.in_step(number)
    inputs = "" if step is None else other_inputs(counts, step)
    because = f"its input is {inputs}" if inputs else "it might have fewer tokens"
    return (
        f"step {number} does {1 - share:.0%} fewer FLOPs than step {COUNTED_STEP} of the same launch: "
        f"{because}, so less work and less time do not count as an improvement"
    )


def _least_share(counts: Counts) -> tuple[float, int]:
    """Find the counted step with the fewest FLOPs, except the reported step.

    Return its FLOPs, as a share of the FLOPs of the reported step, and its number. If no other step was
    counted, return 1.0 and the number of the reported step.
    """
    reported = sum(counts.flops.values())
    steps = [counts.in_step(step) for step in counts.also_counted]
    shares = [(sum(step.flops.values()) / reported, step.step) for step in steps if step and reported]
    return min(shares, default=(1.0, counts.step))


def works_in_threads(runs: Sequence[Run], before: int | None) -> str | None:
    """Return a reason to doubt that a step does less work: more threads compute than on the other side.

    `before` is the value of `other_threads` on the other side. Returns None if the number is not higher now,
    or if `before` is unknown. Call this only if the counted work decreased. If the work is equal, more
    threads are not a reason to doubt it, because threads of loggers and loaders compute in some steps only.
    """
    now = min((run.other_threads for run in counted(runs)), default=0)
    if before is None or now <= before:
        return None
    more = now - before
    threads = "1 more thread computes" if more == 1 else f"{more} more threads compute"
    return f"{threads} in a step, and the work of threads is not counted"
