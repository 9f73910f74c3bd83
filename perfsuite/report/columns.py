"""The columns of tables with a row for each case: terminal, Markdown, overview of the HTML page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfsuite.case.case import Unit
from perfsuite.report import counts, summary, text
from perfsuite.results.amounts import amount
from perfsuite.results.counts import Counts
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, Metric, extra_metrics
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
    return Column(
        heading=TOKENS_PER_S.counting(unit).label,
        value=lambda result: TOKENS_PER_S.of(result.figures),
        format=lambda result, value: summary.speed(value, result.unit, unit),
    )


def extras(results: Sequence[Measurement]) -> list[Column]:
    """Return a column for each metric of another package that any of these cases has."""
    return [figure(metric) for metric in extra_metrics(result.figures for result in results)]


def of_cases(results: Sequence[Measurement], measured: Sequence[Column]) -> Sequence[Column]:
    """Return the columns for these cases: `measured`, or what is known of dry runs, or of two arms."""
    if any(result.before for result in results):
        return _compared(summary.speed_unit(results))
    if not summary.only_dry(results):
        return measured
    return [column for column in DRY if any(column.value(result) is not None for result in results)]


def _compared(unit: Unit) -> list[Column]:
    """The columns of cases of which two arms were compared; speeds are in `unit` per second."""
    speed = speed_in(unit)
    return [
        Column(
            heading=f"{speed.heading} A",
            value=lambda result: Figures.median_of(run.figures for run in result.healthy_before).tokens_per_s,
            format=speed.format,
        ),
        Column(heading="B", value=speed.value, format=speed.format),
        _change("B vs A (99 %)", TOKENS_PER_S, interval=True),
        _change("memory B vs A", PEAK_MEMORY, interval=True),
        Column(
            heading="pairs",
            value=lambda result: len(result.runs),
            format=lambda result, pairs: f"{len(result.healthy_runs)} of {len(result.runs)}",
        ),
    ]


def _change(heading: str, metric: Metric, *, interval: bool = False) -> Column:
    """The column of the judged change of a metric."""

    def value(result: Measurement) -> float | None:
        check = result.verdict.check(metric.name)
        return None if check is None else check.change

    def show(result: Measurement, change: float) -> str:
        check = result.verdict.check(metric.name)
        if not interval or check is None or check.interval is None:
            return text.percent(change)
        return f"{text.percent(change)} ({text.between(check.interval)})"

    return Column(heading=heading, value=value, format=show)


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
    assert result.dry_facts.fit is not None
    return f"{share:.0%}: {result.dry_facts.fit.verdict}"


def _most_speed(result: Measurement) -> float | None:
    limit = result.dry_facts.roofline
    return None if limit is None else limit.tokens_per_s


SPEED_CHANGE = _change("vs baseline", TOKENS_PER_S)
MEMORY_CHANGE = _change("memory vs baseline", PEAK_MEMORY)
DRY = (
    _counted("computed", counts.flops, "FLOP"),
    _counted("collectives", counts.moved, "bytes"),
    _counted("live peak", counts.peak, "bytes"),
    Column(heading="of card", value=_share_of_card, format=_fits),
    Column(
        heading="most tokens/s",
        value=_most_speed,
        format=lambda result, most: summary.speed(most, result.unit, "tokens"),
    ),
)
"""What a dry run has to show: what a step does, how much of the card it needs, the most that it can reach."""
LAUNCHES = Column(
    heading="launches",
    value=lambda result: None if result.dry else len(result.runs),
    format=lambda result, count: str(len(result.runs)),
)
