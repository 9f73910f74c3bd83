"""Define the columns of all tables that have one row per case, in the terminal, Markdown and HTML. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from perfsuite.case.case import Unit
from perfsuite.report import counts, summary, text
from perfsuite.results.amounts import amount, arrow
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, Metric, extra_metrics
from perfsuite.results.quantities import Unit as CountUnit
from perfsuite.results.session_file import Measurement


class Cell(NamedTuple):
    """A cell: its text, and the number to sort by. The number is None if it is not finite."""

    text: str
    number: float | None


class Column(NamedTuple):
    """One column: its heading, and a function that returns the cell of a case, or None."""

    heading: str
    cell: Callable[[Measurement], Cell | None]

    def text(self, result: Measurement) -> str:
        """Return the text of a case's cell, or a dash."""
        cell = self.cell(result)
        return "-" if cell is None else cell.text


def _cell(number: float | None, written: Callable[[float], str]) -> Cell | None:
    if number is None:
        return None
    return Cell(written(number), number if math.isfinite(number) else None)


def figure(metric: Metric) -> Column:
    """Return the column of a metric: the median over the launches of each case."""
    return Column(
        metric.heading or metric.label,
        lambda result: _cell(metric.of(result.figures), lambda value: amount(value, metric.unit)),
    )


def speed_in(unit: Unit) -> Column:
    """Return the column of tokens/s or samples/s. A row in the other unit shows its unit."""
    return Column(
        TOKENS_PER_S.counting(unit).label, lambda result: _speed(result.figures.tokens_per_s, result, unit)
    )


def _speed(speed: float | None, result: Measurement, heading: Unit) -> Cell | None:
    return _cell(speed, lambda value: summary.speed(value, result.unit, heading))


def extras(results: Sequence[Measurement]) -> list[Column]:
    """Return the columns of other packages' metrics, for metrics that at least one of these cases has."""
    return [figure(metric) for metric in extra_metrics(result.figures for result in results)]


def of_cases(results: Sequence[Measurement], measured: Sequence[Column]) -> Sequence[Column]:
    """Return the columns for these cases: columns for dry runs, columns for two arms, or `measured`."""
    is_counted = [result.by_counts or result.dry for result in results if result.runs]
    if not (is_counted and all(is_counted)):
        is_compared = any(result.before for result in results)
        return _compared(speed_in(summary.speed_unit(results))) if is_compared else measured
    return [column for column in DRY if any(map(column.cell, results))]


def _compared(speed: Column) -> list[Column]:
    return [
        Column(f"{speed.heading} A", lambda result: speed.cell(result.replace(runs=result.before))),
        Column("B", speed.cell),
        _change("B vs A (99%)", TOKENS_PER_S, interval=True),
        _change("memory B vs A", PEAK_MEMORY, interval=True),
        Column(
            "pairs",
            lambda result: _cell(len(result.runs), lambda pairs: f"{len(result.healthy_runs)} of {pairs}"),
        ),
    ]


def _change(heading: str, metric: Metric, *, interval: bool = False) -> Column:
    def cell(result: Measurement) -> Cell | None:
        check = result.verdict.check(metric.name)
        if check is None:
            return None
        bounds = f" ({text.between(check.interval)})" if interval and check.interval is not None else ""
        return _cell(check.change, lambda change: text.percent(change) + bounds)

    return Column(heading, cell)


def _counted(heading: str, of: Callable[[Counts], int | None], unit: CountUnit) -> Column:
    """Return the column of a count. Its cells show the maximum over the ranks."""

    def most_of(entries: Iterable[RankCounts]) -> int | None:
        of_ranks = (of(entry.counts) for entry in entries)
        return max((count for count in of_ranks if count is not None), default=None)

    def cell(result: Measurement) -> Cell | None:
        then = most_of(result.before[-1].counts) if result.before else None
        return _cell(
            most_of(result.counts),
            lambda now: amount(int(now), unit) if then in (None, now) else arrow(then or 0, int(now), unit),
        )

    return Column(heading, cell)


def _of_card(result: Measurement) -> Cell | None:
    fit = result.dry_facts.fit
    return None if fit is None else _cell(fit.most / fit.card, lambda share: f"{share:.0%}: {fit.verdict}")


def _most_speed(result: Measurement) -> Cell | None:
    limit = result.dry_facts.roofline
    return _speed(limit.tokens_per_s, result, "tokens") if limit is not None and limit.is_bound else None


EXPECTED_SHARE = Column(
    "of expected", lambda result: _cell(result.expected_share, lambda share: amount(share, "share"))
)
SPEED_CHANGE = _change("vs baseline", TOKENS_PER_S)
MEMORY_CHANGE = _change("memory vs baseline", PEAK_MEMORY)
DRY = (  # columns of dry runs: the work of a step, its share of the card's memory, its maximum speed
    _counted("computed", counts.flops, "FLOP"),
    _counted("collectives", counts.moved, "bytes"),
    _counted("live peak", counts.peak, "bytes"),
    Column("of card", _of_card),
    Column("max tokens/s", _most_speed),
)
STEP = (  # columns of a step: its counts, and the norm of its gradients
    _counted("collectives", lambda step: sum(call.count for call in step.collectives), "calls"),
    _counted("bytes", counts.moved, "bytes"),
    _counted("FLOPs", counts.flops, "FLOP"),
    _counted("kernels", counts.kernels, "calls"),
    _counted("host reads", lambda step: sum(step.host_reads.values()), "calls"),
    _counted("memory", counts.peak, "bytes"),
    Column("gradient norm", lambda result: _cell(result.figures.gradient_norm, "{:.4g}".format)),
)
STEP_MS = Column("p50 ms", lambda result: _cell(result.figures.step_s_p50, lambda s: f"{1e3 * s:.1f}"))
"""The median time of a step. Its unit is in the heading, to keep tables narrow."""
LAUNCHES = Column("launches", lambda result: None if result.dry else _cell(len(result.runs), str))
