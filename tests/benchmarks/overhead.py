"""What measuring costs: the same training loop bare and under the clock, in pairs, alternating.

The bare loop is timed from outside, as a whole. Under the clock the step times are those that the recorder
reports; the probe and the bookkeeping between steps are not in them, and must not slow the steps down either.
It is the loop that `perfsuite doctor` runs.
"""

from __future__ import annotations

from statistics import quantiles

import torch

from perfsuite.worker.doctor_probe import STEPS, clock_facts

PAIRS = 40


def main() -> None:
    """Print the median ratio of the pairs."""
    ratios = clock_facts(torch.device("cpu"), pairs=PAIRS).overhead
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    print(
        f"step time measured / bare: median {middle:.4f}, "
        f"middle half {low:.4f} to {high:.4f}, {PAIRS} pairs of {STEPS} steps"
    )


if __name__ == "__main__":
    main()
