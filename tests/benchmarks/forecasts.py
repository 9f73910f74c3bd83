"""Checks how often forecasts hold: docs/evidence/step-times.md.

python -m tests.benchmarks.forecasts                  # from the stored predictions, in seconds
python -m tests.benchmarks.forecasts record FILE      # predict the cases of one H100 again (10 minutes)
python -m tests.benchmarks.forecasts time             # measure what forecasts of 12 cases cost (3 minutes)

`record` writes the predictions without reading any measurement, and prints the digest of the file.
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench_cases.predicted import digest
from perfsuite import documents
from perfsuite.analysis.step_time.forecast import MeasuredCase, forecast, host_can_set_the_pace, seconds_at
from perfsuite.dry.driver import dry_run
from perfsuite.errors import PredictionError
from perfsuite.results.amounts import duration
from perfsuite.results.dry_facts import DryFacts, Forecast
from tests.bench_cases.forecast_cases import CLUSTERS, PREDICTED, PredictedFile, cases_of, one_h100
from tests.benchmarks import show_table
from tests.gpu.test_day import SCRIPT, WIDE

TIMED = 12  # number of cases whose forecasts are timed
KNOWN = (1, 2, 3)  # a forecast is made from this many measured cases, and also from all other cases


class Tried(NamedTuple):
    """The forecast of a case from some other cases of its cluster."""

    case: MeasuredCase
    forecast: Forecast | None
    reason: str = ""  # why there is no forecast

    @property
    def holds(self) -> bool:
        """Whether the measurement is in the interval."""
        return self.forecast is not None and self.forecast.holds(self.case.step_s)


def tries(cases: Sequence[MeasuredCase], number: int) -> Iterator[Tried]:
    """For each case and each choice of `number` other cases, yield the forecast from these cases."""
    for case in cases:
        others = [other for other in cases if other is not case]
        for chosen in itertools.combinations(others, number):
            try:
                yield Tried(case, forecast(case.expected, chosen))
            except PredictionError as error:
                yield Tried(case, None, str(error))


def record(file: Path) -> None:
    """Make dry runs of the cases for one H100, and write the predictions."""
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


def time_forecasts() -> None:
    """Run cases for one H100 dry, forecast each from all others, and print the CPU seconds of each part."""
    measured = {case.case_id: case for case in one_h100()}
    chosen = [case for case in WIDE if case.id in measured][:TIMED]
    before = os.times()
    for case in chosen:
        with tempfile.TemporaryDirectory() as directory:
            dry_run(case, Path(directory))
    after = os.times()
    made = 0
    for case in chosen:
        others = [measured[other] for other in measured if other != case.id]
        with contextlib.suppress(PredictionError):
            forecast(measured[case.id].expected, others)
            made += 1
    fitted = os.times()
    dry_s = after.children_user + after.children_system - before.children_user - before.children_system
    replay_s = after.user + after.system - before.user - before.system
    fit_s = fitted.user + fitted.system - after.user - after.system
    headings = ("cases", "forecasts", "dry runs", "reading and replaying", "fitting")
    seconds = (f"{dry_s:.0f} s", f"{replay_s:.1f} s", f"{max(fit_s, 0.0):.2f} s")
    show_table(headings, [(str(len(chosen)), str(made), *seconds)])


def _row(one: Tried) -> tuple[str, ...]:
    case = one.case
    error = case.expected.step_s / case.step_s - 1
    slower_host = seconds_at(case.expected, 2) / seconds_at(case.expected, 1) - 1
    ends = (case.case_id, duration(case.step_s), f"{error:+.1%}", f"{slower_host:+.0%}")
    if one.forecast is None:
        return (*ends, "-", one.reason)
    interval = f"{duration(one.forecast.low_s)} to {duration(one.forecast.high_s)}"
    return (*ends, interval, "yes" if one.holds else "no")


def _coverage(cluster: str, cases: Sequence[MeasuredCase], host: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rows for cases whose pace the host can set, or the rows for all other cases.

    The forecasts are made from all cases of the cluster.
    """
    pace = "the host" if host else "the GPU"
    numbers = [number for number in KNOWN if number < len(cases) - 1]
    for number in (*numbers, len(cases) - 1):
        tried = [one for one in tries(cases, number) if host_can_set_the_pace(one.case.expected) == host]
        widths = [one.forecast.high_s / one.forecast.low_s for one in tried if one.forecast is not None]
        if widths:
            held = sum(one.holds for one in tried)
            width = median(widths) ** 0.5 - 1
            shown = (str(number), str(len(tried)), str(len(widths)), f"{held} ({held / len(widths):.0%})")
            yield cluster, pace, *shown, f"±{width:.1%}"


def main() -> None:
    """Print how many forecasts held, and the forecasts for one H100. A command is run instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", choices=("record", "time"))
    parser.add_argument("file", nargs="?", type=Path, default=PREDICTED)
    given = parser.parse_args()
    if given.command == "record":
        record(given.file)
        return
    if given.command == "time":
        time_forecasts()
        return
    tables = {**{cluster: cases_of(cluster) for cluster in CLUSTERS}, "one H100": one_h100()}
    show_table(
        ("cluster", "pace", "measured cases", "other cases", "forecasts", "held", "median interval"),
        [
            row
            for name, cases in tables.items()
            for host in (False, True)
            for row in _coverage(name, cases, host)
        ],
    )
    print()
    cases = tables["one H100"]
    show_table(
        ("case", "measured", "error", "with half the host's speed", "forecast from the others", "held"),
        map(_row, tries(cases, len(cases) - 1)),
    )


if __name__ == "__main__":
    main()
