"""Decide which regressions are waived, and which waivers are not needed. Pure."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from datetime import date
from fnmatch import fnmatchcase
from typing import NamedTuple

from perfsuite.results.counts import Counts
from perfsuite.results.metric import TOKENS_PER_S, TOKENS_PER_S_MEAN, in_unit
from perfsuite.results.outcome import Check, in_span
from perfsuite.results.quantities import quantities
from perfsuite.results.session_file import Measurement
from perfsuite.results.waivers import FILE, Waiver

_KIND = re.compile(r"(\w+) of \d+ rank")  # the kind of a collective, for any size of group


class Regression(NamedTuple):
    """A metric or a count that got worse."""

    names: set[str]  # names that a waiver can use for it
    sentence: str
    share: float  # relative size of the change
    growth: int | None  # growth of a count, in its unit; None for a metric


def waive(result: Measurement, waivers: Sequence[Waiver], today: date) -> tuple[bool, tuple[str, ...]]:
    """Return whether all regressions of a case are waived, and a sentence about each regression."""
    regressions = _regressions(result) if result.outcome == "regressed" else []
    sentences = list[str]()
    uncovered = list[str]()
    is_waived = bool(regressions)
    own = [waiver for waiver in waivers if fnmatchcase(result.case_id, waiver.case)]
    for regression in regressions:
        why_not = {
            waiver: _why_not(waiver, regression, today)
            for waiver in own
            if _matches(waiver, regression.names)
        }
        holds = [
            f"waived: {regression.sentence}: {waiver.terms}" for waiver, why in why_not.items() if why is None
        ]
        sentences += holds[:1] or [f"not waived: {regression.sentence}: {why}" for why in why_not.values()]
        is_waived = is_waived and bool(holds)
        if not why_not:
            uncovered.append(
                f"not waived: {regression.sentence}: no waiver for this case names this metric or count"
            )
    # If waivers name only some of the regressions, the case fails because of the others.
    return is_waived, (*sentences, *(uncovered if sentences else ()))


def remarks(
    waivers: Sequence[Waiver], results: Sequence[Measurement], collected: Collection[str], today: date
) -> tuple[str, ...]:
    """Return remarks on waivers that match nothing or are not needed. `collected` is empty if unknown."""
    remarked = [(waiver, _remark(waiver, results, collected)) for waiver in waivers]
    ended = {waiver: f" (ended on {waiver.until})" if waiver.until < today else "" for waiver in waivers}
    return tuple(f"{FILE}: {waiver.name}{ended[waiver]} {remark}" for waiver, remark in remarked if remark)


def _remark(waiver: Waiver, results: Sequence[Measurement], collected: Collection[str]) -> str | None:
    if collected and not any(fnmatchcase(case, waiver.case) for case in collected):
        return f"matches none of the {len(collected)} cases here"
    own = [result for result in results if result.runs and fnmatchcase(result.case_id, waiver.case)]
    measured = {result.case_id for result in own}
    if any(fnmatchcase(case, waiver.case) for case in {*(collected or [waiver.case])} - measured):
        return None  # a case that was not measured might need the waiver
    names = {name for result in own for check in result.verdict.checks for name in _called(check, result)}
    names |= {name for result in own for name in _counted(result)}
    if names and not _matches(waiver, names):
        return f"matches no metric or count of its cases. These have {', '.join(sorted(names))}"
    is_good = bool(own) and all(_is_good(waiver, result) for result in own)
    return "is no longer needed: remove it" if is_good else None


def _is_good(waiver: Waiver, result: Measurement) -> bool:
    """Return whether everything that a waiver names was judged in a case, and none of it got worse."""
    checks = [check for check in result.verdict.checks if _matches(waiver, _called(check, result))]
    good = [check.outcome in ("passed", "improved") for check in checks]
    if _matches(waiver, _counted(result)):
        counts = result.verdict.counts
        good.append(counts is not None and counts.compared and counts.outcome != "not counted")
    is_worse = any(_matches(waiver, regression.names) for regression in _regressions(result))
    return result.outcome != "failed" and bool(good) and all(good) and not is_worse


def _why_not(waiver: Waiver, regression: Regression, today: date) -> str | None:
    """Return why a waiver does not apply to a regression that it names, or None if it applies."""
    if waiver.until < today:
        return f"{waiver.name} ended on {waiver.until}, owner {waiver.owner}, issue {waiver.issue}"
    if isinstance(waiver.tolerated, str):
        # pragma: no mutate 6 to 7: seven digits also remove the rounding errors
        is_within = round(regression.share, 6) <= float(waiver.tolerated.rstrip("% ")) / 100
    elif regression.growth is None:
        return (
            f"{waiver.name} tolerates {waiver.tolerated}, but only counts can grow by a number. "
            'Give a share, such as "22%"'
        )
    else:
        is_within = regression.growth <= waiver.tolerated
    return None if is_within else f"beyond {waiver.name}: {waiver.terms}"


def _regressions(result: Measurement) -> list[Regression]:
    regressions = []
    for check in (check for check in result.verdict.checks if check.outcome == "regressed"):
        share = math.inf if check.change is None else abs(check.change)  # unknown: beyond any limit
        sentence = check.label if check.change is None else f"{check.label} {check.change:+.1%}"
        regressions.append(Regression(_called(check, result), sentence, share, None))
    counted = result.verdict.counts.findings if result.verdict.counts is not None else ()
    for finding in (finding for finding in counted if finding.outcome == "regressed"):
        growth = abs(finding.now - finding.before)
        share = growth / finding.before if finding.before else math.inf
        names = {in_span(finding.span, name) for name in (finding.quantity, finding.field)}
        regressions.append(Regression(_with_kinds(names), finding.in_words(), share, growth))
    return regressions


def _matches(waiver: Waiver, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, waiver.metric) for name in names)


def _called(check: Check, result: Measurement) -> set[str]:
    """Return the names that a waiver can use for a check.

    A waiver for tokens/s also covers tokens/s with stalls, because a change that lowers tokens/s also lowers
    tokens/s with stalls.
    """
    names = {check.metric, in_unit(check.metric, result.unit), check.label}
    if check.metric == TOKENS_PER_S_MEAN.name:
        speed = TOKENS_PER_S.counting(result.unit)
        names |= {speed.name, in_unit(speed.name, result.unit), speed.label}
    return names


def _counted(result: Measurement) -> set[str]:
    of_ranks = [entry.counts for entry in result.counts]
    names = _names(of_ranks)
    for span in {name for counts in of_ranks for name in counts.spans}:
        of_span = [counts.spans[span] for counts in of_ranks if span in counts.spans]
        names |= {in_span(span, name) for name in _names(of_span)}
    return _with_kinds(names)


def _names(counts: Sequence[Counts]) -> set[str]:
    return {
        name
        for quantity in quantities(counts)
        for of_rank in counts
        for name in (quantity.name, *(quantity.read(of_rank) or ()))
    }


def _with_kinds(names: set[str]) -> set[str]:
    return names | {kind[1] for kind in map(_KIND.match, names) if kind}
