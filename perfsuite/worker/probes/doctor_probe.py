"""Take the measurements of `perfsuite doctor` that need a process with torch.

Run as `python -m perfsuite.worker.probes.doctor_probe FILE DEVICE [--quick]`.
"""

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from perfsuite import documents
from perfsuite.case.case import Case, Topology
from perfsuite.frameworks.base import Ranks, framework_of
from perfsuite.frameworks.ddp import DDP
from perfsuite.results.rank_report import Memory
from perfsuite.worker.clock.collector import CollectorClock
from perfsuite.worker.clock.levels import MemoryLevels
from perfsuite.worker.clock.memory import memory_for
from perfsuite.worker.clock.recorder import Recorder
from perfsuite.worker.clock.timers import clock_for
from perfsuite.worker.probes.doctor_facts import ClockFacts, DoctorFile

# Number of pairs of neighbouring blocks of steps. In each pair, one block runs without the clock and one with
# it. The speed of the machine affects both blocks in the same way, so the ratio of their times does not
# depend on that speed.
PAIRS = 10
STEPS = 20  # number of steps in a block
BLOCK_BYTES = 64 * 2**20  # size of a test allocation. The peak that perfsuite reads must rise by this size
Run = Callable[[int], list[Any]]


def main(path: str, *, kind: Literal["cpu", "cuda"], quick: bool) -> None:
    """Write a `DoctorFile`. With `quick`, nothing is trained, and only the GPUs are checked."""
    facts = DoctorFile() if kind == "cpu" else reached_gpus()
    if not quick and (kind == "cpu" or (facts.devices and facts.kernel_error is None)):
        device = torch.device("cuda:0" if kind == "cuda" else "cpu")
        memory, expected = peak_memory(device)
        facts = facts.replace(memory=memory, expected_peak=expected, clock=clock_facts(device))
    documents.write(Path(path), facts)


def reached_gpus() -> DoctorFile:
    """Initialise CUDA, and return the number of GPUs that torch can use, or the error."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return DoctorFile(error=str(error).splitlines()[0])
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    reached = DoctorFile(devices=torch.cuda.device_count(), nccl=nccl)
    for index in range(reached.devices):
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
        except RuntimeError as error:
            return reached.replace(kernel_error=f"GPU {index}: {str(error).splitlines()[0]}")
    return reached


def peak_memory(device: torch.device) -> tuple[Memory, int]:
    """Allocate and free a block. Return the peak memory as a rank would read it, and the expected peak."""
    # Allocate something first. This initialises the device and the allocator, whose memory must not count as
    # the block's.
    torch.ones(1, device=device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    memory = memory_for(device)
    torch.ones(BLOCK_BYTES, dtype=torch.uint8, device=device)
    return memory.read(), before + BLOCK_BYTES


def clock_facts(device: torch.device) -> ClockFacts:
    """Train a small DDP model in this process, on a `torch.device`, with and without the clock."""
    with one_rank(clock_case(device), device) as run:
        return timed(run, device, PAIRS)


def clock_case(device: torch.device) -> Case:
    """Return the case whose training loop is timed on a `torch.device`."""
    on_gpu = device.type == "cuda"
    return Case(
        model="gpt2" if on_gpu else "llama-tiny",
        framework=DDP(),
        sequence_length=512 if on_gpu else 64,
        micro_batch=4,
        topology=Topology(processes_per_node=1),
        hardware="gpu" if on_gpu else "cpu",
    )


@contextmanager
def one_rank(case: Case, device: torch.device) -> Iterator[Run]:
    """Build the training loop of `case` in this process, as the only rank of its group."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as store:
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1)
        ranks = Ranks(rank=0, world_size=1, device=device, directory=Path())
        yield framework_of(case).build(case, ranks, Recorder(clock_for(device)[0])).run
        dist.destroy_process_group()


def timed(run: Run, device: torch.device, pairs: int) -> ClockFacts:
    """Time pairs of blocks of `STEPS` steps, without and with the clock.

    On a GPU, then time one more block with the profiler.
    """
    bare_s(run, device)  # warms up
    blocks = []
    for pair in range(pairs):
        before = bare_s(run, device) if pair % 2 == 0 else None
        measured = under_the_clock(run, device)
        blocks.append((before or bare_s(run, device), measured))
    return ClockFacts(
        overhead=tuple(sum(measured.step_s) / STEPS / alone for alone, measured in blocks),
        wall=tuple(sum(measured.step_s) / measured.wall_s for _, measured in blocks),
        step_s=median(second for _, measured in blocks for second in measured.step_s),
        profiler_s=_profiled_s(run) if device.type == "cuda" else None,
    )


def bare_s(run: Run, device: torch.device) -> float:
    """Run a block without the clock, synchronise the device, and return the mean seconds per step."""
    timer, _ = clock_for(device)
    gc.collect()
    timer.settle()
    began = timer.host()
    run(STEPS)
    timer.settle()
    return (timer.host() - began) / STEPS


def under_the_clock(run: Run, device: torch.device) -> Recorder:
    """Measure a block of `STEPS` steps in the same way as a rank, and return the block's recorder."""
    timer, probe = clock_for(device)
    recorder = Recorder(timer, probe=probe)
    recorder.collector = CollectorClock(timer.host)
    recorder.levels = MemoryLevels(device, STEPS)
    hook = register_optimizer_step_post_hook(recorder.after_optimizer_step)
    recorder.start()
    run(STEPS)
    recorder.finish()
    hook.remove()
    return recorder


def _profiled_s(run: Run) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(STEPS)
        torch.cuda.synchronize()
    on_device = [event.time_range for event in profiled.events() if event.device_type.name == "CUDA"]
    microseconds = max(event.end for event in on_device) - min(event.start for event in on_device)
    return float(microseconds / 1e6 / STEPS)


if __name__ == "__main__":
    main(sys.argv[1], kind="cuda" if sys.argv[2] == "cuda" else "cpu", quick="--quick" in sys.argv)
