"""Says which regressions are waived. Pure."""

import math
from collections.abc import Sequence
from datetime import date
from fnmatch import fnmatchcase
from typing import NamedTuple

from perfsuite.results.metric import in_unit
from perfsuite.results.session_file import Measurement
from perfsuite.results.waivers import Waiver


class Regression(NamedTuple):
    """A metric or a count that is worse."""

    names: set[str]  # what a waiver may call it
    told: str
    share: float  # size of its change, relative
    growth: int | None  # of a count, in its unit


def waive(result: Measurement, waivers: Sequence[Waiver], today: date) -> tuple[bool, tuple[str, ...]]:
    """Whether all that regressed in a case is waived, and what waivers say of each regression."""
    regressions = _regressions(result) if result.outcome == "regressed" else []
    told, is_waived = list[str](), bool(regressions)
    own = [each for each in waivers if fnmatchcase(result.case_id, each.case)]
    for found in regressions:
        meant = [each for each in own if any(fnmatchcase(name, each.metric) for name in found.names)]
        why_not = {each: _why_not(each, found, today) for each in meant}
        holds = [f"waived: {found.told}: {each.told}" for each, why in why_not.items() if why is None]
        told += holds[:1] or [f"not waived: {found.told}: {why}" for why in why_not.values()]
        is_waived = is_waived and bool(holds)
    return is_waived, tuple(told)


def _why_not(waiver: Waiver, found: Regression, today: date) -> str | None:
    """Why a waiver does not hold for a regression that it names; None if it does."""
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
    for check in result.verdict.checks:
        if check.outcome == "regressed":
            share = math.inf if check.change is None else abs(check.change)  # unknown: beyond every bound
            told = check.label if check.change is None else f"{check.label} {check.change:+.1%}"
            names = {check.metric, in_unit(check.metric, result.unit), check.label}
            found.append(Regression(names, told, share, None))
    for each in result.verdict.counts.findings if result.verdict.counts is not None else ():
        if each.outcome == "regressed":
            growth = abs(each.now - each.before)
            share = growth / each.before if each.before else math.inf
            kind, _, _ = each.quantity.partition(" of ")  # of a collective, whatever its group
            names = {each.quantity, each.field, kind}
            found.append(Regression(names, each.sentence, share, growth))
    return found
