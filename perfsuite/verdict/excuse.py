"""Whether a failure is no surprise. Pure; imports neither torch nor pytest."""

from __future__ import annotations

from perfsuite.case.case import Case
from perfsuite.results.baseline import Baseline
from perfsuite.results.outcome import Excuse, Verdict


def excuse(case: Case, verdict: Verdict, baseline: Baseline | None, *, shared: bool = False) -> Excuse | None:
    """Why the failure of `case` is no surprise; None if it is one, or if the case did not fail.

    A known issue excuses the failure that it names, unless a reviewed baseline shows that the issue is gone.
    A case that may run out of memory is excused for that, unless any baseline shows that it fits, or others
    held memory of its GPUs meanwhile (`shared`).
    """
    is_reviewed = baseline is not None and baseline.accepted is not None
    if case.known_issue is not None and verdict.failure == case.known_issue.failure and not is_reviewed:
        return "known issue"
    is_surprise = baseline is not None or shared
    if case.may_run_out_of_memory and verdict.failure == "out_of_memory" and not is_surprise:
        return "out of memory"
    return None
