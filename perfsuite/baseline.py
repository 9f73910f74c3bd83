"""Baselines: accepted measurements, one file per hardware class and case.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import Field

from perfsuite import data
from perfsuite.case import Case
from perfsuite.data import Document
from perfsuite.errors import FileError
from perfsuite.result import Figures, Flops, Observed, Run


class Baseline(Document):
    """`<hardware class>/<case id>.json`: what a case reached when it was accepted."""

    schema_version: Literal[1] = 1
    hardware_class: str
    case: Case
    launches: tuple[Figures, ...] = Field(min_length=1)
    """The figures of each launch, rounded."""
    flops: Flops | None = None
    observed: Observed | None = None
    recorded_at: str

    def median(self, figure: str) -> float | None:
        """The median of a figure over the launches; None if no launch has it."""
        values = [value for launch in self.launches if (value := getattr(launch, figure)) is not None]
        return median(values) if values else None


def from_runs(runs: Sequence[Run]) -> Baseline:
    """A baseline out of runs of one case on one hardware class."""
    first = runs[0]
    return Baseline(
        hardware_class=first.machine.hardware_class,
        case=first.case,
        launches=tuple(_rounded(run.figures) for run in runs),
        flops=first.flops,
        observed=first.observed,
        recorded_at=first.started_at,
    )


def path(directory: Path, hardware_class: str, case: Case) -> Path:
    """Where a baseline stands in a directory of baselines."""
    return directory / hardware_class / f"{case.id}.json"


def find(directories: Sequence[Path], hardware_class: str, case: Case) -> tuple[Baseline, Path] | None:
    """The first directory's baseline of `case`, and its file. Raises `FileError` if that file is bad."""
    for directory in directories:
        file = path(directory, hardware_class, case)
        if file.exists():
            baseline = data.read(file, Baseline)
            if baseline.case.id != case.id or baseline.hardware_class != hardware_class:
                raise FileError(
                    f"{file}: it holds the baseline of {baseline.case.id} on {baseline.hardware_class}. "
                    "A file must stand where its content says; move it or delete it."
                )
            return baseline, file
    return None


def _rounded(figures: Figures, digits: int = 6) -> Figures:
    """Numbers as far as they mean something, so that a diff shows changes and not noise."""

    def cut(value: float | None) -> float | None:
        if not value or not math.isfinite(value):
            return value
        return round(value, digits - 1 - math.floor(math.log10(abs(value))))

    return Figures(**{name: cut(value) for name, value in figures})
