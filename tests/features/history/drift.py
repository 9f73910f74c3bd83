"""Measures how soon a change of level is found, and how often there is a false alarm.

Compares perfsuite with asv's detector (on its regressions page). If an interpreter with Apache Otava is
given, Otava is compared as well. It needs a separate interpreter, because its pinned packages conflict with
torch's. Every detector gets the same series and reports changes of at least 0.5%.

    python -m tests.features.history.drift [--series 60] [--otava /path/to/python]
"""

import argparse
import json
import math
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median, quantiles

from asv.step_detect import detect_regressions, detect_steps

from perfsuite.features.history import changepoint
from tests.benchmarks import show_table

MIN_CHANGE = 0.005
BEFORE = 60
AFTER = 120
YEAR = 365
NEAR = 14
"""A step counts as found if it is reported at most this number of nights too early or too late."""
STEPS = [(noise, step) for noise in (0.005, 0.01, 0.02) for step in (0.01, 0.02, 0.03)]
DRIFT_PER_WEEK = 0.003

Detector = Callable[[Sequence[float]], list[tuple[int, float]]]
"""A function that takes a series and returns the index and the relative size of each change."""

OTAVA = """
import json, sys
from otava.analysis import compute_change_points
for line in sys.stdin:
    series, p = json.loads(line)
    points, _ = compute_change_points(series, window_len=50, max_pvalue=p, min_magnitude=0.005)
    print(json.dumps([[int(c.index), float(c.stats.forward_rel_change())] for c in points]), flush=True)
"""


def ours(series: Sequence[float]) -> list[tuple[int, float]]:
    """Detect with `perfsuite history trend`."""
    return [
        (change.index, change.relative) for change in changepoint.change_points(series, min_change=MIN_CHANGE)
    ]


def asvs(series: Sequence[float]) -> list[tuple[int, float]]:
    """Detect with asv's regressions page."""
    _, _, jumps = detect_regressions(detect_steps(list(series)), MIN_CHANGE)
    return [(place, after / before - 1) for _, place, before, after in jumps or []]


def otavas(process: subprocess.Popen[str], p: float, series: Sequence[float]) -> list[tuple[int, float]]:
    """Detect with Otava, using the p-value `p` and Otava's default window of 50."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([list(series), p]), file=process.stdin, flush=True)
    return [(index, relative) for index, relative in json.loads(process.stdout.readline())]


def nights(level: Callable[[int], float], count: int, noise: float, seed: int) -> list[float]:
    """Return a series of `count` nights with this level and noise."""
    luck = random.Random(seed)
    return [level(night) * math.exp(noise * luck.gauss(0, 1)) for night in range(count)]


def looks(first: int, last: int) -> Iterator[int]:
    """Yield the nights on which somebody looks for changes: daily for two weeks, then every third night."""
    yield from range(first, min(first + 14, last + 1))
    yield from range(first + 14, last + 1, 3)


def false_alarms(detect: Detector, count: int) -> float:
    """Return the share of series without a change for which a change is reported within a year."""
    alarms = 0
    for seed in range(count):
        series = nights(lambda night: 1, YEAR, 0.01, seed)
        alarms += any(relative > 0 for end in looks(6, YEAR) for _, relative in detect(series[:end]))
    return alarms / count


def delays(detect: Detector, count: int, noise: float, step: float) -> list[float]:
    """Return how many nights pass until a step is reported in the right place; infinity if it never is."""
    delays_found = []
    for seed in range(count):
        series = nights(lambda night: 1 + step * (night >= BEFORE), BEFORE + AFTER, noise, 1000 + seed)
        delays_found.append(first(detect, series, lambda place: abs(place - BEFORE) <= NEAR))
    return delays_found


def drift_delays(detect: Detector, count: int, noise: float) -> list[float]:
    """Return how many nights pass until any part of a slow drift is reported."""
    delays_found = []
    for seed in range(count):
        series = nights(
            lambda night: (1 + DRIFT_PER_WEEK) ** (max(night - BEFORE, 0) / 7),
            BEFORE + AFTER,
            noise,
            2000 + seed,
        )
        delays_found.append(first(detect, series, lambda place: place > BEFORE - NEAR))
    return delays_found


def first(detect: Detector, series: Sequence[float], right: Callable[[int], bool]) -> float:
    """Return how many nights pass until a regression is reported in the right place."""
    for end in looks(BEFORE + 1, len(series)):
        if any(relative > 0 and right(place) for place, relative in detect(series[:end])):
            return end - BEFORE
    return math.inf


def summary(delays_found: Sequence[float]) -> str:
    """Return a text with the median, the 95th percentile, and the share of changes that are never found."""
    high = (
        quantiles(delays_found, n=20)[-1]
        if max(delays_found) < math.inf
        else sorted(delays_found)[int(0.95 * len(delays_found))]
    )
    never = sum(delay == math.inf for delay in delays_found) / len(delays_found)
    return " / ".join("never" if math.isinf(x) else f"{x:.0f}" for x in (median(delays_found), high)) + (
        f" ({never:.0%} never)" if never else ""
    )


def main() -> None:
    """Print the table of all detectors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=60)
    parser.add_argument("--otava", help="an interpreter that has apache-otava")
    chosen = parser.parse_args()
    detectors: dict[str, Detector] = {"perfsuite": ours, "asv": asvs}
    process = None
    if chosen.otava:
        process = subprocess.Popen(
            [chosen.otava, "-c", OTAVA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        detectors |= {f"Otava, p = {p:g}": partial(otavas, process, p) for p in (0.001, 0.00001)}
    count = chosen.series
    print(f"{count} series each; nights until found, median / 95%; looking nightly, later every third night")
    show_table(["", *detectors], rows([*detectors.values()], count))
    if process is not None:
        process.communicate()


def rows(detectors: Sequence[Detector], count: int) -> Iterator[list[str]]:
    """Yield the rows of the table. Each has a cell for each detector."""
    yield ["false alarm within a year", *(f"{false_alarms(detect, count):.0%}" for detect in detectors)]
    for noise, step in STEPS:
        cells = [summary(delays(detect, count, noise, step)) for detect in detectors]
        yield [f"step of {step:.0%}, noise {noise:.1%}", *cells]
    for noise in (0.005, 0.01, 0.02):
        cells = [summary(drift_delays(detect, count, noise)) for detect in detectors]
        yield [f"drift of {DRIFT_PER_WEEK:.1%} a week, noise {noise:.1%}", *cells]


if __name__ == "__main__":
    main()
