"""Judge the counts of a step exactly, against those of a baseline. Pure.

No statistics are needed, because counts have no noise. More of anything is `regressed`, less is `improved`.
If the number of calls differs but the sum that is judged does not, the difference is only listed. The outcome
is `not counted` if a step did work that was not counted.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from perfsuite.results import quantities
from perfsuite.results.amounts import arrow
from perfsuite.results.count_baseline import DRY, CountBaseline, unsteady, versions_of
from perfsuite.results.counts import (
    COUNTED_STEP,
    EVENTS,
    Counts,
    RankCounts,
    are_alike,
    spans,
    step_name,
)
from perfsuite.results.outcome import NOT_JUDGED, WORST_FIRST, CountCheck, Finding, in_span
from perfsuite.results.quantities import Group, Quantity, differing, unsteady_in
from perfsuite.results.rank_report import is_of_start_up
from perfsuite.results.run import Run
from perfsuite.verdict.count_sentences import sentence
from perfsuite.verdict.counted_spans import combined, counted_spans, missing_spans

Judged = Literal["regressed", "improved", "passed"]
Launches = Sequence[Sequence[RankCounts]]  # the counts of each launch
_NOT_COUNTED = "not counted in these launches"
_NOT_IN_BASELINE = "not in the baseline"
_OF_THE_HOST = (
    "because an older perfsuite also counted reads of tensors on the host: accept the counts again "
    "(perfsuite baseline accept --only-counts)"
)
LATER_LESS = 0.02
"""Share of the reported step's FLOPs that a later step may lack. If a later step lacks more, a decrease of
the work does not count as `improved`."""
GONE = 0.5  # below this share of the baseline's FLOPs or bytes, work might be uncounted
MANY_MORE = 2  # the same bytes are `regressed` if sent in more than this many times the baseline's calls
_OUT_OF_SIGHT = " a step: less than half, so the rest might be done without being counted"
_WAITS = (quantities.HOST_READS, quantities.COPIES, quantities.BLOCKING, quantities.STALLS)
_OF_MEMORY = (quantities.PEAK, quantities.SAVED, quantities.GROWTH, quantities.KEPT, quantities.KEPT_GRAPHS)
_ACCEPT = ". If the work is no longer done, accept the counts (perfsuite baseline accept --only-counts)"


def counted(runs: Sequence[Run]) -> list[Run]:
    """Return the launches whose counts are evidence. A busy or slow machine does not change counts."""
    return [run for run in runs if run.failure is None and run.counts]


def why_hidden(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return why some work in the steps of these launches was not counted; empty if all was counted."""
    return tuple(dict.fromkeys(why for run in runs if run.failure is None for why in run.hidden))


def unlike(runs: Sequence[Run], baseline: CountBaseline) -> str | None:
    """Return why these launches are not comparable with a baseline of counts, or None.

    They cannot be compared if their work was counted with another method.
    """
    methods = {entry.counts.method for run in counted(runs) for entry in run.counts}
    others = [method for method in methods if not are_alike(method, baseline.method)]
    if not others:
        return None
    return (
        f"cannot be compared: the baseline was counted with the method {baseline.method!r}, this step with "
        f"{others[0]!r}. Accept the counts again (perfsuite baseline accept --only-counts), or delete the "
        "baseline"
    )


def unlike_compiled(runs: Sequence[Run], baseline: CountBaseline) -> str | None:
    """Return why dry runs of compiled models are not comparable with a baseline, or None.

    They cannot be compared if the baseline is from an older perfsuite, whose dry runs did not compile models.
    """
    compiles = any(entry.counts.kernels is None for run in counted(runs) for entry in run.counts)
    if not compiles or any(entry.counts.kernels is None for entry in baseline.counts):
        return None
    return (
        "cannot be compared: this dry run compiled the model, which the baseline's did not. Accept the "
        "counts again (perfsuite baseline accept --only-counts), or delete the baseline"
    )


def check(runs: Sequence[Run], baseline: CountBaseline | None, *, of_arm: bool = False) -> CountCheck | None:
    """Judge the counts of launches.

    Returns None if all launches failed, or if there are neither counts nor a baseline. Counts that are
    `unlike` the baseline's are not compared. With `of_arm`, the baseline is made from another arm.
    """
    launches = [run.counts for run in counted(runs)]
    not_compared = CountCheck(outcome="not counted", compared=False)
    if all(run.failure is not None for run in runs):
        return None
    hidden = why_hidden(runs)
    if hidden:
        return not_compared.replace(notes=hidden)
    if baseline is None:
        return not_compared.replace(outcome="recorded") if launches else None
    if not launches:
        return not_compared.replace(notes=("no launch was counted",))
    if unlike(runs, baseline) is not None or (not of_arm and unlike_compiled(runs, baseline) is not None):
        return not_compared.replace(outcome="passed")
    findings = _findings(baseline, launches)
    advice = "" if of_arm else _ACCEPT
    doubts = _doubts(runs, baseline, launches, advice=advice)
    of_runs = (does_less_later(runs, baseline.counts), _lacks_events(runs, baseline.counts, advice=advice))
    doubts += [doubt for doubt in of_runs if doubt is not None]
    new_events = [*_new_events(baseline, launches)] if of_arm else []
    findings = (*new_events, *findings)
    outcome: Judged = min((finding.outcome for finding in findings), key=WORST_FIRST.index, default="passed")
    if doubts:
        findings = tuple(
            finding.replace(outcome="passed") if finding.outcome == "improved" else finding
            for finding in findings
        )
    changed = [] if of_arm else changed_versions(baseline.versions, versions_of(counted(runs)[-1]))
    upgraded = [f"counted with other versions: {', '.join(changed)}"] if changed and findings else []
    return CountCheck(
        outcome="not counted" if doubts and outcome != "regressed" else outcome,
        findings=findings,
        unsteady=tuple(sorted({*baseline.unsteady, *unsteady(launches)})),
        compared=bool(_ranks(baseline.counts).intersection(*map(_ranks, launches))),
        notes=(*doubts, *upgraded, *_not_judged(baseline, launches, {event.span for event in new_events})),
    )


def does_less_later(runs: Sequence[Run], before: Sequence[RankCounts]) -> str | None:
    """Return why launches might do less work than they claim: a later step does less than the reported step.

    Every step should have the same number of tokens, but only the number in the second step is compared with
    the case. `before` has the counts of the baseline or of the other arm. Returns None if the steps in
    `before` differ as much, if only one step was counted, or if the number of tokens may vary in the case.
    """
    if any(run.case.framework.promises.tokens_vary for run in runs):
        return None
    now = [entry.counts for run in counted(runs) for entry in run.counts]
    usual = [_least_share(entry.counts)[0] for entry in before if entry.counts.also_counted]
    if not now or not usual:
        return None
    share, step = min(map(_least_share, now))
    if share >= min(usual) - LATER_LESS:
        return None
    return (
        f"step {step} does {1 - share:.0%} fewer FLOPs than step {COUNTED_STEP} of the same launch: it might "
        "have fewer tokens, so less work and less time do not count as an improvement"
    )


def works_in_threads(runs: Sequence[Run], before: int | None) -> str | None:
    """Return a reason to doubt that a step does less work: more threads compute than on the other side.

    `before` is the number of other threads that computed on the other side. Returns None if there are not
    more such threads now, or if `before` is unknown. Call this only if the counted work decreased: threads of
    loggers and loaders compute in some steps only, so more threads are not a reason to doubt equal work.
    """
    now = min((run.other_threads for run in counted(runs)), default=0)
    if before is None or now <= before:
        return None
    more = now - before
    threads = "1 more thread computes" if more == 1 else f"{more} more threads compute"
    return f"{threads} in a step, and the work of threads is not counted"


def _lacks_events(runs: Sequence[Run], before: Sequence[RankCounts], *, advice: str) -> str | None:
    """Return a reason to doubt the counts if some launch lacks an event of the other side.

    The work of this event might now be done in a way that is not recognised, such as in a thread, or with
    another writer. `before` has the counts of the baseline or of the other arm. Returns None if all launches
    have all of its events.
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


def _least_share(counts: Counts) -> tuple[float, int]:
    """Find the counted step with the fewest FLOPs, except the reported step.

    Return its FLOPs, as a share of the FLOPs of the reported step, and its number. If no other step was
    counted, return 1.0 and the number of the reported step.
    """
    reported = sum(counts.flops.values())
    steps = [counts.in_step(step) for step in counts.also_counted]
    shares = [(sum(step.flops.values()) / reported, step.step) for step in steps if step and reported]
    return min(shares, default=(1.0, counts.step))


def _new_events(baseline: CountBaseline, launches: Launches) -> Iterator[Finding]:
    """Yield a regression for each event that only arm B has, such as saving a checkpoint."""
    for ranks, before, now in _alike(baseline, launches):
        new = sorted(EVENTS - before.spans.keys())
        for name in [name for name in new if all(name in counts.spans for counts in now)]:
            yield Finding(
                field=name,
                quantity="events",
                unit="calls",
                before=0,
                now=1,
                ranks=spans(ranks),
                outcome="regressed",
                sentence=f"{name}: only in arm B",
                span=name,
            )


def count_differences(baseline: CountBaseline, now: CountBaseline) -> tuple[Finding, ...]:
    """Return the differences between two baselines of the same case."""
    return _findings(baseline, [now.counts])


def missing_ranks(baseline: CountBaseline, now: CountBaseline) -> str | None:
    """Return the ranks that are in the baseline but not in `now`: `rank 1 is`, or `ranks 0-3 are`."""
    lost = _ranks(baseline.counts) - _ranks(now.counts)
    return _named(sorted(lost)) if lost else None


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the versions that differ, such as `torch 2.13.0 -> 2.14.0`."""
    return [
        f"{name} {before.get(name, 'unknown')} -> {now.get(name, 'unknown')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def _doubts(runs: Sequence[Run], baseline: CountBaseline, launches: Launches, *, advice: str) -> list[str]:
    """List reasons why counts below the baseline's do not necessarily mean less work.

    If FLOPs are missing, they might be those of new operators without a FLOP formula. If more than half of
    the FLOPs or bytes are missing, the work might be done without being counted. The second rule is not
    applied to FLOPs that have already been compared with the model's own formula
    (`perfsuite.analysis.agreement`).
    """
    is_known = all(
        run.flops is not None and not run.case.framework.promises.tokens_vary for run in counted(runs)
    )
    doubts: list[str] = []
    for _, whole_before, whole_now in _alike(baseline, launches):
        for span, before, now in counted_spans(whole_before, whole_now):
            prefix = "" if span == step_name(whole_before.step) else span
            of_span = _doubts_of_span(before, now, advice=advice, is_known=is_known)
            doubts += [in_span(prefix, doubt) for doubt in of_span]
    return list(dict.fromkeys(doubts))


def _doubts_of_span(before: Counts, now: list[Counts], *, advice: str, is_known: bool) -> Iterator[str]:
    then = sum(before.flops.values())
    today = max(sum(counts.flops.values()) for counts in now)
    new = sorted(set().union(*map(_unknown, now)) - _unknown(before))
    if today < then and new:
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


def _findings(baseline: CountBaseline, launches: Launches) -> tuple[Finding, ...]:
    """Return the findings, each with its ranks. Regressions come first.

    Among findings with the same outcome, those of a start-up come last, because a start-up happens once. The
    others are sorted by kind of work (see `_place`), and the largest change of each kind comes first.
    """
    ranks_of = defaultdict[Finding, list[int]](list)
    place_of: dict[Finding, tuple[int, bool, int, float]] = {}
    for ranks, before, now in _alike(baseline, launches):
        for quantity, finding, of_span in _in_all_spans(before, now, baseline):
            # Among findings with the same outcome and place, the largest relative change comes first. Each
            # change is divided by the work of its own span, because a start-up does far more than a step.
            size = abs(finding.now - finding.before) / max(_whole(quantity, of_span), 1)
            kind = _place(quantity, finding, baseline)
            place = WORST_FIRST.index(finding.outcome), is_of_start_up(finding.span), kind, -size
            ranks_of[finding].extend(ranks)
            place_of[finding] = min(place, place_of.get(finding, place))
    ordered = sorted(ranks_of, key=place_of.__getitem__)
    return tuple(finding.replace(ranks=spans(sorted(ranks_of[finding]))) for finding in ordered)


def _whole(quantity: Quantity, counts: Counts) -> float:
    """Return the total of all quantities of the same family."""
    family = (other for other in quantities.quantities((counts,)) if other.family == quantity.family)
    return sum(abs(other.value(counts) or 0) for other in family)


def _in_all_spans(
    before: Counts, now: list[Counts], baseline: CountBaseline
) -> Iterator[tuple[Quantity, Finding, Counts]]:
    """Yield the changes in the counts of one rank, both in steps and in other spans of the run.

    Each change comes with the baseline's counts of its span, or of the reported step if it is in steps.
    """
    in_steps = defaultdict[str, dict[int, Finding]](dict)
    by_name: dict[str, Quantity] = {}
    steps: dict[int, tuple[Counts, list[Counts]]] = {}
    for span, then, today in counted_spans(before, now):
        is_step = span == step_name(then.step)
        if is_step:
            steps[then.step] = then, today
        if all(counts == then for counts in today):
            continue
        for quantity in quantities.quantities((then, *today)):
            finding = _finding(quantity, then, today, unsteady_in(span, baseline.unsteady), baseline.target)
            if finding is None:
                continue
            if is_step:
                by_name.setdefault(quantity.name, quantity)
                in_steps[quantity.name][then.step] = finding
            elif finding.outcome != "passed":
                yield quantity, finding.replace(span=span, sentence=in_span(span, finding.sentence)), then
    for name, findings in in_steps.items():
        quantity = by_name[name]
        noise = 0 if baseline.target.startswith(DRY) else quantity.allowed(before)
        counted_steps = [step for step, (then, today) in steps.items() if _is_known(quantity, then, *today)]
        for finding in combined(findings, counted_steps, partial(_are_close, noise)):
            yield quantity, finding, before


def _is_known(quantity: Quantity, *sides: Counts) -> bool:
    return all(quantity.value(counts) is not None for counts in sides)


def _are_close(noise: float, first: int, second: int) -> bool:
    return abs(first - second) <= noise


def _place(quantity: Quantity, finding: Finding, baseline: CountBaseline) -> int:
    """Return the sort key of a finding.

    The order is: communication and computation, waits for the device, memory, calls, and Python calls. On a
    CPU, reads and stalls come last, because the host does not wait for a device.
    """
    if quantity in (quantities.HOST_READS, quantities.STALLS) and baseline.target == "cpu":
        return 5  # pragma: no mutate 5 to 6: it stays last
    if quantity in _WAITS:
        return 1
    if finding.unit == "calls":
        return 4 if quantity.is_python else 3
    return 2 if quantity in _OF_MEMORY else 0


def _alike(
    baseline: CountBaseline, launches: Launches
) -> Iterator[tuple[tuple[int, ...], Counts, list[Counts]]]:
    """Yield the ranks that all sides have, with their counts in the baseline and in each launch."""
    sides = [baseline.counts, *launches]
    # Ranks with equal counts on all sides are compared once, together.
    alike = defaultdict[tuple[int, ...], list[int]](list)
    for rank in sorted(set.intersection(*map(_ranks, sides))):
        places = (next(at for at, entry in enumerate(side) if rank in entry.ranks) for side in sides)
        alike[tuple(places)].append(rank)
    for key, same in alike.items():
        before, *now = (side[at].counts for side, at in zip(sides, key, strict=True))
        yield tuple(same), before, now


def _finding(
    quantity: Quantity, before: Counts, launches: list[Counts], unsteady: Collection[str], target: str
) -> Finding | None:
    """Return the change in a quantity of one span, without its ranks; None if nothing changed.

    If all launches are worse, or all are better, the smallest change is returned. If some are worse and
    others are not, None is returned, because the quantity is unsteady today.
    """
    then = quantity.value(before, unsteady)
    today = [quantity.value(counts, unsteady) for counts in launches]
    if then is None or None in today:
        return None
    by = [value - then for value in today if value is not None]
    # pragma: no mutate 0 to -1: the larger of noise and floor counts, and the floor is at least 0
    noise = 0 if target.startswith(DRY) else quantity.allowed(before)
    floor = 0 if _has_other_calls(quantity, before, launches, by) else quantity.floor(before)
    allowed = max(noise, floor)
    outcome: Judged | None = None  # None: the launches disagree
    if all(abs(change) <= allowed for change in by):
        outcome = "regressed" if _has_many_more_calls(quantity, before, launches) else "passed"
    elif all(change > allowed for change in by) or (
        quantity is quantities.GRAPHS and then and not any(today)
    ):
        outcome = "regressed"
    elif all(change < -allowed for change in by):
        outcome = "improved"
    # pragma: no mutate True: `by` has one entry for each launch
    now = min(zip(by, launches, strict=True), key=lambda pair: abs(pair[0]))[1]
    hidden = {*unsteady, *(differing(launches) if outcome == "passed" else ())}
    changes = [change for change in quantity.changes(before, now) if change.field not in hidden]
    is_noise = outcome == "passed" and noise and all(abs(change) <= noise for change in by)
    if outcome is None or not changes or is_noise:
        return None
    return Finding(
        field=changes[0].field if len(changes) == 1 else quantity.name,
        quantity=quantity.name,
        unit=changes[0].unit,
        before=sum(change.before for change in changes),
        now=sum(change.now for change in changes),
        ranks="",
        outcome=outcome,
        sentence=sentence(quantity, changes, before, now),
    )


def _has_other_calls(quantity: Quantity, before: Counts, launches: list[Counts], by: Sequence[int]) -> bool:
    """Return whether all launches send more bytes in more calls, or all send fewer bytes in fewer calls.

    If they do, the floor does not apply: even a small change of the bytes is judged.
    """
    if not isinstance(quantity, Group) or quantity.ranks == 1:
        return False
    calls = [quantity.calls(counts) - quantity.calls(before) for counts in launches]
    more, fewer = (
        all(sign * n > 0 < sign * sent for n, sent in zip(calls, by, strict=True)) for sign in (1, -1)
    )
    return more or fewer


def _has_many_more_calls(quantity: Quantity, before: Counts, launches: list[Counts]) -> bool:
    return (
        isinstance(quantity, Group)
        and quantity.ranks > 1
        # pragma: no mutate > 0 to >= 0: if the bytes are equal, there were calls before
        and all(quantity.calls(counts) > MANY_MORE * quantity.calls(before) > 0 for counts in launches)
    )


def _not_judged(baseline: CountBaseline, launches: Launches, judged: Collection[str]) -> Iterable[str]:
    """Describe what was not judged, and why. `judged` has the names of new spans that are judged."""
    then = _ranks(baseline.counts)
    now = set.intersection(*map(_ranks, launches))
    missing = ((then - now, _NOT_COUNTED), (now - then, _NOT_IN_BASELINE))
    notes = [f"{_named(sorted(ranks))} not judged: {where}" for ranks, where in missing if ranks]
    for _, before, after in _alike(baseline, launches):
        for span, is_before in missing_spans(before, after):
            if span in judged:
                continue
            notes.append(f"{span}{NOT_JUDGED}{_NOT_COUNTED if is_before else _NOT_IN_BASELINE}")
        for span, was, is_now in counted_spans(before, after):
            for quantity in quantities.OF_SPANS:
                is_before = quantity.value(was) is not None
                if is_before != all(quantity.value(counts) is not None for counts in is_now):
                    where = _NOT_COUNTED if is_before else _NOT_IN_BASELINE
                    notes.append(f"{span}: {quantity.name}{NOT_JUDGED}{where}")
        for quantity in quantities.quantities((before, *after)):
            is_before = quantity.value(before) is not None
            values = [quantity.value(counts) for counts in after]
            is_rare = quantity in (quantities.STALLS, quantities.KEPT_GRAPHS)
            if is_rare and not is_before and not any(values):
                continue  # most training runs have none, and older baselines did not record them
            if is_before != all(value is not None for value in values):
                where = _NOT_COUNTED if is_before else _NOT_IN_BASELINE
                if quantity is quantities.HOST_READS:
                    where = _OF_THE_HOST
                if quantity is quantities.WORKER_KERNELS:
                    continue  # missing whenever the worker's Python calls are missing: one note is enough
                if quantity is quantities.KEPT_GRAPHS and is_before:
                    continue  # missing whenever kept objects or their types are missing: one note is enough
                notes.append(f"{quantity.name}{NOT_JUDGED}{where}")
    return dict.fromkeys(notes)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {spans(ranks)} are"


def _ranks(entries: Sequence[RankCounts]) -> set[int]:
    return {rank for entry in entries for rank in entry.ranks}
