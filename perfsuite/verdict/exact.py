"""Judge the counts of a step exactly, against those of a baseline. Pure.

No statistics are needed, because counts have no noise. More of anything is `regressed`, less is `improved`.
If collectives send the same bytes in another number of calls, the difference is only listed, as long as the
number of calls is at most `MANY_MORE` times the baseline's. The outcome is `not counted` if a step did work
that was not counted.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from perfsuite.results import quantities
from perfsuite.results.count_baseline import CountBaseline, unsteady, versions_of
from perfsuite.results.counts import Counts, are_alike, named_ranks, step_name
from perfsuite.results.outcome import NOT_JUDGED, WORST_FIRST, CountCheck, Finding
from perfsuite.results.quantities import Quantity
from perfsuite.results.rank_report import is_of_start_up
from perfsuite.results.run import Run
from perfsuite.verdict.count_doubts import reasons_to_doubt
from perfsuite.verdict.count_findings import Judged, Launches, alike, findings_of, new_events, ranks_in
from perfsuite.verdict.counted_spans import counted_spans, missing_spans
from perfsuite.verdict.evidence import counted

_NOT_COUNTED = "not counted in these launches"
NOT_IN_BASELINE = "not in the baseline"
_OF_THE_HOST = (
    "because an older perfsuite also counted reads of tensors on the host: accept the counts again "
    "(perfsuite baseline accept --only-counts)"
)
_ACCEPT = (
    ". If the training no longer does this work, accept the counts (perfsuite baseline accept --only-counts)"
)


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
        "cannot be compared: this dry run compiled the model, but the baseline's dry run did not. Accept "
        "the counts again (perfsuite baseline accept --only-counts), or delete the baseline"
    )


def check(runs: Sequence[Run], baseline: CountBaseline | None, *, of_arm: bool = False) -> CountCheck | None:
    """Judge the counts of launches.

    Returns None if all launches failed, or if there are neither counts nor a baseline. Counts that are
    `unlike` the baseline's are not compared. With `of_arm`, the baseline is made from another arm.
    """
    launches = [run.counts for run in counted(runs) if not run.hidden]
    not_compared = CountCheck(outcome="not counted", compared=False)
    if all(run.failure is not None for run in runs):
        return None
    hidden = why_hidden(runs)
    if hidden and (baseline is None or not launches):
        return not_compared.replace(notes=hidden)
    if baseline is None:
        return not_compared.replace(outcome="recorded") if launches else None
    if not launches:
        return not_compared.replace(notes=("no launch was counted",))
    if unlike(runs, baseline) is not None or (not of_arm and unlike_compiled(runs, baseline) is not None):
        return not_compared.replace(outcome="passed")
    if not ranks_in(baseline.counts).intersection(*map(ranks_in, launches)):
        return not_compared.replace(notes=tuple(_not_judged(baseline, launches, ())))
    findings = findings_of(baseline, launches)
    new = [*new_events(baseline, launches)] if of_arm else []
    findings = (*new, *findings)
    outcome: Judged = min((finding.outcome for finding in findings), key=WORST_FIRST.index, default="passed")
    # Work that was not counted can only make counts too low. So if a count is above the baseline's, the work
    # has certainly increased.
    doubts = [*hidden, *_missing_ranks(runs, baseline, launches)]
    doubts += reasons_to_doubt(runs, baseline, launches, advice="" if of_arm else _ACCEPT)
    if doubts:
        findings = tuple(
            finding.replace(outcome="passed") if finding.outcome == "improved" else finding
            for finding in findings
        )
    # pragma: no mutate [-1] to [-0]: all launches of a session have the same versions
    changed = [] if of_arm else changed_versions(baseline.versions, versions_of(counted(runs)[-1]))
    not_judged = _not_judged(baseline, launches, {event.span for event in new})
    varying = unsteady(launches)
    upgraded = [f"counted with other versions: {', '.join(changed)}"] if changed and findings else []
    return CountCheck(
        outcome="not counted" if doubts and outcome != "regressed" else outcome,
        findings=findings,
        unsteady=tuple(sorted({*baseline.unsteady, *varying})),
        grown=_grown(baseline, launches, {*varying, *baseline.largest}),
        one_sided=tuple(note for note, can_be_a_change in not_judged.items() if can_be_a_change),
        notes=(*doubts, *upgraded, *[note for note in not_judged if note not in doubts]),
    )


def _missing_ranks(runs: Sequence[Run], baseline: CountBaseline, launches: Launches) -> list[str]:
    """Name the ranks whose work was not counted, although the baseline has it.

    Returns an empty list for dry runs, because the user chooses their ranks.
    """
    if any(run.dry for run in runs):
        return []
    now: set[int] = set.intersection(*map(ranks_in, launches))
    missing = ranks_in(baseline.counts) - now
    return [_rank_note(missing, _NOT_COUNTED)] if missing else []


def _grown(baseline: CountBaseline, launches: Launches, unjudged: Collection[str]) -> tuple[str, ...]:
    """Return the unsteady fields that are larger than in any launch of the baseline.

    Older baselines do not record the largest value of their unsteady fields, so these fields are left out.
    """
    if not unjudged:  # the usual case
        return ()
    before = _largest([baseline.counts], unjudged)
    now = _largest(launches, unjudged)
    return tuple(
        sorted(
            field
            for field, value in now.items()
            if value > max(before.get(field, 0), baseline.largest.get(field, 0))
        )
    )


def _largest(sides: Launches, fields: Collection[str]) -> dict[str, int]:
    """Return the largest value of each of these fields on any rank, also in spans."""
    largest = dict[str, int]()
    for entry in [entry for entries in sides for entry in entries]:
        spans = {"": entry.counts, **{f"{name}: ": span for name, span in entry.counts.spans.items()}}
        for prefix, counts in spans.items():
            for quantity in quantities.quantities((counts,)):
                for field, value in (quantity.read(counts) or {}).items():
                    if prefix + field in fields:
                        largest[prefix + field] = max(largest.get(prefix + field, 0), value)
    return largest


def count_differences(baseline: CountBaseline, now: CountBaseline) -> tuple[Finding, ...]:
    """Return the differences between two baselines of the same case."""
    return findings_of(baseline, [now.counts])


def missing_ranks(baseline: CountBaseline, now: CountBaseline) -> str | None:
    """Name the ranks that are in the baseline but not in `now`, with a verb, such as `ranks 0-3 are`."""
    lost = ranks_in(baseline.counts) - ranks_in(now.counts)
    return _named(sorted(lost)) if lost else None


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the versions that differ, such as `torch 2.13.0 -> 2.14.0`."""
    return [
        f"{name} {before.get(name, 'unknown')} -> {now.get(name, 'unknown')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def _not_judged(baseline: CountBaseline, launches: Launches, judged: Collection[str]) -> dict[str, bool]:
    """Describe what was not judged, and why. `judged` has the names of new spans that are judged.

    Each note is a key of the result. Its value is True if the work that was not judged might have changed. If
    a baseline lacks something that an older perfsuite did not count, this is not a sign of a change.
    """
    then = ranks_in(baseline.counts)
    now = set.intersection(*map(ranks_in, launches))
    missing = ((then - now, _NOT_COUNTED), (now - then, NOT_IN_BASELINE))
    notes = [(_rank_note(ranks, where), True) for ranks, where in missing if ranks]
    for _, before, after in alike(baseline, launches):
        notes += _spans_not_judged(before, after, judged)
        notes += _quantities_not_judged(before, after)
    return dict(notes)


def _spans_not_judged(
    before: Counts, after: Sequence[Counts], judged: Collection[str]
) -> Iterator[tuple[str, bool]]:
    """Yield a note for each span, and for each quantity of a span, that only one side has.

    Each note comes with a bool that says whether the work might have changed, as in `_not_judged`.
    """
    steps = {step_name(step) for counts in after for step in counts.also_counted}
    for span, is_before in missing_spans(before, after):
        if span not in judged:
            # An older perfsuite counted fewer steps, and no start-ups.
            is_always_there = span in steps or is_of_start_up(span)
            where = _NOT_COUNTED if is_before else NOT_IN_BASELINE
            yield f"{span}{NOT_JUDGED}{where}", is_before or not is_always_there
    for span, was, is_now in counted_spans(before, after):
        for quantity in quantities.OF_SPANS:
            where_not = _only_on_one_side(quantity, was, is_now)
            if where_not is not None:
                yield f"{span}: {quantity.name}{NOT_JUDGED}{where_not}", where_not == _NOT_COUNTED


def _quantities_not_judged(before: Counts, after: Sequence[Counts]) -> Iterator[tuple[str, bool]]:
    """Yield a note for each quantity of the reported step that only one side has.

    Each note comes with a bool that says whether the work might have changed, as in `_not_judged`.
    """
    for quantity in quantities.quantities((before, *after)):
        where = _only_on_one_side(quantity, before, after)
        if where is None:
            continue
        is_in_baseline = quantity.value(before) is not None
        if quantity is quantities.GRAPHS_LEFT:
            continue  # unknown whenever kept graphs are unknown, and missing in older baselines
        is_rare = quantity in (quantities.STALLS, quantities.KEPT_GRAPHS, quantities.IN_CYCLES)
        if is_rare and not is_in_baseline and not any(quantity.value(counts) for counts in after):
            continue  # most training runs have none, and older baselines did not record them
        of_worker = quantity in (quantities.WORKER_KERNELS, quantities.WORKER_KEPT)
        if of_worker and _only_on_one_side(quantities.WORKER_KERNELS, before, after) is not None:
            continue  # the worker's Python calls are missing as well: one note is enough
        if quantity is quantities.KEPT_GRAPHS and is_in_baseline:
            continue  # missing whenever kept objects or their types are missing: one note is enough
        if quantity is quantities.HOST_READS:
            where = _OF_THE_HOST
        yield f"{quantity.name}{NOT_JUDGED}{where}", is_in_baseline


def _only_on_one_side(quantity: Quantity, before: Counts, after: Sequence[Counts]) -> str | None:
    """Return where a quantity is missing; None if both sides have it, or neither."""
    is_before = quantity.value(before) is not None
    if is_before == all(quantity.value(counts) is not None for counts in after):
        return None
    return _NOT_COUNTED if is_before else NOT_IN_BASELINE


def _rank_note(ranks: set[int], where: str) -> str:
    return f"{_named(sorted(ranks))} not judged: {where}"


def _named(ranks: Sequence[int]) -> str:
    return f"{named_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"
