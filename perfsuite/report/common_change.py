"""Report a change that the cases of a session have in common as one finding. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from perfsuite.report.text import percent, plural
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Check
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.common_change import Change, CommonChange, common_change
from perfsuite.verdict.robust import Z_99

FEWEST_CHANGED = 2  # minimum number of cases that changed, each on its own evidence
NOTHING = "Nothing that is recorded changed in all of them, so look at the machine first (perfsuite doctor)"


def sentences(results: Iterable[Measurement]) -> list[str]:
    """Return a sentence for each hardware class whose cases all became slower, or all became faster.

    Only cases with a baseline are compared. Two arms are launched alternately, so a
    slow machine slows both.
    """
    compared = [result for result in results if result.verdict.against is None and _change(result)]
    compared.sort(key=lambda result: result.hardware_class or "")
    by_class = groupby(compared, lambda result: result.hardware_class)
    return [sentence for _, of_class in by_class for sentence in _of_class([*of_class])]


def _of_class(results: Sequence[Measurement]) -> Iterator[str]:
    by_id = {result.case_id: result for result in results}
    changes = {case: change for case, result in by_id.items() if (change := _change(result))}
    common = common_change(changes)
    if common is None or not common.is_shared:
        return
    shared = [by_id[case] for case in common.cases]
    if sum(map(_has_changed, shared)) >= FEWEST_CHANGED:
        yield _sentence(common, shared, len(results), [by_id[case] for case in common.apart])


def _sentence(
    common: CommonChange, shared: Sequence[Measurement], count: int, apart: Sequence[Measurement]
) -> str:
    direction = "slower" if common.estimate > 0 else "faster"
    low, high = TOKENS_PER_S.interval((math.expm1(common.interval[0]), math.expm1(common.interval[1])))
    size = percent(TOKENS_PER_S.change(math.expm1(common.estimate)))
    changed = [change for change in shared[0].verdict.changed if _is_in_all(change, shared)]
    cause = f"Changed in all of them: {', '.join(changed)}" if changed else NOTHING
    others = ", ".join(f"{result.case_id} ({_shown(result)})" for result in apart)
    return (
        f"{len(shared)} of {plural(count, 'case')} are {direction} by about the same: tokens/s {size} "
        f"(99% interval {percent(low)} to {percent(high)}). This is one finding, so look for one cause. "
        f"{cause}." + (f" Different from these: {others}." if others else "")
    )


def _is_in_all(change: str, results: Sequence[Measurement]) -> bool:
    return all(change in result.verdict.changed for result in results)


def _shown(result: Measurement) -> str:
    check = _check(result)
    assert check is not None
    assert check.change is not None
    return percent(check.change)


def _check(result: Measurement) -> Check | None:
    return result.verdict.check(TOKENS_PER_S.name)


def _has_changed(result: Measurement) -> bool:
    check = _check(result)
    return check in result.verdict.moved_by_machine or (
        check is not None and check.outcome in ("regressed", "improved")
    )


def _change(result: Measurement) -> Change | None:
    """Return the change of the seconds per token of a case; None if it is unknown."""
    check = _check(result)
    if check is None or check.change is None or check.interval is None:
        return None
    low, high = (TOKENS_PER_S.change(end) for end in check.interval)
    estimate = TOKENS_PER_S.change(check.change)
    half = abs(math.log1p(high) - math.log1p(low)) / 2 if min(low, high) > -1 else math.inf
    return Change(math.log1p(estimate), half / Z_99) if 0 < half < math.inf else None
