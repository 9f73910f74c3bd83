"""Simulates how often a common change of several cases is recognised, using the code that reports it.

The change of each case is the sum of the common change, the case's own effect, and an error of 0.2, 0.4 or
0.8%.

    python -m tests.benchmarks.simulated_common_change   # docs/evidence/statistics.md
"""

import random
from dataclasses import dataclass

from perfsuite.verdict.common_change import Estimate, common_change
from tests.benchmarks import show_table

ERRORS = (0.002, 0.004, 0.008)
REGRESSION = 0.06
"""An additional change of one case, in logarithms."""
CASES = (4, 5, 10, 20)
NIGHTS = ((0.0, 0.0), (0.0, 0.005), (0.01, 0.002), (0.01, 0.01), (0.03, 0.005), (0.05, 0.01))
"""Common change and standard deviation of the cases' own effects, in logarithms."""


@dataclass(frozen=True)
class Shares:
    """Shares of the nights, from 0 to 1."""

    shared: float  # the change is reported as shared
    covered: float  # the 99% interval contains the common change
    apart: float  # the first case is reported as different


def simulate(
    *, cases: int, common: float, scatter: float, regression: float = 0.0, nights: int = 2_000, seed: int = 0
) -> Shares:
    """Simulate nights. `regression` is added to the change of the first case. All changes are logarithms."""
    draw = random.Random(seed)
    shared = covered = apart = 0
    for _ in range(nights):
        changes = {}
        for case in range(cases):
            error = draw.choice(ERRORS)
            change = common + draw.gauss(0, scatter) + draw.gauss(0, error)
            changes[str(case)] = Estimate(change + (0 if case else regression), error)
        estimate = common_change(changes)
        if estimate is None:
            continue
        low, high = estimate.interval
        shared += estimate.is_shared
        covered += low <= common <= high
        apart += "0" in estimate.apart
    return Shares(shared / nights, covered / nights, apart / nights)


def main() -> None:
    """Print the table."""
    rows = []
    for cases in CASES:
        for common, scatter in NIGHTS:
            alone = simulate(cases=cases, common=common, scatter=scatter)
            beside = simulate(cases=cases, common=common, scatter=scatter, regression=REGRESSION)
            shares = (alone.shared, alone.covered, beside.shared, beside.apart, alone.apart)
            rows.append(
                [str(cases), f"{common:.1%}", f"{scatter:.1%}", *(f"{share:.1%}" for share in shares)]
            )
    columns = [
        "cases",
        "common",
        "own",
        "shared",
        "covered",
        "shared, with 6%",
        "6% found",
        "apart by chance",
    ]
    show_table(columns, rows)


if __name__ == "__main__":
    main()
