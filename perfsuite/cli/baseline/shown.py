"""How baselines of any kind are shown; what is special of times and counts is in `times` and `counts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

from perfsuite.report.profile import split
from perfsuite.results.baseline import BaselineDocument
from perfsuite.results.profile import LaunchProfile, ProfileBaseline
from perfsuite.verdict.profiled import compared

B = TypeVar("B", bound=BaselineDocument)


@dataclass(frozen=True, kw_only=True)
class Shown(Generic[B]):
    """How baselines of one kind are shown."""

    on: str = "on"
    """The words between a case and its folder."""
    headings: Sequence[str] = ()
    """The columns of the list, apart from when it was made and who accepted it; none: it is not listed."""
    cells: Callable[[B], list[str]] = lambda known: []
    """The cells of a baseline in the list, after its folder and its case."""
    details: Callable[[B], list[str]] = lambda known: []
    """The lines of a baseline in full, after those of who accepted it."""
    changes: Callable[[B | None, B | None], list[str]]
    """The lines that tell what differs between two baselines; None is one that is not there."""

    def title(self, known: B) -> Text:
        """The case of a baseline and what else it depends on."""
        return Text.assemble((known.case.id, "bold"), f" {self.on} {known.folder}")

    def before_after(self, before: B | None, now: B | None) -> Text:
        """What differs between two baselines of a case, of which one may not be there."""
        either = now or before
        assert either is not None
        return Text("\n  ").join([self.title(either), *map(Text, self.changes(before, now))])


def profile_lines(profile: LaunchProfile) -> list[str]:
    """Where the time of a step goes."""
    return [f"profile of ranks {entry.name}: {split(entry.profile.split)}" for entry in profile.ranks]


def _changes(before: ProfileBaseline | None, now: ProfileBaseline | None) -> list[str]:
    if before is None or now is None:
        return [f"profile: {'new' if before is None else 'removed'}"]
    found = compared(before.profile, now.profile, "the baseline")
    return [*(found.calls or ("a step calls the same",)), *found.hints, *found.notes]


PROFILES = Shown[ProfileBaseline](on="profiled on", changes=_changes)
