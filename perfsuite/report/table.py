"""The table of every report: cells as text, which terminal, Markdown and HTML format. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE = "\N{EN DASH}"
"""Stands where a figure is not known."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, or as charts on the HTML page; the first of a row names it. False without rows."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    """What it shows, where no heading stands above it."""
    text_columns: int = 1
    """Number of leading columns that hold text."""
    last_text_columns: int = 0
    """Number of columns at the end that hold text or charts. Those between hold figures."""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def is_figure(self, column: int) -> bool:
        """Return whether a column, counted from 0, holds figures, which are aligned to the right."""
        return self.text_columns <= column < len(self.headers) - self.last_text_columns
