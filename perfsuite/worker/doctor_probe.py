"""Measures what `perfsuite doctor` can only learn in a process that imports torch.

Run as `python -m perfsuite.worker.doctor_probe FILE DEVICE [--quick]`; the driver reads the file that it
writes. Worker side; imports no pytest, and torch only inside functions.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from perfsuite import documents
from perfsuite.documents import Data, Document

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.worker.recorder import Recorder

PAIRS, STEPS = 10, 20
"""The same steps bare and under the clock, alternating, so that what the machine does to both cancels."""
BLOCK_BYTES = 64 * 2**20
"""Bytes that are allocated to see whether the peak that perfsuite reads rises by as much."""


class TorchFacts(Data):
    """What the installed torch says of itself and of the devices that it reaches."""

    version: str
    cuda: str | None
    """The CUDA version that it was built with; None for a build without."""
    nccl: str | None
    devices: int
    """GPUs that it reaches."""
    error: str | None = None
    """Why it reaches none, in the words of torch or the driver."""


class ClockFacts(Data):
    """One training loop, timed in several ways: in seconds per step, or as ratios of neighbouring blocks."""

    overhead: tuple[float, ...]
    """Mean step under the clock over the mean bare step, one ratio a pair."""
    wall: tuple[float, ...]
    """Sum of the steps that the clock saw over the host's clock for the same steps, one ratio a pair."""
    step_s: float
    """Median step under the clock."""
    profiler_s: float | None = None
    """On a GPU: from the first kernel's start to the last one's end by torch's profiler, per step."""


class MemoryFacts(Data):
    """Bytes that were allocated, and the peak that perfsuite reads."""

    expected: int
    read: int
    method: str


class DoctorFile(Document):
    """What the process writes. A part is None where it was not asked for or could not be done."""

    schema_version: Literal[1] = 1
    torch: TorchFacts
    clock: ClockFacts | None = None
    memory: MemoryFacts | None = None


def main(path: str, *, kind: Literal["cpu", "cuda"], quick: bool) -> None:
    """Write a `DoctorFile`; with `quick` of torch alone, without training."""
    import torch

    found = DoctorFile(torch=torch_facts(wants_gpu=kind == "cuda"))
    if not quick and (kind == "cpu" or found.torch.devices):
        device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        found = found.replace(memory=memory_facts(device), clock=clock_facts(device))
    documents.write(Path(path), found)


def torch_facts(*, wants_gpu: bool) -> TorchFacts:
    """Import torch and, if GPUs are wanted, reach for the first of them."""
    import torch

    error = None
    if wants_gpu:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as said:
            error = str(said).splitlines()[0]
    reached = wants_gpu and error is None
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if reached else None,
        devices=torch.cuda.device_count() if reached else 0,
        error=error,
    )


def memory_facts(device: Any) -> MemoryFacts:
    """Allocate a block, let it go, and read the peak as a rank would."""
    import torch

    from perfsuite.worker.memory import memory_for

    torch.ones(1, device=device)  # what the allocator itself needs is not the block's
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    memory = memory_for(device)
    block = torch.ones(BLOCK_BYTES, dtype=torch.uint8, device=device)
    del block
    read = memory.read()
    return MemoryFacts(expected=before + BLOCK_BYTES, read=read.peak, method=read.method)


def clock_facts(device: Any, pairs: int = PAIRS) -> ClockFacts:
    """Train a small model by DDP in this one process, on a `torch.device`, bare and under the clock."""
    with one_rank(clock_case(device), device) as run:
        return timed(run, device, pairs)


def clock_case(device: Any) -> Case:
    """Return the case whose loop is timed on a `torch.device`."""
    from perfsuite.case.case import Case, Topology
    from perfsuite.frameworks.ddp import DDP

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
def one_rank(case: Case, device: Any) -> Iterator[Callable[[int], list[Any]]]:
    """Build the training loop of `case` in this process, as the only rank of its group."""
    import torch
    import torch.distributed as dist

    from perfsuite.frameworks.base import Ranks, framework_of
    from perfsuite.worker.recorder import Recorder
    from perfsuite.worker.timers import clock_for

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


def timed(run: Callable[[int], list[Any]], device: Any, pairs: int) -> ClockFacts:
    """Time blocks of `STEPS` steps of a loop, bare and under the clock in turn, then under the profiler."""
    bare_s(run, device)  # warms up
    blocks = []
    for pair in range(pairs):
        if pair % 2:
            measured, alone = under_the_clock(run, device), bare_s(run, device)
        else:
            alone, measured = bare_s(run, device), under_the_clock(run, device)
        blocks.append((alone, measured))
    return ClockFacts(
        overhead=tuple(sum(measured.step_s) / STEPS / alone for alone, measured in blocks),
        wall=tuple(sum(measured.step_s) / measured.wall_s for _, measured in blocks),
        step_s=median(second for _, measured in blocks for second in measured.step_s),
        profiler_s=_profiled_s(run) if device.type == "cuda" else None,
    )


def bare_s(run: Callable[[int], list[Any]], device: Any) -> float:
    """Return seconds per step, timed as a whole, with the device synchronised before and after."""
    from perfsuite.worker.timers import clock_for

    timer, _ = clock_for(device)
    gc.collect()
    gc.disable()
    timer.settle()
    began = timer.host()
    run(STEPS)
    timer.settle()
    spent = timer.host() - began
    gc.enable()
    return spent / STEPS


def under_the_clock(run: Callable[[int], list[Any]], device: Any) -> Recorder:
    """Return the recorder of the same steps, measured as in a rank."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from perfsuite.worker.recorder import Recorder
    from perfsuite.worker.timers import clock_for

    timer, probe = clock_for(device)
    recorder = Recorder(timer, probe=probe)
    hook = register_optimizer_step_post_hook(recorder.after_optimizer_step)
    recorder.start()
    run(STEPS)
    recorder.finish()
    hook.remove()
    return recorder


def _profiled_s(run: Callable[[int], list[Any]]) -> float:
    """Return seconds per step from the first to the last moment at which torch's profiler sees a kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run(STEPS)
        torch.cuda.synchronize()
    on_device = [event.time_range for event in profiled.events() if event.device_type.name == "CUDA"]
    microseconds = max(each.end for each in on_device) - min(each.start for each in on_device)
    return float(microseconds / 1e6 / STEPS)


if __name__ == "__main__":
    main(sys.argv[1], kind="cuda" if sys.argv[2] == "cuda" else "cpu", quick="--quick" in sys.argv)
