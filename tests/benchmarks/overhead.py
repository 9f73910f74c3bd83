"""Measures the cost of measuring. The same training loop runs alternately bare and under the clock.

The bare loop is timed from outside, as a whole. Under the clock, the step times are those that the recorder
reports. They exclude the probe and the bookkeeping between steps, but neither may slow the steps down.
The loop is the one that `perfsuite doctor` runs. Its CPU time scatters less than its wall time, which other
programs disturb.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from perfsuite.worker.probes.doctor_probe import STEPS, clock_case, one_rank, timed, under_the_clock
from tests.benchmarks import show_ratios

PAIRS = 100


def main() -> None:
    """Print the median ratio of the pairs, for wall time and for CPU time."""
    device = torch.device("cpu")
    with one_rank(clock_case(device), device) as run:
        wall = timed(run, device, PAIRS).overhead
        cpu = [cpu_ratio(run, device, bare_first=pair % 2 == 0) for pair in range(PAIRS)]
        for clock, ratios in (("wall", wall), ("CPU", cpu)):
            what = f"{clock} time of a step, measured / bare"
            show_ratios(what, ratios, f"{PAIRS} pairs of {STEPS} steps")


def cpu_ratio(run: Callable[[int], list[Any]], device: torch.device, *, bare_first: bool) -> float:
    """Return the CPU seconds of `STEPS` steps under the clock as a multiple of the seconds of bare steps."""
    if bare_first:
        bare = bare_cpu_s(run)
        measured = sum(under_the_clock(run, device).cpu_s)
    else:
        measured = sum(under_the_clock(run, device).cpu_s)
        bare = bare_cpu_s(run)
    return measured / bare


def bare_cpu_s(run: Callable[[int], list[Any]]) -> float:
    """Return the CPU seconds of `STEPS` bare steps."""
    gc.collect()
    began = time.process_time()
    run(STEPS)
    return time.process_time() - began


if __name__ == "__main__":
    main()
