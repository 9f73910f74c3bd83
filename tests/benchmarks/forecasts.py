"""Checks how often forecasts hold: docs/evidence/step-times.md.

python -m tests.benchmarks.forecasts                  # from the stored predictions, in seconds
python -m tests.benchmarks.forecasts record FILE      # predict the cases of one H100 again (10 minutes)

`record` writes the predictions without reading any measurement, and prints the digest of the file.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench_cases.predicted import digest
from perfsuite import documents
from perfsuite.analysis.step_time.forecast import MeasuredCase, forecast
from perfsuite.dry.driver import dry_run
from perfsuite.errors import PredictionError
from perfsuite.results.dry_facts import DryFacts, Forecast
from tests.bench_cases.forecast_cases import CLUSTERS, ONE_H100, PREDICTED, PredictedFile
from tests.benchmarks import show_table
from tests.gpu.test_day import SCRIPT, WIDE


class Tried(NamedTuple):
    """The forecast of a case from all other cases of its cluster."""

    case: MeasuredCase
    forecast: Forecast | None
    reason: str = ""  # why there is no forecast

    @property
    def holds(self) -> bool:
        """Whether the measurement is in the interval."""
        return self.forecast is not None and self.forecast.holds(self.case.step_s)


def leave_one_out(cases: Sequence[MeasuredCase], most: int | None = None) -> Iterator[Tried]:
    """Yield the forecast of each case from the others, or from the first `most` others."""
    for case in cases:
        others = [other for other in cases if other is not case][:most]
        try:
            yield Tried(case, forecast(case.expected, others))
        except PredictionError as error:
            yield Tried(case, None, str(error))


def record(file: Path) -> None:
    """Run the cases of one H100 dry, and write the predictions."""
    predicted: dict[str, DryFacts] = {}
    for case in WIDE:
        if case.compile or case == SCRIPT:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            run = dry_run(case, Path(directory))
        facts = run.dry_facts or DryFacts(no_expected=str(run.failure))
        predicted[case.id] = DryFacts(expected=facts.expected, no_expected=facts.no_expected)
        print(f"{case.id}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    documents.write(file, PredictedFile(predicted=predicted))
    print(digest(file))


def _rows(cluster: str, tries: Sequence[Tried]) -> Iterator[tuple[str, ...]]:
    for one in tries:
        measured = f"{1e3 * one.case.step_s:,.1f}"
        if one.forecast is None:
            yield cluster, one.case.case_id, measured, "-", one.reason
        else:
            interval = f"{1e3 * one.forecast.low_s:,.1f} to {1e3 * one.forecast.high_s:,.1f}"
            yield cluster, one.case.case_id, measured, interval, "held" if one.holds else "missed"


def _coverage(cluster: str, tries: Sequence[Tried]) -> tuple[str, ...]:
    made = [one.forecast for one in tries if one.forecast is not None]
    if not made:
        return cluster, str(len(tries)), "0", "-", "-"
    width = median(one.high_s / one.low_s for one in made)
    held = sum(one.holds for one in tries)
    return cluster, str(len(tries)), str(len(made)), str(held), f"+-{width**0.5 - 1:.1%}"


def main() -> None:
    """Print each forecast and how many held, or record the predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", choices=("record",))
    parser.add_argument("file", nargs="?", type=Path, default=PREDICTED)
    given = parser.parse_args()
    if given.command == "record":
        record(given.file)
        return
    tables = {**CLUSTERS, "one H100": ONE_H100}
    tries = {name: [*leave_one_out(cases)] for name, cases in tables.items()}
    show_table(
        ("cluster", "case", "measured, ms", "forecast, ms", "held"),
        (row for name, of_cluster in tries.items() for row in _rows(name, of_cluster)),
    )
    print()
    show_table(
        ("cluster", "cases", "forecasts", "held", "median interval"),
        (_coverage(name, of_cluster) for name, of_cluster in tries.items()),
    )


if __name__ == "__main__":
    main()
