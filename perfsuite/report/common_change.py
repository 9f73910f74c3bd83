"""Report one finding if the cases of a session have a change in common. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from perfsuite.report.reference import about, beside_reference, machine_changes
from perfsuite.report.text import percent, plural
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Verdict
from perfsuite.results.session_file import MachineChange, Measurement, SessionReference
from perfsuite.verdict.common_change import Estimate, common_change
from perfsuite.verdict.robust import Z_99, relative

FEWEST_CHANGED = 2  # minimum number of cases that each show a change on their own
NOTHING = "No recorded fact changed in all of them, so look at the machine first (perfsuite doctor)"


def sentences(results: Iterable[Measurement], reference: SessionReference | None = None) -> list[str]:
    """Return a sentence for each hardware class whose cases became slower or faster together.

    Only cases with a baseline are considered. Comparisons of two arms are left out: a slow machine slows down
    both arms, because they are launched alternately. If the session has a reference, there are also sentences
    on how the reference changed, and on what it cannot show.
    """
    by_id = {result.case_id: result for result in results if result.verdict.against is None}
    by_class = defaultdict[str | None, dict[str, Estimate]](dict)
    for case_id, result in by_id.items():
        change = _change(result.verdict)
        if change is not None:
            by_class[result.hardware_class][case_id] = change
    machine = machine_changes(reference)
    made = [
        _sentence(changes, by_id, machine.get(hardware_class or ""))
        for hardware_class, changes in by_class.items()
    ]
    return [sentence for sentence in made if sentence is not None] + about(reference, by_id.values())


def _cause(verdicts: Sequence[Verdict]) -> str:
    """Name the versions, settings and counts that changed in all of these cases."""
    first = verdicts[0].changed if verdicts else ()
    changed = [change for change in first if all(change in other.changed for other in verdicts)]
    return f"Changed in all of them: {', '.join(changed)}" if changed else NOTHING


def _sentence(
    changes: Mapping[str, Estimate], by_id: Mapping[str, Measurement], machine: MachineChange | None
) -> str | None:
    """Report the common change of the cases and, if there is a reference, the change of the reference.

    Without a reference, returns a sentence only if the cases share a change, and if at least `FEWEST_CHANGED`
    of these cases each show a change on their own. Otherwise returns None.
    """
    common = common_change(changes)
    if common is not None and not common.is_shared:
        common = None
    shared = [] if common is None else [by_id[case_id].verdict for case_id in common.cases]
    cause = _cause(shared)
    if machine is not None:
        return beside_reference(machine, len(changes), common, cause)
    if common is None or sum(map(_has_changed, shared)) < FEWEST_CHANGED:
        return None
    direction = "slower" if common.estimate > 0 else "faster"
    high, low = map(_shown, common.interval)  # more seconds are fewer tokens/s
    apart = ", ".join(f"{case_id} ({_shown(changes[case_id].estimate)})" for case_id in common.apart)
    sentence = (
        f"{len(shared)} of {plural(len(changes), 'case')} are {direction} by about the same amount: "
        f"tokens/s {_shown(common.estimate)} (99% interval {low} to {high}). "
        f"The cases changed together, so look for one cause. {cause}."
    )
    return f"{sentence} Different from these: {apart}." if apart else sentence


def _shown(logarithm: float) -> str:
    """Return a change of the seconds per token as a change of tokens/s, in percent."""
    return percent(TOKENS_PER_S.change(relative(logarithm)))


def _has_changed(verdict: Verdict) -> bool:
    check = verdict.check(TOKENS_PER_S.name)
    if check is None:
        return False
    return check.outcome in ("regressed", "improved") or check in verdict.moved_by_machine


def _change(verdict: Verdict) -> Estimate | None:
    """Return the change of the seconds per token of a case; None if it is unknown."""
    check = verdict.check(TOKENS_PER_S.name)
    if check is None or check.change is None or check.interval is None:
        return None
    low, high = (TOKENS_PER_S.change(end) for end in check.interval)
    if min(low, high) <= -1:
        return None
    half = abs(math.log1p(high) - math.log1p(low)) / 2
    if not 0 < half < math.inf:
        return None
    return Estimate(math.log1p(TOKENS_PER_S.change(check.change)), half / Z_99)
