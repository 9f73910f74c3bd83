"""Profiles of baselines for `perfsuite baseline`: how one is shown. Imports neither torch nor pytest."""

from __future__ import annotations

from rich.text import Text

from perfsuite.report import profile as told
from perfsuite.results.profile import LaunchProfile, ProfileBaseline
from perfsuite.verdict.profiled import compared


def details(profile: LaunchProfile | None) -> list[str]:
    """Return lines: where the time of a step goes; none of a baseline without a profile."""
    if profile is None:
        return []
    return [f"profile of ranks {entry.name}: {told.split(entry.profile.split)}" for entry in profile.ranks]


def before_after(before: ProfileBaseline | None, now: ProfileBaseline | None) -> Text:
    """Show what differs between two profiles, in the sentences of a verdict."""
    either = now or before
    assert either is not None
    shown = Text.assemble((either.case.id, "bold"), f" profiled on {either.hardware_class}")
    if before is None or now is None:
        lines = [f"profile: {'new' if before is None else 'removed'}"]
    else:
        found = compared(before.profile, now.profile, "the baseline")
        lines = [*(found.calls or ("a step calls the same",)), *found.hints, *found.notes]
    for line in lines:
        shown.append(f"\n  {line}")
    return shown
