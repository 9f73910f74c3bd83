"""Simulates which changes of spans are found. The tests, metric and floor are those for real launches.

The seconds of a launch are a constant times a log-normal factor. One launch in 20 takes twice as long, for
example because the system's cache has lost its files.

    python -m tests.benchmarks.simulated_spans   # docs/evidence/statistics.md, "Spans"
"""

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from perfsuite.results.metric import SpanSeconds, span_seconds
from perfsuite.results.run import Figures
from perfsuite.verdict.checks import LOOKS_CHANGED, is_negligible
from perfsuite.verdict.paired_comparison import MAX_PAIRS, decided
from perfsuite.verdict.sequential import MAX_LAUNCHES, decide, pooled_noise

DISTURBED = 0.05
"""The share of launches that take `DISTURBED_TIMES` as long."""
DISTURBED_TIMES = 2
BASELINE = 5
CLASS = 8
"""The number of baselines of the hardware class from which the noise is estimated."""
SPAN = "start-up: imports"


def simulate(
    *, seconds: float, scatter: float, growth_s: float = 0.0, trials: int = 2_000, seed: int = 0
) -> SimpleNamespace:
    """Return the shares of outcomes and the number of launches if a span grows by `growth_s` seconds.

    Each share is given against a baseline and in pairs. `scatter` is the standard deviation of the
    logarithm of a launch's seconds.
    """
    rng = np.random.default_rng(seed)

    def launches(count: int, more_s: float = 0.0) -> list[Figures]:
        factors = np.exp(scatter * rng.normal(size=count))
        factors *= np.where(rng.random(count) < DISTURBED, DISTURBED_TIMES, 1)
        return [Figures(spans_s={SPAN: float(duration_s)}) for duration_s in (seconds + more_s) * factors]

    against_baseline = Counter[str]()
    in_pairs = Counter[str]()
    used = 0
    for _ in range(trials):
        baselines = [launches(BASELINE) for _ in range(CLASS)]
        outcome, needed = _night(baselines, launches(MAX_LAUNCHES, growth_s))
        against_baseline[outcome] += 1
        used += needed
        in_pairs[_comparison(launches(MAX_PAIRS), launches(MAX_PAIRS, growth_s))] += 1
    return SimpleNamespace(
        against_baseline={outcome: count / trials for outcome, count in against_baseline.items()},
        in_pairs={outcome: count / trials for outcome, count in in_pairs.items()},
        launches=used / trials,
    )


def _costs(metric: SpanSeconds, launches: Sequence[Figures]) -> list[float]:
    return [metric.cost(value) for launch in launches if (value := metric.of(launch)) is not None]


def _night(baselines: list[list[Figures]], today: list[Figures]) -> tuple[str, int]:
    metric = span_seconds(SPAN).against(baselines[0])
    noise = pooled_noise([_costs(metric, baseline) for baseline in baselines])
    before = _costs(metric, baselines[0])
    now = _costs(metric, today)
    for used in range(1, len(now) + 1):
        decision = decide(before, now[:used], tolerance=metric.tolerance("cuda"), noise=noise)
        allowed = metric.bound(metric.tolerance("cuda"))
        if (
            decision.outcome != "undecided"
            or abs(metric.change(decision.estimate)) <= LOOKS_CHANGED * allowed
        ):
            break
    is_small = is_negligible(metric, decision.outcome, decision.estimate)
    return ("passed" if is_small else decision.outcome), used


def _comparison(a: list[Figures], b: list[Figures]) -> str:
    metric = span_seconds(SPAN).against(a)
    decision = decided(_costs(metric, a), _costs(metric, b), tolerance=metric.tolerance("cuda"))
    return "passed" if is_negligible(metric, decision.outcome, decision.change) else decision.outcome


def found(scatter: float, seconds: float) -> float:
    """Return the smallest growth in seconds that is found 95 times in 100, in pairs and against a
    baseline.
    """
    for growth_s in (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50):
        shares = simulate(seconds=seconds, scatter=scatter, growth_s=growth_s, trials=200)
        both = (shares.against_baseline, shares.in_pairs)
        if min(share.get("regressed", 0) for share in both) >= 0.95:
            return growth_s
    return math.inf


if __name__ == "__main__":
    print("| span | scatter | false alarms: baseline, pairs | launches | found from |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for seconds, scatter in ((0.05, 0.5), (0.5, 0.2), (5, 0.05), (5, 0.1), (50, 0.05), (50, 0.1)):
        same = simulate(seconds=seconds, scatter=scatter, trials=4_000)
        both = (same.against_baseline, same.in_pairs)
        alarms = ", ".join(f"{share.get('regressed', 0):.2%}" for share in both)
        least = found(scatter, seconds)
        print(f"| {seconds:g} s | {scatter:.0%} | {alarms} | {same.launches:.1f} | {least:g} s |")
