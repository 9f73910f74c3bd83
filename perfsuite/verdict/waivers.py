"""Decide which regressions are waived, and which waivers are not needed. Pure."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from datetime import date
from fnmatch import fnmatchcase
from typing import NamedTuple

from perfsuite.case.case import Case, Unit
from perfsuite.results.counts import Counts
from perfsuite.results.metric import TOKENS_PER_S, TOKENS_PER_S_MEAN, in_unit
from perfsuite.results.outcome import Check, in_span
from perfsuite.results.quantities import quantities
from perfsuite.results.session_file import Measurement
from perfsuite.results.waivers import FILE, Waiver
from perfsuite.verdict.checks import is_left_open, worst_verdict

_KIND = re.compile(r"(\w+) of \d+ rank")  # the kind of a collective, for any size of group


class Regression(NamedTuple):
    """A metric or a count that got worse."""

    names: set[str]  # names that a waiver can use for it
    sentence: str
    share: float  # relative size of the change
    growth: int | None  # growth of a count, in its unit; None for a metric


def waive(
    result: Measurement, waivers: Sequence[Waiver], today: date, strict: Collection[str] = ()
) -> tuple[bool, tuple[str, ...]]:
    """Return whether all regressions of a case are waived, and a sentence about each regression.

    `strict` has the outcomes that `--perf-strict` does not allow. A waiver covers only regressions: a case is
    not waived if another check has an outcome in `strict`.
    """
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
    refused = _refused(result, strict) if is_waived else []
    # If waivers name only some of the regressions, the case fails because of the others.
    return is_waived and not refused, (*sentences, *(uncovered if sentences else ()), *refused)


def are_waived(checks: Sequence[Check], case: Case, waivers: Sequence[Waiver], today: date) -> bool:
    """Return whether waivers cover every regression among these checks of a case."""
    own = [waiver for waiver in waivers if fnmatchcase(case.id, waiver.case)]
    return all(
        any(_matches(waiver, worse.names) and _why_not(waiver, worse, today) is None for waiver in own)
        for worse in _worse_metrics(checks, case.unit)
    )


def _refused(result: Measurement, strict: Collection[str]) -> list[str]:
    """Return a sentence about each check that did not regress, but that `--perf-strict` does not allow."""
    others = [check for check in result.verdict.checks if check.outcome != "regressed"]
    if not others:
        return []
    outcome = worst_verdict(others, result.verdict.launches).outcome
    if outcome not in strict:
        return []
    return [
        f"not waived: {check.label}: {outcome}, and --perf-strict={outcome} is set"
        for check in others
        if check.outcome == outcome and not is_left_open(check)
    ]


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
    names = {
        name
        for result in own
        for check in result.verdict.checks
        for name in _called(check, result.verdict.checks, result.unit)
    }
    names |= {name for result in own for name in _counted(result)}
    if names and not _matches(waiver, names):
        return f"matches no metric or count of its cases. These have {', '.join(sorted(names))}"
    is_good = bool(own) and all(_is_good(waiver, result) for result in own)
    return "is no longer needed: remove it" if is_good else None


def _is_good(waiver: Waiver, result: Measurement) -> bool:
    """Return whether everything that a waiver names was judged in a case, and none of it got worse."""
    checks = result.verdict.checks
    named = [check for check in checks if _matches(waiver, _called(check, checks, result.unit))]
    good = [check.outcome in ("passed", "improved") for check in named]
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
            f"{waiver.name} tolerates {waiver.tolerated}, but an absolute number is only valid for counts. "
            'Give a share, such as "22%"'
        )
    else:
        is_within = regression.growth <= waiver.tolerated
    return None if is_within else f"beyond {waiver.name}: {waiver.terms}"


def _regressions(result: Measurement) -> list[Regression]:
    regressions = _worse_metrics(result.verdict.checks, result.unit)
    counted = result.verdict.counts.findings if result.verdict.counts is not None else ()
    for finding in (finding for finding in counted if finding.outcome == "regressed"):
        growth = abs(finding.now - finding.before)
        share = growth / finding.before if finding.before else math.inf
        names = {in_span(finding.span, name) for name in (finding.quantity, finding.field)}
        regressions.append(Regression(_with_kinds(names), finding.in_words(), share, growth))
    return regressions


def _worse_metrics(checks: Sequence[Check], unit: Unit) -> list[Regression]:
    """Return the metrics that got worse, without counts."""
    regressions = []
    for check in checks:
        if check.outcome != "regressed":
            continue
        share = math.inf if check.change is None else abs(check.change)  # unknown: beyond any limit
        sentence = check.label if check.change is None else f"{check.label} {check.change:+.1%}"
        regressions.append(Regression(_called(check, checks, unit), sentence, share, None))
    return regressions


def _matches(waiver: Waiver, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, waiver.metric) for name in names)


def _called(check: Check, checks: Sequence[Check], unit: Unit) -> set[str]:
    """Return the names that a waiver can use for one of the checks of a case.

    If tokens/s regressed, a waiver for it also covers tokens/s with stalls, because a change that lowers
    tokens/s also lowers tokens/s with stalls. If tokens/s did not regress, the stalls are the cause, and need
    a waiver of their own.
    """
    names = {check.metric, in_unit(check.metric, unit), check.label}
    slower = {other.metric for other in checks if other.outcome == "regressed"}
    if check.metric == TOKENS_PER_S_MEAN.name and TOKENS_PER_S.name in slower:
        speed = TOKENS_PER_S.counting(unit)
        names |= {speed.name, in_unit(speed.name, unit), speed.label}
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
