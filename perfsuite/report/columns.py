"""The columns of the tables with one row for each case: terminal, Markdown, overview of the HTML page. Pure.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfsuite.case.case import Unit
from perfsuite.report import counts, summary, text
from perfsuite.report.summary import speed, speed_change
from perfsuite.results.amounts import amount
from perfsuite.results.counts import Counts
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, Metric, extra_metrics
from perfsuite.results.outcome import Check
from perfsuite.results.quantities import Unit as CountUnit
from perfsuite.results.run import Figures
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


def of_cases(results: Sequence[Measurement], measured: Sequence[Column]) -> Sequence[Column]:
    """Return the columns for these cases: `measured`, or what is known of dry runs, or of two arms."""
    if any(result.before for result in results):
        return compared(summary.speed_unit(results))
    if not summary.only_dry(results):
        return measured
    return [column for column in DRY if any(column.value(result) is not None for result in results)]


def _counted(heading: str, of: Callable[[Counts], int | None], unit: CountUnit) -> Column:
    """The column of what a step does, of the rank that does most of it."""

    def value(result: Measurement) -> float | None:
        amounts = [of(entry.counts) for entry in result.counts]
        return max((amount for amount in amounts if amount is not None), default=None)

    return Column(heading=heading, value=value, format=lambda result, value: amount(int(value), unit))


def _share_of_card(result: Measurement) -> float | None:
    fit = result.dry_facts.fit
    return None if fit is None else fit.most / fit.card


def _fits(result: Measurement, share: float) -> str:
    fit = result.dry_facts.fit
    assert fit is not None
    return f"{share:.0%}: {fit.verdict}"


def _most_speed(result: Measurement) -> float | None:
    limit = result.dry_facts.roofline
    return None if limit is None else limit.tokens_per_s


def _memory_growth(result: Measurement) -> float | None:
    check = result.verdict.check(PEAK_MEMORY.name)
    return None if check is None else check.change


SPEED_CHANGE = Column(
    heading="vs baseline", value=speed_change, format=lambda result, change: text.percent(change)
)
MEMORY_CHANGE = Column(
    heading="memory vs baseline", value=_memory_growth, format=lambda result, change: text.percent(change)
)
DRY = (
    _counted("computed", counts.flops, "FLOP"),
    _counted("collectives", counts.moved, "bytes"),
    _counted("live peak", counts.peak, "bytes"),
    Column(heading="of card", value=_share_of_card, format=_fits),
    Column(
        heading="most tokens/s",
        value=_most_speed,
        format=lambda result, most: speed(most, result.unit, "tokens"),
    ),
)
"""What a dry run has to show: what a step does, how much of the card it needs, the most that it can reach."""


def compared(unit: Unit) -> list[Column]:
    """Return the columns of cases of which two arms were compared; speeds are in `unit` per second."""
    metric = TOKENS_PER_S.counting(unit)

    def of_a(result: Measurement) -> float | None:
        return metric.of(Figures.median_of(run.figures for run in result.healthy_before))

    def show(result: Measurement, value: float) -> str:
        return speed(value, result.unit, unit)

    return [
        Column(heading=f"{metric.label} A", value=of_a, format=show),
        Column(heading="B", value=lambda result: metric.of(result.figures), format=show),
        _change("B vs A (99 %)", TOKENS_PER_S),
        _change("memory B vs A", PEAK_MEMORY),
        Column(
            heading="pairs",
            value=lambda result: len(result.runs),
            format=lambda result, pairs: f"{len(result.healthy_runs)} of {len(result.runs)}",
        ),
    ]


def _change(heading: str, metric: Metric) -> Column:
    """The column of the change of a metric from arm A to arm B, with its interval."""

    def check_of(result: Measurement) -> Check | None:
        return result.verdict.check(metric.name)

    def value(result: Measurement) -> float | None:
        check = check_of(result)
        return None if check is None else check.change

    def show(result: Measurement, change: float) -> str:
        check = check_of(result)
        interval = "" if check is None or check.interval is None else f" ({text.between(check.interval)})"
        return text.percent(change) + interval

    return Column(heading=heading, value=value, format=show)


LAUNCHES = Column(
    heading="launches",
    value=lambda result: None if result.dry else len(result.runs),
    format=lambda result, count: str(len(result.runs)),
)
