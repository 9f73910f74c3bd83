"""The columns of the tables with one row for each case: terminal, Markdown, overview of the HTML page. Pure.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfsuite.case.case import Unit
from perfsuite.report import text
from perfsuite.report.summary import speed, speed_change
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, Metric, extra_metrics
from perfsuite.results.session_file import Measurement


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its heading, and for each case a number and that number as text."""

    heading: str
    value: Callable[[Measurement], float | None]
    """The number that rows are sorted by; None where the case has none."""
    format: Callable[[Measurement, float], str]

    def cell(self, result: Measurement, *, missing: str = "-") -> str:
        """Return the cell of a case; `missing` where it has no value."""
        value = self.value(result)
        return missing if value is None else self.format(result, value)


def figure(metric: Metric) -> Column:
    """Return the column of a metric: the median over the launches of each case."""
    return Column(
        heading=metric.heading or metric.label,
        value=lambda result: metric.of(result.figures),
        format=lambda result, value: text.value(metric, value),
    )


def speed_in(unit: Unit) -> Column:
    """Return the column of tokens/s or samples/s; a row that counts otherwise says so."""
    metric = TOKENS_PER_S.counting(unit)
    return Column(
        heading=metric.label,
        value=lambda result: metric.of(result.figures),
        format=lambda result, value: speed(value, result.unit, unit),
    )


def extras(results: Sequence[Measurement]) -> list[Column]:
    """Return a column for each metric of another package that any of these cases has."""
    return [figure(metric) for metric in extra_metrics(result.figures for result in results)]


def _memory_growth(result: Measurement) -> float | None:
    checks = [check for check in result.verdict.checks if check.metric == PEAK_MEMORY.name]
    return checks[0].worsening if checks else None


SPEED_CHANGE = Column(
    heading="vs baseline", value=speed_change, format=lambda result, change: text.percent(change)
)
MEMORY_CHANGE = Column(
    heading="memory vs baseline", value=_memory_growth, format=lambda result, change: text.percent(change)
)
LAUNCHES = Column(
    heading="launches",
    value=lambda result: len(result.runs),
    format=lambda result, count: str(len(result.runs)),
)
