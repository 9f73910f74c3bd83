"""Simulates which changes of data wait are found. The tests, metric and floor are those for real launches.

The wait of a launch is a share of the step, times a log-normal factor. In one launch in 20, the wait is three
times as long, for example because another program reads from the disk.

    python -m tests.benchmarks.simulated_data_wait   # docs/evidence/statistics.md, "Data wait"
"""

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from perfsuite.results.metric import DATA_WAIT, PartOfStep
from perfsuite.results.run import Figures
from perfsuite.verdict.checks import is_negligible
from perfsuite.verdict.paired_comparison import MAX_PAIRS, decided
from perfsuite.verdict.sequential import MAX_LAUNCHES, decide, pooled_noise

DISTURBED = 0.05
"""The share of launches in which the wait is `DISTURBED_TIMES` times as long."""
DISTURBED_TIMES = 3
BASELINE = 5
CLASS = 8
"""The number of the hardware class's baselines. The noise is estimated from them."""
STEP_S = 0.5


def simulate(
    *, wait: float, scatter: float, growth: float = 0.0, trials: int = 2_000, seed: int = 0
) -> SimpleNamespace:
    """Return the shares of outcomes if the wait grows, against a baseline and in pairs.

    `wait` is the share of the step for which unchanged code waits. `growth` is the increase of this share.
    `scatter` is the standard deviation of the wait's logarithm between launches.
    """
    rng = np.random.default_rng(seed)

    def launches(count: int, more: float = 0.0) -> list[Figures]:
        factors = np.exp(scatter * rng.normal(size=count))
        factors *= np.where(rng.random(count) < DISTURBED, DISTURBED_TIMES, 1)
        waits = STEP_S * (wait * factors + more)
        steps = STEP_S * np.exp(0.005 * rng.normal(size=count)) + waits
        return [
            Figures(data_wait_s=float(waited), step_s_mean=float(step))
            for waited, step in zip(waits, steps, strict=True)
        ]

    against_baseline = Counter[str]()
    in_pairs = Counter[str]()
    for _ in range(trials):
        baselines = [launches(BASELINE) for _ in range(CLASS)]
        against_baseline[_night(baselines, launches(MAX_LAUNCHES, growth))] += 1
        in_pairs[_comparison(launches(MAX_PAIRS), launches(MAX_PAIRS, growth))] += 1
    return SimpleNamespace(
        against_baseline={outcome: count / trials for outcome, count in against_baseline.items()},
        in_pairs={outcome: count / trials for outcome, count in in_pairs.items()},
    )


def _costs(metric: PartOfStep, launches: Sequence[Figures]) -> list[float]:
    return [metric.cost(value) for launch in launches if (value := metric.of(launch)) is not None]


def _night(baselines: list[list[Figures]], today: list[Figures]) -> str:
    metric = DATA_WAIT.against(baselines[0])
    noise = pooled_noise([_costs(DATA_WAIT.against(baseline), baseline) for baseline in baselines])
    before = _costs(metric, baselines[0])
    now = _costs(metric, today)
    for used in range(1, len(now) + 1):
        decision = decide(before, now[:used], tolerance=metric.tolerance("cuda"), noise=noise)
        if decision.outcome != "undecided":
            break
    return "passed" if is_negligible(metric, decision.outcome, decision.estimate) else decision.outcome


def _comparison(a: list[Figures], b: list[Figures]) -> str:
    metric = DATA_WAIT.against(a)
    decision = decided(_costs(metric, a), _costs(metric, b), tolerance=metric.tolerance("cuda"))
    return "passed" if is_negligible(metric, decision.outcome, decision.change) else decision.outcome


def found(scatter: float, wait: float) -> float:
    """Return the smallest growth of the wait that is found 95 times in 100, as a share of the step.

    It must be found against a baseline and also in pairs.
    """
    for growth in (0.025, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5):
        shares = simulate(wait=wait, scatter=scatter, growth=growth, trials=300)
        if min(share.get("regressed", 0) for share in vars(shares).values()) >= 0.95:
            return growth
    return math.inf


if __name__ == "__main__":
    print("| wait | scatter | false alarms: baseline, pairs | inconclusive | found from |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for wait, scatter in ((0.001, 0.5), (0.01, 0.3), (0.05, 0.3), (0.2, 0.1), (0.5, 0.1)):
        same = vars(simulate(wait=wait, scatter=scatter, trials=4_000)).values()
        alarms, unsure = (
            ", ".join(f"{share.get(outcome, 0):.2%}" for share in same)
            for outcome in ("regressed", "inconclusive")
        )
        print(f"| {wait:.1%} | {scatter:.0%} | {alarms} | {unsure} | {found(scatter, wait):.1%} of a step |")
