"""Decide whether a case is fit for a baseline, from its first and its second measurement."""

from collections.abc import Sequence

from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.report.summary import change, reason
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Check
from perfsuite.results.session_file import Measurement


def case_row(first: Measurement, second: Measurement | None = None) -> Row:
    """Return the row of a case.

    A case is fit for a baseline if the first measurement recorded one, and the second measurement passed and
    was precise enough to detect changes of the allowed size.
    """
    check = first.case_id
    if first.excused is not None:
        return unknown(check, f"no baseline: {first.excused}: {_why(first)}".rstrip(": "))
    if first.outcome == "failed":
        return failed(check, _why(first) or "failed", "fix it, or expect it with known_issue")
    if not first.verdict.is_recorded:
        return unknown(check, f"no baseline: {first.outcome}: {_why(first) or ''}".rstrip(": "))
    if second is None:
        return unknown(check, "recorded, but not measured again yet")
    if second.excused is not None:
        return unknown(check, f"recorded, then {second.excused}: {_why(second)}".rstrip(": "))
    if second.verdict.moved_by_machine:
        return _moved_row(check, second.verdict.moved_by_machine)
    if second.outcome == "passed":
        speed = second.verdict.check(TOKENS_PER_S.name)
        least = None if speed is None else speed.minimum_detectable
        detects = "" if least is None else f"changes of {least:.1%} or more in tokens/s can be detected"
        if speed is not None and speed.blind:
            advice = (
                "use longer steps or lock the clocks, because otherwise "
                "changes of the allowed size would be missed"
            )
            shown = f"passed, but only {detects}, and the allowed change is {speed.allowed:.1%}"
            return unknown(check, shown, advice)
        return passed(check, f"fit for a baseline: recorded, then passed; {detects}".rstrip("; "))
    outcome = f"{second.outcome} although the code did not change: {_why(second) or ''}".rstrip(": ")
    if second.outcome in ("regressed", "failed"):
        return failed(check, outcome, "find out why before accepting a baseline")
    return unknown(check, outcome)


def _why(result: Measurement) -> str:
    """Explain a verdict with the messages of its launches, because a row has no details below it."""
    if result.outcome in ("failed", "unhealthy") and result.verdict.reasons:
        return "; ".join(result.verdict.reasons)
    return reason(result)


def _moved_row(check: str, moved: Sequence[Check]) -> Row:
    """Return the row of a case whose speed changed although the code did not.

    The cause is the machine. Such a variation could later hide the effect of a change of the code. The row
    fails only if the case became slower.
    """
    changes = ", ".join(map(change, moved))
    observed = f"two sessions of the same code differ: {changes}"
    advice = "find out why before accepting a baseline: the machine's speed differs between sessions"
    is_slower = any(metric.outcome == "inconclusive" for metric in moved)
    return failed(check, observed, advice) if is_slower else unknown(check, observed, advice)
