"""Simulates what a paired comparison detects on a drifting machine, with the code that judges real pairs.

One simulated day is log(seconds) of 24 launches in a row. These have normal noise and the drift of the
machine, and one launch in 20 is 10% slower. A drift of d is a random walk with standard deviation d after 24
launches. In addition, the machine has periods of about 6 launches in which it is 5% to 30% slower or faster.
At each launch, such a period begins with the probability 1.4 d. The effect of arm B is added to the launches
of arm B. If a machine has two speeds, each launch has either speed with the same probability.

If launches follow a probe (slow down together with it), log(probe seconds) is normal noise. This noise times
an exponent is added to log(seconds) of the launch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from perfsuite.verdict.paired_comparison import MAX_PAIRS, PairedDecision, decided, order
from tests.benchmarks.simulated_gate import Table, rows

DISTURBED = 0.05
"""The share of launches that are slow for a reason other than the drift."""
DISTURBED_BY = math.log(1.1)
"""The slowdown of these launches, in log(seconds)."""
STEPS_FOR_DRIFT = 1.4
"""This factor times the drift is the share of launches at which a slower or faster period begins."""
STEP_LAUNCHES = 6
"""The average number of launches in such a period."""
STEP_SIZES = (0.05, 0.30)
"""The smallest and the largest relative change of speed in such a period."""

FOLLOWING: dict[str, Any] = {
    "sigma": 0.052,
    "drift": 0.0,
    "probe_sigma": 0.129,
    "exponent": 0.52,
    "tolerance": 0.1,
    "changes": (0.0, 0.1),
}
"""A machine whose launches follow its probe. The scatter is that of 27 comparisons of a DDP script on two
shared cores."""


def simulate(
    *,
    sigma: float,
    drift: float = 0.015,
    tolerance: float = 0.03,
    changes: Sequence[float] = (0.0, 0.01, 0.02, 0.03, 0.05),
    two_speeds: float = 0.0,
    probe_sigma: float = 0.0,
    exponent: float = 0.0,
    corrects: bool = True,
    slows_probe: bool = False,
    max_pairs: int = MAX_PAIRS,
    disturbed: float = DISTURBED,
    trials: int = 20_000,
    seed: int = 0,
) -> Table:
    """Simulate one comparison. All changes use the same days. Equal arguments give equal tables.

    `sigma` is the standard deviation of log(seconds) between launches. `drift` is the standard deviation of
    the machine's random walk after 24 launches. `two_speeds` is the slowdown of the slower launches on a
    machine with two speeds: 0.1 is 10%. `probe_sigma` is the standard deviation of log(probe seconds). If it
    is not 0, the launches follow the probe with the `exponent`. If `corrects`, the judge gets the probe and
    corrects for it. If `slows_probe`, arm B changes the probe as much as its steps.
    """
    counts = {change: Counter[str]() for change in changes}
    nearest = min(changes, key=abs)
    detectable = []
    launches = 2 * max_pairs
    alone = days(sigma, drift, launches, two_speeds=two_speeds, disturbed=disturbed, trials=trials, seed=seed)
    for logs, probes in _followed(alone, probe_sigma, exponent, launches, seed):
        known_probes = probes if probe_sigma and corrects else None
        for change, count in counts.items():
            decision = judge_day(
                logs,
                change=change,
                tolerance=tolerance,
                max_pairs=max_pairs,
                probes=known_probes,
                probe_change=change if slows_probe else 0.0,
            )
            count[decision.outcome] += 1
            count["mean_pairs"] += decision.pairs
            if change == nearest:
                detectable.append(decision.minimum_detectable)
    table_rows = rows(counts, trials, "regressed improved passed inconclusive mean_pairs")
    return Table(rows=table_rows, minimum_detectable=median(detectable))


def judge_day(
    logs: Sequence[float],
    *,
    change: float,
    tolerance: float,
    max_pairs: int = MAX_PAIRS,
    probes: Sequence[float] | None = None,
    probe_change: float = 0.0,
) -> PairedDecision:
    """Judge pair by pair, like a real comparison.

    `logs` are log(seconds) of launches in a row, and `probes` are log(seconds) of the probe in each launch.
    Arm B adds `change` to its launches and `probe_change` to its probes.
    """
    a, b = arms(logs, max_pairs, change)
    beside = None if probes is None else arms(probes, max_pairs, probe_change)
    return decided(a, b, tolerance=tolerance, max_pairs=max_pairs, probes=beside)


def arms(logs: Sequence[float], pairs: int, change: float) -> tuple[list[float], list[float]]:
    """Return the seconds of each arm's launches, including the change of arm B.

    `logs` are log(seconds) of launches in a row.
    """
    seconds: dict[str, list[float]] = {"a": [], "b": []}
    for pair in range(pairs):
        for arm, log in zip(order(pair), logs[2 * pair : 2 * pair + 2], strict=True):
            seconds[arm].append(math.exp(log))
    return seconds["a"], [(1 + change) * second for second in seconds["b"]]


def days(
    sigma: float,
    drift: float,
    launches: int,
    *,
    two_speeds: float = 0.0,
    disturbed: float = DISTURBED,
    steps_for_drift: float = STEPS_FOR_DRIFT,
    trials: int,
    seed: int,
) -> Iterator[list[float]]:
    """For each trial, yield log(seconds) of successive launches of unchanged code."""
    rng = np.random.default_rng(seed)
    walk = drift / math.sqrt(2 * MAX_PAIRS)
    for _ in range(trials):
        logs = sigma * rng.standard_normal(launches)
        logs += np.cumsum(walk * rng.standard_normal(launches))
        logs += DISTURBED_BY * (rng.random(launches) < disturbed)
        begins = rng.random(launches) < steps_for_drift * drift
        lengths = rng.geometric(1 / STEP_LAUNCHES, launches)
        sizes = rng.uniform(*STEP_SIZES, launches) * rng.choice((-1, 1), launches)
        ends = 0
        for launch in np.flatnonzero(begins):
            if launch >= ends:  # no period begins inside another one
                ends = launch + lengths[launch]
                logs[launch:ends] += np.log1p(sizes[launch])
        if two_speeds:
            logs += math.log1p(two_speeds) * (rng.random(launches) < 0.5)
        yield logs.tolist()


def _followed(
    alone: Iterable[list[float]], probe_sigma: float, exponent: float, launches: int, seed: int
) -> Iterator[tuple[list[float], list[float]]]:
    """Make each day's launches follow a probe, and yield them with log(probe seconds)."""
    rng = np.random.default_rng([seed, 1])
    for logs in alone:
        probes = probe_sigma * rng.standard_normal(launches)
        yield (np.array(logs) + exponent * probes).tolist(), probes.tolist()
