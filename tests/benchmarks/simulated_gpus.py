"""Simulates how many healthy machines are refused because their GPUs differ.

Run it as `python -m tests.benchmarks.simulated_gpus`. The speed of the chips is normally distributed. Each
launch measures this speed with an additional scatter of `PROBE_SD`.
"""

import numpy as np

from perfsuite.analysis.health import NOTED_LAG, UNEQUAL_LAG
from perfsuite.verdict.comparability import DEVICE_PROBE_SLOWER

MACHINES = 100_000
GPUS = 8
LAUNCHES = 5  # launches of a baseline
PROBE_SD = 0.01
CHIP_SDS = (0.01, 0.02, 0.03, 0.04)


def slowest_shares(chips: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Measure machines once. Return the slowest GPU's rate as a share of the fastest GPU's."""
    rates = chips * (1 + PROBE_SD * random.standard_normal(chips.shape))
    shares: np.ndarray = rates.min(axis=1) / rates.max(axis=1)
    return shares


def main() -> None:
    """Print how many machines have a GPU that lags, and how many are refused, without and with a baseline."""
    random = np.random.default_rng(0)
    print("| scatter of the chips | lag above 10% | refused without a baseline | refused with one |")
    print("| --- | --- | --- | --- |")
    for sd in CHIP_SDS:
        chips = 1 + sd * random.standard_normal((MACHINES, GPUS))
        lags = 1 - chips.min(axis=1) / chips.max(axis=1)
        tonight = slowest_shares(chips, random)
        usual = np.median([slowest_shares(chips, random) for _ in range(LAUNCHES)], axis=0)
        with_baseline = tonight < (1 - DEVICE_PROBE_SLOWER) * usual
        shares = (lags > NOTED_LAG, lags > UNEQUAL_LAG, with_baseline)
        print(f"| {sd:.0%} | {' | '.join(f'{share.mean():.2%}' for share in shares)} |")


if __name__ == "__main__":
    main()
