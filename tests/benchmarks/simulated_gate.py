"""Simulates what the gate detects, with the same `decide` loop that judges real launches.

Draws baselines and launches, passes them to `decide` launch by launch until it decides, and counts the
outcomes. For comparison, it also counts what most suites would report. They compare one sample with one
baseline sample, and use a fixed threshold.

    python -m tests.benchmarks.simulated_gate   # docs/evidence/statistics.md, "What a gate can detect"
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from perfsuite.verdict.robust import SCALE_EFFICIENCY
from perfsuite.verdict.sequential import MAX_LAUNCHES, Decision, Noise, decide, pooled_noise

FIXED_THRESHOLD = 0.05
"""The relative slowdown at which suites with a fixed threshold would fail."""
SHARES = "passed improved regressed inconclusive mean_launches fixed_5_percent fixed_tolerance"


class Table(SimpleNamespace):
    """A simulated judge. `rows` has one row for each `true` change, with shares of the trials from 0 to 1.

    A change of +0.03 is 3% more seconds per step. `fixed_5_percent` is the share of trials in which one
    sample is more than 5% above one baseline sample. `fixed_tolerance` is the same share with the tolerance
    instead of 5%. `minimum_detectable_drop` and `blind` are from the trials with the change nearest to 0.
    `minimum_detectable_drop` is a median. `blind` is the share of trials in which the decision says that the
    gate is blind.
    """

    def row(self, true: float) -> SimpleNamespace:
        """Return the row of one simulated change. Raises KeyError if there is none."""
        found: dict[float, SimpleNamespace] = {row.true: row for row in self.rows}
        return found[true]

    def __str__(self) -> str:
        """Return a Markdown table with shares in percent."""
        heads = ["true drop", "regressed", "inconclusive", "passed", "improved", "launches"]
        heads += ["fixed 5%", "fixed at tolerance"]
        lines = [self.title, "", f"| {' | '.join(heads)} |", "| ---: " * len(heads) + "|"]
        for row in self.rows:
            shares = [row.regressed, row.inconclusive, row.passed, row.improved]
            cells = [f"{100 * row.true:g}%", *(f"{100 * share:.3f}" for share in shares)]
            cells.append(f"{row.mean_launches:.2f}")
            cells += [f"{100 * share:.2f}" for share in (row.fixed_5_percent, row.fixed_tolerance)]
            lines.append(f"| {' | '.join(cells)} |")
        drop = 100 * self.minimum_detectable_drop
        blind = 100 * self.blind
        lines += ["", f"minimum detectable drop {drop:.2f}% (median), blind in {blind:.1f}%"]
        return "\n".join(lines)


def simulate(
    *,
    sigma: float,
    tolerance: float = 0.03,
    baseline_launches: int = 10,
    pooled_degrees: int | None = 30,
    drops: Sequence[float] = (0.0, 0.01, 0.02, 0.03, 0.05),
    max_launches: int = MAX_LAUNCHES,
    is_contaminated: bool = False,
    session_sigma: float = 0.0,
    known_session_sigma: float = 0.0,
    trials: int = 20_000,
    seed: int = 0,
) -> Table:
    """Simulate one gate, with the same random launches for all `drops`. Equal arguments give equal tables.

    log(seconds) is normal with standard deviation `sigma`. If `is_contaminated`, log(seconds) is `sigma`
    times Student's t with 3 degrees of freedom, and one launch in 20 is 10% slower, also in baselines.
    `pooled_degrees` is the number of degrees of freedom of the class's noise. Enough baselines are drawn to
    reach this number. With None, the noise is estimated from one baseline alone. All of today's launches
    share a shift in log(seconds) with standard deviation `session_sigma`. The gate assumes that this standard
    deviation is `known_session_sigma`.
    """
    groups = _groups(baseline_launches, pooled_degrees)
    shape = groups, baseline_launches
    draws = _draws(sigma, shape, max_launches, session_sigma, trials, seed, is_contaminated=is_contaminated)
    outcomes = {drop: Counter[str]() for drop in drops}
    nearest = min(drops, key=abs)
    detectable = []
    blind = 0
    for baselines, unchanged in draws:
        noise = replace(pooled_noise(baselines), session_sigma=known_session_sigma)
        for drop, count in outcomes.items():
            launches = [seconds * (1 + drop) for seconds in unchanged]
            decision = in_turn(baselines[0], launches, tolerance=tolerance, noise=noise)
            _add(count, decision, single=launches[0] / baselines[0][0] - 1)
            if drop == nearest:
                detectable.append(decision.minimum_detectable_drop)
                blind += decision.blind
    scatter = "contaminated" if is_contaminated else "normal"
    return Table(
        title=f"sigma {100 * sigma:g}% ({scatter}), tolerance {100 * tolerance:g}%, "
        f"{groups} baselines of {baseline_launches}, at most {max_launches} launches, "
        f"{trials} trials",
        rows=rows(outcomes, trials, SHARES),
        minimum_detectable_drop=median(detectable),
        blind=blind / trials,
    )


def in_turn(
    baseline: Sequence[float], available: Sequence[float], *, tolerance: float, noise: Noise
) -> Decision:
    """Judge launch by launch, like a real session, until there is a decision or no launch is left."""
    for used in range(1, len(available) + 1):
        decision = decide(
            baseline, available[:used], tolerance=tolerance, noise=noise, max_launches=len(available)
        )
        if decision.outcome != "undecided":
            break
    return decision


def _add(count: Counter[str], decision: Decision, *, single: float) -> None:
    """Count a decision. `single` is the relative change from one baseline launch to one launch of today."""
    count[decision.outcome] += 1
    count["mean_launches"] += decision.launches_used
    count["fixed_5_percent"] += single > FIXED_THRESHOLD
    count["fixed_tolerance"] += single > decision.tolerance


def _groups(baseline_launches: int, pooled_degrees: int | None) -> int:
    """Return the number of baselines whose noise has about `pooled_degrees` degrees of freedom."""
    if pooled_degrees is None:
        return 1
    groups = round(pooled_degrees / (SCALE_EFFICIENCY * (baseline_launches - 1)))
    return max(groups, 2 if baseline_launches == 2 else 1)


def _draws(
    sigma: float,
    shape: tuple[int, int],
    launches: int,
    session_sigma: float,
    trials: int,
    seed: int,
    *,
    is_contaminated: bool,
) -> Iterator[tuple[list[list[float]], list[float]]]:
    """For each trial, yield the seconds of the class's baselines and of today's launches.

    The case's own baseline is the first. `shape` is (number of baselines, launches in each).
    """
    rng = np.random.default_rng(seed)

    def scatter(*size: int) -> Any:
        if not is_contaminated:
            return rng.normal(0.0, sigma, size)
        return sigma * rng.standard_t(3, size) + math.log(1.1) * (rng.random(size) < 1 / 20)

    for _ in range(trials):
        baselines = scatter(*shape)
        today = scatter(launches) + session_sigma * rng.normal()
        yield np.exp(baselines).tolist(), np.exp(today).tolist()


def rows(counts: Mapping[float, Counter[str]], trials: int, names: str) -> list[SimpleNamespace]:
    """Return one row for each change. Its values are the counts divided by the number of trials."""
    return [
        SimpleNamespace(true=change, **{name: count[name] / trials for name in names.split()})
        for change, count in counts.items()
    ]


if __name__ == "__main__":
    for each in (0.003, 0.01, 0.02):
        print(f"{simulate(sigma=each)}\n")
