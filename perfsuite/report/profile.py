"""Says what profiles found, in lines of text: terminal, HTML and Markdown share them. Pure.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.report.text import plural
from perfsuite.results.outcome import Verdict
from perfsuite.results.profile import StepSplit
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.overall import THE_SAME
from perfsuite.verdict.profiled import NOT_IN_EACH_STEP


def split(shown: StepSplit) -> str:
    """Return where the time of a step goes, in one line: `12.3 ms a step: compute 8.1, the rest 4.2`."""
    parts = ", ".join(f"{name} {us / 1e3:.1f}" for name, us in shown.parts().items())
    return f"{shown.step_us / 1e3:.1f} ms a step: {parts}"


def because(verdict: Verdict) -> list[str]:
    """Return why a case is slower, the surest first: calls that differ, what was counted, then times.

    That the counts are the same is left out where calls are not.
    """
    found = verdict.profiled
    counted = [verdict.explained] if verdict.explained is not None else []
    if found is None:
        return counted
    if found.calls and (verdict.explained or "").startswith(THE_SAME):
        counted = []
    others = any(note.startswith(NOT_IN_EACH_STEP) for note in found.notes)
    same = [] if found.calls or others or not found.hints else ["no call differs"]
    return [*found.calls, *counted, *same, *found.hints, *found.notes]


def traces(result: Measurement) -> list[str]:
    """Return which files to open in Perfetto; none without a profile."""
    named = (("arm A, ", result.profile_before), ("arm B, " if result.before else "", result.profile))
    return [
        f"trace of {arm}rank 0{_others(taken.traces)}: {taken.traces[0]} (opens in https://ui.perfetto.dev)"
        for arm, taken in named
        if taken is not None and taken.traces
    ]


def _others(files: Sequence[str]) -> str:
    return f", beside {plural(len(files) - 1, 'other')}" if len(files) > 1 else ""
