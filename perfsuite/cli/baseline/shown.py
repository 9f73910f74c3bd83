"""How baselines of any kind are shown: what differs between the kinds is in `times`, `counts` and `profiles`.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.text import Text

from perfsuite.results.baseline import Acceptance, BaselineDocument

B = TypeVar("B", bound=BaselineDocument)


@dataclass(frozen=True, kw_only=True)
class Shown(Generic[B]):
    """How baselines of one kind are shown."""

    on: str = "on"
    """The words between a case and its folder."""
    headings: Sequence[str] = ()
    """The columns of the list; none of a kind that is not listed."""
    cells: Callable[[B], list[str]]
    """The cells of a baseline in the list, but for its case, its folder, and who accepted it when."""
    details: Callable[[B], list[str]]
    """The lines of a baseline in full, but for who accepted it."""
    changes: Callable[[B | None, B | None], list[str]]
    """The lines that tell what differs between two baselines; None is one that is not there."""

    def title(self, known: B) -> Text:
        """Return the case of a baseline and what else it depends on."""
        return Text.assemble((known.case.id, "bold"), f" {self.on} {known.folder}")

    def before_after(self, before: B | None, now: B | None) -> Text:
        """Return what differs between two baselines of a case, of which one may not be there."""
        either = now or before
        assert either is not None
        return Text("\n  ").join([self.title(either), *map(Text, self.changes(before, now))])


def accepted_cells(recorded_at: str, accepted: Acceptance | None) -> list[str]:
    """Return the last cells of a row in the list: of when a baseline is, and who accepted it."""
    return [recorded_at[:10], "local" if accepted is None else f"by {accepted.by}"]


def accepted_lines(accepted: Acceptance | None) -> list[str]:
    """Return who accepted a baseline and why; nothing of one that was merely recorded."""
    if accepted is None:
        return []
    return [
        f"accepted by {accepted.by} on {accepted.date} at {accepted.commit or 'no commit'}",
        f"reason: {accepted.reason or 'none given'}",
    ]
