"""Find how the counts of a step differ from those of a baseline. Pure.

The entry is `findings_of`. It compares the counts of each rank, quantity by quantity, in each span that both
sides counted.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Literal

from perfsuite.results import quantities
from perfsuite.results.count_baseline import DRY, CountBaseline
from perfsuite.results.counts import EVENTS, Counts, RankCounts, spans, step_name
from perfsuite.results.outcome import WORST_FIRST, Finding, in_span
from perfsuite.results.quantities import Group, Quantity, differing, unsteady_in
from perfsuite.results.rank_report import is_of_start_up
from perfsuite.verdict.count_sentences import sentence
from perfsuite.verdict.counted_spans import combined, counted_spans

Judged = Literal["regressed", "improved", "passed"]
Launches = Sequence[Sequence[RankCounts]]  # the counts of each launch
MANY_MORE = 2
"""If the bytes are equal, a change of the number of calls is `regressed` only above this multiple of the
baseline's number of calls."""
_WAITS = (quantities.HOST_READS, quantities.COPIES, quantities.BLOCKING, quantities.STALLS)
_OF_MEMORY = (
    quantities.PEAK,
    quantities.SAVED,
    quantities.GROWTH,
    quantities.IN_CYCLES,
    quantities.KEPT,
    quantities.KEPT_GRAPHS,
    quantities.GRAPHS_LEFT,
    quantities.WORKER_KEPT,
)


def findings_of(baseline: CountBaseline, launches: Launches) -> tuple[Finding, ...]:
    """Return the findings, each with its ranks. Regressions come first.

    Among findings with the same outcome, those of a start-up come last, because a start-up happens once. The
    others are sorted by kind of work (see `_place`), and the largest change of each kind comes first.
    """
    ranks_of = defaultdict[Finding, list[int]](list)
    place_of: dict[Finding, tuple[int, bool, int, float]] = {}
    for ranks, before, now in alike(baseline, launches):
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


def _place(quantity: Quantity, finding: Finding, baseline: CountBaseline) -> int:
    """Return the sort key of a finding.

    The order is: communication and computation, waits for the device, memory, calls, and Python calls. On a
    CPU, reads and stalls come last, because the host does not wait for a device.
    """
    if quantity in (quantities.HOST_READS, quantities.STALLS) and baseline.target == "cpu":
        return 6  # pragma: no mutate 6 to 7: it stays last
    if quantity in _WAITS:
        return 1
    if finding.unit == "calls":
        return 5 if quantity.is_python else 4
    if quantity is quantities.IN_CYCLES:  # the cause of other changes of memory
        return 2
    return 3 if quantity in _OF_MEMORY else 0


def _whole(quantity: Quantity, counts: Counts) -> float:
    """Return the total of all quantities of the same family."""
    family = (other for other in quantities.quantities((counts,)) if other.family == quantity.family)
    return sum(abs(other.value(counts) or 0) for other in family)


def _left_after_same_steps(then: Counts, today: Sequence[Counts]) -> bool:
    """Return whether the tensors with a graph were counted after the same steps on both sides.

    Their number can depend on the step, for example if the training empties a buffer regularly.
    """
    steps = {counts.kept.graphs_after for counts in (then, *today) if counts.kept is not None}
    return len(steps) == 1


def _in_all_spans(
    before: Counts, now: list[Counts], baseline: CountBaseline
) -> Iterator[tuple[Quantity, Finding, Counts]]:
    """Yield the changes in the counts of one rank, both in steps and in other spans of the run.

    Each change comes with the baseline's counts of its span. A change in steps comes with the counts of the
    reported step.
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
            if quantity is quantities.GRAPHS_LEFT and not _left_after_same_steps(then, today):
                continue
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
    outcome = _outcome(quantity, before, launches, by, noise)
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


def _outcome(
    quantity: Quantity, before: Counts, launches: list[Counts], by: Sequence[int], noise: float
) -> Judged | None:
    """Judge the changes of a quantity, one for each launch; None if the launches disagree."""
    floor = 0 if _has_other_calls(quantity, before, launches, by) else quantity.floor(before)
    allowed = max(noise, floor)
    if all(abs(change) <= allowed for change in by):
        return "regressed" if _has_many_more_calls(quantity, before, launches) else "passed"
    is_compiled_no_more = quantity is quantities.GRAPHS and not any(map(quantity.value, launches))
    if is_compiled_no_more or all(change > allowed for change in by):
        return "regressed"
    return "improved" if all(change < -allowed for change in by) else None


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


def new_events(baseline: CountBaseline, launches: Launches) -> Iterator[Finding]:
    """Yield a regression for each event that only arm B has, such as saving a checkpoint.

    `baseline` was made from the launches of arm A. An event counts only if all launches of arm B have it.
    """
    for ranks, before, now in alike(baseline, launches):
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


def alike(
    baseline: CountBaseline, launches: Launches
) -> Iterator[tuple[tuple[int, ...], Counts, list[Counts]]]:
    """Yield the ranks that all sides have, with their counts in the baseline and in each launch."""
    sides = [baseline.counts, *launches]
    # Ranks with equal counts on all sides are compared once, together.
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for rank in sorted(set.intersection(*map(ranks_in, sides))):
        places = (next(at for at, entry in enumerate(side) if rank in entry.ranks) for side in sides)
        groups[tuple(places)].append(rank)
    for key, same in groups.items():
        before, *now = (side[at].counts for side, at in zip(sides, key, strict=True))
        yield tuple(same), before, now


def ranks_in(entries: Sequence[RankCounts]) -> set[int]:
    """Return the ranks that these counts belong to."""
    return {rank for entry in entries for rank in entry.ranks}
