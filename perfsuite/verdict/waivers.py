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

_KIND = re.compile(r"(\w+) of \d+ rank")  # the kind of a collective, whatever its group


class Regression(NamedTuple):
    """A metric or a count that is worse."""

    names: set[str]  # names that a waiver can use for it
    told: str
    share: float  # size of its change, relative
    growth: int | None  # of a count, in its unit; None for a metric


def waive(result: Measurement, waivers: Sequence[Waiver], today: date) -> tuple[bool, tuple[str, ...]]:
    """Return whether all regressions of a case are waived, and a sentence on each."""
    regressions = _regressions(result) if result.outcome == "regressed" else []
    sentences = list[str]()
    uncovered = list[str]()
    is_waived = bool(regressions)
    own = [each for each in waivers if fnmatchcase(result.case_id, each.case)]
    for found in regressions:
        why_not = {each: _why_not(each, found, today) for each in own if _matches(each, found.names)}
        holds = [f"waived: {found.told}: {each.told}" for each, why in why_not.items() if why is None]
        sentences += holds[:1] or [f"not waived: {found.told}: {why}" for why in why_not.values()]
        is_waived = is_waived and bool(holds)
        if not why_not:
            uncovered.append(f"not waived: {found.told}: no waiver of this case names it")
    # If waivers name only some of the regressions, the others are the reason why the case fails.
    return is_waived, (*sentences, *(uncovered if sentences else ()))


def remarks(
    waivers: Sequence[Waiver], results: Sequence[Measurement], collected: Collection[str], today: date
) -> tuple[str, ...]:
    """Return remarks on waivers that match nothing or are not needed. Without ids, `collected` is unknown."""
    told = [(each, _remark(each, results, collected)) for each in waivers]
    ended = {each: f", and ended on {each.until}" if each.until < today else "" for each in waivers}
    return tuple(f"{FILE}: {each.name} {remark}{ended[each]}" for each, remark in told if remark)


def _remark(waiver: Waiver, results: Sequence[Measurement], collected: Collection[str]) -> str | None:
    if collected and not any(fnmatchcase(case, waiver.case) for case in collected):
        return f"matches none of the {len(collected)} cases here"
    own = [each for each in results if each.runs and fnmatchcase(each.case_id, waiver.case)]
    measured = {each.case_id for each in own}
    if any(fnmatchcase(case, waiver.case) for case in {*(collected or [waiver.case])} - measured):
        return None  # a case that was not measured may need it
    known = {name for each in own for check in each.verdict.checks for name in _called(check, each)}
    known |= {name for each in own for name in _counted(each)}
    if known and not _matches(waiver, known):
        return f"matches no metric and no count of them, which are {', '.join(sorted(known))}"
    is_good = bool(own) and all(_is_good(waiver, each) for each in own)
    return "is not needed any more: take it out" if is_good else None


def _is_good(waiver: Waiver, result: Measurement) -> bool:
    """Return whether everything that a waiver names was judged in a case, and none of it is worse."""
    checks = [check for check in result.verdict.checks if _matches(waiver, _called(check, result))]
    good = [check.outcome in ("passed", "improved") for check in checks]
    if _matches(waiver, _counted(result)):
        counts = result.verdict.counts
        good.append(counts is not None and counts.compared and counts.outcome != "not counted")
    is_worse = any(_matches(waiver, each.names) for each in _regressions(result))
    return result.outcome != "failed" and bool(good) and all(good) and not is_worse


def _why_not(waiver: Waiver, found: Regression, today: date) -> str | None:
    """Return why a waiver does not hold for a regression that it names; None if it holds."""
    if waiver.until < today:
        return f"{waiver.name} ended on {waiver.until}, {waiver.owner}, {waiver.issue}"
    if isinstance(waiver.tolerated, str):
        is_within = round(found.share, 6) <= float(waiver.tolerated.rstrip("% ")) / 100
    elif found.growth is None:
        return f'{waiver.name} tolerates {waiver.tolerated}, a growth of counts: give a share, as "22%"'
    else:
        is_within = found.growth <= waiver.tolerated
    return None if is_within else f"beyond {waiver.name}: {waiver.told}"


def _regressions(result: Measurement) -> list[Regression]:
    found = []
    for check in (each for each in result.verdict.checks if each.outcome == "regressed"):
        share = math.inf if check.change is None else abs(check.change)  # unknown: beyond every bound
        told = check.label if check.change is None else f"{check.label} {check.change:+.1%}"
        found.append(Regression(_called(check, result), told, share, None))
    counted = result.verdict.counts.findings if result.verdict.counts is not None else ()
    for each in (finding for finding in counted if finding.outcome == "regressed"):
        growth = abs(each.now - each.before)
        share = growth / each.before if each.before else math.inf
        names = {each.quantity, each.field}
        names = {in_span(each.span, name) for name in names}
        found.append(Regression(_with_kinds(names), each.sentence, share, growth))
    return found


def _matches(waiver: Waiver, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, waiver.metric) for name in names)


def _called(check: Check, result: Measurement) -> set[str]:
    """Return the names that a waiver can use for a check.

    A waiver of tokens/s also covers tokens/s with stalls: whatever lowers the first lowers the second.
    """
    names = {check.metric, in_unit(check.metric, result.unit), check.label}
    if check.metric == TOKENS_PER_S_MEAN.name:
        speed = TOKENS_PER_S.counting(result.unit)
        names |= {speed.name, in_unit(speed.name, result.unit), speed.label}
    return names


def _counted(result: Measurement) -> set[str]:
    every = [entry.counts for entry in result.counts]
    names = _names(every)
    for span in {name for counts in every for name in counts.spans}:
        of_span = [counts.spans[span] for counts in every if span in counts.spans]
        names |= {in_span(span, name) for name in _names(of_span)}
    return _with_kinds(names)


def _names(every: Sequence[Counts]) -> set[str]:
    read = ((each.name, *(each.read(one) or ())) for each in quantities(every) for one in every)
    return {name for names in read for name in names}


def _with_kinds(names: set[str]) -> set[str]:
    return names | {kind[1] for kind in map(_KIND.match, names) if kind}
