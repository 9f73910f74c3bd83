"""What measuring costs: the same training loop bare and under the clock, in pairs, alternating.

The bare loop is timed from outside, as a whole. Under the clock the step times are those that the recorder
reports; the probe and the bookkeeping between steps are not in them, and must not slow the steps down either.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsuite import DDP, Case, Topology
from perfsuite.framework import Ranks
from perfsuite.measure import HostTimer, Recorder, cpu_probe

PAIRS, STEPS = 20, 40


def bare(run: Callable[[int], list[Any]]) -> float:
    """Seconds per step, from outside."""
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    run(STEPS)
    spent = time.perf_counter() - began
    gc.enable()
    return spent / STEPS


def under_the_clock(run: Callable[[int], list[Any]]) -> float:
    """Mean seconds per step, as the recorder reports them."""
    recorder = Recorder(HostTimer(), probe=cpu_probe())
    hook = register_optimizer_step_post_hook(recorder.after_optimizer_step)
    recorder.start()
    run(STEPS)
    recorder.finish()
    hook.remove()
    return sum(recorder.step_s) / STEPS


def main() -> None:
    """Print the median ratio of the pairs."""
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        case = Case(
            model="llama-tiny",
            framework=DDP(),
            sequence_length=64,
            micro_batch=4,
            topology=Topology(processes_per_node=1),
            hardware="cpu",
        )
        ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"), directory=Path())
        run = case.framework.build(case, ranks, Recorder(HostTimer())).run
        bare(run)
        ratios = []
        for pair in range(PAIRS):
            if pair % 2:
                measured, alone = under_the_clock(run), bare(run)
            else:
                alone, measured = bare(run), under_the_clock(run)
            ratios.append(measured / alone)
        dist.destroy_process_group()
    ratios.sort()
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(
        f"step time measured / bare: median {median(ratios):.4f}, "
        f"middle half {low:.4f} to {high:.4f}, {PAIRS} pairs of {STEPS} steps"
    )


if __name__ == "__main__":
    main()
