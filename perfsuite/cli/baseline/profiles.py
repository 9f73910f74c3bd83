"""Profiles of baselines for `perfsuite baseline`: how one is shown. Imports neither torch nor pytest."""

from __future__ import annotations

from perfsuite.cli.baseline.shown import Shown
from perfsuite.report import profile as told
from perfsuite.results.profile import LaunchProfile, ProfileBaseline
from perfsuite.verdict.profiled import compared


def lines(profile: LaunchProfile) -> list[str]:
    """Return lines: where the time of a step goes."""
    return [f"profile of ranks {entry.name}: {told.split(entry.profile.split)}" for entry in profile.ranks]


def _changes(before: ProfileBaseline | None, now: ProfileBaseline | None) -> list[str]:
    """Return what differs between two profiles, in the sentences of a verdict."""
    if before is None or now is None:
        return [f"profile: {'new' if before is None else 'removed'}"]
    found = compared(before.profile, now.profile, "the baseline")
    return [*(found.calls or ("a step calls the same",)), *found.hints, *found.notes]


PROFILES = Shown[ProfileBaseline](
    on="profiled on",
    cells=lambda known: [],
    details=lambda known: lines(known.profile),
    changes=_changes,
)
