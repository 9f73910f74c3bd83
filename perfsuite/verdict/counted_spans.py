"""Match the counted spans (such as steps and start-ups) of two sides, and merge equal findings. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from perfsuite.results.counts import Counts, grouped, spans, step_name
from perfsuite.results.outcome import Finding, in_span
from perfsuite.results.rank_report import COLD, START_UPS, is_of_start_up
from perfsuite.results.run import Run


def without_start_up_calls(run: Run) -> Run:
    """Return a launch without the counts of the parts of its start-up."""

    def without(counts: Counts) -> Counts:
        parts = _start_up_parts(counts)
        return counts.replace(spans={name: span for name, span in counts.spans.items() if name not in parts})

    return run.replace(counts=tuple(entry.replace(counts=without(entry.counts)) for entry in run.counts))


def counted_spans(before: Counts, launches: Sequence[Counts]) -> Iterator[tuple[str, Counts, list[Counts]]]:
    """Yield the name and the counts of each span that both sides counted. The reported step comes first.

    The start-up of a launch is either cold (it compiled) or warm (it found what another launch compiled). A
    cold start-up is compared only with cold start-ups, and a warm one only with warm ones. The parts of a
    start-up are counted only in launches that are not timed.
    """
    for name, then in _by_name(before).items():
        now = [_by_name(counts).get(name) for counts in launches]
        counted = [counts for counts in now if counts is not None]
        if len(counted) == len(now) or (counted and is_of_start_up(name)):
            yield name, then, counted


def missing_spans(before: Counts, launches: Sequence[Counts]) -> Iterator[tuple[str, bool]]:
    """Yield each span that cannot be compared, and whether it is in the baseline."""
    steps_before = {*before.also_counted}
    steps_now = [{*counts.also_counted} for counts in launches]
    gone = steps_before - steps_now[0].intersection(*steps_now)
    new = steps_now[0].union(*steps_now) - steps_before
    for steps, is_before in ((gone, True), (new, False)):
        if steps:
            yield f"step{'s' * (len(steps) > 1)} {spans(sorted(steps))}", is_before
    events_before = set(_events(before))
    events_now = [set(_events(counts)) for counts in launches]
    compared = {name for name, _, _ in counted_spans(before, launches)}
    missing = events_before.union(*events_now) - compared
    for name in sorted(missing):
        is_of_other_kind = is_of_start_up(name) and not _is_in_both(name, before, launches)
        if not (compared & START_UPS and is_of_other_kind):
            yield name, name in events_before


def _is_in_both(name: str, before: Counts, launches: Sequence[Counts]) -> bool:
    """Return whether both sides counted parts of a start-up of the same kind (cold or warm) as `name`.

    `name` is a start-up or a part of one. A timed launch does not count the parts.
    """

    def has_parts(counts: Counts) -> bool:
        return any(part.startswith(COLD) == name.startswith(COLD) for part in _start_up_parts(counts))

    return has_parts(before) and any(map(has_parts, launches))


def _start_up_parts(counts: Counts) -> set[str]:
    return {name for name in counts.spans if is_of_start_up(name) and name not in START_UPS}


def _by_name(counts: Counts) -> dict[str, Counts]:
    steps = (counts.step, *counts.also_counted)
    by_step = {step_name(step): counts.in_step(step) for step in steps}
    in_steps = {name: counted for name, counted in by_step.items() if counted is not None}
    return {**in_steps, **_events(counts)}


def _events(counts: Counts) -> dict[str, Counts]:
    of_steps = set(map(step_name, counts.also_counted))
    return {name: span for name, span in counts.spans.items() if name not in of_steps}


def combined(
    findings: Mapping[int, Finding], counted: Sequence[int], is_alike: Callable[[int, int], bool]
) -> list[Finding]:
    """Return the findings about one quantity. Equal findings about several counted steps become one.

    `findings` has the findings by step number. `counted` has the numbers of all counted steps in ascending
    order; the first is the reported step. Two findings are merged if both have the same outcome and
    if `is_alike` returns True for their changes. If a finding applies to all counted steps, its sentence does
    not name the steps. A finding with the outcome `passed`, which is listed but not judged, is returned only
    for the reported step.
    """
    reported = findings.get(counted[0])
    if reported is not None and reported.outcome == "passed":
        return [reported, *_judged(findings, counted, is_alike)]
    return _judged(findings, counted, is_alike)


def _judged(
    findings: Mapping[int, Finding], counted: Sequence[int], is_alike: Callable[[int, int], bool]
) -> list[Finding]:
    judged = {step: findings[step] for step in counted if step in findings}
    judged = {step: finding for step, finding in judged.items() if finding.outcome != "passed"}
    groups = map(list, grouped(judged, lambda one, other: _are_one(one, other, is_alike)))
    return [_named(findings[group[0]], when(group, counted)) for group in groups]


def _are_one(first: Finding, second: Finding, is_alike: Callable[[int, int], bool]) -> bool:
    return first.outcome == second.outcome and is_alike(first.now - first.before, second.now - second.before)


def _named(finding: Finding, steps: str) -> Finding:
    return finding.replace(steps=steps, sentence=in_span(steps, finding.sentence))


def when(steps: Sequence[int], counted: Sequence[int]) -> str:
    """Describe a selection of the counted steps, such as `every 5th step`. Empty if all are selected.

    A period is named only if at least two steps are selected: work seen only in step 10 might never recur.
    """
    if list(steps) == list(counted):
        return ""
    period = steps[1] - steps[0] if len(steps) > 1 else 0
    is_consecutive = counted[-1] - counted[0] == len(counted) - 1
    of_period = [step for step in counted if period and (step - steps[0]) % period == 0]
    if is_consecutive and period > 1 and list(steps) == of_period:
        return f"every {_ordinal(period)} step ({', '.join(map(str, steps))})"
    if len(steps) > 1 and list(steps) == [step for step in counted if step >= steps[0]]:
        return f"from step {steps[0]} on"
    return f"in step{'s' * (len(steps) > 1)} {spans(steps)} of {spans(counted)}"


def _ordinal(number: int) -> str:
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else last}"
