"""The births and deaths of a rank's storages, in order, as data: a worker writes it, a dry run replays it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from perfsuite.results.counts import Phase


class MemoryChange(NamedTuple):
    """A storage is born, dies, or takes another size."""

    storage: int
    """Its number, in the order in which storages were first seen."""
    bytes: int
    """Growth, or less than 0."""
    phase: Phase


class MemoryLog(NamedTuple):
    """The storages of one rank on its device over one step, or several in a row."""

    at_start: tuple[int, ...]
    """Bytes of those that lived when the first of the steps began, by number; 0 for one that did not."""
    steps: tuple[tuple[MemoryChange, ...], ...]
    """What happened in each step, in this order."""

    @property
    def changes(self) -> Iterator[MemoryChange]:
        """What happened in all steps."""
        return (change for step in self.steps for change in step)

    @property
    def peak(self) -> int:
        """The most bytes alive at once: each storage once, no allocator's rounding."""
        live = peak = sum(self.at_start)
        for change in self.changes:
            live += change.bytes
            peak = max(peak, live)
        return peak
