"""Measures the cost of measuring. The same training loop runs alternately without and with the clock.

The loop without the clock (the bare loop) is timed from outside, as a whole. With the clock, the recorder
reports the step times. These times exclude the probe and the bookkeeping between steps. But the probe and the
bookkeeping could slow the steps down, and must not. `perfsuite doctor` runs the same loop. The CPU time of
the loop scatters less than its wall time, because other programs disturb the wall time.
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
    """Print the median ratio of the pairs' wall times, and that of their CPU times."""
    device = torch.device("cpu")
    with one_rank(clock_case(device), device) as run:
        wall = timed(run, device, PAIRS).overhead
        cpu = [cpu_ratio(run, device, bare_first=pair % 2 == 0) for pair in range(PAIRS)]
        for clock, ratios in (("wall", wall), ("CPU", cpu)):
            what = f"{clock} time of a step, measured / bare"
            show_ratios(what, ratios, f"{PAIRS} pairs of {STEPS} steps")


def cpu_ratio(run: Callable[[int], list[Any]], device: torch.device, *, bare_first: bool) -> float:
    """Return the CPU time of `STEPS` steps with the clock, divided by the CPU time of as many bare steps."""
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
