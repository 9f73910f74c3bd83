"""A published comparison as reports show it: a table, and pairs of figures for bars.

Vocabulary: imports neither torch nor pytest.
"""

from __future__ import annotations

from perfsuite.data import Data


class Pair(Data):
    """One bar of what was published, beside one of what was measured here."""

    label: str
    published: float
    measured: float | None = None
    """None where nothing was measured: only the published bar is drawn."""


class ComparisonTable(Data):
    """A published table with what was measured beside it."""

    title: str
    source: str
    """Where it was published; an https address becomes a link."""
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Cells as text; the first of a row names it."""
    unit: str = ""
    """Of the pairs."""
    pairs: tuple[Pair, ...] = ()
