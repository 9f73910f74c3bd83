"""Compares the clock with a bare loop and torch's profiler, and memory with torch's own numbers.

`python -m tests.gpu.clock ddp|fsdp2` trains Llama-3.2-1B on one GPU with 80 GB or more. `perfsuite doctor`
does the same with a small model.
"""

import gc
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from perfsuite.worker.clock.memory import CudaMemory
from perfsuite.worker.clock.timers import clock_for
from perfsuite.worker.probes.doctor_probe import one_rank, timed, under_the_clock
from tests.gpu.test_day import BASE

STEPS_WITHOUT_GC = 60
DEVICE = torch.device("cuda", 0)
Loop = Callable[[int], list[Any]]


def main(framework: str) -> None:
    """Print each comparison on a line."""
    case = BASE.replace(framework=framework, sequence_length=4096)
    with one_rank(case, DEVICE) as run:
        facts = timed(run, DEVICE, pairs=4)
        print(
            f"under the clock / bare: {median(facts.overhead):.5f}  {[round(r, 4) for r in facts.overhead]}"
        )
        print(f"sum of the steps / host's clock: {median(facts.wall):.5f}")
        assert facts.profiler_s is not None
        print(f"median step {1e3 * facts.step_s:.2f} ms, by the profiler {1e3 * facts.profiler_s:.2f} ms")
        print(f"profiler / clock: {facts.profiler_s / facts.step_s:.5f}")
        print(f"synchronised / clock: {synchronised_s(run) / facts.step_s:.5f}")
        memory = CudaMemory(DEVICE)
        under_the_clock(run, DEVICE)
        print(f"peak: {memory.read()}")
        print(f"peak of torch / of perfsuite: {torch.cuda.max_memory_allocated() / memory.read().peak:.9f}")
        peaks = peaks_without_gc(run)
        print(f"peaks of steps without garbage collection: {peaks}")
        print(f"last peak / first peak: {peaks[-1] / peaks[0]:.9f}")
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        print(f"outside the allocator, GiB: {outside / 2**30:.2f}")
        print(f"attention and loss kernels: {kernels(run)}")


def synchronised_s(run: Loop) -> float:
    """Return the median seconds of a step if the host waits for the device after each step."""
    timer, _ = clock_for(DEVICE)
    seconds = []
    for _ in range(10):
        began = timer.host()
        run(1)
        timer.settle()
        seconds.append(timer.host() - began)
    return median(seconds)


def peaks_without_gc(run: Loop) -> list[int]:
    """Return the peak memory of the first, middle and last of many steps.

    If the peaks grow, reference cycles keep memory alive.
    """
    gc.collect()
    gc.disable()
    peaks = []
    for _ in range(STEPS_WITHOUT_GC):
        torch.cuda.reset_peak_memory_stats()
        run(1)
        peaks.append(torch.cuda.max_memory_allocated())
    gc.enable()
    return [peaks[0], peaks[STEPS_WITHOUT_GC // 2], peaks[-1]]


def kernels(run: Loop) -> set[str]:
    """Return the names of the kernels of attention and of the loss."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(1)
        torch.cuda.synchronize()
    telling = ("flash", "fmha", "sdpa", "cudnn", "softmax")
    names = {event.name for event in profiled.events()}
    return {name[:90] for name in names if any(word in name.lower() for word in telling)}


if __name__ == "__main__":
    main(sys.argv[1])
